"""``python -m kvstore.tools.kvbench``."""

from kvstore.tools.kvbench.main import main

main()
