"""When an anchor is due: one rule, for publishers and for what adds anchors later."""

from dataclasses import dataclass
from typing import Literal

from patchstore.errors import UsageError

LONGEST = 4096
"""Deltas from one anchor to the next at most, where another process adds anchors or their distance is `auto`:
all of them are open at once when they are compacted."""

Every = int | Literal["auto"]
"""After how many deltas an anchor is due; or `auto`: when the deltas since the last one have its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Since:
    """What was published since an anchor."""

    num_deltas: int = 0
    num_bytes: int = 0


def is_due(every: Every, since: Since, anchor_bytes: int) -> bool:
    """Whether the newest version is to get an anchor.

    Args:
        since: what leads from the last anchor to that version, its own delta included.
        anchor_bytes: what an anchor takes.
    """
    if every == "auto":
        return since.num_bytes >= anchor_bytes or since.num_deltas >= LONGEST
    return since.num_deltas >= every


def check_every(every: object) -> Every:
    """Return after how many deltas another process adds an anchor, as a user names it.

    Raises:
        UsageError: neither `auto` nor a number from 2 to `LONGEST`.
    """
    if every == "auto":
        return "auto"
    try:
        number = int(str(every))
    except ValueError:
        number = 0
    if not 2 <= number <= LONGEST:
        raise UsageError(f"an anchor is due every 2 to {LONGEST} deltas, or `auto`, not {every!r:.80}")
    return number
