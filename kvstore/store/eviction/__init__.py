"""In which order the copies of a tier go: the contract, the policies that meet it, and how uses are told to them.

It knows slots of the index and their order, and not why one may not go. Start with ``contract.py``.
"""
