"""What updates under load do to the time between tokens."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, get_args

from benchmarks.serving import latency
from benchmarks.serving.latency import Gap, Span, Window
from benchmarks.serving.load import Request
from benchmarks.serving.updates import Update


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """Some updates of one density, with quiet times before, between and after them."""

    density: float
    updates: Sequence[Update]
    quiet: Sequence[Span]

    def spans(self) -> list[Span]:
        return [*self.quiet, *(span for update in self.updates for span in update.spans())]


def analyse(episode: Episode, requests: Sequence[Request]) -> tuple[list[Gap], dict[str, Any]]:
    """Return the episode's gaps, and a row of their statistics per window.

    The stall is None if no answer was under way in any commit.
    """
    spans = episode.spans()
    began, ended = min(span.began for span in spans), max(span.ended for span in spans)
    found = [gap for gap in latency.gaps(requests) if gap.began < ended and began < gap.ended]
    windows = latency.sort_gaps(found, spans)
    each = [latency.longest(found, update.pause) for update in episode.updates]
    stalls = [stall for stall in each if stall is not None]
    pauses = [update.pause.seconds for update in episode.updates]
    row: dict[str, Any] = {
        "updates": len(episode.updates),
        "num_requests": len(requests),
        "in_flight": min(latency.num_clients(found, update.pause) for update in episode.updates),
        "quiet_tokens_per_s": latency.num_tokens(requests, episode.quiet)
        / sum(span.seconds for span in episode.quiet),
        "stall_s": statistics.median(stalls) if stalls else None,
        "stall_min_s": min(stalls, default=None),
        "stall_max_s": max(stalls, default=None),
        "pause_s": statistics.median(pauses),
        "engine_apply_s": statistics.median(update.timings["apply"] for update in episode.updates),
    }
    for window in get_args(Window):
        row[f"{window}_gaps"] = len(windows[window])
        row |= {f"{window}_{name}": value for name, value in latency.quantiles(windows[window]).items()}
    return found, row


def around(found: Sequence[Gap], episode: Episode, margin_s: float = 1.0) -> dict[str, Any]:
    """Return a row with the gaps around the update of the median stall, in seconds from the pause."""
    stalls = [(latency.longest(found, update.pause) or 0.0, update) for update in episode.updates]
    stalls.sort(key=itemgetter(0))
    stall_s, update = stalls[(len(stalls) - 1) // 2]
    zero = update.pausing
    marks = {
        name: round(getattr(update, name) - zero, 5)
        for name in (
            "called",
            "compared",
            "published",
            "noticed",
            "prefetched",
            "pausing",
            "resumed",
            "answered",
        )
    }
    return {
        "version": update.version,
        "stall_s": stall_s,
        "marks": marks,
        "points": latency.series(
            found, zero=zero, began=update.called - margin_s, ended=update.resumed + margin_s
        ),
    }
