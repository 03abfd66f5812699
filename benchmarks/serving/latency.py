"""The time between the tokens of answers, sorted by what the server did meanwhile."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from benchmarks.serving.load import Request

Window = Literal["quiet", "publishing", "staging", "commit"]
WINDOWS: tuple[Window, ...] = ("quiet", "publishing", "staging", "commit")
"""Weakest first. A gap that overlaps several windows belongs to the strongest."""

_TOGETHER_S = 0.0005
"""No step of the engine is this short: chunks that are closer together waited in a queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A period of one window; windows may overlap."""

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
    """Return the times between arrivals of tokens of an answer. Tokens that came together are one arrival."""
    found = []
    for request in requests:
        last = request.times[0]
        for at in request.times[1:]:
            if at - last >= _TOGETHER_S:
                found.append(Gap(client=request.client, began=last, ended=at))
                last = at
    return found


def sort_gaps(found: Sequence[Gap], spans: Sequence[Span]) -> dict[Window, list[Gap]]:
    """Sort gaps by window: those within a quiet span, and those that overlap another. Others are left out."""
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
    """Return the median, 95th and 99th percentile and maximum, in seconds; None without gaps."""
    names = {"p50_s": 50, "p95_s": 95, "p99_s": 99, "max_s": 100}
    if not found:
        return dict.fromkeys(names)
    points = np.percentile([gap.seconds for gap in found], list(names.values()))
    return dict(zip(names, points.tolist(), strict=True))


def longest(found: Sequence[Gap], span: Span) -> float | None:
    """Return the stall: the longest gap that overlaps a span; None if no answer was under way."""
    return max((gap.seconds for gap in found if _is_of(gap, span)), default=None)


def num_clients(found: Sequence[Gap], span: Span) -> int:
    """Return how many clients had an answer under way in a span."""
    return len({gap.client for gap in found if _is_of(gap, span)})


def num_tokens(requests: Sequence[Request], spans: Sequence[Span]) -> int:
    """Return how many tokens came within the spans, which must not overlap."""
    return sum(
        count
        for request in requests
        for at, count in zip(request.times, request.counts, strict=True)
        if any(span.began <= at < span.ended for span in spans)
    )


def series(
    found: Sequence[Gap], *, zero: float, began: float, ended: float, num_points: int = 400
) -> list[list[float]]:
    """Return the longest gap of each stretch of time: `[seconds after zero of its end, its seconds]`."""
    width = (ended - began) / num_points
    tallest: dict[int, Gap] = {}
    for gap in found:
        if began <= gap.ended < ended:
            at = min(int((gap.ended - began) / width), num_points - 1)
            if at not in tallest or gap.seconds > tallest[at].seconds:
                tallest[at] = gap
    return [[round(each.ended - zero, 5), round(each.seconds, 5)] for _, each in sorted(tallest.items())]
