"""Channels of gRPC: plain on a Unix socket and where no credentials are given, else as these say."""

from __future__ import annotations

from typing import Any

import grpc

from kvstore.client.grpc_errors import CHANNEL_OPTIONS
from kvstore.client.options import Credentials


def channel(address: str, credentials: Credentials | None) -> Any:
    """A blocking channel."""
    if credentials is None or not credentials.tls:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.secure_channel(address, _tls(credentials), options=CHANNEL_OPTIONS)


def aio_channel(address: str, credentials: Credentials | None) -> Any:
    """A channel of the running event loop."""
    if credentials is None or not credentials.tls:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, _tls(credentials), options=CHANNEL_OPTIONS)


def bearer(credentials: Credentials | None) -> tuple[tuple[str, str], ...]:
    """Metadata of the call that opens a session."""
    return (("authorization", f"Bearer {credentials.token}"),) if credentials is not None and credentials.token else ()


def _tls(credentials: Credentials) -> Any:
    return grpc.ssl_channel_credentials(credentials.ca or None, credentials.key or None, credentials.cert or None)
