"""How long to wait between two looks, and which of many failures to report. All services decide it here."""

import time
from dataclasses import dataclass, replace

from patchstore.errors import PatchstoreError


class Pauses:
    """Waits between two looks: short after something new, doubled after each that finds nothing or fails."""

    def __init__(self, least_s: float, most_s: float, *, most_after_failures_s: float | None = None) -> None:
        """Begin with the shortest wait. `most_after_failures_s` is the longest after failures in a row."""
        self.seconds = self._least_s = least_s
        self._most_s = most_s
        self._most_failed_s = most_s if most_after_failures_s is None else most_after_failures_s

    def after(self, *, is_new: bool, is_failed: bool = False) -> float:
        """Return how long to wait now."""
        most_s = self._most_failed_s if is_failed else self._most_s
        self.seconds = self._least_s if is_new else min(2 * self.seconds, most_s)
        return self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class OngoingFailure:
    """A failure that has not ended yet."""

    error: PatchstoreError
    since: float
    """Seconds of the monotonic clock."""
    num_times: int
    """How often errors of this kind came in a row."""

    @property
    def is_reported(self) -> bool:
        """Whether this time is reported: the 1st, 2nd, 4th, 8th ... is."""
        return self.num_times & (self.num_times - 1) == 0


def ongoing(before: OngoingFailure | None, error: PatchstoreError | None) -> OngoingFailure | None:
    """Return the failure after one more try; None after one that succeeded."""
    if error is None:
        return None
    if before is None:
        return OngoingFailure(error=error, since=time.monotonic(), num_times=1)
    is_same = before.error.kind == error.kind
    return replace(before, error=error, num_times=before.num_times + 1 if is_same else 1)
