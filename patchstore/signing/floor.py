"""The newest signed version that was used: a store that ends before it, or answers with less, is refused.

An old version keeps its signature. So a program that may write to a bucket, or answers in its place, could
offer an old state of it as the present one. A signature does not reveal that; a reader that remembers does.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from patchstore.errors import RollbackRefused, UsageError
from patchstore.format import json_fields
from patchstore.format.records import Manifest
from patchstore.support import host
from patchstore.support.durable import replace_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What is remembered of a version."""

    run_id: str
    version: int
    created_at: str
    """By the trainer's clock, as its manifest says."""

    def is_after(self, found: Manifest) -> bool:
        """Whether a version is older. Versions of two runs are compared by the times of their creation."""
        if found.run_id == self.run_id:
            return found.version < self.version
        return json_fields.time_of(found.created_at) <= json_fields.time_of(self.created_at)


class Floor:
    """Remembers the newest version that was used, and refuses older ones. One thread raises it at a time."""

    def __init__(self, path: Path | None = None) -> None:
        """Begin where an earlier process ended.

        Args:
            path: a file that keeps it for the next process; None to forget it with this one.

        Raises:
            UsageError: the file is invalid, or its folder is not writable.
        """
        self._path = path
        self.newest: Mark | None = None
        """None before the first version."""
        if path is None:
            return
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise UsageError(f"{path} cannot be kept: {path.parent} is no folder to write to")
        if path.exists():
            self.newest = _read(path)

    def check(self, found: Manifest) -> None:
        """Check that a version is not older than the newest one that was used.

        Raises:
            RollbackRefused: it is.
        """
        newest = self.newest
        if newest is None or not newest.is_after(found):
            return
        was = f"version {newest.version} was used before"
        if found.run_id != newest.run_id:
            was = (
                f"version {newest.version} of run {newest.run_id} was used before, created at "
                f"{newest.created_at}, and this one is of run {found.run_id}, created at {found.created_at}"
            )
        raise RollbackRefused(
            f"version {found.version} is signed, but {was}: the store was set back, or something answers "
            "with an old state of it. The weights were left as they are. If it is meant, say so with "
            "--allow-rollback (allow_rollback)"
        )

    def raise_to(self, found: Manifest) -> None:
        """Take note that a version is used, if it is the newest so far.

        Raises:
            HostError: the file could not be written; nothing changed.
        """
        if self.newest is None or not self.newest.is_after(found):
            self.set(found)

    def set(self, found: Manifest) -> None:
        """Begin anew from a version, older or newer. Raises as `raise_to`."""
        mark = Mark(run_id=found.run_id, version=found.version, created_at=found.created_at)
        if mark == self.newest:
            return
        if self._path is not None:
            with host.asked(f"writing {self._path}"):
                replace_text(self._path, json.dumps({"floor": asdict(mark)}))
        self.newest = mark


def _read(path: Path) -> Mark:
    try:
        found = json.loads(path.read_text())["floor"]
        mark = Mark(run_id=found["run_id"], version=found["version"], created_at=found["created_at"])
        json_fields.time_of(mark.created_at)
        if type(mark.version) is not int or mark.version < 0 or not isinstance(mark.run_id, str):  # type: ignore[redundant-expr, unused-ignore]
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise UsageError(
            f"{path} does not say which version was used last: put it back, or remove it to accept the store "
            "as it is now"
        ) from exc
    return mark
