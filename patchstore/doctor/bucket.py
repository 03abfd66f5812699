"""A store that is examined, and what the checks learn about it."""

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from patchstore.doctor.finding import Finding
from patchstore.errors import PatchstoreError, StoreUnavailable
from patchstore.format import layout
from patchstore.format.records import Manifest, StoreHeader
from patchstore.stores import Store, open_store
from patchstore.stores.folder import FolderStore


class Bucket:
    """A store that is examined, and what is known about it."""

    def __init__(
        self,
        store: Store | str,
        *,
        options: Mapping[str, Any],
        num_bytes: int,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Prepare; nothing is opened yet.

        Args:
            store: a URL, or a store that is open already.
            num_bytes: size of the payload that measures throughput.
            now: this machine's clock.
        """
        self.url = store if isinstance(store, str) else store.url
        self.options, self.num_bytes, self.now = options, num_bytes, now
        self.header: StoreHeader | None = None
        """Of the run there, once it was read."""
        self.head: Manifest | None = None
        self.can_create = False
        """Whether create-only puts are worth measuring."""
        self.num_left = 0
        """Probes that could not be removed."""
        self._store = None if isinstance(store, str) else store
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
