"""What both ends of the wire share: the data calls, frames, messages to values and back, errors, chunks of streams.

It must know neither the store nor sockets: daemon and client import it, and meet here alone. Read ``verbs/base.py``
first.
"""
