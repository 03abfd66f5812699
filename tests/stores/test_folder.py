import errno
import os
import resource
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from patchstore import verify
from patchstore.errors import AlreadyExists, NotFound, StoreUnavailable, UnsupportedStore, UsageError
from patchstore.stores.base import PART_BYTES, Store
from patchstore.stores.folder import FolderStore
from patchstore.support import host
from patchstore.testing.store import StoreConformance
from tests.stores.asks import OF_OBJECTS, OPERATIONS
from tests.support.weights import Run

_ENDLESS_UPLOAD = """
import sys
from patchstore.stores import open_store
def chunks():
    yield bytes(100_000)
    print("under way", flush=True)
    sys.stdin.read()
open_store(sys.argv[1]).upload("deltas/x", chunks())
"""


_RUNS_AS_NOBODY = """
import os, sys
from patchstore.errors import UsageError
from patchstore.stores.folder import FolderStore
from tests.stores.asks import OF_OBJECTS, OPERATIONS
from tests.support.weights import Run
os.setgid(65534)
os.setuid(65534)
store = FolderStore(sys.argv[1])
for ask in OPERATIONS.values():
    try:
        ask(store, "a/b")
    except UsageError as exc:
        print(exc.kind, str(exc).startswith(f"{store.url}: "), "access is refused" in str(exc))
"""


class TestFolderStore(StoreConformance):
    reads_with = "_part"

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return FolderStore(tmp_path / "not" / "made" / "yet")

    def other_process(self, store: Store) -> tuple[str, dict[str, Any]]:
        return store.url, {}


def refuses(
    store: FolderStore, key: str, match: str, *verbs: str, kind: type[Exception] = UsageError
) -> None:
    """Fail unless requests for a key are refused, all or those of these kinds."""
    for verb in verbs or OF_OBJECTS:
        with pytest.raises(UsageError, match=match) as caught:
            OPERATIONS[verb](store, key)
        assert type(caught.value) is UsageError
        assert str(caught.value).startswith(f"{store.url}: {verb}")


def temporary(root: Path) -> list[Path]:
    return list((root / ".tmp").iterdir())


