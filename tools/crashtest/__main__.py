"""``python -m kvstore.tools.crashtest``."""

from kvstore.tools.crashtest.main import main

main()
