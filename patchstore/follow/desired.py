"""Which version servers should serve: the store's newest, or one that an operator pinned them to.

The store is polled once for all servers. From time to time the run itself is checked again, because a bucket
may be emptied and another run begun in it. Nothing goes to another run by itself.
"""

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from itertools import takewhile
from pathlib import Path

from patchstore.bucket import history, kept, manifest_json, notes
from patchstore.bucket.records import Manifest, Schema, StoreHeader
from patchstore.errors import StoreReplaced, Unsigned, UsageError, VersionNotFound, WrongSignature
from patchstore.signing.required import Floor, RequiredKeys, Trust
from patchstore.stores.base import Store
from patchstore.support.arguments import version_number
from patchstore.support.host import replace_text

_NUM_REMEMBERED = 10_000
"""So many versions' times of creation are kept, to report how late a server is."""


def check_kind(store: Store, header: StoreHeader, adapter: str | None) -> None:
    """Check that a run is of adapters where servers serve it under a name, and else of whole weights."""
    if header.adapter is not None and adapter is None:
        raise UsageError(
            f"{store.url} has {header.adapter}. Servers load them beside their base, under a name: give it "
            "with --adapter NAME, in Python with AdapterServer"
        )
    if header.adapter is None and adapter is not None:
        raise UsageError(
            f"{store.url} has whole weights, and no adapter to serve as {adapter}: leave out --adapter, in "
            "Python use VllmServer"
        )


class NotKnown(Enum):
    """There is no answer yet, which is not the answer that nothing is committed."""

    NOT_KNOWN = "not known"


class HeadWatcher:
    """The newest version of one run."""

    def __init__(
        self,
        store: Store,
        *,
        run_id: str | None = None,
        recheck_s: float = 10.0,
        then: str = "Servers were left as they are; put the objects back, or restart this process with --run "
        "to follow what is there now",
    ) -> None:
        """Nothing is read yet.

        After `recheck_s` without a new version the run itself is checked again. `then` ends errors about
        another run in its place, or about a version that is gone.
        """
        self.store = store
        self.run_id = run_id
        """The run; None before it is known."""
        self._then = then
        self._recheck_s = recheck_s
        self._checked = 0.0
        self._found: Manifest | None = None
        self._created: deque[tuple[int, datetime]] = deque(maxlen=_NUM_REMEMBERED)

    def refresh(self) -> Manifest | None:
        """Read what is new: one object if nothing is, and from time to time a second one.

        After an error the version found before stays. `StoreReplaced` (another run is there, or not the
        version that was the newest) is raised each time, until what was there is there again.
        """
        found = self._found
        if found is None:
            self._begin()
            return self._found
        # A version that was seen stays committed, so only later versions are requested.
        at = found
        while (later := history.following(self.store, at)) is not None:
            at = later
            if later.run_id == found.run_id:
                self._found = found = later
                self._remember(later)
        if at is not found:
            # Another run is there, or a program that follows another one wrote here, which stops no server.
            self._check_again(found)
        elif time.monotonic() - self._checked >= self._recheck_s:
            self._check_again(found)
        return self._found

    def _begin(self) -> None:
        newest = history.head(self.store)
        if newest is not None and newest.run_id != self.run_id:
            header = history.read_header(self.store)
            if header is not None:
                self.check_run(header)
                while newest is not None and newest.run_id != header.run_id:
                    version = newest.version
                    newest = history.read_manifest(self.store, version - 1) if version else None
        if newest is not None:
            self.check_run(newest)
            self.run_id = newest.run_id
        self._found = newest
        self._checked = time.monotonic()
        self._created.clear()
        if self._found is not None:
            self._remember(self._found)

    def check_run(self, found: Manifest | StoreHeader) -> None:
        """Check that something of the store is of this run, as far as that is known. Raises StoreReplaced."""
        if self.run_id is not None:
            history.check_run(self.store, found, self.run_id, self._then)

    def _check_again(self, found: Manifest) -> None:
        header = history.read_header(self.store)
        if header is None:
            self._begin()
            return
        self.check_run(header)
        self._check_is_there(found)
        self._checked = time.monotonic()

    def _check_is_there(self, found: Manifest) -> None:
        try:
            now = history.read_manifest(self.store, found.version)
        except VersionNotFound:
            now = None
        if now != found:
            raise StoreReplaced(
                f"{self.store.url} {'no longer has' if now is None else 'has another'} version "
                f"{found.version} of run {found.run_id}, which was its newest. Its objects were removed or "
                f"replaced. {self._then}"
            )

    def _remember(self, found: Manifest) -> None:
        self._created.append((found.version, manifest_json.time_of(found.created_at)))

    def first_missing_at(self, serving: int) -> datetime | None:
        """When the first version after `serving` was created; None if none was seen. For any thread."""
        later = list(takewhile(lambda seen: seen[0] > serving, reversed(self._created.copy())))
        return later[-1][1] if later else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A version that servers are pinned to, whatever the store's newest is."""

    version: int
    run_id: str | None = None
    """The run that the version belongs to; None until the store was read."""
    allow_rollback: bool = False
    """The operator said that it may be older than what servers served."""


