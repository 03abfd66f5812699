"""Host caches: one download for all processes of a host, and nothing left behind by a failure."""

import errno
import os
import resource
import shutil
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from cache_host import Host, fetched, keep, kept, results, three

from patchstore.bucket.records import Payload
from patchstore.errors import CorruptObject, HostError, StoreUnavailable, UsageError
from patchstore.read import download, host_cache
from patchstore.read.host_cache import HostCache
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore
from patchstore.support.host import file_system
from patchstore.testing.faults import Fault, FaultyStore


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


# What a host cache keeps while it is unused, and what it removes.


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
@pytest.mark.parametrize("is_in_use", [False, True])
def test_a_file_that_was_changed_is_noticed_and_downloaded_again(
    host: Host, change: Callable[[bytes], bytes], is_in_use: bool
) -> None:
    keep(host, host.payload, max_bytes=1 << 20)
    before = host.path.stat()
    with HostCache(host.folder).fetch(host.store, host.payload) if is_in_use else nullcontext():
        host.path.chmod(0o600)
        host.path.write_bytes(change(host.data))
        if not is_in_use:
            # Its time does not show it.
            os.utime(host.path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert keep(host, host.payload, host.payload, max_bytes=1 << 20) == [host.data] * 2
    assert host.num_reads == 2


def test_what_is_kept_is_digested_once_for_all_who_use_it_together(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    digested = []
    holds = host_cache.holds
    monkeypatch.setattr(host_cache, "holds", lambda *args: digested.append(args) or holds(*args))
    cache = HostCache(host.folder)
    for number in (0, 1, 2):
        if number:
            os.utime(host.path)  # as a user may do by hand
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
