"""SHA-256 of weights, remembered beside them, so that a start does not read gigabytes to name them.

The record of a folder is one JSON file in it. An entry counts while the file has the size, times and inode that it had
when it was hashed; a file that changed within the last moments is not recorded, since a later write could leave them as
they are. A folder that can not be written is hashed at each start.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Final

LOG: Final = logging.getLogger("kvstore.engine")

RECORD_FILE: Final = ".kvstore-digests.json"
SETTLED_S: Final = 2.0
"""Age from which a file's times tell a later change: file systems keep them to milliseconds, some to a second."""


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def remembered_sha256(path: Path) -> str:
    """The same, from the record beside the file where that is of these bytes; else it is put there."""
    known, stamp = _read(path.parent), _stamp(path)
    entry = known.get(path.name)
    if isinstance(entry, dict) and entry.get("stamp") == stamp and isinstance(entry.get("sha256"), str):
        return str(entry["sha256"])
    digest = sha256_of(path)
    changed = max(path.stat().st_mtime, path.stat().st_ctime)
    if stamp == _stamp(path) and time.time() - changed > SETTLED_S:
        _write(path.parent, {**_read(path.parent), path.name: {"stamp": stamp, "sha256": digest}})
    return digest


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _read(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        LOG.debug("no record of digests in %s: %s", folder, error)
        return {}
    return found if isinstance(found, dict) else {}


def _write(folder: Path, record: dict[str, Any]) -> None:
    try:
        handle, name = tempfile.mkstemp(prefix=RECORD_FILE, dir=folder)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(record, file)
        os.chmod(name, 0o644)
        os.replace(name, folder / RECORD_FILE)
    except OSError as error:
        LOG.info("the digest of the weights in %s can not be remembered: %s", folder, error)
