"""Which version servers should serve: the store's newest, or one that an operator pinned them to.

The store is polled once for all servers. From time to time the run itself is checked again, because a bucket
may be emptied and another run begun in it.
"""

import json
import os
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from pathlib import Path

from patchstore.errors import StoreReplaced, Unsigned, UsageError, VersionNotFound, WrongSignature
from patchstore.format import history, json_fields, kept, tags
from patchstore.format.records import Manifest
from patchstore.retention.lease import Lease
from patchstore.signing.required import RequiredKeys
from patchstore.signing.trust import Trust
from patchstore.stores.base import Store

_NUM_REMEMBERED = 10_000
"""So many versions' times of creation are kept, to report how late a server is."""


class HeadWatcher:
    """The newest version of the run that a store has now, also after another run replaced it."""

    def __init__(self, store: Store, *, recheck_s: float = 10.0) -> None:
        """Nothing is read yet.

        Args:
            recheck_s: after this time without a new version the run itself is checked again.
        """
        self.store = store
        self._recheck_s = recheck_s
        self._checked = 0.0
        self._found: Manifest | None = None
        self._created: deque[tuple[int, datetime]] = deque(maxlen=_NUM_REMEMBERED)

    def refresh(self) -> Manifest | None:
        """Read what is new: one object if nothing is, and from time to time a second one.

        Returns:
            None if nothing is committed.

        Raises:
            StoreUnavailable, DataError: the version found before stays.
            StoreReplaced: the run is still there, but not the version that was its newest. Raised each time,
                until that version is there again.
        """
        found = self._found
        if found is None:
            self._begin()
            return self._found
        # A version that was seen stays committed, so only later versions are requested.
        while (later := history.following(self.store, found)) is not None and later.run_id == found.run_id:
            self._found = found = later
            self._remember(later)
        if later is not None or self._has_another_run(found):
            self._begin()
        return self._found

    def _begin(self) -> None:
        self._found = history.head(self.store)
        self._checked = time.monotonic()
        self._created.clear()
        if self._found is not None:
            self._remember(self._found)

    def _has_another_run(self, found: Manifest) -> bool:
        if time.monotonic() - self._checked < self._recheck_s:
            return False
        header = history.read_header(self.store)
        is_other = header is None or header.run_id != found.run_id
        if not is_other:
            self._check_is_there(found)
        self._checked = time.monotonic()
        return is_other

    def _check_is_there(self, found: Manifest) -> None:
        try:
            now = history.read_manifest(self.store, found.version)
        except VersionNotFound:
            now = None
        if now != found:
            raise StoreReplaced(
                f"{self.store.url} {'no longer has' if now is None else 'has another'} version "
                f"{found.version} of run {found.run_id}, which was its newest. Its objects were removed or "
                "replaced. Servers were left as they are; put the objects back, or restart this process to "
                "follow what is there now"
            )

    def _remember(self, found: Manifest) -> None:
        self._created.append((found.version, json_fields.time_of(found.created_at)))

    def created(self, version: int) -> datetime | None:
        """When a version was created, if it was seen. For any thread."""
        return next((created for seen, created in reversed(self._created.copy()) if seen == version), None)

    def first_missing_at(self, serving: int) -> datetime | None:
        """When the first version after `serving` was created, if one was seen; otherwise None."""
        later = list(takewhile(lambda seen: seen[0] > serving, reversed(self._created.copy())))
        return later[-1][1] if later else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A version that servers are pinned to, whatever the store's newest is."""

    version: int
    run_id: str | None = None
    """The run that the version belongs to; None until the store was read."""


