"""Buckets: which path has which content, and who waits to hear of changes."""

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tests.support.hub.content import ContentStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a path has."""

    content: str
    """Hash of its content."""
    size: int
    modified: float
    """When the client made it, in seconds."""
    uploaded: float

    def described(self, path: str) -> dict[str, Any]:
        return {
            "type": "file",
            "path": path,
            "size": self.size,
            "xetHash": self.content,
            "mtime": iso(self.modified),
            "uploadedAt": iso(self.uploaded),
        }


class Bucket:
    """Paths and their entries. May be used from several threads; each change is one step."""

    def __init__(self, contents: ContentStore) -> None:
        self._contents = contents
        self._entries: dict[str, Entry] = {}
        self._lock = threading.Lock()
        self._listeners: list[queue.SimpleQueue[dict[str, Any] | None]] = []
        self._num_changes = 0

    def get(self, path: str) -> Entry | None:
        return self._entries.get(path)

    def items(self) -> list[tuple[str, Entry]]:
        """All paths in ascending order."""
        with self._lock:
            return sorted(self._entries.items())

    def put(self, path: str, content: str, modified: float, *, if_absent: bool = False) -> bool:
        """Give a path a content; return False where it has one already and `if_absent`."""
        with self._lock:
            taken = path in self._entries
            if taken and if_absent:
                return False
            size = self._contents.file_size(content)
            self._entries[path] = Entry(content=content, size=size, modified=modified, uploaded=time.time())
            self._tell({"path": path, "op": "update" if taken else "add", "size": size, "xetHash": content})
        return True

    def delete(self, path: str) -> None:
        with self._lock:
            if self._entries.pop(path, None):
                self._tell({"path": path, "op": "delete"})

    def changes(self) -> Iterator[dict[str, Any] | None]:
        """Yield changes as they happen, and None once that this waits for them; ends with `hang_up`."""
        heard: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        with self._lock:
            self._listeners.append(heard)
        try:
            yield None
            while change := heard.get():
                yield change
        finally:
            with self._lock:
                self._listeners.remove(heard)

    def hang_up(self) -> None:
        """End all feeds of changes."""
        with self._lock:
            for heard in self._listeners:
                heard.put(None)

    def _tell(self, change: dict[str, Any]) -> None:
        self._num_changes += 1
        for heard in self._listeners:
            heard.put({"cursor": str(self._num_changes), "changes": [change]})


def iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
