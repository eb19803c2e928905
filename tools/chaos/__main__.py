"""``python -m kvstore.tools.chaos``."""

from kvstore.tools.chaos.main import main

main()
