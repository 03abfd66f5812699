"""The log of commands: as text, or, of those that run on, as JSON with one object per line."""

import logging
import sys
from datetime import UTC, datetime
from typing import Any

from patchstore.support.printable import escaped, json_line

_FIELDS = ("event", "server", "store", "version", "seconds", "kind", "num_times", "url")
"""Fields that records may have, as `extra`, beside their message."""


def utc(seconds: float) -> str:
    """Spell a time, in seconds since 1970, as manifests do: UTC, ISO 8601."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextFormatter(logging.Formatter):
    """A line for each record, which begins with the UTC time; below it, indented, its traceback.

    So no line that a store or a server made up looks like one of a record.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return _below(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return _below(stack_info)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return utc(record.created)


def _below(text: str) -> str:
    return "\n".join(f"    {escaped(line)}" for line in text.split("\n"))


class JsonFormatter(logging.Formatter):
    """An object with `time`, `level`, `logger`, `message`, and those of `event`, `server`, `store`,
    `version`, `seconds`, `kind` (of an error), `num_times` and `url` that apply.
    """

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in _FIELDS if getattr(record, name, None) is not None}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json_line(line, ensure_ascii=False, default=str)


def configure(*, as_json: bool) -> None:
    """Let all loggers write to standard error: ours from INFO on, others from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("patchstore").setLevel(logging.INFO)
