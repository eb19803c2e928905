"""The engine behind HTTP: OpenAI's completions and chat completions, health and metrics.

``driver.py`` is the one thread that owns the engine; ``app.py`` the routes; ``requests.py`` reads what clients send and
``replies.py`` makes what they get. Nothing here opens a port: the command does. Read ``driver.py`` first.
"""
