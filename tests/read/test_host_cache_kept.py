"""What a host cache keeps while it is unused, and what it removes."""

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cache_host import Host, keep, kept, results, three

from patchstore.errors import CorruptObject, HostError, UsageError
from patchstore.format import hashing
from patchstore.format.records import Payload
from patchstore.read import host_cache
from patchstore.read.host_cache import HostCache
from patchstore.stores.base import Store
from patchstore.support.host import file_system


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
