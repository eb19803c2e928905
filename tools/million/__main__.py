"""``python -m kvstore.tools.million``."""

from kvstore.tools.million.main import main

main()