class DesiredVersion:
    """The version that servers should serve. `refresh` is for one thread, the rest for any."""

    def __init__(
        self,
        watcher: HeadWatcher,
        *,
        at: int | None = None,
        pin_file: Path | None = None,
        required: RequiredKeys | None = None,
        floor: Floor | None = None,
        allow_rollback: bool = False,
        max_head_age_s: float | None = None,
        check_run: Callable[[StoreHeader], None] | None = None,
    ) -> None:
        """Begin with the newest version, or with the last pin: `at`, or a later one, which `pin_file` keeps.

        One of the `required` keys must have signed each version that servers should serve. An older version
        than one that they were to serve before, which `floor` remembers, is then refused. `allow_rollback`
        accepts the version `at` also if it is older; without `at`, the store's newest version once.

        `check_run` raises if a run is not one that can be served.
        """
        self.watcher = watcher
        self._trust = None if required is None else Trust(watcher.store, required)
        self._floor = floor or Floor()
        self._allow_rollback, self._max_head_age_s = allow_rollback, max_head_age_s
        self._is_free = allow_rollback and at is None
        """Whether the next newest version may be older, and is the floor then."""
        self._check_run = check_run
        self._checked: str | None = None
        """The run that was checked."""
        self._schema = Schema(tensors=(), tied={})
        """Of its tensors."""
        self._pin_file = pin_file
        self._lock = threading.Lock()
        self.head: Manifest | None = None
        """The store's newest version, as seen last; if keys are required, the newest one that was signed."""
        self._found: Manifest | None = None
        """Of the pinned version."""
        self._pin = Pin(version=at, allow_rollback=allow_rollback) if at is not None else None
        """Of the pinned version, which may be retired while servers are pinned to it."""
        if pin_file is not None:
            if not os.access(pin_file.parent, os.W_OK | os.X_OK):
                raise UsageError(f"{pin_file} cannot be kept: {pin_file.parent} is no folder to write to")
            if pin_file.exists():
                self._pin = _read(pin_file)
        newest = self._floor.newest
        if self._trust is not None and watcher.run_id is None and newest is not None and not self._is_free:
            # The process before this one followed that run.
            watcher.run_id = newest.run_id

    def is_head_old(self) -> bool:
        """Whether the newest version is older than it may be."""
        age_s = self.head_age_s()
        return age_s is not None and self._max_head_age_s is not None and age_s > self._max_head_age_s

    def head_age_s(self) -> float | None:
        """Seconds since the newest version was created, by the trainer's clock; None before the first.

        If keys are required, of the newest one that was signed.
        """
        head = self.head
        if head is None:
            return None
        return max(0.0, (datetime.now(UTC) - manifest_json.time_of(head.created_at)).total_seconds())

    def head_share(self) -> float | None:
        """The share of elements in which the newest version differs from the one before; None where it is not
        known, as of an anchor alone.
        """
        head = self.head
        if head is None or head.delta is None or head.run_id != self._checked:
            return None
        return head.delta.share_changed(self._schema)

    @property
    def pinned(self) -> Pin | None:
        return self._pin

    @property
    def allows_rollback(self) -> bool:
        """Whether the operator said that servers may go to an older version than they served."""
        pin = self._pin
        return self._allow_rollback if pin is None else pin.allow_rollback

    def refresh(self) -> Manifest | None:
        """Read the store, and return the manifest of the version that servers should serve; None where
        nothing is committed.
        """
        head = self.watcher.refresh()
        if head is not None and head.run_id != self._checked and self._check_run is not None:
            header = history.run_header(self.watcher.store)
            self._check_run(header)
            self._checked, self._schema = head.run_id, header.schema
        with self._lock:
            pin = self._pin
        if pin is None or head is None or self._trust is None:
            if head is not None:
                self._check(head)
                self._take(head)
            self.head = head
        else:
            # Servers do not go to the newest version, so an unsigned one does not keep them from theirs.
            with suppress(Unsigned, WrongSignature):
                self._check(head)
                self.head = head
        if pin is None or head is None:
            return head
        if pin.run_id not in (None, head.run_id):
            raise UsageError(
                f"servers are pinned to version {pin.version} of run {pin.run_id}, but "
                f"{self.watcher.store.url} now holds run {head.run_id}: unpin them, or pin them to another"
            )
        if self._found is None or (self._found.version, self._found.run_id) != (pin.version, head.run_id):
            found = history.read_manifest(self.watcher.store, pin.version)
            self._check(found)
            kept.check(self.watcher.store, pin.version)
            self._take(found, pin)
            self._found = found
            with self._lock:
                if self._pin == pin:
                    self._pin = replace(pin, run_id=head.run_id)
        return self._found

    def _check(self, found: Manifest) -> None:
        if self._trust is not None:
            self._trust.check(found)

    def _take(self, found: Manifest, pin: Pin | None = None) -> None:
        """Take note that servers are to serve a version, unless it is older than it may be."""
        if self._trust is None:
            return
        if pin is None and self._is_free:
            self._floor.set(found)
            self._is_free = False
        elif pin is None or not pin.allow_rollback:
            self._floor.check(found)
        self._floor.raise_to(found)

    def pin(self, version: int | str, *, allow_rollback: bool = False) -> int:
        """Pin servers to a version from the next `refresh` on, and return its number.

        It may be a tag; if that moves later, the servers stay. After any error nothing has changed.
        """
        store = self.watcher.store
        number = notes.version_of(store, version)
        found = history.read_manifest(store, number)
        self.watcher.check_run(found)
        self._check(found)
        if self._trust is not None and not allow_rollback:
            self._floor.check(found)
        kept.check(store, number)
        self._set(Pin(version=number, run_id=found.run_id, allow_rollback=allow_rollback))
        return number

    def unpin(self) -> None:
        """Follow the store's newest version from the next `refresh` on."""
        self._set(None)

    def _set(self, pin: Pin | None) -> None:
        with self._lock:
            if self._pin_file is not None:
                replace_text(self._pin_file, json.dumps({"pin": None if pin is None else asdict(pin)}))
            self._pin = pin


def _read(path: Path) -> Pin | None:
    try:
        pin = json.loads(path.read_text())["pin"]
        if pin is None:
            return None
        version, run_id, allowed = pin["version"], pin["run_id"], pin.get("allow_rollback", False)
        if type(allowed) is not bool:
            raise TypeError
        version_number(version)
        if not isinstance(run_id, str | None):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError, UsageError) as exc:
        raise UsageError(
            f"{path} does not say whether servers are pinned to a version: correct it, or remove it to "
            "follow the newest"
        ) from exc
    return Pin(version=version, run_id=run_id, allow_rollback=allowed)
