"""Space for a download: reserved on a disk, and only looked for in memory."""

import tempfile
from pathlib import Path

import pytest

from patchstore.read import download
from patchstore.support import host

SHM = Path("/dev/shm")


def test_a_file_on_a_disk_has_its_space_from_the_start(tmp_path: Path) -> None:
    with (tmp_path / "file").open("xb") as file:
        if host.file_system_number(file.fileno()) == host.TMPFS:
            pytest.skip("temporary files are in memory here")
        download.reserve(file.fileno(), 1 << 20)
        assert Path(file.name).stat().st_size == 1 << 20
    with (tmp_path / "other").open("xb") as file, pytest.raises(OSError, match=r"No space left|too large"):
        download.reserve(file.fileno(), 1 << 60)


@pytest.mark.skipif(not SHM.is_dir(), reason="needs a file system in memory")
def test_a_file_in_memory_takes_none_before_it_is_written() -> None:
    with tempfile.NamedTemporaryFile(dir=SHM) as file:
        if host.file_system_number(file.fileno()) != host.TMPFS:
            pytest.skip("/dev/shm is no tmpfs here")
        download.reserve(file.fileno(), 1 << 20)
        assert Path(file.name).stat().st_blocks == 0
        with pytest.raises(OSError, match="No space left"):
            download.reserve(file.fileno(), 1 << 60)
