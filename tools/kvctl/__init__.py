"""``kvctl``, the operator's command: one file a command, printers by format.

It talks to the daemon over the session socket and starts without grpc or numpy. It must not hold logic that a
program would want: that belongs to the client. Read ``main.py`` first, then ``command.py``.
"""
