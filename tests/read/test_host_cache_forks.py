"""Children that are forked from a user of a host cache."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any

from cache_host import WORKERS, Host, StuckStore, fetched, kept, results

from patchstore.format.records import Payload
from patchstore.read import download
from patchstore.read.host_cache import HostCache
from patchstore.stores.base import Store


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
