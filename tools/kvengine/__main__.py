"""``python -m kvstore.tools.kvengine``."""

from kvstore.tools.kvengine.main import main

main()
