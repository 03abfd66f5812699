"""What a fleet tells: the events of its steps, and its state at one moment."""

import time
from dataclasses import dataclass, field
from typing import Any

from patchstore.errors import PatchstoreError
from patchstore.format.records import Manifest
from patchstore.serve.desired import Pin
from patchstore.serve.logs import utc
from patchstore.serve.reconcile import StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowEvent:
    """Something that happened and is reported."""

    server: str | None
    """URL; None for an event of the store."""
    step: StepResult
    num_times: int = 1
    """How often this failure came in a row. Only the 1st, 2nd, 4th, 8th ... is reported."""
    time: str = field(default_factory=lambda: utc(time.time()))
    """When the step ended: UTC, ISO 8601."""

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"time": self.time, "server": self.server, **self.step.to_dict()}

    def __str__(self) -> str:
        return f"{self.time} {self.server or 'store'}: {self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OngoingFailure:
    """A failure that has not ended yet."""

    error: PatchstoreError
    since: float
    """Seconds of the monotonic clock."""
    num_times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerView:
    """One server, as its last step found it. Times are seconds of the monotonic clock."""

    url: str
    is_alive: bool = True
    """Whether its thread runs."""
    is_up: bool = False
    """Whether it answered."""
    serving: int | None = None
    run_id: str | None = None
    """The run of that version; None if it serves none, or opened the store just now."""
    num_engines: int = 1
    engines_differ: bool = False
    half_applied: bool = False
    current: float | None = None
    """When it last served the desired version, or came a version nearer; None for never."""
    failure: OngoingFailure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """The state of store and servers at one moment."""

    store: str
    head: Manifest | None
    target: Manifest | None
    """The desired version: the head, or the version that servers are pinned to."""
    pin: Pin | None
    is_alive: bool
    """Whether the thread that polls the store runs."""
    interval_s: float
    """Longest time between two polls of the store."""
    looked: float | None
    """When the store last answered, in seconds of the monotonic clock; None for never."""
    failure: OngoingFailure | None
    """Of the store, or of the file of servers."""
    head_age_s: float | None = None
    """Seconds since the head was created, by the trainer's clock."""
    is_head_old: bool = False
    """Whether it is older than it may be."""
    servers: tuple[ServerView, ...]
