"""``kvengine``: the command. Options are read before torch and transformers are loaded, which takes seconds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from kvstore.tools.kvengine import options, serve_options


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry of ``kvengine``; ends the process with the documented exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["serve"]:
        served = serve_options.parse(words[1:])
        sys.exit(import_module("kvstore.tools.kvengine.serve").run(served))
    asked = options.parse(words)
    sys.exit(import_module("kvstore.tools.kvengine.ask").run(asked))


if __name__ == "__main__":
    main()
