"""``make million``: needles in a million tokens of which memory holds a quarter, and what each step costs.

It knows the engine and the daemon from outside, as a user does; ``main.py`` is read first.
"""
