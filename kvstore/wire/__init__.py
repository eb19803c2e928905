"""What both ends of the wire share: frames, messages to values and back, errors, chunks of streams.

It must know neither the store nor sockets: daemon and client import it, and meet here alone. Read ``messages.py``
first.
"""
