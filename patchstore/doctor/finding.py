"""Findings of an examination, and the loop that runs checks.

A check that cannot be made is a finding like any other, so a failed check does not hide the others.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from patchstore.errors import PatchstoreError

logger = logging.getLogger(__name__)

Subject = TypeVar("Subject")
Level = Literal["ok", "warning", "problem"]

KINDS: Mapping[str, Level] = {
    # The frame.
    "check-failed": "problem",
    "not-tried": "ok",
    # This machine.
    "packages": "ok",
    "packages-unknown": "warning",
    "package-missing": "problem",
    "package-version": "problem",
    "package-version-server": "warning",
    # The store.
    "store": "ok",
    "store-url": "problem",
    "store-unsupported": "problem",
    "store-unreachable": "problem",
    "store-refused": "problem",
    "no-bucket": "problem",
    "no-folder": "warning",
    "clock": "ok",
    "clock-unknown": "ok",
    "clock-off": "warning",
    "clock-wrong": "problem",
    "write": "ok",
    "write-refused": "problem",
    "create-only": "ok",
    "create-only-broken": "problem",
    "gateway-missing": "problem",
    "single-writer": "warning",
    "read-after-write": "ok",
    "read-lags": "problem",
    "listing": "ok",
    "listing-lags": "warning",
    "ranges": "ok",
    "ranges-wrong": "problem",
    "latency": "ok",
    "throughput": "ok",
    "payload-wrong": "problem",
    "left-behind": "warning",
    # The run there.
    "run": "ok",
    "dtypes": "ok",
    "replica": "ok",
    "no-run": "ok",
    "run-unreadable": "problem",
    "format-unknown": "problem",
    "lineage": "ok",
    "lineage-broken": "problem",
    "payloads": "ok",
    "payload-missing": "problem",
    "payload-size": "problem",
    # A server.
    "server": "ok",
    "server-unreachable": "problem",
    "server-unhealthy": "problem",
    "not-vllm": "problem",
    "server-version": "problem",
    "dev-mode-off": "problem",
    "no-extension": "problem",
    "no-delta-backend": "problem",
    "delta": "ok",
    "server-half-applied": "problem",
    "server-ranks-differ": "warning",
    "server-engines-differ": "warning",
    "server-asleep": "warning",
    "switch-open": "warning",
    "update-open": "warning",
    "server-paused": "warning",
    "server-last-error": "warning",
    "store-not-shared": "warning",
    "following": "ok",
    "following-nothing": "ok",
    "other-run": "warning",
    "behind": "warning",
    "tensors": "ok",
    "tensors-wider": "warning",
    "tensors-unknown": "warning",
    "tensors-unfit": "problem",
}
"""Every kind of finding, and its level; `docs/doctor.md` explains them. Programs may rely on these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was found."""

    kind: str
    """A key of `KINDS`."""
    about: str
    """What was looked at: `packages`, or the URL of a store or server."""
    found: str
    """One sentence, with the figure."""
    advice: str | None = None
    """What to do; None if there is nothing to do."""

    def __post_init__(self) -> None:
        assert (self.level == "ok") == (self.advice is None), f"{self.kind} and its advice disagree"

    @property
    def level(self) -> Level:
        return KINDS[self.kind]

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        record = {"level": self.level, "kind": self.kind, "about": self.about, "found": self.found}
        return record if self.advice is None else {**record, "advice": self.advice}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check(Generic[Subject]):
    """One check."""

    name: str
    """What it checks, as in "the clock could not be checked"."""
    look: Callable[[Subject], Iterator[Finding]]
    """Yields findings. An exception becomes a finding too."""
    needs: tuple[str, ...] = ()
    """Names of earlier checks that this one depends on."""
    writes: bool = False
    """Whether it writes, if only for a moment."""


def run_all(
    checks: Sequence[Check[Subject]], subject: Subject, *, about: str, read_only: bool = False
) -> Iterator[Finding]:
    """Run checks in order, and yield their findings as they are made.

    A check is left out if a check that it needs found a problem, or was left out itself.

    Args:
        read_only: leave out checks that write, and report that.
    """
    missing: set[str] = set()
    left_out: list[str] = []
    for check in checks:
        if check.writes and read_only:
            left_out.append(check.name)
            continue
        if missing & {*check.needs}:
            missing.add(check.name)
            continue
        try:
            for finding in check.look(subject):
                if finding.level == "problem":
                    missing.add(check.name)
                yield finding
        except PatchstoreError as exc:
            missing.add(check.name)
            yield _failure(check.name, about, f"[{exc.kind}] {exc}")
        except Exception as exc:
            logger.info("%s: check %s failed", about, check.name, exc_info=True)
            missing.add(check.name)
            yield _failure(check.name, about, f"{type(exc).__name__}: {exc}")
    if left_out:
        yield Finding(kind="not-tried", about=about, found=f"--read-only leaves out: {', '.join(left_out)}")


def _failure(name: str, about: str, reason: str) -> Finding:
    return Finding(
        kind="check-failed",
        about=about,
        found=f"{name} could not be checked: {reason}",
        advice="fix what it says and run this again; --verbose shows where it happened",
    )
