"""Measure `patchstore replicate` over lines of several lengths: how late a replica is, and what it asks for.

Both buckets are in memory. Requests to the source take as long as over a line to another region; those to the
target take no time, as a replicator runs near it. Bytes and requests are counted.
"""

import argparse
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.support.counting import CountingStore
from patchstore import Publisher
from patchstore.ops.replicate.replicator import Replicator
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore

_SINGLE = 10
"""Versions that are copied as they come, one at a time."""


class _Far(FaultyStore):
    """A store that is read over a long line; transfers do not slow each other."""

    def __init__(self, inner: Store, latency_s: float, bytes_per_s: float) -> None:
        super().__init__(inner, Fault(verb="*", effect="delay", times=None, delay_s=latency_s))
        self._bytes_per_s = bytes_per_s

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        data = super().get(key, start, end)
        time.sleep(len(data) / self._bytes_per_s)
        return data


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--versions", type=int, default=200, help="versions that are copied after an outage")
    parser.add_argument("--elements", type=int, default=2_000_000, help="elements of the model")
    parser.add_argument("--density", type=float, default=0.01, help="share of elements that change")
    parser.add_argument("--latency-ms", type=float, nargs="+", default=[0.0, 40.0, 80.0])
    parser.add_argument("--mb-per-s", type=float, default=100.0, help="of one transfer")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row per latency."""
    source = MemoryStore("memory://benchmark-source")
    weights = {"w": torch.randn(args.elements, generator=torch.Generator().manual_seed(0)).bfloat16()}
    num_changed = max(1, round(args.density * args.elements))
    with Publisher(source, weights, anchor_every=10**6) as publisher:
        for step in range(1 + args.versions + _SINGLE):
            weights["w"].view(torch.int16)[torch.randperm(args.elements)[:num_changed]] ^= 1
            publisher.publish_patch(step)
    for latency_ms in args.latency_ms:
        yield _measured(source, args, latency_ms)


def _measured(source: Store, args: argparse.Namespace, latency_ms: float) -> dict[str, Any]:
    slow = _Far(source, latency_ms / 1000, 1e6 * args.mb_per_s)
    theirs, ours = CountingStore(slow), CountingStore(MemoryStore(f"memory://benchmark-{latency_ms}"))
    replicator = Replicator(theirs, ours)
    replicator.open()
    copied = replicator.versions()
    # The anchor of version 0, and the first requests.
    next(copied)
    for counter in (theirs, ours):
        counter.calls.clear()
        counter.num_bytes = 0
    began, cpu = time.perf_counter(), time.process_time()
    needed = 0
    for _ in range(args.versions):
        found = next(copied).manifest
        needed += sum(each.size for each in found.objects)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    copied.close()
    counts = [len(each.calls) / args.versions for each in (theirs, ours)]
    payloads_read = theirs.num_bytes / needed
    each_s = []
    for _ in range(_SINGLE):
        began = time.perf_counter()
        one = replicator.versions()
        next(one)
        each_s.append(time.perf_counter() - began)
        one.close()
    return {
        "latency_ms": latency_ms,
        "mb_per_s": args.mb_per_s,
        "versions": args.versions,
        "bytes_per_version": needed / args.versions,
        "versions_per_s": args.versions / seconds,
        "cpu_ms_per_version": 1000 * cpu_s / args.versions,
        "source_requests_per_version": counts[0],
        "target_requests_per_version": counts[1],
        "read_over_needed": payloads_read,
        "single_s": sorted(each_s)[len(each_s) // 2],
    }
