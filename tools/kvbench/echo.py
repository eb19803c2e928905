"""The other end of ``limits.echo``: reads length-framed messages from its standard input, a socket; answers each."""

from __future__ import annotations

import socket
import sys


def main() -> None:
    """Answer until the other side closes. The argument is the number of bytes of an answer."""
    reply = bytes(int(sys.argv[1]))
    with socket.socket(fileno=0) as connection:
        while head := connection.recv(4, socket.MSG_WAITALL):
            connection.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL)
            connection.sendall(reply)


if __name__ == "__main__":
    main()
