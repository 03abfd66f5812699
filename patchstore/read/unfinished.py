"""Write files and folders under a temporary name until they are complete, so that readers never see a part.

A killed process leaves an unfinished file. Each is locked while its process lives. So the next process that
writes in the same folder can tell, and removes it.
"""

import errno
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from patchstore.errors import UsageError
from patchstore.stores.base import Chunk
from patchstore.support import host, locks

logger = logging.getLogger(__name__)

_NAME = re.compile(r"\..+\.[0-9a-f]{32}\.partial")
_NO_LOCKS = {errno.EBADF, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


@contextmanager
def unfinished(target: Path, *, is_folder: bool) -> Iterator[Path]:
    """Create an empty file or folder beside `target`; it is renamed to `target` when the block ends.

    After an error nothing is left. The folder of `target` is made if need be, and what killed processes left
    in it is removed; not on network file systems, where a lock may be known to one host alone.

    Raises:
        HostError: the file system refuses.
    """
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    try:
        with host.asked(f"making {target}"):
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                has_locks = host.file_system(target.parent) not in host.REMOTE
                if has_locks:
                    _remove_left(target.parent)
                handle = _made(partial, is_folder=is_folder, has_locks=has_locks)
            except (FileExistsError, FileNotFoundError, NotADirectoryError) as exc:
                # Such as below a file, or in /proc.
                raise UsageError(f"{target} cannot be made: {exc}; name another place") from exc
        with closing(handle):
            yield partial
            with host.asked(f"naming {target}"):
                partial.rename(target)
                flush(target.parent)
    except BaseException:
        _remove(partial)
        raise


def _made(partial: Path, *, is_folder: bool, has_locks: bool) -> locks.Handle:
    """Make an empty file or folder, and lock it where that can be done."""
    while True:
        if is_folder:
            # `exist_ok` would raise where another process removes the folder of an earlier try meanwhile.
            with suppress(FileExistsError):
                partial.mkdir()
        else:
            partial.touch()
        # Until it is locked, another process may take it for a killed process's and remove it: then try
        # again.
        with suppress(FileNotFoundError, BlockingIOError):
            handle = locks.Handle(partial)
            try:
                if has_locks:
                    handle.lock(wait=False)
                if handle.is_at(partial):
                    return handle
            except BaseException as exc:
                if isinstance(exc, OSError) and exc.errno in _NO_LOCKS:
                    return handle
                handle.close()
                raise
            handle.close()


def _remove_left(folder: Path) -> None:
    """Remove what killed processes left in a folder."""
    for path in [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]:
        # A file that cannot be opened, locked or removed is left.
        with suppress(OSError), closing(locks.Handle(path, os.O_RDONLY | os.O_NOFOLLOW)) as handle:
            handle.lock(wait=False)
            if os.fstat(handle.fileno()).st_uid == os.geteuid():
                _remove(path)
                logger.info("removed %s, which a killed process had left", path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        # Its folder may be none, which is what ended the attempt.
        with suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()


def write_file(path: Path, chunks: Iterable[Chunk]) -> None:
    """Write a file; what `chunks` raises passes through.

    Raises:
        HostError: there is no space for it, or the disk fails.
    """
    with host.asked(f"writing {path}"):
        file = path.open("wb", buffering=0)
    with file:
        for chunk in chunks:
            rest = memoryview(chunk).cast("B")
            with host.asked(f"writing {path}"):
                while rest:
                    rest = rest[file.write(rest) :]


def flush(path: Path) -> None:
    """Make a file, or a folder's list of files, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
