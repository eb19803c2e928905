"""How a copy gets from tier to tier or leaves: claimed and published under the lock, copied outside it.

It knows no request and no session. Start with ``move.py``; ``threads.py`` says who runs it, ``space.py`` who has to go.
"""