def test_a_writer_killed_in_an_upload_leaves_only_a_temporary_file(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _ENDLESS_UPLOAD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "under way\n"
        writer.kill()
    store = FolderStore(tmp_path)
    assert list(store.list()) == []
    assert [path.stat().st_size for path in temporary(tmp_path)] == [100_000]
    store.put("deltas/x", b"the next writer's", if_absent=True)
    assert list(store.list()) == ["deltas/x"]


def test_no_temporary_file_is_left_by_writes_that_end(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.put("a", b"x", if_absent=True)
    store.put("a", b"y")
    store.upload("b", [b"z"])
    with pytest.raises(AlreadyExists):
        store.put("a", b"x", if_absent=True)
    with pytest.raises(ZeroDivisionError):
        store.upload("c", (bytes(1 // 0) for _ in range(1)))
    assert temporary(tmp_path) == []


def test_a_file_that_a_killed_writer_left_long_ago_is_removed(tmp_path: Path) -> None:
    FolderStore(tmp_path).put("a", b"")
    old, young = tmp_path / ".tmp" / uuid.uuid4().hex, tmp_path / ".tmp" / uuid.uuid4().hex
    old.touch()
    young.touch()
    os.utime(old, (0, 0))
    FolderStore(tmp_path).put("a", b"")
    assert temporary(tmp_path) == [young]


def test_only_what_this_user_left_under_such_a_name_is_removed(tmp_path: Path) -> None:
    FolderStore(tmp_path).put("a", b"")
    unfinished, thesis = tmp_path / ".tmp", tmp_path / "thesis"
    link, other_users = unfinished / uuid.uuid4().hex, unfinished / uuid.uuid4().hex
    stay = {unfinished / "thesis.txt", unfinished / f"{uuid.uuid4().hex}.txt", link}
    thesis.touch()
    link.symlink_to(thesis)
    if os.getuid() == 0:
        other_users.touch()
        os.chown(other_users, 65534, 65534)
        stay.add(other_users)
    for path in stay:
        path.touch()
        os.utime(path, (0, 0), follow_symlinks=False)
    FolderStore(tmp_path).put("a", b"")
    assert {*temporary(tmp_path)} == stay
    assert thesis.exists()


def test_a_link_in_place_of_the_folder_for_unfinished_objects_is_refused(tmp_path: Path) -> None:
    victim, root = tmp_path / "victim", tmp_path / "run"
    victim.mkdir()
    FolderStore(root).put("a", b"x")
    left = victim / uuid.uuid4().hex
    left.touch()
    os.utime(left, (0, 0))
    (root / ".tmp").rmdir()
    (root / ".tmp").symlink_to(victim)
    store = FolderStore(root)
    refuses(store, "a", r"\.tmp is a symbolic link", "put", "upload")
    with pytest.raises(UsageError, match=r"\.tmp is a symbolic link"):
        store.put("b", b"y", if_absent=True)
    assert [*victim.iterdir()] == [left]
    assert [*store.list()] == ["a"]
    assert store.get("a") == b"x"


@pytest.mark.parametrize("swapped", [".tmp", "deltas"])
def test_a_link_that_takes_a_folders_place_leads_nowhere(tmp_path: Path, swapped: str) -> None:
    victim, root = tmp_path / "victim", tmp_path / "run"
    victim.mkdir()
    store = FolderStore(root)
    store.put("deltas/1", b"x")

    def swap() -> Iterator[bytes]:
        yield b"new"
        name = next((root / ".tmp").iterdir()).name
        (root / swapped).rename(root / "aside")
        (root / swapped).symlink_to(victim)
        (victim / name).write_bytes(b"forged")

    def upload() -> None:
        store.upload("deltas/1", swap())

    if swapped == "deltas":
        with pytest.raises(UsageError, match="deltas is a symbolic link"):
            upload()
        assert (root / "aside" / "1").read_bytes() == b"x"
    else:
        upload()
        assert store.get("deltas/1") == b"new"
        assert list((root / "aside").iterdir()) == []
    assert [each.read_bytes() for each in victim.iterdir()] == [b"forged"]


def test_a_link_that_takes_a_folders_place_in_a_delete_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, root, unlink = tmp_path / "victim", tmp_path / "run", os.unlink
    victim.mkdir()
    (victim / "1").write_bytes(b"thesis")
    store = FolderStore(root)
    store.put("deltas/1", b"x")

    def unlink_after_swap(path: Any, **folders: Any) -> None:
        (root / "deltas").rename(root / "aside")
        (root / "deltas").symlink_to(victim)
        unlink(path, **folders)

    monkeypatch.setattr(os, "unlink", unlink_after_swap)
    store.delete("deltas/1")
    assert (victim / "1").read_bytes() == b"thesis"
    assert list((root / "aside").iterdir()) == []


def test_temporary_files_cannot_be_reached_as_objects(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.put("a", b"")
    (tmp_path / ".tmp" / "half").write_bytes(b"half")
    for key in (".tmp", ".tmp/half"):
        refuses(store, key, "unfinished")
    assert list(store.list()) == ["a"]
    assert list(store.list(".tmp/")) == []


def test_files_are_as_readable_as_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        FolderStore(tmp_path).put("a", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


def test_a_folder_that_was_never_made_is_an_empty_store(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "nothing")
    assert list(store.list()) == []
    with pytest.raises(NotFound):
        store.get("a")
    store.delete("a")
    assert not (tmp_path / "nothing").exists()


def test_a_symbolic_link_below_the_folder_is_no_object(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    root.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (root / "folder").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    store = FolderStore(root)
    for key in ("folder/secret", "file"):
        refuses(store, key, "symbolic link")
    assert list(store.list()) == []
    assert list(store.list("folder/")) == []
    assert (outside / "secret").read_bytes() == b"secret"


def pipe(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero, which never ends
    except PermissionError:
        pytest.skip("only root makes devices, and not in every container")


@pytest.mark.parametrize("make", [pipe, unix_socket, device])
def test_a_pipe_a_socket_or_a_device_is_no_object_and_is_not_waited_for(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    store = FolderStore(tmp_path)
    make(tmp_path / "odd")
    refuses(store, "odd", "odd", "get", "size", "read")
    with pytest.raises(UsageError, match="odd"):
        store.get("odd", 0, 10)
    assert list(store.list()) == []
    with pytest.raises(AlreadyExists):
        store.put("odd", b"x", if_absent=True)
    store.put("odd", b"x")
    assert store.get("odd") == b"x"


@pytest.mark.parametrize("key", ["store.json", "head.json", "versions/00000001.json", "anchors/", "deltas/"])
def test_a_pipe_in_an_objects_place_ends_a_reader_with_an_error_that_names_it(
    tmp_path: Path, key: str
) -> None:
    bucket = tmp_path / "bucket"
    Run(FolderStore(bucket)).publish_and_close(2)
    key = next(found for found in FolderStore(bucket).list() if found.startswith(key))
    (bucket / key).unlink()
    os.mkfifo(bucket / key)
    with pytest.raises(UsageError, match=key):
        verify(FolderStore(bucket))


def test_the_folder_itself_may_be_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    FolderStore(tmp_path / "link").put("a", b"x")
    assert FolderStore(tmp_path / "real").get("a") == b"x"


def test_a_relative_path_stays_where_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = FolderStore("bucket")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.put("a", b"x")
    assert (tmp_path / "bucket" / "a").read_bytes() == b"x"


@pytest.mark.parametrize("if_absent", [True, False])
@pytest.mark.parametrize("key", ["a", "a/b/c"])
def test_a_key_cannot_also_be_a_folder(tmp_path: Path, key: str, if_absent: bool) -> None:
    store = FolderStore(tmp_path)
    store.put("a/b", b"x")
    with pytest.raises(UsageError):
        store.put(key, b"y", if_absent=if_absent)
    assert list(store.list()) == ["a/b"]


def test_the_last_object_of_a_folder_takes_the_folder_with_it(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.put("deltas/00000001-x/1", b"")
    store.put("deltas/00000001-x/2", b"")
    store.delete("deltas/00000001-x/1")
    assert (tmp_path / "deltas" / "00000001-x").is_dir()
    store.delete("deltas/00000001-x/2")
    assert not (tmp_path / "deltas").exists()
    assert tmp_path.is_dir()


def test_a_put_survives_a_delete_that_removes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path)
    link = os.link
    removed: list[str] = []

    def link_after_removal(source: str, target: str, **folders: Any) -> None:
        if not removed:
            removed.append(target)
            (tmp_path / "probes").rmdir()
        link(source, target, **folders)

    monkeypatch.setattr(os, "link", link_after_removal)
    store.put("probes/a", b"x", if_absent=True)
    assert removed
    assert store.get("probes/a") == b"x"


def failing(number: int) -> Callable[..., None]:
    """A call of the system that fails."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_hard_links_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "link", failing(number))
    store = FolderStore(tmp_path)
    with pytest.raises(UnsupportedStore, match="hard links"):
        store.put("a", b"x", if_absent=True)
    assert list(store.list()) == []
    assert temporary(tmp_path) == []


def test_a_link_whose_answer_was_lost_is_recognised_as_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def link_twice(source: str, target: str, **folders: Any) -> None:
        link(source, target, **folders)
        link(source, target, **folders)

    monkeypatch.setattr(os, "link", link_twice)
    store = FolderStore(tmp_path)
    store.put("a", b"x", if_absent=True)
    assert store.get("a") == b"x"


def test_a_full_disk_leaves_nothing_and_says_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path)
    store.put("a", b"x")
    monkeypatch.setattr(os, "fsync", failing(errno.ENOSPC))
    for if_absent in (True, False):
        with pytest.raises(StoreUnavailable) as caught:
            store.put("b", b"x", if_absent=if_absent)
        assert isinstance(caught.value.__cause__, OSError)
    assert list(store.list()) == ["a"]
    assert temporary(tmp_path) == []


def test_an_operating_system_error_of_the_chunks_passes_through(tmp_path: Path) -> None:
    def chunks() -> Any:
        yield b"x"
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        FolderStore(tmp_path).upload("a", chunks())


# Places that are no folder, or that cannot be used.


@pytest.mark.parametrize("below", ["", "run"])
def test_a_path_that_is_a_file_is_no_empty_store(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    refuses(FolderStore(tmp_path / "file" / below), "a", "leads through, a file", *OPERATIONS)
    assert (tmp_path / "file").read_bytes() == b"mine"


@pytest.mark.parametrize("path", ["", "a\0b", "\ud800"])
def test_a_path_that_cannot_be_one_is_refused(path: str) -> None:
    with pytest.raises(UsageError):
        FolderStore(path)


def test_a_name_that_is_too_long_for_the_file_system_is_the_callers_mistake(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    refuses(store, "a" * 300, "a{300}: .*too long")
    assert list(store.list()) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_folder_without_permission_is_the_callers_mistake() -> None:
    with other_users_folder() as folder:
        FolderStore(folder).put("a/b", b"mine")
        (folder / "a").chmod(0o700)
        folder.chmod(0o755)
        command = [sys.executable, "-c", _RUNS_AS_NOBODY, str(folder)]
        answer = subprocess.run(command, check=True, capture_output=True, text=True)
        assert answer.stdout.splitlines() == ["usage True True"] * len(OPERATIONS)
        assert FolderStore(folder).get("a/b") == b"mine"


@contextmanager
def other_users_folder() -> Iterator[Path]:
    """A folder that every user can reach, which pytest's are not."""
    folder = Path(tempfile.mkdtemp(prefix="patchstore-"))
    try:
        folder.chmod(0o755)
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    """A small file system of its own at a folder; the test is skipped where none can be mounted."""
    command = ["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)]
    done = subprocess.run(command, check=False, capture_output=True)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_read_only_mount_is_the_callers_mistake(tmp_path: Path) -> None:
    with mounted(tmp_path, "-o", "ro"):
        store = FolderStore(tmp_path)
        refuses(store, "a", "Read-only", "put", "upload")
        with pytest.raises(NotFound):
            store.get("a")


@pytest.mark.parametrize("ask", ["put", "upload"])
def test_a_disk_that_is_really_full_leaves_nothing_and_says_so(tmp_path: Path, ask: str) -> None:
    with mounted(tmp_path, "-o", "size=256k"):
        store, large = FolderStore(tmp_path), bytes(1 << 20)
        store.put("small", b"x")
        with pytest.raises(StoreUnavailable, match=f"{tmp_path}: {ask} a: .*No space left.*free some space"):
            store.put("a", large, if_absent=True) if ask == "put" else store.upload("a", [large])
        assert list(store.list()) == ["small"]
        assert temporary(tmp_path) == []


def test_a_limit_on_the_size_of_files_is_said(tmp_path: Path) -> None:
    store, before = FolderStore(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(StoreUnavailable, match="File too large"):
            store.put("a", bytes(2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(store.list()) == []


def test_a_long_read_stays_with_the_file_that_it_opened(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    size = 3 * PART_BYTES + 7
    store.upload("object", [b"a" * size])
    reading = store.read("object")
    parts = [next(reading)]
    store.upload("object", [b"b" * size])
    parts += reading
    assert b"".join(parts) == b"a" * size
    assert b"".join(store.read("object", start=5, end=size + 9)) == b"b" * (size - 5)
    store.delete("object")
    with pytest.raises(NotFound):
        next(store.read("object"))


def test_a_file_on_a_disk_or_in_memory_is_on_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path / "later")
    assert not store.is_on_this_host("a/b")
    store.put("a/b", b"x")
    assert store.is_on_this_host("a/b")
    assert not store.is_on_this_host("a/c")
    os.mkfifo(tmp_path / "later" / "pipe")
    with pytest.raises(UsageError, match="pipe"):
        store.is_on_this_host("pipe")
    # NFS, FUSE, 9p, and where the system does not say.
    for number in (0x6969, 0x65735546, 0x01021997, None):
        monkeypatch.setattr(host, "file_system_number", lambda _, number=number: number)
        assert not store.is_on_this_host("a/b"), number


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/etc/passwd")])
def test_only_a_file_is_read_into_memory(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "odd")
    with pytest.raises((UsageError, NotFound), match="odd"):
        FolderStore(tmp_path).read_into("odd", memoryview(bytearray(3)))
