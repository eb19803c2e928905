"""The store: which block is where, who may use it, what goes when space is short.

Bookkeeping is apart from bytes: one lock guards the tables, and is never held across a copy, a sync or an
await. This room knows tiers through their contract; callers are sessions, which own their rights. It must not know
protobuf, grpc or sockets. Read ``session.py`` first, then ``tables/state.py``. Its rooms, each of which may import
those above it only:

- ``columns``: the index, a slot a block and an array a field; the life of a copy.
- ``eviction``: what leaves a tier first, a contract with policies by name.
- ``tables``: what is known (blocks, namespaces, sessions and their rights, events) and the lock; changed with it held.
- ``moves``: how a copy gets from tier to tier or leaves, the lock held for claims and publishing only; the threads.
- ``verbs``: what a caller asks for, one file a verb. A verb of many blocks works in sections (``State.parts``).

Beside them lie ``store.py`` (built from the rooms), ``session.py`` (the owner of rights that callers hold) and
``recovery.py`` (the warm start).
"""
