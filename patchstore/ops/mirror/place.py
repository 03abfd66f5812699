"""The folder of a mirror: one folder per version, and a link to the present one.

- `current` is a link to `00000012`, and is replaced by one rename
- `00000012/` is a checkpoint folder: complete once it has this name, and never written to after that
- `mirror.json` says which run this is, and which folder the consumers have accepted
- `floor.json`, where signatures are required, says which version was the newest
- `.lock` is locked by the process that keeps the mirror
"""

import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from patchstore.errors import UsageError
from patchstore.read.download import flush
from patchstore.support import host, locks

LINK = "current"
_RECORD = "mirror.json"
_LOCK = ".lock"
FLOOR = "floor.json"
_NAME = re.compile(r"(\d{8,})(-\d+)?")
_DIGITS = 8

Stat = tuple[int, int, int]
"""Inode, size and time of the last change of a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The content of `mirror.json`."""

    run_id: str
    store: str
    """The store's URL, for people."""
    told: str | None = None
    """The name of the folder that all consumers have accepted last."""
    signed: bool = False
    """Each folder was made of a version that a required key had signed."""


class Place:
    """The folder of a mirror, while this process keeps it. Not for use from several threads at once."""

    def __init__(self, path: Path) -> None:
        """Make the folder if need be, and lock it."""
        self.path = path
        with host.asked(f"opening {path}"):
            try:
                path.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError) as exc:
                raise UsageError(f"{path} is no folder and cannot be one: {exc}; name another place") from exc
            if not (path / _RECORD).exists() and {each.name for each in path.iterdir()} - {_LOCK, FLOOR}:
                raise UsageError(
                    f"{path} is not empty, and no mirror, as it has no {_RECORD}; name a folder that is "
                    "empty or does not exist"
                )
            self._lock = locks.Handle(path / _LOCK, os.O_RDWR | os.O_CREAT)
            try:
                self._lock.lock(wait=False)
            except BlockingIOError as exc:
                self._lock.close()
                raise UsageError(f"{path} is kept by another patchstore mirror; stop one of them") from exc
            except OSError as exc:
                # A file system without locks; two mirrors of one folder are then not prevented.
                if exc.errno not in {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}:
                    self._lock.close()
                    raise
        self.record = self._read()

    def close(self) -> None:
        self._lock.close()

    @property
    def current(self) -> Path | None:
        """The folder of the present version."""
        try:
            name = str((self.path / LINK).readlink())
        except OSError:
            return None
        found = self.path / name
        return found if _NAME.fullmatch(name) and found.is_dir() else None

    def free_name(self, version: int) -> Path:
        """A name for a version's folder that is not taken."""
        found, number = self.path / f"{version:0{_DIGITS}d}", 1
        while os.path.lexists(found):
            found, number = self.path / f"{version:0{_DIGITS}d}-{number}", number + 1
        return found

    def existing(self, version: int) -> list[Path]:
        """Folders that have this version's name."""
        return [each for each in self._folders() if version_of(each) == version]

    def switch(self, folder: Path) -> None:
        """Let the link lead to a version's folder, in one step."""
        draft = self.path / f".{LINK}.{uuid.uuid4().hex}"
        with host.asked(f"switching {self.path / LINK}"):
            try:
                draft.symlink_to(folder.name)
                draft.replace(self.path / LINK)
            finally:
                draft.unlink(missing_ok=True)
            flush(self.path)

    def prune(self, keep: int) -> None:
        """Remove all folders but the present one, the one that was accepted last, and `keep` newer ones.

        One that cannot be removed stays. Processes that have its files open or mapped keep them.
        """
        present, accepted = self.current, None if self.record is None else self.record.told
        others = [each for each in self._folders() if each != present and each.name != accepted]
        others.sort(key=lambda each: each.stat().st_mtime_ns, reverse=True)
        for each in others[keep:]:
            shutil.rmtree(each, ignore_errors=True)
        for each in self.path.glob(f".{LINK}.*"):
            each.unlink(missing_ok=True)

    def check_signed(self, *, is_signed: bool) -> None:
        """Check that all folders here were made with required keys, or all without."""
        if self.record is None or self.record.signed == is_signed:
            return
        raise UsageError(
            f"{self.path} was begun without --require-signature, so what it has may be forged; name another"
            if is_signed
            else f"{self.path} was begun with --require-signature: name the public keys, or another folder"
        )

    def begin(self, run_id: str, store: str, *, is_signed: bool = False) -> None:
        """Take note of the run that is mirrored here, which never changes."""
        if self.record is None:
            self._write(Record(run_id=run_id, store=store, signed=is_signed))

    def tell(self, folder: Path) -> None:
        """Take note of the folder that all consumers have accepted."""
        assert self.record is not None
        self._write(replace(self.record, told=folder.name))

    def _folders(self) -> list[Path]:
        return [each for each in self.path.iterdir() if _NAME.fullmatch(each.name) and each.is_dir()]

    def _read(self) -> Record | None:
        path = self.path / _RECORD
        try:
            found: Any = json.loads(path.read_text())
            told = found["told"]
            if not (isinstance(found["run_id"], str) and isinstance(found["store"], str)):
                raise TypeError("run_id and store must be texts")
            if not isinstance(told, str | None):
                raise TypeError("told must be a text")
            if not isinstance(signed := found.get("signed", False), bool):
                raise TypeError("signed must be true or false")
            return Record(run_id=found["run_id"], store=found["store"], told=told, signed=signed)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise UsageError(
                f"{path} cannot be read: {exc}. Remove {self.path}, or name another folder"
            ) from exc

    def _write(self, record: Record) -> None:
        path = self.path / _RECORD
        with host.asked(f"writing {path}"):
            host.replace_text(path, json.dumps(asdict(record)) + "\n")
        self.record = record


def version_of(folder: Path) -> int:
    """The version whose folder has this name."""
    match = _NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[1])


def stats(folder: Path) -> Mapping[str, Stat]:
    """What tells that a folder's files are as they were: by name, without reading them."""
    found = {}
    for each in os.scandir(folder):
        stat = each.stat(follow_symlinks=False)
        found[each.name] = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return found
