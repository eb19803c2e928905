"""``python -m kvstore.tools.fuzz``."""

from kvstore.tools.fuzz.main import main

main()
