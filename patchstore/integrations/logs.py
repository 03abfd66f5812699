"""The log of `patchstore follow`: as text, or as JSON with one object a line."""

import json
import logging
import sys
from datetime import UTC, datetime

_FIELDS = ("event", "server", "store", "version", "seconds", "kind", "num_times", "url")
"""What records carry, as `extra`, beside their message."""


class JsonFormatter(logging.Formatter):
    """An object with `time`, `level`, `logger`, `message`, and those of `event`, `server`, `store`,
    `version`, `seconds`, `kind` (of an error), `num_times` and `url` that apply.
    """

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in _FIELDS if getattr(record, name, None) is not None}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(*, as_json: bool) -> None:
    """Have all loggers write to standard error: ours from INFO on, others from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if as_json else text)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("patchstore").setLevel(logging.INFO)
