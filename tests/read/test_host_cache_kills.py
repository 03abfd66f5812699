"""What other processes find in a host cache when one is killed."""

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from cache_host import WORKERS, Host, keep, kept, results, three

from patchstore.format import hashing
from patchstore.format.records import Payload
from patchstore.read import host_cache
from patchstore.read.host_cache import HostCache
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore

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
    # A third of the calls, another one in each run: each takes a process.
    at = first = os.getpid() % 3
    exit_code = None
    with HostCache(host.folder, max_bytes=1000).fetch(host.store, c) as file:
        while exit_code != 0:
            victim = WORKERS.Process(
                target=_download_use_and_evict, args=(at, _Copied(store), host.folder, payloads)
            )
            victim.start()
            victim.join()
            exit_code = victim.exitcode
            assert exit_code in {0, -signal.SIGKILL}, at
            for name in kept(host):
                path = host.folder / name.removeprefix("blake3:")
                assert hashing.digest(path.read_bytes()) == name
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
