"""``python -m kvstore.tools.kvctl``."""

from kvstore.tools.kvctl.main import main

main()
