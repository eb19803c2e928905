"""Torture of the SSD tier by real processes: kill -9 at random moments, reopen, compare with what was acknowledged.

``worker`` writes, reads, drops and compacts until it is killed; ``judge`` reopens and compares; ``main`` is the
command. It must not know how the tier works inside: it sees handles, bytes and the size of the directory.
"""
