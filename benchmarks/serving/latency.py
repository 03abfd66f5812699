"""The time between the tokens of answers, sorted by what the server did meanwhile."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from benchmarks.serving.load import Request

Window = Literal["quiet", "publishing", "staging", "commit"]
WINDOWS: tuple[Window, ...] = ("quiet", "publishing", "staging", "commit")
"""Weakest first: a gap that overlaps several belongs to the strongest."""

_TOGETHER_S = 0.0005
"""No step is so short: chunks closer than this were made apart, but waited in a queue for each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of time of one kind; kinds may overlap."""

    window: Window
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The time between two chunks of one answer."""

    client: int
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def gaps(requests: Sequence[Request]) -> list[Gap]:
    """Every time between two arrivals of an answer's tokens, of which some may have come together."""
    found = []
    for request in requests:
        last = request.times[0]
        for at in request.times[1:]:
            if at - last >= _TOGETHER_S:
                found.append(Gap(client=request.client, began=last, ended=at))
                last = at
    return found


def sort_gaps(found: Sequence[Gap], spans: Sequence[Span]) -> dict[Window, list[Gap]]:
    """Gaps by window: wholly in a quiet span, or overlapping one of another kind; others are left out."""
    windows: dict[Window, list[Gap]] = {window: [] for window in WINDOWS}
    for gap in found:
        kinds = {span.window for span in spans if _is_of(gap, span)}
        if kinds:
            windows[max(kinds, key=WINDOWS.index)].append(gap)
    return windows


def _is_of(gap: Gap, span: Span) -> bool:
    if span.window == "quiet":
        return span.began <= gap.began and gap.ended <= span.ended
    return gap.began < span.ended and span.began < gap.ended


def quantiles(found: Sequence[Gap]) -> dict[str, float | None]:
    """Median, 95th and 99th percentile and longest, in seconds; None where there are no gaps."""
    names = {"p50_s": 50, "p95_s": 95, "p99_s": 99, "max_s": 100}
    if not found:
        return dict.fromkeys(names)
    points = np.percentile([gap.seconds for gap in found], list(names.values()))
    return dict(zip(names, points.tolist(), strict=True))


def longest(found: Sequence[Gap], span: Span) -> float | None:
    """The stall: the longest gap that overlaps a span, or None where no answer was under way."""
    return max((gap.seconds for gap in found if _is_of(gap, span)), default=None)


def num_clients(found: Sequence[Gap], span: Span) -> int:
    """Clients with an answer under way in a span."""
    return len({gap.client for gap in found if _is_of(gap, span)})


def num_tokens(requests: Sequence[Request], spans: Sequence[Span]) -> int:
    """Tokens that came within the spans, which do not overlap."""
    return sum(
        count
        for request in requests
        for at, count in zip(request.times, request.counts, strict=True)
        if any(span.began <= at < span.ended for span in spans)
    )


def series(
    found: Sequence[Gap], *, zero: float, began: float, ended: float, num_points: int = 400
) -> list[list[float]]:
    """`[seconds after zero, seconds of the gap that ended then]`: the longest of each stretch of time."""
    width = (ended - began) / num_points
    tallest: dict[int, Gap] = {}
    for gap in found:
        if began <= gap.ended < ended:
            at = min(int((gap.ended - began) / width), num_points - 1)
            if at not in tallest or gap.seconds > tallest[at].seconds:
                tallest[at] = gap
    return [[round(each.ended - zero, 5), round(each.seconds, 5)] for _, each in sorted(tallest.items())]
