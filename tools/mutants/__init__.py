"""Breaks the code in small ways and runs the tests of the room: what survives, no test holds.

It must not know the rooms that it breaks. Read ``operators.py`` first.
"""
