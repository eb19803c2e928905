"""Makes the asyncio twin of the client's typed calls: ``python -m kvstore.tools.twins [--check]``.

Source-to-source, as the ``unasync`` package does for whole libraries, for one file: methods become coroutines and their
calls are awaited. ``make check`` proves that what is checked in is what this makes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

SOURCE: Final = Path("kvstore/client/sync_calls.py")
TWIN: Final = Path("kvstore/client/aio_calls.py")

_HEAD: Final = '''"""The calls of an asyncio client, typed.

Made from ``sync_calls.py`` by ``python -m kvstore.tools.twins``: change that one.
"""
'''


def twin_of(source: str) -> str:
    """The twin of a source, not yet formatted."""
    body = source.partition('"""\n\nfrom __future__')[2]
    text = f"{_HEAD}\nfrom __future__{body}"
    text = re.sub(r"^    def ", "    async def ", text, flags=re.MULTILINE)
    text = re.sub(r"return self\.(run|drive)\(", r"return await self.\1(", text)
    return text.replace("SyncCalls", "AsyncCalls").replace("a client that waits", "a client that is awaited")


def formatted(source: str) -> str:
    """The twin as ruff formats it."""
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(TWIN), "-"]
    return subprocess.run(command, input=twin_of(source), capture_output=True, text=True, check=True).stdout


def main() -> int:
    """Write the twin, or with ``--check`` say whether it is current (exit status 1 if not)."""
    parser = argparse.ArgumentParser(prog="twins", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the twin is not current")
    check = parser.parse_args().check
    made = formatted(SOURCE.read_text())
    if check and made != TWIN.read_text():
        print(f"{TWIN} is not what {SOURCE} makes: run python -m kvstore.tools.twins", file=sys.stderr)
        return 1
    if not check:
        TWIN.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
