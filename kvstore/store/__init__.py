"""The store: which block is where, who may use it, what goes when space is short.

Bookkeeping is apart from bytes: one lock guards the tables, and is never held across a copy, a sync or an
await. This room knows tiers through their contract; callers are sessions, which own their rights. It must not know
protobuf, grpc or sockets. Read ``session.py`` first, then ``state.py`` and ``lifecycle.py``. Three kinds of files:

- *Tables*, what is known, changed with the lock held only: ``state`` (the lock, and what it guards), ``book``
  and ``index`` (copies), ``owners`` (sessions and their rights), ``namespaces``, ``history``, ``lru`` and ``policies``
  (what leaves first), ``uses``, ``occupants``.
- *Moves*, how a copy gets from tier to tier, the lock held for claims and publishing only: ``space``, ``choice`` (room,
  and who has to go), ``movement`` (claims), ``promote`` (towards hot), ``persist`` and ``durable`` (to storage),
  ``loading`` (jobs), ``queues`` and ``movers`` (what waits, and the threads that do it), ``recovery``.
- *Verbs*, what a caller asks for: ``put`` and ``commit``, ``get`` and ``pinning``, ``tenancy`` (sessions and leases),
  ``opening``, ``removal``, ``maintenance``, ``admin``. A verb of many blocks works in sections (``state.parts``).
"""
