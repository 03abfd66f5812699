"""Spools: one download for all processes of a host, whatever becomes of each of them."""

import errno
import multiprocessing
import os
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from patchstore import checksum, digest, fetch, lineage, log
from patchstore.errors import CorruptObject, PatchstoreError, StoreUnavailable, UsageError
from patchstore.model import Payload
from patchstore.spool import Spool
from patchstore.stores.base import Store
from patchstore.stores.folder import FolderStore
from patchstore.tensors import bits
from patchstore.testing.faults import Fault, FaultyStore
from tests.format import bad_buckets, surgery
from tests.weights import Run, State, assert_same_bits

GOLDEN = Path(__file__).parent / "golden"
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
    """A bucket with one payload, and a host with a spool."""

    def __init__(self, tmp_path: Path) -> None:
        self.bucket, self.folder, self.reads = (tmp_path / name for name in ("bucket", "spool", "reads"))
        self.store = LoggedStore(self.bucket, self.reads)
        self.data = Random(0).randbytes(300_000)
        self.payload = self.stored("deltas/one", self.data)

    def stored(self, key: str, data: bytes) -> Payload:
        self.store.put(key, data)
        return Payload(key=key, size=len(data), digest=checksum.digest(data))

    @property
    def num_reads(self) -> int:
        return len(self.reads.read_text().splitlines()) if self.reads.exists() else 0

    @property
    def path(self) -> Path:
        """Of the payload's file in the spool."""
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
    with Spool(folder).fetch(store, wanted) as file:
        found = checksum.digest(file.read())
        if everybody is not None:
            everybody.wait()
    return found


def test_four_processes_read_an_object_from_the_store_once(host: Host) -> None:
    found = results(4, fetched, host.store, host.folder, host.payload, WORKERS.Barrier(4))
    assert found == [host.payload.digest] * 4
    assert host.num_reads == 1
    assert host.files() == []


def test_a_killed_downloader_does_not_block_the_others(host: Host) -> None:
    is_stuck = WORKERS.Event()
    stuck = StuckStore(host.bucket, host.reads, is_stuck)
    victim = WORKERS.Process(target=fetched, args=(stuck, host.folder, host.payload))
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
    spool = Spool(host.folder)
    host.path.with_suffix(".part").write_bytes(b"x" * 400_000)
    with spool.fetch(host.store, host.payload) as file:
        assert file.read() == host.data
    assert host.files() == []


def test_a_corrupt_payload_is_refused_by_every_process(host: Host) -> None:
    host.store.put(host.payload.key, host.data[:-1] + b"x")
    assert results(3, fetched, host.store, host.folder, host.payload) == ["corrupt-object"] * 3
    assert host.num_reads == 3
    assert host.files() == []


def test_a_missing_payload_is_corrupt_and_leaves_nothing(host: Host) -> None:
    host.store.delete(host.payload.key)
    with pytest.raises(CorruptObject), Spool(host.folder).fetch(host.store, host.payload):
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
    mine, yours = Spool(host.folder), Spool(host.folder)
    with mine.fetch(host.store, host.payload):
        with yours.fetch(host.store, host.payload) as file:
            assert file.read() == host.data
        assert host.path.exists()
        with mine.fetch(host.store, host.payload) as file:
            assert file.read() == host.data
    assert host.files() == []
    assert host.num_reads == 1


def test_a_user_that_fails_lets_go_too(host: Host) -> None:
    with pytest.raises(ZeroDivisionError), Spool(host.folder).fetch(host.store, host.payload):
        _ = 1 // 0
    assert host.files() == []


def test_an_empty_payload_is_a_file_too(host: Host) -> None:
    with Spool(host.folder).fetch(host.store, host.stored("deltas/empty", b"")) as file:
        assert file.read() == b""


@pytest.mark.parametrize("change", [lambda data: data[:-1] + b"x", lambda data: data[:-1], lambda data: b""])
def test_a_file_that_was_changed_is_noticed_and_downloaded_again(
    host: Host, change: Callable[[bytes], bytes]
) -> None:
    spool = Spool(host.folder)
    with spool.fetch(host.store, host.payload):
        host.path.chmod(0o600)
        host.path.write_bytes(change(host.data))
        with spool.fetch(host.store, host.payload) as file:
            assert file.read() == host.data
            assert host.num_reads == 2
    assert host.files() == []


def test_what_killed_processes_left_is_removed_and_nothing_else(host: Host) -> None:
    other = host.stored("deltas/other", b"other")
    with Spool(host.folder).fetch(host.store, other):
        in_use = host.files()
        host.path.write_bytes(b"")
        host.path.with_suffix(".part").write_bytes(b"half")
        host.folder.joinpath("0" * 64 + ".part").write_bytes(b"half")
        host.folder.joinpath("1" * 64 + ".lock").touch()
        host.folder.joinpath("notes.txt").touch()
        Spool(host.folder)
        assert host.files() == sorted([*in_use, "notes.txt"])


def test_a_killed_user_keeps_nothing(host: Host) -> None:
    has_it = WORKERS.Event()
    victim = WORKERS.Process(target=_fetch_and_stay, args=(host.store, host.folder, host.payload, has_it))
    victim.start()
    has_it.wait()
    Spool(host.folder)
    assert host.path.exists()
    victim.kill()
    victim.join()
    Spool(host.folder)
    assert host.files() == []


def _fetch_and_stay(store: Store, folder: Path, wanted: Payload, has_it: Any) -> None:
    with Spool(folder).fetch(store, wanted):
        has_it.set()
        threading.Event().wait()


