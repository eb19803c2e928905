"""``kvengine``: run prompts on a model, over a daemon or an embedded store.

This package holds the command only: options, the loop that times the answers, and its printers. What serves
belongs to ``kvstore.engine``. Read ``main.py`` first.
"""
