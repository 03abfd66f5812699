"""Objects in this process's memory, for tests and examples: gone when the process ends."""

import threading
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from patchstore.stores.base import Chunk, Store, check_range
from patchstore.stores.errors import StoreErrors


class MemoryStore(Store):
    """A dict under a lock. Unlike in other stores, `upload` holds the whole object in memory."""

    def __init__(self, url: str = "memory://") -> None:
        self.url = url
        self._errors = StoreErrors(url)
        self._objects: dict[str, bytes] = {}
        self._times: dict[str, datetime] = {}
        self._lock = threading.Lock()

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        check_range(self.url, "get", key, start, end)
        return self._object("get", key)[start:end]

    def size(self, key: str) -> int:
        return len(self._object("size", key))

    def stored_at(self, key: str) -> datetime | None:
        self._object("stored_at", key)
        return self._times.get(key)

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        self._errors.key("put", key)
        with self._lock:
            if if_absent and key in self._objects:
                raise self._errors.taken(key)
            self._objects[key] = bytes(data)
            self._times[key] = datetime.now(UTC)

    def list(self, prefix: str = "") -> Iterator[str]:
        self._errors.prefix(prefix)
        with self._lock:
            keys = sorted(key for key in self._objects if key.startswith(prefix))
        yield from keys

    def delete(self, key: str) -> None:
        self._errors.key("delete", key)
        with self._lock:
            self._objects.pop(key, None)

    def upload(self, key: str, chunks: Iterable[Chunk]) -> None:
        self._errors.key("upload", key)
        collected = bytearray()
        for chunk in chunks:
            collected += chunk
        self.put(key, bytes(collected))

    def _object(self, operation: str, key: str) -> bytes:
        self._errors.key(operation, key)
        with self._lock:
            if key not in self._objects:
                raise self._errors.not_found(operation, key)
            return self._objects[key]


_named: dict[str, MemoryStore] = {}
_named_lock = threading.Lock()


def named(name: str) -> MemoryStore:
    """Return this process's store of that name: the same one for the same name."""
    with _named_lock:
        return _named.setdefault(name, MemoryStore(f"memory://{name}"))
