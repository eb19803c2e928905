"""What blocks there are, as columns: one slot number a block, one array a field.

It knows numbers and bits, and nothing of sessions, tiers' bytes or threads. Start with ``index.py``.
"""
