"""Tiered KV-cache memory service for LLM serving.

This package holds the daemon ``kvstored`` and its client; it knows blocks, tiers and leases, and nothing
of models. Importing it is light: rooms are imported by name. ``docs/architecture.md`` is the room map.
"""

__version__ = "0.1.0"
