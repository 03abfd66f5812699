"""Findings of an examination, the loop that runs checks, and the store that they look at.

A check that cannot be made is a finding like any other, so a failed check does not hide the others.
"""

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from patchstore.bucket.records import Manifest, StoreHeader
from patchstore.errors import PatchstoreError, StoreUnavailable
from patchstore.stores import Store, layout, open_store
from patchstore.stores.folder import FolderStore

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
    "body-check": "ok",
    "body-unchecked": "warning",
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
    "routes-missing": "problem",
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
    "caches-kept": "problem",
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


class Bucket:
    """A store that is examined, and what is known about it."""

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        options: Mapping[str, Any],
        num_bytes: int,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Prepare; nothing is opened yet."""
        self.url = store.url if isinstance(store, Store) else os.fspath(store)
        self.options, self.num_bytes, self.now = options, num_bytes, now
        self.header: StoreHeader | None = None
        """Of the run there, once it was read."""
        self.head: Manifest | None = None
        self.can_create = False
        """Whether create-only puts are worth measuring."""
        self.num_left = 0
        """Probes that could not be removed."""
        self._store = store if isinstance(store, Store) else None
        self._is_mine = self._store is None
        self._missing: list[Path] = []
        """Folders that a write makes, the outermost first."""

    @property
    def store(self) -> Store:
        assert self._store is not None
        return self._store

    @property
    def opened_url(self) -> str:
        """The URL of the open store, so that a folder is an absolute path; before that, the given one."""
        return self.url if self._store is None else self._store.url

    def open(self) -> None:
        """Open the store, unless it is. Raises as `open_store`."""
        self._store = self._store or open_store(self.url, **self.options)
        if self.folder is not None:
            wanted = (*reversed(self.folder.parents), self.folder, self.folder / ".tmp")
            self._missing = [each for each in wanted if not os.path.lexists(each)]

    @property
    def folder(self) -> Path | None:
        """Where the store is, if it is a folder."""
        return Path(self.store.url) if isinstance(self.store, FolderStore) else None

    @property
    def is_new(self) -> bool:
        """Whether the store was a folder that did not exist."""
        return self.folder is not None and self.folder in self._missing

    def close(self) -> None:
        """Remove the folders that were made, and close the store if it was opened here."""
        for each in reversed(self._missing):
            # A publisher may have stored something there meanwhile.
            with suppress(OSError):
                each.rmdir()
        if self._is_mine and self._store is not None:
            self._store.close()

    def finding(self, kind: str, found: str, advice: str | None = None) -> Finding:
        return Finding(kind=kind, about=self.url, found=found, advice=advice)

    @contextmanager
    def probes(self) -> Iterator[Callable[[object], str]]:
        """Make keys from names, and remove what is stored there at the end."""
        folder, keys = f"{layout.PROBES}{uuid.uuid4().hex}/", list[str]()

        def key(name: object) -> str:
            keys.append(f"{folder}{name}")
            return keys[-1]

        try:
            yield key
        finally:
            for number, each in enumerate(keys):
                try:
                    self.store.delete(each)
                except StoreUnavailable:
                    # Each further attempt would take as long as this one did.
                    self.num_left += len(keys) - number
                    break
                except PatchstoreError:
                    self.num_left += 1
