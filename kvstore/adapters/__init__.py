"""Adapters: what lets other people's engines keep their K and V in the store, one file an engine.

They know the client and nothing above it, and each imports its engine's packages in its own file only: importing this
room imports none of them. Read ``transformers.py`` first; docs/engines.md says what was run with which release.
"""
