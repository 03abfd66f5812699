"""What the killed processes said, and how long each took to recover."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.support.killable_program import Part


@dataclass(slots=True, kw_only=True)
class Kill:
    """A process that was killed, by the monotonic clock."""

    victim: str
    number: int
    """Which process of that name."""
    at: float
    head: int
    """The newest version in the store just afterwards."""
    alone: bool
    """No other one was to be recovered from, nor came one until this was."""
    recovered: float | None = None


@dataclass(slots=True)
class Journal:
    """What the processes say, and what became of each kill; for any thread, under `changed`."""

    stored: dict[int, str] = field(default_factory=dict)
    """Version that the trainer was told is stored -> state digest of the weights it had then."""
    applied: list[int] = field(default_factory=list)
    """Versions that the server was brought to, as `patchstore follow` said."""
    kills: list[Kill] = field(default_factory=list)
    final: int | None = None
    """The trainer's last version, once it has ended."""
    twice: list[int] = field(default_factory=list)
    """Versions that were said to be stored more than once."""
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
        """Of each kill that came alone."""
        return [
            kill.recovered - kill.at
            for kill in self.kills
            if kill.victim == victim and kill.alone and kill.recovered is not None
        ]
