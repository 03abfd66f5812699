import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
import s3fs
from fsspec.asyn import AsyncFileSystem

from patchstore.errors import NotFound, StoreUnavailable, UnsupportedStore, UsageError
from patchstore.stores import open_store
from patchstore.stores.base import Store
from patchstore.stores.fsspec_store import FsspecStore
from patchstore.testing.store import StoreConformance


@pytest.fixture
def fs(s3_options: dict[str, Any]) -> Iterator[Any]:
    """A file system that creates atomically; it happens to be S3."""
    fs = s3fs.S3FileSystem(**s3_options, skip_instance_cache=True, use_listings_cache=False)
    yield fs
    fs.close_session(fs.loop, fs.s3)


class TestFsspecStore(StoreConformance):
    @pytest.fixture
    def store(self, fs: Any, s3_url: str) -> Store:
        return FsspecStore(fs, s3_url.removeprefix("s3://"), url=s3_url)


class CheckThenWrite(fsspec.AbstractFileSystem):
    """Inherits a create that looks first."""


class Drops(AsyncFileSystem):
    """Drops the condition."""

    async def _pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        raise AssertionError("written to")


@pytest.mark.parametrize(
    "driver",
    [
        *map(fsspec.get_filesystem_class, ("local", "memory", "file", "dir", "simplecache", "reference")),
        CheckThenWrite,
        Drops,
    ],
)
def test_a_file_system_that_does_not_create_atomically_is_refused(driver: type) -> None:
    with pytest.raises(UnsupportedStore, match="s3://"):
        FsspecStore(driver.__new__(driver), "root", url="protocol://root")


def test_listings_are_fresh_although_the_file_system_keeps_them(
    s3_options: dict[str, Any], s3_url: str
) -> None:
    keeping = s3fs.S3FileSystem(**s3_options, skip_instance_cache=True)
    root = s3_url.removeprefix("s3://")
    reader, writer = (FsspecStore(keeping, root, url=s3_url), open_store(s3_url, **s3_options))
    writer.put("a/b", b"x")
    assert list(reader.list()) == ["a/b"]
    keeping.ls(f"{root}/a")
    writer.put("a/c", b"longer")
    assert reader.size("a/c") == 6
    assert list(reader.list()) == ["a/b", "a/c"]


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (FileNotFoundError("no bucket"), UsageError),
        (PermissionError("no"), UsageError),
        (TimeoutError(), StoreUnavailable),
        (RuntimeError("a driver's own error"), StoreUnavailable),
    ],
)
def test_what_a_put_raises_becomes_an_error_that_says_how_to_handle_it(
    fs: Any, s3_url: str, monkeypatch: pytest.MonkeyPatch, raised: Exception, expected: type[Exception]
) -> None:
    def failing(*args: Any, **kwargs: Any) -> None:
        raise raised

    monkeypatch.setattr(fs, "pipe_file", failing)
    store = FsspecStore(fs, s3_url.removeprefix("s3://"), url=s3_url)
    with pytest.raises(expected) as caught:
        store.put("a", b"", if_absent=True)
    assert not isinstance(caught.value, NotFound)
    assert caught.value.__cause__ is raised


def test_stores_are_imported_without_the_packages_of_those_not_opened() -> None:
    code = (
        "import sys; from patchstore.stores import open_store; open_store('folder'); open_store('memory://x');"
        "print({'fsspec', 's3fs', 'aiobotocore', 'botocore', 'torch'} & set(sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert answer.stdout == "set()\n"
