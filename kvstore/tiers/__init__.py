"""The three tiers: memory and disk that hold blocks, and the bytes of a stored block.

This room moves and checks bytes. It knows offsets, handles and headers; it must not know leases, LRU
order, sessions or RPCs: which block goes where is the store's choice. Read ``base.py`` first.
"""
