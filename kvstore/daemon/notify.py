"""What systemd is told of a daemon of ``Type=notify``: ready, stopping. Nothing where it did not start this one."""

from __future__ import annotations

import logging
import socket
from typing import Final

log: Final = logging.getLogger("kvstored")


def notify(address: str, message: str) -> None:
    """Send ``message``, such as READY=1, to the socket that systemd named; "" for none. A failure is only logged."""
    if not address:
        return
    # A leading @ stands for the abstract namespace.
    where = "\0" + address[1:] if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.sendto(message.encode(), where)
    except OSError as error:
        log.warning("systemd was not told %r: %s", message.partition("\n")[0], error)
