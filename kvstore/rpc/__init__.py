"""The border between the wire and the store: methods, messages, errors, sessions and transports.

Data calls are the rows of ``kvstore.wire.verbs``, those of sessions and operators stand in ``table.py``; gRPC and the
session socket both dispatch through them, and no handler knows which transport called it. This room must not know
arenas' insides, disks or models. Read ``dispatch.py`` first.
"""
