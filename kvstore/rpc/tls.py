"""The certificate of the TCP port, read from files; ``reload`` reads them again, for the connections that come then."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from kvstore.core.errors import InvalidArgument

log = logging.getLogger("kvstored")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. With ``client_ca`` a client needs a certificate of it, too (mutual TLS)."""

    cert: Path
    key: Path
    client_ca: Path | None = None


class Tls:
    """Credentials of a server. Its methods may be called by any thread."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._now = self._read()

    def reload(self) -> None:
        """Read the files again; wrong ones are logged, and the ones before stay in use."""
        try:
            self._now = self._read()
        except InvalidArgument as error:
            log.error("the certificate stays as it was: %s", error)

    def credentials(self) -> grpc.ServerCredentials:
        """What a port is made with."""
        made: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            self._now, self._fetch, require_client_authentication=self._files.client_ca is not None
        )
        return made

    def _fetch(self) -> grpc.ServerCertificateConfiguration:
        """Called by gRPC at each handshake."""
        return self._now

    def _read(self) -> grpc.ServerCertificateConfiguration:
        files = self._files
        cert, key = _bytes("tls_cert", files.cert), _bytes("tls_key", files.key)
        try:
            # gRPC itself would find a pair that does not fit at the first handshake, and not say so.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(files.cert, files.key, password="")
        except ssl.SSLError as error:
            raise InvalidArgument("tls_key", str(files.key), f"the key of {files.cert}, without a password") from error
        roots = _bytes("tls_client_ca", files.client_ca) if files.client_ca is not None else None
        return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=roots)


def _bytes(field: str, file: Path) -> bytes:
    try:
        found = file.read_bytes()
    except OSError as error:
        raise InvalidArgument(field, str(file), f"a file that can be read ({error.strerror})") from error
    if b"-----BEGIN " not in found:
        raise InvalidArgument(field, str(file), "a file in PEM form")
    return found
