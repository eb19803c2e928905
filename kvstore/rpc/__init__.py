"""The border between the wire and the store: methods, messages, errors, sessions and transports.

One table names every method with its handler; the gRPC servicers and the session socket both dispatch
through it, and no handler knows which transport called it. This room must not know arenas' insides, disks
or models; ``framing``, ``errors`` and ``convert`` are shared with the client and import no grpc. Read
``table.py`` first.
"""
