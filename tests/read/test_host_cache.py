"""Host caches: one download for all processes of a host, whatever becomes of each of them."""

import errno
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest

from patchstore import Replica
from patchstore.errors import CorruptObject, HostError, PatchstoreError, StoreUnavailable, UsageError
from patchstore.format import hashing, history, planning
from patchstore.format.records import Payload
from patchstore.read import download, host_cache
from patchstore.read.anchors import open_anchor, stream_anchor
from patchstore.read.deltas import open_deltas
from patchstore.read.host_cache import HostCache
from patchstore.stores.base import Store
from patchstore.stores.folder import FolderStore
from patchstore.stores.memory import MemoryStore
from patchstore.support.host import file_system
from patchstore.tensors import state_digest
from patchstore.tensors.bits import bits
from patchstore.testing.faults import Fault, FaultyStore
from tests.format import bad_buckets, surgery
from tests.support.weights import Run, State, assert_same_bits

GOLDEN = Path(__file__).parent.parent / "golden"
WORKERS = multiprocessing.get_context("forkserver")
# torch is imported once, and not by each of some twenty processes.
WORKERS.set_forkserver_preload([__name__])


class LoggedStore(FolderStore):
    """A folder that notes each reading of an object in a file, for all processes that read."""

    def __init__(self, bucket: Path, reads: Path) -> None:
        super().__init__(bucket)
        self._bucket, self._reads = bucket, reads

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """Be opened anew in another process."""
        return type(self), (self._bucket, self._reads)

    def read(self, key: str, *, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        with self._reads.open("a") as file:
            file.write(f"{key}\n")
        yield from super().read(key, start=start, end=end)


class StuckStore(LoggedStore):
    """Sends half of each object, says so, and then nothing more."""

    def __init__(self, bucket: Path, reads: Path, is_stuck: Any) -> None:
        super().__init__(bucket, reads)
        self._is_stuck = is_stuck

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self._bucket, self._reads, self._is_stuck)

    def read(self, key: str, *, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        data = b"".join(super().read(key, start=start, end=end))
        yield data[: len(data) // 2]
        self._is_stuck.set()
        threading.Event().wait()


class Host:
    """A bucket with one payload, and a host with a cache that keeps nothing."""

    def __init__(self, tmp_path: Path) -> None:
        self.bucket, self.folder, self.reads = (tmp_path / name for name in ("bucket", "cache", "reads"))
        self.store = LoggedStore(self.bucket, self.reads)
        self.data = Random(0).randbytes(300_000)
        self.payload = self.stored("deltas/one", self.data)

    def stored(self, key: str, data: bytes) -> Payload:
        self.store.put(key, data)
        return Payload(key=key, size=len(data), digest=hashing.digest(data))

    @property
    def num_reads(self) -> int:
        return len(self.reads.read_text().splitlines()) if self.reads.exists() else 0

    @property
    def path(self) -> Path:
        """Of the payload's file in the cache."""
        return self.folder / self.payload.digest.removeprefix("blake3:")

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def results(processes: int, task: Callable[..., Any], *args: Any) -> list[Any]:
    """What a task returns in so many processes, or the kind of error that it raises there."""
    answers = WORKERS.SimpleQueue()
    running = [WORKERS.Process(target=_answer, args=(answers, task, *args)) for _ in range(processes)]
    for process in running:
        process.start()
    found = [answers.get() for _ in running]
    for process in running:
        process.join()
    return found


def _answer(answers: Any, task: Callable[..., Any], *args: Any) -> None:
    try:
        answers.put(task(*args))
    except Exception as exc:  # noqa: BLE001 - whatever it is, the test must see it
        answers.put(exc.kind if isinstance(exc, PatchstoreError) else repr(exc))


def fetched(store: Store, folder: Path, wanted: Payload, everybody: Any = None) -> str:
    """Fetch a payload, return its digest, and let go of it when everybody has it."""
    with HostCache(folder, max_bytes=0).fetch(store, wanted) as file:
        found = hashing.digest(file.read())
        if everybody is not None:
            everybody.wait()
    return found


@pytest.mark.exhaustive
def test_four_processes_read_an_object_from_the_store_once(host: Host) -> None:
    found = results(4, fetched, host.store, host.folder, host.payload, WORKERS.Barrier(4))
    assert found == [host.payload.digest] * 4
    assert host.num_reads == 1
    assert host.files() == []


def test_a_killed_downloader_does_not_block_the_others(host: Host) -> None:
    is_stuck = WORKERS.Event()
    stuck = StuckStore(host.bucket, host.reads, is_stuck)
    victim = WORKERS.Process(target=fetched, args=(stuck, host.folder, host.payload), daemon=True)
    victim.start()
    is_stuck.wait()
    assert host.files() == [f"{host.path.name}.lock", f"{host.path.name}.part"]
    with ThreadPoolExecutor(1) as background:
        others = background.submit(
            results, 3, fetched, host.store, host.folder, host.payload, WORKERS.Barrier(3)
        )
        victim.kill()
        victim.join()
        assert others.result() == [host.payload.digest] * 3
    assert host.num_reads == 2
    assert host.files() == []


def test_what_a_killed_downloader_left_is_not_continued(host: Host) -> None:
    cache = HostCache(host.folder, max_bytes=0)
    host.path.with_suffix(".part").write_bytes(b"x" * 400_000)
    with cache.fetch(host.store, host.payload) as file:
        assert file.read() == host.data
    assert host.files() == []


def test_a_corrupt_payload_is_refused_by_every_process(host: Host) -> None:
    host.store.put(host.payload.key, host.data[:-1] + b"x")
    assert results(3, fetched, host.store, host.folder, host.payload) == ["corrupt-object"] * 3
    assert host.num_reads == 3
    assert host.files() == []


def test_a_missing_payload_is_corrupt_and_leaves_nothing(host: Host) -> None:
    host.store.delete(host.payload.key)
    with pytest.raises(CorruptObject), HostCache(host.folder, max_bytes=0).fetch(host.store, host.payload):
        pass
    assert host.files() == []


def test_whoever_waits_for_a_download_that_fails_tries_for_itself(host: Host) -> None:
    has_begun, may_fail = threading.Event(), threading.Event()

    def fail(_: float) -> None:
        has_begun.set()
        may_fail.wait()
        raise StoreUnavailable("no answer (injected)")

    failing = FaultyStore(host.store, Fault(verb="get", effect="delay"), sleep=fail)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(fetched, failing, host.folder, host.payload)
        has_begun.wait()
        second = threads.submit(fetched, host.store, host.folder, host.payload)
        may_fail.set()
        assert isinstance(first.exception(), StoreUnavailable)
        assert second.result() == host.payload.digest
    assert host.files() == []


def test_a_file_is_there_until_its_last_user_leaves(host: Host) -> None:
    mine, yours = HostCache(host.folder, max_bytes=0), HostCache(host.folder, max_bytes=0)
    with mine.fetch(host.store, host.payload):
        with yours.fetch(host.store, host.payload) as file:
            assert file.read() == host.data
        assert host.path.exists()
        with mine.fetch(host.store, host.payload) as file:
            assert file.read() == host.data
    assert host.files() == []
    assert host.num_reads == 1


def test_a_user_that_fails_lets_go_too(host: Host) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        HostCache(host.folder, max_bytes=0).fetch(host.store, host.payload),
    ):
        _ = 1 // 0
    assert host.files() == []


def test_an_empty_payload_is_a_file_too(host: Host) -> None:
    with HostCache(host.folder, max_bytes=0).fetch(host.store, host.stored("deltas/empty", b"")) as file:
        assert file.read() == b""


@pytest.mark.parametrize("change", [lambda data: data[:-1] + b"x", lambda data: data[:-1], lambda data: b""])
def test_a_file_that_was_changed_is_noticed_and_downloaded_again(
    host: Host, change: Callable[[bytes], bytes]
) -> None:
    cache = HostCache(host.folder, max_bytes=0)
    with cache.fetch(host.store, host.payload):
        host.path.chmod(0o600)
        host.path.write_bytes(change(host.data))
        with cache.fetch(host.store, host.payload) as file:
            assert file.read() == host.data
            assert host.num_reads == 2
    assert host.files() == []


def test_what_killed_processes_left_is_removed_and_nothing_else(host: Host) -> None:
    other = host.stored("deltas/other", b"other")
    with HostCache(host.folder, max_bytes=0).fetch(host.store, other):
        in_use = host.files()
        host.path.write_bytes(b"x")
        host.path.with_suffix(".part").write_bytes(b"half")
        host.folder.joinpath("0" * 64 + ".part").write_bytes(b"half")
        host.folder.joinpath("1" * 64 + ".lock").touch()
        host.folder.joinpath("notes.txt").touch()
        HostCache(host.folder, max_bytes=0)
        assert host.files() == sorted([*in_use, "notes.txt"])


def test_a_killed_user_keeps_nothing(host: Host) -> None:
    has_it = WORKERS.Event()
    victim = WORKERS.Process(
        target=_fetch_and_stay, args=(host.store, host.folder, host.payload, has_it), daemon=True
    )
    victim.start()
    has_it.wait()
    HostCache(host.folder, max_bytes=0)
    assert host.path.exists()
    victim.kill()
    victim.join()
    HostCache(host.folder, max_bytes=0)
    assert host.files() == []


def _fetch_and_stay(store: Store, folder: Path, wanted: Payload, has_it: Any) -> None:
    with HostCache(folder, max_bytes=0).fetch(store, wanted):
        has_it.set()
        threading.Event().wait()


def test_a_full_disk_leaves_nothing_and_is_mended_by_room(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = HostCache(host.folder, max_bytes=0)

    def full(store: Store, wanted: Payload, path: Path) -> None:
        path.write_bytes(host.data[:1000])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("patchstore.read.host_cache.download", full)
        with (
            pytest.raises(HostError, match=f"{host.folder}.*No space"),
            cache.fetch(host.store, host.payload),
        ):
            pass
    assert host.files() == []
    with cache.fetch(host.store, host.payload) as file:
        assert file.read() == host.data


def test_a_write_that_the_system_refuses_leaves_nothing(host: Host) -> None:
    assert results(1, _fetch_within, 100_000, host.store, host.folder, host.payload) == [
        ("os", [], host.payload.digest)
    ]


def _fetch_within(max_bytes: int, store: Store, folder: Path, wanted: Payload) -> tuple[str, list[Path], str]:
    """Fetch where no file may grow beyond `max_bytes`, look at what is left, and fetch without the limit."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, limit[1]))
    with pytest.raises(HostError, match="ulimit -f") as error:
        fetched(store, folder, wanted)
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    return error.value.kind, list(folder.iterdir()), fetched(store, folder, wanted)


def test_a_folder_that_others_could_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine"
    HostCache(mine, max_bytes=0)
    assert mine.stat().st_mode & 0o777 == 0o700
    link = tmp_path / "link"
    link.symlink_to(mine)
    file = tmp_path / "file"
    file.touch()
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o750)
    for folder in (link, file, shared):
        with pytest.raises(UsageError):
            HostCache(folder, max_bytes=0)
    monkeypatch.setattr("os.geteuid", lambda: mine.stat().st_uid + 1)
    with pytest.raises(UsageError):
        HostCache(mine, max_bytes=0)


def test_users_that_come_and_go_at_random_always_get_the_right_bytes(host: Host) -> None:
    contents = [Random(number).randbytes(1000 + number) for number in range(3)]
    payloads = [host.stored(f"deltas/{number}", data) for number, data in enumerate(contents)]

    def come_and_go(seed: int) -> None:
        random = Random(seed)
        for _ in range(60):
            number = random.randrange(3)
            with HostCache(host.folder, max_bytes=0).fetch(host.store, payloads[number]) as file:
                assert file.read() == contents[number]
                if random.random() < 0.1:
                    # Somebody cleans up by hand.
                    with suppress(FileNotFoundError):
                        (host.folder / payloads[number].digest.removeprefix("blake3:")).unlink()

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(come_and_go, seed) for seed in range(8)]:
            done.result()
    assert host.files() == []


def test_a_folder_that_was_cleaned_away_is_made_again(host: Host) -> None:
    cache = HostCache(host.folder)
    payload = host.stored("deltas/1", b"weights")
    with cache.fetch(host.store, payload) as file:
        shutil.rmtree(host.folder)
        assert file.read() == b"weights"
    with cache.fetch(host.store, payload) as file:
        assert file.read() == b"weights"


def test_a_folder_that_somebody_else_made_meanwhile_is_refused(host: Host) -> None:
    cache = HostCache(host.folder)
    payload = host.stored("deltas/1", b"weights")
    host.folder.rmdir()
    host.folder.mkdir()
    host.folder.chmod(0o777)
    with pytest.raises(UsageError, match="open to other users"), cache.fetch(host.store, payload):
        pass


def rebuilt(store: Store, version: int, folder: Path, everybody: Any = None) -> State:
    """A version's weights, by way of local files alone, proved by its state digest."""
    cache = HostCache(folder, max_bytes=0)
    header = history.read_header(store)
    assert header is not None
    schema = header.schema.by_name()
    route = planning.plan(history.read_lineage(store, version), None, version)
    assert route.anchor is not None
    with (
        open_deltas(store, route.deltas, schema, None, cache) as deltas,
        open_anchor(store, route.anchor, schema, cache) as tensors,
    ):
        if everybody is not None:
            everybody.wait()
        weights = {name: tensors[name] for name in schema}
        for name in deltas.names:
            patch = deltas.merged(schema[name], weights[name])
            bits(weights[name])[patch.indices] = bits(patch.values)
    state_digest.check_state(
        store, header.schema, {n: state_digest.of_tensor(t) for n, t in weights.items()}, route.target
    )
    return weights


def test_every_version_is_rebuilt_from_local_files(run: Run, tmp_path: Path) -> None:
    run.publish_versions(7)
    for version, expected in run.history.items():
        assert_same_bits(rebuilt(run.store, version, tmp_path), expected)
        assert list(tmp_path.iterdir()) == []


def test_four_processes_rebuild_a_version_with_one_download_of_each_payload(tmp_path: Path) -> None:
    bucket, reads, folder = (tmp_path / name for name in ("bucket", "reads", "cache"))
    run = Run(FolderStore(bucket))
    run.publish_versions(4)
    run.close()
    store = LoggedStore(bucket, reads)
    found = results(4, _is_rebuilt, store, folder, WORKERS.Barrier(4))
    assert found == [True] * 4
    keys = reads.read_text().splitlines()
    assert len(keys) == len(set(keys)) == 4
    assert list(folder.iterdir()) == []


def _is_rebuilt(store: Store, folder: Path, everybody: Any) -> bool:
    return len(rebuilt(store, 3, folder, everybody)) > 0


def test_a_streamed_anchor_is_the_same_by_way_of_a_cache(run: Run, tmp_path: Path) -> None:
    manifest = run.publish()
    header = history.read_header(run.store)
    assert header is not None
    schema = header.schema.by_name()
    found = {}
    for _, specs, tensors in stream_anchor(run.store, manifest, schema, HostCache(tmp_path, max_bytes=0)):
        found |= {spec.name: tensor for spec, tensor in zip(specs, tensors, strict=True)}
    assert_same_bits(found, run.history[0])
    assert list(tmp_path.iterdir()) == []


def test_writing_to_an_anchors_tensors_leaves_the_files_as_they_are(run: Run, tmp_path: Path) -> None:
    manifest = run.publish()
    header = history.read_header(run.store)
    assert header is not None
    schema = header.schema.by_name()
    cache = HostCache(tmp_path, max_bytes=0)
    with open_anchor(run.store, manifest, schema, cache) as mine:
        for tensor in mine.values():
            bits(tensor).zero_()
        run.store.delete(next(run.store.list("anchors/")))
        with open_anchor(run.store, manifest, schema, cache) as yours:
            assert_same_bits(dict(yours), run.history[0])
    # The files are gone, and their bytes are still mapped.
    assert list(tmp_path.iterdir()) == []
    assert_same_bits(dict(yours), run.history[0])
    assert not any(tensor.any() for tensor in mine.values())


@pytest.mark.parametrize(
    "case",
    # What store.json says is compared by the follower, before it fetches anything.
    [
        case
        for case in bad_buckets.CASES
        if not (case.beyond_followers or case.only_verified or "store.json" in case.name)
    ],
    ids=lambda case: case.name.encode("unicode_escape").decode(),
)
def test_a_bad_bucket_is_refused_from_local_files_too(tmp_path: Path, case: bad_buckets.Bad) -> None:
    objects = dict(surgery.load(GOLDEN / case.bucket))
    case.change(objects)
    with pytest.raises(PatchstoreError) as error:
        rebuilt(surgery.store_of(objects), case.version, tmp_path)
    assert error.value.kind in case.kinds
    assert list(tmp_path.iterdir()) == []


# What stays when nobody uses it.


def keep(host: Host, *payloads: Payload, max_bytes: int) -> list[bytes]:
    """Fetch payloads, one after the other, and return what was in their files."""
    cache, found = HostCache(host.folder, max_bytes=max_bytes), []
    for wanted in payloads:
        with cache.fetch(host.store, wanted) as file:
            found.append(file.read())
    return found


def kept(host: Host) -> set[str]:
    """Digests of the payloads that lie in the cache."""
    return {f"blake3:{name}" for name in host.files() if len(name) == 64}


def three(host: Host) -> list[Payload]:
    return [host.stored(f"deltas/{number}", bytes([number]) * 1000) for number in range(3)]


@pytest.mark.exhaustive
def test_processes_that_come_one_after_the_other_download_once(host: Host) -> None:
    found = [results(1, _fetched_and_kept, host.store, host.folder, host.payload) for _ in range(3)]
    assert found == [[host.payload.digest]] * 3
    assert host.num_reads == 1
    assert kept(host) == {host.payload.digest}


def _fetched_and_kept(store: Store, folder: Path, wanted: Payload) -> str:
    with HostCache(folder).fetch(store, wanted) as file:
        return hashing.digest(file.read())


def test_the_least_recently_used_goes_first(host: Host) -> None:
    a, b, c = three(host)
    keep(host, a, b, a, c, max_bytes=2000)
    assert kept(host) == {a.digest, c.digest}
    keep(host, a, b, max_bytes=2000)
    assert kept(host) == {a.digest, b.digest}
    assert host.num_reads == 4


def test_what_was_let_go_of_last_was_used_last(host: Host) -> None:
    a, b, c = three(host)
    cache = HostCache(host.folder, max_bytes=2000)
    with cache.fetch(host.store, a):
        keep(host, b, max_bytes=2000)
    keep(host, c, max_bytes=2000)
    assert kept(host) == {a.digest, c.digest}


def test_what_is_larger_than_the_bound_goes_alone(host: Host) -> None:
    a, b, _ = three(host)
    keep(host, a, b, host.payload, max_bytes=2000)
    assert kept(host) == {a.digest, b.digest}


def test_what_is_in_use_is_neither_counted_nor_removed(host: Host) -> None:
    payloads = three(host)
    cache = HostCache(host.folder, max_bytes=1000)
    with cache.fetch(host.store, payloads[0]), cache.fetch(host.store, payloads[1]):
        keep(host, payloads[2], max_bytes=1000)
        assert len(kept(host)) == 3
    assert kept(host) == {payloads[0].digest}


def test_a_smaller_bound_holds_from_the_start(host: Host) -> None:
    a, b, c = three(host)
    keep(host, a, b, c, max_bytes=3000)
    HostCache(host.folder, max_bytes=1500)
    assert kept(host) == {c.digest}
    with pytest.raises(UsageError):
        HostCache(host.folder, max_bytes=-1)


@pytest.mark.parametrize("change", [lambda data: data[:-1] + b"x", lambda data: data[:-1], lambda data: b""])
def test_a_kept_file_that_was_changed_is_noticed_and_downloaded_again(
    host: Host, change: Callable[[bytes], bytes]
) -> None:
    keep(host, host.payload, max_bytes=1 << 20)
    before = host.path.stat()
    host.path.chmod(0o600)
    host.path.write_bytes(change(host.data))
    os.utime(host.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert keep(host, host.payload, host.payload, max_bytes=1 << 20) == [host.data] * 2
    assert host.num_reads == 2


def test_what_is_kept_is_digested_once_for_all_who_use_it_together(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    digested = []
    holds = host_cache._holds
    monkeypatch.setattr(host_cache, "_holds", lambda *args: digested.append(args) or holds(*args))
    cache = HostCache(host.folder)
    for number in (0, 1, 2):
        if number:
            os.utime(host.path)  # somebody's hands
        with cache.fetch(host.store, host.payload) as first, cache.fetch(host.store, host.payload) as second:
            assert first.read() == second.read() == host.data
        assert len(digested) == number
    assert host.num_reads == 1


def test_room_is_made_before_a_download_or_nothing_is_downloaded(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk of 301,000 bytes."""
    statvfs = os.statvfs

    def small(folder: Path) -> os.statvfs_result:
        found = list(statvfs(folder))
        found[1], found[4] = (
            1,
            301_000 - sum(path.stat().st_size for path in host.folder.iterdir() if path.is_file()),
        )
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", small)
    a, b, _ = three(host)
    keep(host, a, b, host.payload, max_bytes=1 << 20)
    assert kept(host) == {b.digest, host.payload.digest}

    larger = host.stored("deltas/larger", bytes(300_500))
    num_reads = host.num_reads
    with HostCache(host.folder).fetch(host.store, b):
        with pytest.raises(
            HostError, match=rf"{host.folder} .* 300,500 bytes of deltas/larger: 300,000 are free"
        ):
            keep(host, larger, max_bytes=1 << 20)
        assert kept(host) == {b.digest}
    assert host.num_reads == num_reads
    keep(host, larger, max_bytes=1 << 20)
    assert kept(host) == {larger.digest}


def test_a_manifest_that_asks_for_more_room_than_there_is_removes_nothing(host: Host) -> None:
    keep(host, host.payload, max_bytes=1 << 20)
    wrong = replace(host.stored("deltas/one-more", b"1"), size=1 << 60)
    with pytest.raises(CorruptObject, match=r"has 1$"):
        keep(host, wrong, max_bytes=1 << 20)
    assert kept(host) == {host.payload.digest}


def test_a_folder_on_a_network_file_system_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    df = subprocess.run(["df", "--output=fstype", tmp_path], capture_output=True, text=True, check=True)
    assert file_system(tmp_path) in {df.stdout.split()[1], None}
    monkeypatch.setattr("patchstore.support.host.file_system", lambda folder: "nfs4")
    with pytest.raises(UsageError, match="nfs4"):
        HostCache(tmp_path / "cache")


# Forked children.


@contextmanager
def forked(task: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Have a child that was forked from this process live through the block, after it did a task."""
    is_ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            task()
            os.write(tell, b"x")
            code = 0
        finally:
            if code == 0:
                threading.Event().wait(60)
            os._exit(code)
    os.close(tell)
    try:
        assert os.read(is_ready, 1) == b"x", "the child failed"
        yield
    finally:
        os.close(is_ready)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _fork_and_stay(store: Store, folder: Path, wanted: Payload, pids: Any) -> None:
    """Use a payload, in memory too, have a child that outlives this process, and wait to be killed."""
    with HostCache(folder, max_bytes=0).lease() as lend:
        with lend(store, wanted) as file:
            mapped = download.in_memory(file)
            child = os.fork()
            if child == 0:
                threading.Event().wait(60)
                os._exit(0)
        pids.put((child, len(mapped)))
        threading.Event().wait()


def test_what_a_killed_process_used_is_free_though_a_child_of_it_lives(host: Host) -> None:
    pids = WORKERS.SimpleQueue()
    victim = WORKERS.Process(
        target=_fork_and_stay, args=(host.store, host.folder, host.payload, pids), daemon=True
    )
    victim.start()
    child, _ = pids.get()
    try:
        HostCache(host.folder, max_bytes=0)
        assert host.path.exists()
        victim.kill()
        victim.join()
        os.kill(child, 0)
        HostCache(host.folder, max_bytes=0)
        assert host.files() == []
    finally:
        os.kill(child, signal.SIGKILL)


def _fork_and_download(store: Store, folder: Path, wanted: Payload, pids: Any) -> None:
    """Fork while a download is under way, and wait to be killed."""

    def fork() -> None:
        store._is_stuck.wait()  # type: ignore[attr-defined]
        child = os.fork()
        if child == 0:
            threading.Event().wait(60)
            os._exit(0)
        pids.put(child)

    threading.Thread(target=fork, daemon=True).start()
    fetched(store, folder, wanted)


def test_a_download_goes_on_elsewhere_though_a_child_of_the_killed_downloader_lives(host: Host) -> None:
    pids = WORKERS.SimpleQueue()
    stuck = StuckStore(host.bucket, host.reads, WORKERS.Event())
    victim = WORKERS.Process(
        target=_fork_and_download, args=(stuck, host.folder, host.payload, pids), daemon=True
    )
    victim.start()
    child = pids.get()
    try:
        victim.kill()
        victim.join()
        os.kill(child, 0)
        other = WORKERS.Process(target=fetched, args=(host.store, host.folder, host.payload), daemon=True)
        other.start()
        other.join(30)
        is_done = other.exitcode == 0
        other.kill()
        assert is_done
    finally:
        os.kill(child, signal.SIGKILL)
    assert host.files() == []


def test_what_was_let_go_of_is_free_though_a_child_was_forked_meanwhile(host: Host) -> None:
    with HostCache(host.folder, max_bytes=0).fetch(host.store, host.payload):
        holder = forked()
        holder.__enter__()
    try:
        assert host.files() == []
        assert results(1, fetched, host.store, host.folder, host.payload) == [host.payload.digest]
    finally:
        holder.__exit__(None, None, None)


def test_a_child_that_lets_go_takes_nothing_from_its_parent(host: Host) -> None:
    cache = HostCache(host.folder, max_bytes=0)
    with ExitStack() as uses:
        file = uses.enter_context(cache.fetch(host.store, host.payload))
        with forked(uses.close):
            assert results(1, _evicted, host.folder) == [None]
            assert host.path.exists()
            assert file.read() == host.data
    assert host.files() == []


def _evicted(folder: Path) -> None:
    HostCache(folder, max_bytes=0)


def test_a_child_uses_the_cache_that_it_inherited(host: Host) -> None:
    cache = HostCache(host.folder, max_bytes=0)
    other = host.stored("deltas/other", b"other")

    def use() -> None:
        with cache.fetch(host.store, other) as mine, cache.fetch(host.store, host.payload) as shared:
            HostCache(host.folder, max_bytes=0)
            assert (mine.read(), shared.read()) == (b"other", host.data)
            assert (host.folder / other.digest.removeprefix("blake3:")).exists()

    with cache.fetch(host.store, host.payload) as file:
        with forked(use):
            pass
        assert file.read() == host.data
        assert len(kept(host)) == 1
    assert host.files() == []


def test_threads_that_fork_while_others_fetch_never_wait_for_each_other(host: Host) -> None:
    payloads = [host.stored(f"deltas/{n}", Random(n).randbytes(1000)) for n in range(3)]
    assert results(1, _fork_and_fetch, host, payloads) == [40]
    assert host.files() == []


def _fork_and_fetch(host: "Host", payloads: list[Payload]) -> int:
    def fetch_many(seed: int) -> None:
        random = Random(seed)
        for _ in range(60):
            fetched(host.store, host.folder, random.choice(payloads))

    with ThreadPoolExecutor(3) as threads:
        fetching = [threads.submit(fetch_many, seed) for seed in range(3)]
        children = []
        for number in range(40):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    fetched(host.store, host.folder, payloads[number % 3])
                    code = 0
                finally:
                    os._exit(code)
            children.append(child)
        codes = [os.waitpid(child, 0)[1] for child in children]
        for each in fetching:
            each.result()
    return codes.count(0)


# What the system refuses.


def test_a_folder_that_is_removed_during_a_download_is_named(host: Host) -> None:
    def remove(_: float) -> None:
        shutil.rmtree(host.folder)

    store = FaultyStore(host.store, Fault(verb="get", effect="delay"), sleep=remove)
    cache = HostCache(host.folder, max_bytes=0)
    with pytest.raises(HostError, match=f"{host.folder} .*removed while it was in use"):
        fetched(store, host.folder, host.payload)
    with cache.fetch(host.store, host.payload) as file:
        assert file.read() == host.data


def test_a_folder_without_the_right_to_write_there_is_named(host: Host) -> None:
    HostCache(host.folder, max_bytes=0)
    host.folder.chmod(0o500)
    host.bucket.parent.chmod(0o755)
    found = results(1, _fetched_as_nobody, host)
    host.folder.chmod(0o700)
    assert found == ["os"]


def _fetched_as_nobody(host: "Host") -> None:
    if os.geteuid() == 0:
        # Root may write anywhere.
        for path in (host.bucket.parent, *host.bucket.parents[1:-2]):
            path.chmod(path.stat().st_mode | 0o055)
        os.chown(host.folder, 65534, 65534)
        os.seteuid(65534)
    fetched(MemoryStore(), host.folder, host.payload)


def test_a_mapped_payload_stays_whole_though_its_file_is_removed(host: Host) -> None:
    with HostCache(host.folder, max_bytes=0).lease() as lend:
        with lend(host.store, host.payload) as file:
            mapped = download.in_memory(file)
        host.path.unlink()
        assert bytes(mapped) == host.data
    assert bytes(mapped) == host.data


# What becomes of the others when one is killed.

_CALLS = ("open", "os.", "fcntl.")
"""Audit events of what the operating system is asked for."""


def die_at(number: int) -> None:
    """Have this process killed right before its call of that number to the operating system, from 0."""
    calls = count()

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event.startswith(_CALLS) and next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def _download_use_and_evict(number: int, store: Store, folder: Path, payloads: list[Payload]) -> None:
    a, b, _ = payloads
    die_at(number)
    cache = HostCache(folder, max_bytes=1000)
    with cache.fetch(store, a) as first, cache.fetch(store, b) as second:
        first.read()
        second.read()
    # Now one of them is kept: it is proved, and the other one takes its place.
    for wanted in (b, a):
        with cache.fetch(store, wanted) as file:
            file.read()


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_a_process_killed_at_any_call_to_the_system_leaves_a_cache_to_go_on_with(host: Host) -> None:
    a, b, c = payloads = three(host)
    # In-memory, so that only the cache's own calls count.
    store = MemoryStore()
    for number, wanted in enumerate(payloads):
        store.put(wanted.key, bytes([number]) * 1000)
    exit_code, num_kills = None, 0
    with HostCache(host.folder, max_bytes=1000).fetch(host.store, c) as file:
        while exit_code != 0:
            victim = WORKERS.Process(
                target=_download_use_and_evict, args=(num_kills, _Copied(store), host.folder, payloads)
            )
            victim.start()
            victim.join()
            exit_code = victim.exitcode
            assert exit_code in {0, -signal.SIGKILL}
            for name in kept(host):
                path = host.folder / name.removeprefix("blake3:")
                assert hashing.digest(path.read_bytes()) == name
            # Half of the time somebody goes on, and half of the time a new process begins.
            if num_kills % 2:
                assert keep(host, a, b, max_bytes=1000) == [b"\0" * 1000, b"\1" * 1000]
            else:
                HostCache(host.folder, max_bytes=1000)
            assert len(kept(host) - {c.digest}) <= 1
            assert not any(name.endswith(".part") for name in host.files())
            num_kills += 1
        assert file.read() == b"\2" * 1000
    HostCache(host.folder, max_bytes=0)
    assert host.files() == []
    assert num_kills > 50


class _Copied(MemoryStore):
    """A copy of a store, for another process."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__()
        self._objects = dict(store._objects)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return _restored, (self._objects,)


def _restored(objects: dict[str, bytes]) -> _Copied:
    store = MemoryStore()
    store._objects = objects
    return _Copied(store)


def _hammer(number: int | None, seed: int, host: "Host", payloads: list[Payload]) -> int:
    """Use payloads and spoil kept ones, at random; return how often somebody spoiled one that was kept."""
    if number is not None:
        die_at(number)
    random, spoiled = Random(seed), 0
    for _ in range(100):
        cache = HostCache(host.folder, max_bytes=random.choice((0, 2000, 2000, 4000)))
        wanted = random.choice(payloads)
        with (
            cache.fetch(host.store, wanted) as file,
            cache.fetch(host.store, random.choice(payloads)) as other,
        ):
            assert hashing.digest(file.read()) == wanted.digest
            other.read()
        path = host.folder / random.choice(payloads).digest.removeprefix("blake3:")
        with suppress(BlockingIOError), host_cache._alone(path, wait=False):
            if host_cache._if_unused(path) is not None:
                path.chmod(0o600)
                with path.open("r+b") as kept_file:
                    kept_file.seek(random.randrange(1000))
                    kept_file.write(b"?")
                spoiled += 1
    return spoiled


@pytest.mark.exhaustive
def test_many_who_come_go_spoil_and_are_killed_always_get_the_right_bytes(host: Host) -> None:
    payloads = [host.stored(f"deltas/{n}", Random(n).randbytes(1000)) for n in range(6)]
    random = Random(1)
    victims = [
        WORKERS.Process(target=_hammer, args=(random.randrange(200, 4000), seed, host, payloads))
        for seed in range(8)
    ]
    for victim in victims:
        victim.start()
    with ThreadPoolExecutor(3) as threads:
        threaded = [threads.submit(_hammer, None, 100 + number, host, payloads) for number in range(3)]
        others = results(2, _hammer, None, 200, host, payloads)
        found = [*others, *(each.result() for each in threaded)]
    for victim in victims:
        victim.join()
        assert victim.exitcode == -signal.SIGKILL
    assert all(isinstance(spoiled, int) for spoiled in found)
    assert sum(found) > 0
    HostCache(host.folder, max_bytes=2000)
    assert len(kept(host)) <= 2
    HostCache(host.folder, max_bytes=0)
    assert host.files() == []


# Followers.


def _followed(store: Store, folder: Path, everybody: Any) -> list[int]:
    """Follow a store, version by version, at the same time as others; return the versions."""
    follower = Replica(store, {}, cache=HostCache(folder))
    found = []
    for version in range(4):
        everybody.wait()
        found.append(follower.update(version).version)
    return found


def test_followers_of_a_host_download_each_payload_once_also_one_that_comes_late(tmp_path: Path) -> None:
    bucket, reads, folder = (tmp_path / name for name in ("bucket", "reads", "cache"))
    run = Run(FolderStore(bucket))
    run.publish_versions(4)
    run.close()
    store = LoggedStore(bucket, reads)
    assert results(2, _followed, store, folder, WORKERS.Barrier(2)) == [[0, 1, 2, 3]] * 2
    assert results(1, _followed, store, folder, WORKERS.Barrier(1)) == [[0, 1, 2, 3]]
    keys = reads.read_text().splitlines()
    assert len(keys) == len(set(keys)) == 4


def test_a_follower_has_the_same_weights_by_way_of_a_cache(run: Run, tmp_path: Path) -> None:
    run.publish_versions(3)
    follower = Replica(run.store, {}, cache=HostCache(tmp_path))
    for version, expected in run.history.items():
        follower.update(version)
        assert_same_bits(dict(follower.tensors), expected)
    assert list(tmp_path.iterdir())
