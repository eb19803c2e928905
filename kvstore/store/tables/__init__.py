"""What is known, and the only code that changes it: blocks, namespaces, rights, events, under one lock.

It moves no byte and waits for nothing. Start with ``state.py``, which has the lock, then ``book.py``.
"""