class DesiredVersion:
    """The version that servers should serve. `refresh` is for one thread, the rest for any."""

    def __init__(
        self,
        watcher: HeadWatcher,
        *,
        at: int | None = None,
        pin_file: Path | None = None,
        required: RequiredKeys | None = None,
    ) -> None:
        """Begin with the newest version, or with the last pin.

        Args:
            at: the version to pin servers to at first; a later pin, which `pin_file` keeps, outranks it.
            pin_file: stores the pin for the next process.
            required: keys, one of which must have signed each version that servers should serve.

        Raises:
            UsageError: the file is invalid, or its folder is not writable.
        """
        self.watcher = watcher
        self._trust = None if required is None else Trust(watcher.store, required)
        self._pin_file = pin_file
        self._lock = threading.Lock()
        self.head: Manifest | None = None
        """The store's newest version, as seen last; if keys are required, the newest one that was signed."""
        self._found: Manifest | None = None
        """Of the pinned version."""
        self._pin = Pin(version=at) if at is not None else None
        self._lease: Lease | None = None
        """Of the pinned version, which may be retired while servers are pinned to it."""
        if pin_file is not None:
            if not os.access(pin_file.parent, os.W_OK | os.X_OK):
                raise UsageError(f"{pin_file} cannot be kept: {pin_file.parent} is no folder to write to")
            if pin_file.exists():
                self._pin = _read(pin_file)

    @property
    def pinned(self) -> Pin | None:
        return self._pin

    def refresh(self) -> Manifest | None:
        """Read the store, and return the manifest of the version that servers should serve.

        Returns:
            None where nothing is committed.

        Raises:
            VersionNotFound: the store lacks the version that servers are pinned to.
            VersionRetired: that version was retired before this process held it.
            UsageError: that version is of a run that is no longer in the store.
            Unsigned, WrongSignature: no required key has signed the version that servers should serve.
            StoreUnavailable, DataError: the store could not be read.
        """
        head = self.watcher.refresh()
        with self._lock:
            pin = self._pin
        if pin is None or head is None or self._trust is None:
            self._check(head)
            self.head = head
        else:
            # Servers do not go to the newest version, so an unsigned one does not keep them from theirs.
            with suppress(Unsigned, WrongSignature):
                self._check(head)
                self.head = head
        if self._lease is not None and (pin is None or self._lease.versions != (pin.version,)):
            self.close()
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
            self.close()
            self._lease = Lease(self.watcher.store, head.run_id, [pin.version]).__enter__()
            self._found = found
            with self._lock:
                if self._pin == pin:
                    self._pin = Pin(version=pin.version, run_id=head.run_id)
        return self._found

    def _check(self, found: Manifest | None) -> None:
        if found is not None and self._trust is not None:
            self._trust.check(found)

    def close(self) -> None:
        """End the lease of the pinned version."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.end()

    def pin(self, version: int | str) -> int:
        """Pin servers to a version from the next `refresh` on, and return its number.

        Args:
            version: its number, or a tag. If the tag moves later, the servers stay.

        Raises:
            VersionNotFound: the store lacks it; nothing changed. So after all other errors.
            VersionRetired: the version is retired.
            Unsigned, WrongSignature: no required key has signed it; nothing changed.
            UsageError: neither a number nor a name of a tag.
            StoreUnavailable, DataError: the store could not be read.
            OSError: the file could not be written.
        """
        store = self.watcher.store
        number = tags.version_of(store, version)
        found = history.read_manifest(store, number)
        self._check(found)
        kept.check(store, number)
        self._set(Pin(version=number, run_id=found.run_id))
        return number

    def unpin(self) -> None:
        """Follow the store's newest version from the next `refresh` on.

        Raises:
            OSError: the file could not be written; nothing changed.
        """
        self._set(None)

    def _set(self, pin: Pin | None) -> None:
        with self._lock:
            if self._pin_file is not None:
                _write(self._pin_file, pin)
            self._pin = pin


def _write(path: Path, pin: Pin | None) -> None:
    record = None if pin is None else {"version": pin.version, "run_id": pin.run_id}
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("w") as file:
            json.dump({"pin": record}, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    # The new name must outlive a crash of the machine too.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _read(path: Path) -> Pin | None:
    try:
        pin = json.loads(path.read_text())["pin"]
        if pin is None:
            return None
        version, run_id = pin["version"], pin["run_id"]
        if type(version) is not int or version < 0 or not isinstance(run_id, str | None):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise UsageError(
            f"{path} does not say whether servers are pinned to a version: correct it, or remove it to "
            "follow the newest"
        ) from exc
    return Pin(version=version, run_id=run_id)
