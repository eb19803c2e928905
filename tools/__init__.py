"""Commands and tools around the service: ``kvctl``, ``kvengine``, ``kvbench``, the demo, crash and build tools.

This room may import every other; none may import it. It must not hold anything that a library user needs:
what two tools share belongs to the room below. Read ``kvctl/main.py`` first.
"""
