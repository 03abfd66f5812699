"""The log of `patchstore follow`: as text, or as JSON with one object per line."""

import json
import logging
import sys
from datetime import UTC, datetime

_FIELDS = ("event", "server", "store", "version", "seconds", "kind", "num_times", "url")
"""Fields that records may have, as `extra`, beside their message."""


def utc(seconds: float) -> str:
    """Spell a time, in seconds since 1970, as manifests do: UTC, ISO 8601."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextFormatter(logging.Formatter):
    """Lines that begin with the UTC time."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return utc(record.created)


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
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(*, as_json: bool) -> None:
    """Let all loggers write to standard error: ours from INFO on, others from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    text = TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if as_json else text)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("patchstore").setLevel(logging.INFO)
