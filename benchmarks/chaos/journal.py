"""The messages of the parts, and the time that each took to recover from a kill."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.support.killable_program import Part


@dataclass(slots=True, kw_only=True)
class Kill:
    """One kill; times are of the monotonic clock."""

    victim: str
    number: int
    """The process of that name: how many came before it."""
    at: float
    head: int
    """The newest version in the store just after the kill."""
    alone: bool
    """Whether no other kill happened between this one and its recovery, or awaited its own at this one."""
    recovered: float | None = None


@dataclass(slots=True)
class Journal:
    """The messages of the processes, and the outcome of each kill. Any thread may use it, under `changed`."""

    stored: dict[int, str] = field(default_factory=dict)
    """Acknowledged version -> state digest of the trainer's weights at that version."""
    applied: list[int] = field(default_factory=list)
    """Versions that `patchstore follow` reported as applied."""
    kills: list[Kill] = field(default_factory=list)
    final: int | None = None
    """The trainer's last version, once it has ended."""
    twice: list[int] = field(default_factory=list)
    """Versions that were acknowledged more than once."""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def trainer_said(self, number: int, message: Mapping[str, Any]) -> None:
        with self.changed:
            if "final" in message:
                self.final = message["final"]
            else:
                if message["version"] in self.stored:
                    self.twice.append(message["version"])
                self.stored[message["version"]] = message["state"]
                self._recover("trainer", lambda kill: number > kill.number)
            self.changed.notify_all()

    def follow_said(self, number: int, message: Mapping[str, Any]) -> None:
        with self.changed:
            if message["event"] == "applied":
                self.applied.append(message["version"])
                for victim in ("server", "follow"):
                    self._recover(victim, lambda kill: message["version"] > kill.head)
            self.changed.notify_all()

    def _recover(self, victim: str, is_over: Callable[[Kill], bool]) -> None:
        for kill in self.open_kills():
            if kill.victim == victim and is_over(kill):
                kill.recovered = time.monotonic()

    def open_kills(self) -> list[Kill]:
        return [kill for kill in self.kills if kill.recovered is None]

    def killed(self, part: Part, at: float, head: int) -> None:
        with self.changed:
            before = self.open_kills()
            for kill in before:
                kill.alone = False
            self.kills.append(Kill(victim=part.name, number=part.number, at=at, head=head, alone=not before))

    def recover_s(self, victim: str) -> list[float]:
        """Return the seconds from each kill that came alone to its recovery."""
        return [
            kill.recovered - kill.at
            for kill in self.kills
            if kill.victim == victim and kill.alone and kill.recovered is not None
        ]
