"""Times as the format spells them, and by how much clocks may be wrong."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

Clock = Callable[[], datetime]
"""Returns the time now, with a time zone."""

CLOCK_MARGIN = timedelta(hours=2)
"""How far the clocks of two machines may be apart: each of them may be wrong by an hour."""
GRACE = timedelta(hours=24)
"""From the retirement of a version until its payloads may be deleted, and as long for objects that no
manifest names. A part of the format, and no option: readers and writers that began before rely on it."""


def utc_now() -> datetime:
    """Return the time of this machine's clock."""
    return datetime.now(UTC)


def spelled(at: datetime) -> str:
    """Return a time as the format spells it: UTC, ISO 8601, to the millisecond."""
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
