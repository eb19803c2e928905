"""Fakes and makers that tests, here and elsewhere, build on: a disk with seeded faults, blocks from a seed.

Nothing of the product imports this room; it must not know pytest. Read ``faulty_disk.py`` first.
"""
