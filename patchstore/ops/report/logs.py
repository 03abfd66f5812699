"""Files beside a run: what `patchstore follow` did, and the trainer's learning rate by step."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchstore.bucket.manifest_json import MAX_INTEGER, time_of
from patchstore.errors import UsageError

MOST_EVENTS = 20_000
"""Of a log the newest are shown."""
_RATES = ("learning_rate", "lr")


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """One event of `patchstore follow`."""

    at: str
    """UTC, ISO 8601, without the Z."""
    outcome: str
    server: str | None
    """None for the store."""
    version: int | None
    kind: str | None
    """Of the error."""
    stage_s: float | None
    pause_s: float | None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Happened | None":
        """Read an event as `follow --json`, or its JSON log, writes it; None if it is something else."""
        at, outcome, server = record.get("time"), record.get("event"), record.get("server")
        if not (isinstance(at, str) and isinstance(outcome, str) and isinstance(server, str | None)):
            return None
        try:
            time_of(at)
        except ValueError:
            return None
        error, timings = record.get("error"), record.get("timings")
        kind = error.get("kind") if isinstance(error, dict) else record.get("kind")
        parts = timings if isinstance(timings, dict) else {}
        version = record.get("version")
        return cls(
            at=at.removesuffix("Z"),
            outcome=outcome,
            server=server,
            version=version if type(version) is int and 0 <= version <= MAX_INTEGER else None,
            kind=kind if isinstance(kind, str) else None,
            stage_s=_number(parts.get("stage_s")),
            pause_s=_number(parts.get("apply_s")),
        )


def _number(value: object) -> float | None:
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        found = float(value) if is_one else math.nan  # type: ignore[arg-type]
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def follow_log(path: Path) -> list[Happened]:
    """Read the newest events of a log. Lines that are no JSON, such as one that is half written, are skipped.

    Raises:
        UsageError: the file cannot be read, or has no event.
    """
    found = [event for record in _records(path) if (event := Happened.of(record)) is not None]
    if not found:
        raise UsageError(
            f"{path} has no event of patchstore follow: give what `patchstore follow --json` prints, or what "
            "--log-format json writes"
        )
    return found[-MOST_EVENTS:]


def learning_rates(path: Path) -> dict[int, float]:
    """Read the learning rate of steps: JSON lines with `step`, and `learning_rate` or `lr`.

    Raises:
        UsageError: the file cannot be read, or has no such line.
    """
    found = {
        step: rate
        for record in _records(path)
        for name in _RATES
        if type(step := record.get("step")) is int and (rate := _number(record.get(name))) is not None
    }
    if not found:
        raise UsageError(
            f'{path} has no learning rate: give lines of JSON such as {{"step": 12, "learning_rate": 1e-6}}'
        )
    return found


def _records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            yield from _parsed(lines)
    except (OSError, ValueError) as exc:
        raise UsageError(f"{path} cannot be read: {exc}") from exc


def _parsed(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record
