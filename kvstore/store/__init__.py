"""The store: which block is where, who may use it, what goes when space is short.

Bookkeeping is apart from bytes: one lock guards the tables, and is never held across a copy, a sync or an
await. This room knows tiers through their contract and callers by session ids; it must not know protobuf,
grpc or sockets. Read ``api.py`` first, then ``lifecycle.py``.
"""
