"""Host caches: one download for all processes of a host, and nothing left behind by a failure."""

import errno
import os
import resource
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from cache_host import WORKERS, Host, StuckStore, fetched, results

from patchstore.errors import CorruptObject, HostError, StoreUnavailable, UsageError
from patchstore.format.records import Payload
from patchstore.read import download
from patchstore.read.host_cache import HostCache
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore


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


def test_a_process_that_waits_for_a_download_that_fails_tries_for_itself(host: Host) -> None:
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


def test_a_full_disk_leaves_nothing_and_room_is_all_it_takes(
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
                    # A user removes files by hand.
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


def test_a_folder_that_another_user_made_meanwhile_is_refused(host: Host) -> None:
    cache = HostCache(host.folder)
    payload = host.stored("deltas/1", b"weights")
    host.folder.rmdir()
    host.folder.mkdir()
    host.folder.chmod(0o777)
    with pytest.raises(UsageError, match="open to other users"), cache.fetch(host.store, payload):
        pass


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
