"""``kvbench``: figures, each beside the limit that was measured in the same run.

One file a bench, one file for what limits are. A bench returns rows and prints nothing itself. Read ``rows.py``
first, then ``store.py``.
"""
