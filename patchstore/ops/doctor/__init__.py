"""Report what works and what does not, before a training: behind `patchstore doctor STORE --server URL`."""

import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from patchstore.ops.doctor import server_checks, store_checks
from patchstore.ops.doctor.finding import KINDS, Bucket, Check, Finding, run_all
from patchstore.stores import Store

__all__ = ["KINDS", "Check", "Finding", "examine"]


def examine(
    store: Store | str | os.PathLike[str],
    servers: Sequence[str] = (),
    *,
    storage_options: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    read_only: bool = False,
    num_bytes: int = 32_000_000,
    now: Callable[[], float] = time.time,
) -> Generator[Finding]:
    """Yield findings as they are made. A check that cannot be made is a finding too. Test objects are
    removed.

    Args:
        store: a URL, a path, or a store that is open already.
        servers: URLs of vLLM servers that follow it, or will. They are queried, and not changed.
        storage_options: for opening the URL.
        headers: are sent to each server, for a gateway in front of it; see `VllmServer`.
        read_only: leave out checks that write to the store.
        num_bytes: size of the object that measures throughput; it is in memory twice.
        now: this machine's clock.

    Raises:
        UsageError: one of `servers` is no URL of a server, or as of `VllmServer`.
    """
    with ExitStack() as opened:
        place = Bucket(store, options=storage_options or {}, num_bytes=num_bytes, now=now)
        opened.callback(place.close)
        doors = [server_checks.Server(url, place, headers) for url in servers]
        for door in doors:
            opened.callback(door.close)
        yield from run_all(server_checks.PACKAGE_CHECKS, None, about=server_checks.ABOUT_PACKAGES)
        # One sequence: findings about a run need a store that answers, but not one without problems.
        checks = (*store_checks.CHECKS, *store_checks.RUN_CHECKS)
        yield from run_all(checks, place, about=place.url, read_only=read_only)
        for door in doors:
            yield from run_all(server_checks.CHECKS, door, about=door.url)
