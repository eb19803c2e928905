"""The daemon ``kvstored``: the one place that reads configuration and builds collaborators.

It must not know how a block is found, moved or coded: it makes arenas, disk, store and servers, joins them, and
takes them down in order. Read ``daemon.py`` first.
"""
