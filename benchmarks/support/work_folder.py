"""A folder for everything that a case writes."""

import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def work_folder(where: Path | None, name: str) -> Iterator[Path]:
    """Yield a folder for all files of a benchmark, which is removed afterwards, also at SIGTERM.

    Args:
        where: the folder's parent, which is made if need be; None for the system's folder of temporary files.
    """
    # Without a handler, SIGTERM would leave child processes and the folder behind.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if where is not None:
        where.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"patchstore-{name}-", dir=where) as folder:
        yield Path(folder)


def keep_logs(folder: Path, where: Path) -> None:
    """Copy the logs of a folder to a new one."""
    where.mkdir(parents=True)
    for log_file in folder.glob("*.log"):
        (where / log_file.name).write_bytes(log_file.read_bytes())
