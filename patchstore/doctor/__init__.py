"""Report what works and what does not, before a training: behind `patchstore doctor STORE --server URL`."""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from patchstore.doctor import packages, run_checks, server_checks, store_checks
from patchstore.doctor.bucket import Bucket
from patchstore.doctor.finding import KINDS, Check, Finding, run_all
from patchstore.stores import Store

__all__ = ["KINDS", "Check", "Finding", "examine"]


def examine(
    store: Store | str,
    servers: Sequence[str] = (),
    *,
    storage_options: Mapping[str, Any] | None = None,
    read_only: bool = False,
    num_bytes: int = 32_000_000,
    now: Callable[[], float] = time.time,
) -> Generator[Finding]:
    """Yield findings as they are made. A check that cannot be made is a finding too. Test objects are
    removed.

    Args:
        store: a URL, or a store that is open already.
        servers: URLs of vLLM servers that follow it, or will. They are queried, and not changed.
        storage_options: for opening the URL.
        read_only: leave out checks that write to the store.
        num_bytes: size of the object that measures throughput; it is in memory twice.
        now: this machine's clock.

    Raises:
        UsageError: one of `servers` is no URL of a server.
    """
    with ExitStack() as opened:
        place = Bucket(store, options=storage_options or {}, num_bytes=num_bytes, now=now)
        opened.callback(place.close)
        doors = [server_checks.Server(url, place) for url in servers]
        for door in doors:
            opened.callback(door.close)
        yield from run_all(packages.CHECKS, None, about=packages.ABOUT)
        # One sequence: findings about a run need a store that answers, but not one without problems.
        checks = (*store_checks.CHECKS, *run_checks.CHECKS)
        yield from run_all(checks, place, about=place.url, read_only=read_only)
        for door in doors:
            yield from run_all(server_checks.CHECKS, door, about=door.url)
