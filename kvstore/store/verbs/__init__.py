"""What callers ask for, one file a verb: its arguments checked, the tables read or changed, the moves ordered.

It knows no wire: ``session.py`` beside it makes these calls for one owner. Start with ``put.py`` and ``get.py``.
"""