def test_a_full_disk_leaves_nothing_and_is_mended_by_room(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(host.folder)

    def full(store: Store, wanted: Payload, path: Path) -> None:
        path.write_bytes(host.data[:1000])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("patchstore.spool.download", full)
        with pytest.raises(OSError, match=str(host.folder)) as error, spool.fetch(host.store, host.payload):
            pass
    assert error.value.errno == errno.ENOSPC
    assert host.files() == []
    with spool.fetch(host.store, host.payload) as file:
        assert file.read() == host.data


def test_a_write_that_the_system_refuses_leaves_nothing(host: Host) -> None:
    assert results(1, _fetch_within, 100_000, host.store, host.folder, host.payload) == [
        (errno.EFBIG, [], host.payload.digest)
    ]


def _fetch_within(max_bytes: int, store: Store, folder: Path, wanted: Payload) -> tuple[int, list[Path], str]:
    """Fetch where no file may grow beyond `max_bytes`, look at what is left, and fetch without the limit."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, limit[1]))
    with pytest.raises(OSError) as error:  # noqa: PT011 - its number is returned
        fetched(store, folder, wanted)
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert error.value.errno is not None
    return error.value.errno, list(folder.iterdir()), fetched(store, folder, wanted)


def test_a_folder_that_others_could_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine"
    Spool(mine)
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
            Spool(folder)
    monkeypatch.setattr("os.geteuid", lambda: mine.stat().st_uid + 1)
    with pytest.raises(UsageError):
        Spool(mine)


def test_users_that_come_and_go_at_random_always_get_the_right_bytes(host: Host) -> None:
    contents = [Random(number).randbytes(1000 + number) for number in range(3)]
    payloads = [host.stored(f"deltas/{number}", data) for number, data in enumerate(contents)]

    def come_and_go(seed: int) -> None:
        random = Random(seed)
        for _ in range(60):
            number = random.randrange(3)
            with Spool(host.folder).fetch(host.store, payloads[number]) as file:
                assert file.read() == contents[number]
                if random.random() < 0.1:
                    # Somebody cleans up by hand.
                    with suppress(FileNotFoundError):
                        (host.folder / payloads[number].digest.removeprefix("blake3:")).unlink()

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(come_and_go, seed) for seed in range(8)]:
            done.result()
    assert host.files() == []


def rebuilt(store: Store, version: int, folder: Path, everybody: Any = None) -> State:
    """A version's weights, by way of local files alone, proved by its state digest."""
    spool = Spool(folder)
    header = log.read_header(store)
    assert header is not None
    schema = header.schema.by_name()
    route = lineage.plan(log.read_lineage(store, version), None, version)
    assert route.anchor is not None
    with (
        fetch.deltas(store, route.deltas, schema, None, spool) as deltas,
        fetch.local_anchor(store, route.anchor, schema, spool) as tensors,
    ):
        if everybody is not None:
            everybody.wait()
        weights = {name: tensors[name] for name in schema}
        for name in deltas.names:
            patch = deltas.merged(schema[name], weights[name])
            bits(weights[name])[patch.indices] = bits(patch.values)
    digest.check_state(header.schema, {n: digest.of_tensor(t) for n, t in weights.items()}, route.target)
    return weights


def test_every_version_is_rebuilt_from_local_files(run: Run, tmp_path: Path) -> None:
    run.publish_versions(7)
    for version, expected in run.history.items():
        assert_same_bits(rebuilt(run.store, version, tmp_path), expected)
        assert list(tmp_path.iterdir()) == []


def test_four_processes_rebuild_a_version_with_one_download_of_each_payload(tmp_path: Path) -> None:
    bucket, reads, folder = (tmp_path / name for name in ("bucket", "reads", "spool"))
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


def test_a_streamed_anchor_is_the_same_by_way_of_a_spool(run: Run, tmp_path: Path) -> None:
    manifest = run.publish()
    header = log.read_header(run.store)
    assert header is not None
    schema = header.schema.by_name()
    found = {}
    for _, specs, tensors in fetch.anchor(run.store, manifest, schema, Spool(tmp_path)):
        found |= {spec.name: tensor for spec, tensor in zip(specs, tensors, strict=True)}
    assert_same_bits(found, run.history[0])
    assert list(tmp_path.iterdir()) == []


def test_writing_to_an_anchors_tensors_leaves_the_files_as_they_are(run: Run, tmp_path: Path) -> None:
    manifest = run.publish()
    header = log.read_header(run.store)
    assert header is not None
    schema = header.schema.by_name()
    spool = Spool(tmp_path)
    with fetch.local_anchor(run.store, manifest, schema, spool) as mine:
        for tensor in mine.values():
            bits(tensor).zero_()
        run.store.delete(next(run.store.list("anchors/")))
        with fetch.local_anchor(run.store, manifest, schema, spool) as yours:
            assert_same_bits(dict(yours), run.history[0])
    # The files are gone, and their bytes are still mapped.
    assert list(tmp_path.iterdir()) == []
    assert_same_bits(dict(yours), run.history[0])
    assert not any(tensor.any() for tensor in mine.values())


@pytest.mark.parametrize(
    "case",
    # What store.json says is compared by the follower, before it fetches anything.
    [case for case in bad_buckets.CASES if not (case.beyond_followers or "store.json" in case.name)],
    ids=lambda case: case.name.encode("unicode_escape").decode(),
)
def test_a_bad_bucket_is_refused_from_local_files_too(tmp_path: Path, case: bad_buckets.Bad) -> None:
    objects = dict(surgery.load(GOLDEN / case.bucket))
    case.change(objects)
    with pytest.raises(PatchstoreError) as error:
        rebuilt(surgery.store_of(objects), case.version, tmp_path)
    assert error.value.kind in case.kinds
    assert list(tmp_path.iterdir()) == []
