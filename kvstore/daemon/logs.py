"""The daemon's log on stderr: a line a record, as text or as JSON, each with the id of the call that it is about."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Final

from kvstore.core.request import REQUEST

TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class TextLines(logging.Formatter):
    """One line a record, tracebacks apart: a record that holds line breaks can not look like two."""

    def __init__(self) -> None:
        super().__init__(TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        """The line, and behind it the call that it is about."""
        request = REQUEST.get()
        line = super().formatMessage(record) + (f" [request {request}]" if request else "")
        return line.replace("\n", "\\n")


class JsonLines(logging.Formatter):
    """One JSON object a line, traceback and all: ``time`` (UTC), ``level``, ``logger``, ``message``, and where there
    is one ``request`` and ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request := REQUEST.get():
            line["request"] = request
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logging(level: str, form: str) -> None:
    """Log to stderr from ``level`` on, as "text" or as "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
