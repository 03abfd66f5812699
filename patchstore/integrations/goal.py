"""Which version servers should hold: the store's newest, or one that somebody holds them at.

The store is asked once for all servers, and believed to be the same run only for a while: a bucket may be
emptied, and another run begun in it.
"""

import json
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path

from patchstore import log
from patchstore.errors import UsageError
from patchstore.model import Manifest
from patchstore.stores.base import Store

_NUM_REMEMBERED = 10_000
"""Versions whose time of creation is kept, to say how late a server is."""


class Newest:
    """The newest version of whichever run is in a store."""

    def __init__(self, store: Store, *, recheck_s: float = 10.0) -> None:
        """Nothing is read yet.

        Args:
            recheck_s: how long a store without news is taken to hold the same run.
        """
        self.store = store
        self._recheck_s = recheck_s
        self._checked = 0.0
        self._found: Manifest | None = None
        self._created: deque[tuple[int, datetime]] = deque(maxlen=_NUM_REMEMBERED)

    def look(self) -> Manifest | None:
        """Read what is new: one object where nothing is, and now and then a second one.

        Returns:
            None where nothing is committed.

        Raises:
            StoreUnavailable, DataError: what was found before stays.
        """
        found = self._found
        if found is None:
            self._begin()
            return self._found
        # A version that was seen stays committed, so only the slots after it are asked for.
        while (later := log.following(self.store, found)) is not None and later.run_id == found.run_id:
            self._found = found = later
            self._remember(later)
        if later is not None or self._has_another_run(found):
            self._begin()
        return self._found

    def _begin(self) -> None:
        self._found = log.head(self.store)
        self._checked = time.monotonic()
        self._created.clear()
        if self._found is not None:
            self._remember(self._found)

    def _has_another_run(self, found: Manifest) -> bool:
        if time.monotonic() - self._checked < self._recheck_s:
            return False
        header = log.read_header(self.store)
        self._checked = time.monotonic()
        return header is None or header.run_id != found.run_id

    def _remember(self, found: Manifest) -> None:
        try:
            created = datetime.fromisoformat(found.created_at)
        except ValueError:
            # Lateness is then counted from when the version was seen.
            created = datetime.now(UTC)
        # Without a zone it could not be compared with the time now.
        created = created.replace(tzinfo=created.tzinfo or UTC)
        self._created.append((found.version, created))

    def created(self, version: int) -> datetime | None:
        """When a version was created, of those that were seen. For any thread."""
        return next((created for seen, created in reversed(self._created.copy()) if seen == version), None)

    def outdated(self, held: int) -> datetime | None:
        """When the first version after `held` was created, of those that were seen; None without one."""
        later = list(takewhile(lambda seen: seen[0] > held, reversed(self._created.copy())))
        return later[-1][1] if later else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """A version that servers are held at, whatever the store's newest is."""

    version: int
    run_id: str | None = None
    """The run whose version is meant; None until the store was read."""


class Goal:
    """The version that servers should hold. `look` is for one thread, the rest for any."""

    def __init__(self, newest: Newest, *, at: int | None = None, state: Path | None = None) -> None:
        """Begin with the newest, or with what was said last.

        Args:
            at: the version to hold at first; what was said since, and is in `state`, outranks it.
            state: file that keeps what `hold` and `release` were told, for the next process.

        Raises:
            UsageError: the file cannot be understood, or its folder not be written to.
        """
        self.newest = newest
        self._state = state
        self._lock = threading.Lock()
        self.head: Manifest | None = None
        """The store's newest, as seen last."""
        self._held: Manifest | None = None
        self._hold = Hold(version=at) if at is not None else None
        if state is not None:
            if not os.access(state.parent, os.W_OK | os.X_OK):
                raise UsageError(f"{state} cannot be kept: {state.parent} is no folder to write to")
            if state.exists():
                self._hold = _read(state)

    @property
    def hold_at(self) -> Hold | None:
        return self._hold

    def look(self) -> Manifest | None:
        """Read the store, and return the manifest of the version that servers should hold.

        Returns:
            None where nothing is committed.

        Raises:
            VersionNotFound: the store lacks the version to hold at.
            UsageError: that version is of a run that is no longer in the store.
            StoreUnavailable, DataError: the store could not be read.
        """
        self.head = head = self.newest.look()
        with self._lock:
            hold = self._hold
        if hold is None or head is None:
            return head
        if hold.run_id not in (None, head.run_id):
            raise UsageError(
                f"servers are held at version {hold.version} of run {hold.run_id}, but "
                f"{self.newest.store.url} now holds run {head.run_id}: release them, or hold them at another"
            )
        if self._held is None or (self._held.version, self._held.run_id) != (hold.version, head.run_id):
            self._held = log.read_manifest(self.newest.store, hold.version)
            with self._lock:
                if self._hold == hold:
                    self._hold = Hold(version=hold.version, run_id=head.run_id)
        return self._held

    def hold(self, version: int) -> None:
        """Hold servers at a version from the next `look` on.

        Raises:
            VersionNotFound: the store lacks it; nothing changed. So after all other errors.
            StoreUnavailable, DataError: the store could not be read.
            OSError: the state could not be written.
        """
        found = log.read_manifest(self.newest.store, version)
        self._say(Hold(version=version, run_id=found.run_id))

    def release(self) -> None:
        """Follow the store's newest from the next `look` on.

        Raises:
            OSError: the state could not be written; nothing changed.
        """
        self._say(None)

    def _say(self, hold: Hold | None) -> None:
        with self._lock:
            if self._state is not None:
                _write(self._state, hold)
            self._hold = hold


def _write(path: Path, hold: Hold | None) -> None:
    record = None if hold is None else {"version": hold.version, "run_id": hold.run_id}
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("w") as file:
            json.dump({"hold": record}, file)
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


def _read(path: Path) -> Hold | None:
    try:
        hold = json.loads(path.read_text())["hold"]
        if hold is None:
            return None
        version, run_id = hold["version"], hold["run_id"]
        if type(version) is not int or version < 0 or not isinstance(run_id, str | None):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise UsageError(
            f"{path} does not say whether servers are held at a version: mend it, or remove it to follow the "
            "newest"
        ) from exc
    return Hold(version=version, run_id=run_id)
