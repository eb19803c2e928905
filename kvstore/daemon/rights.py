"""Policy and certificate: made from the configuration, and read again on SIGHUP."""

from __future__ import annotations

import asyncio
import logging

from kvstore.daemon.config import Config
from kvstore.rpc.access import Access
from kvstore.rpc.session_server import SessionServer
from kvstore.rpc.sessions import Sessions
from kvstore.rpc.tls import Tls, TlsFiles

log = logging.getLogger("kvstored")


def make_tls(config: Config) -> Tls | None:
    """The TCP port's certificate, if one is configured. Raises InvalidArgument."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    return Tls(TlsFiles(config.tls_cert, config.tls_key, config.tls_client_ca))


def reload(access: Access, tls: Tls | None, sessions: Sessions, server: SessionServer) -> None:
    """Read both again. Sessions whose rights are others by now end; their clients connect again. The loop's thread."""
    access.reload()
    if tls is not None:
        tls.reload()
    changed = sessions.changed()
    for session_id in changed:
        server.end(session_id)
        asyncio.get_running_loop().run_in_executor(None, sessions.close, session_id)
    if changed:
        log.info("%d sessions ended, since the policy gives their callers other rights now", len(changed))
