"""What other processes find in a host cache when one is killed."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from cache_host import (
    WORKERS,
    Host,
    StuckStore,
    fetched,
    idle_child,
    keep,
    kept,
    parent,
    results,
    stuck,
    three,
)

from patchstore.bucket import digests
from patchstore.bucket.records import Payload
from patchstore.read import download, host_cache
from patchstore.read.host_cache import HostCache
from patchstore.stores.base import Store

FORKS = multiprocessing.get_context("fork")
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
    # A third of the calls, another one in each run: each takes a process.
    at = first = os.getpid() % 3
    exit_code = None
    with HostCache(host.folder, max_bytes=1000).fetch(host.store, c) as file:
        while exit_code != 0:
            victim = WORKERS.Process(
                target=_download_use_and_evict,
                args=(at, host.store, host.folder, payloads),
            )
            victim.start()
            victim.join()
            exit_code = victim.exitcode
            assert exit_code in {0, -signal.SIGKILL}, at
            for name in kept(host):
                path = host.folder / name.removeprefix("blake3:")
                assert digests.digest(path.read_bytes()) == name
            # Half of the time another process goes on, and half of the time a new one begins.
            if at % 2:
                assert keep(host, a, b, max_bytes=1000) == [b"\0" * 1000, b"\1" * 1000]
            else:
                HostCache(host.folder, max_bytes=1000)
            assert len(kept(host) - {c.digest}) <= 1
            assert not any(name.endswith(".part") for name in host.files())
            at += 3
        assert file.read() == b"\2" * 1000
    HostCache(host.folder, max_bytes=0)
    assert host.files() == []
    assert at - first > 50


def _hammer(number: int | None, seed: int, host: "Host", payloads: list[Payload]) -> int:
    """Use payloads and spoil kept ones, at random; return how often a kept one was spoiled."""
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
            assert digests.digest(file.read()) == wanted.digest
            other.read()
        path = host.folder / random.choice(payloads).digest.removeprefix("blake3:")
        with suppress(BlockingIOError), host_cache.alone(path, wait=False):
            if host_cache.if_unused(path) is not None:
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


# Children that are forked from a user of a host cache.


@contextmanager
def forked(task: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Have a child that was forked from this process live through the block, after it did a task."""
    is_ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            task()
            os.write(tell, b"x")
            threading.Event().wait(60)
        finally:
            signal.raise_signal(signal.SIGKILL)
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
            child = idle_child()
        pids.put(child)
        threading.Event().wait()
        del mapped


def test_what_a_killed_process_used_is_free_though_a_child_of_it_lives(host: Host) -> None:
    with parent(_fork_and_stay, host.store, host.folder, host.payload) as (victim, child):
        HostCache(host.folder, max_bytes=0)
        assert host.path.exists()
        victim.kill()
        victim.join()
        os.kill(child, 0)
        HostCache(host.folder, max_bytes=0)
        assert host.files() == []


def test_a_killed_downloader_does_not_block_the_others_though_a_child_of_it_lives(host: Host) -> None:
    store = StuckStore(host.bucket, host.reads, WORKERS.Event())
    with (
        parent(stuck, fetched, store, host.folder, host.payload) as (victim, child),
        ThreadPoolExecutor(1) as background,
    ):
        assert host.files() == [f"{host.path.name}.lock", f"{host.path.name}.part"]
        others = background.submit(
            results, 3, fetched, host.store, host.folder, host.payload, WORKERS.Barrier(3)
        )
        victim.kill()
        victim.join()
        os.kill(child, 0)
        assert others.result() == [host.payload.digest] * 3
    assert host.num_reads == 2
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
        children = [
            FORKS.Process(target=fetched, args=(host.store, host.folder, payloads[number % 3]))
            for number in range(40)
        ]
        for child in children:
            child.start()
        for child in children:
            child.join()
        for each in fetching:
            each.result()
    return [child.exitcode for child in children].count(0)
