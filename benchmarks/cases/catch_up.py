"""Measure what a reader needs that is many versions behind, before and after compaction.

All versions are published into a folder. Then readers that hold an older version, or none, come to the head:
with the versions alone, and after each way to compact. A store around the folder counts their requests.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.counting import CountingStore
from patchstore import Publisher, Replica
from patchstore.bucket import lineage, shortcuts
from patchstore.ops.compact.service import Compactor
from patchstore.stores.folder import FolderStore
from patchstore.tensors.bits import bits

Row = dict[str, Any]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--elements", type=int, default=1 << 20, help="of the model, in four tensors")
    parser.add_argument("--density", type=float, default=0.01, help="share of elements that change")
    parser.add_argument("--versions", type=int, default=5001)
    parser.add_argument("--behind", type=int, nargs="+", default=[1, 10, 100, 1000, 5000])
    parser.add_argument("--encoding", default="gap", help="of versions and rollups")
    parser.add_argument(
        "--anchor-every",
        nargs="+",
        default=["64", "auto"],
        help="as of `patchstore compact`, one after the other",
    )
    parser.add_argument("--store", type=Path, help="folder for buckets; a temporary one if not given")


def run(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each reader and way, and one for each compaction."""
    with tempfile.TemporaryDirectory(dir=args.store) as name:
        folder = Path(name) / "bucket"
        store = FolderStore(folder)
        weights = _published(store, args)
        about = {"elements": args.elements, "density": args.density, "encoding": args.encoding}
        about |= {"versions": args.versions}
        yield from ({**about, "shortcuts": "none", **row} for row in _readers(store, weights, args))
        published = set(store.list())
        for every in args.anchor_every:
            for each in set(store.list()) - published:
                store.delete(each)
            before, began, cpu = _size(folder), time.perf_counter(), time.process_time()
            for _ in Compactor(store, anchor_every=every, encoding=args.encoding).compact():
                pass
            yield {
                **about,
                "shortcuts": every,
                "row": "compacted",
                "seconds": time.perf_counter() - began,
                "cpu_s": time.process_time() - cpu,
                "num_shortcuts": len(shortcuts.listed(store)),
                "bucket_bytes": before,
                "added_bytes": _size(folder) - before,
            }
            yield from ({**about, "shortcuts": every, **row} for row in _readers(store, weights, args))


def _published(store: FolderStore, args: argparse.Namespace) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = args.elements // 4
    weights = {f"layers.{at}.weight": torch.randn(size, generator=generator).bfloat16() for at in range(4)}
    num = max(1, int(size * args.density))
    with Publisher(store, weights, encoding=args.encoding, anchor_every=10**6) as publisher:
        for step in range(args.versions):
            if step:
                for tensor in weights.values():
                    at = torch.randint(size, (num,), generator=generator)
                    raw = bits(tensor)
                    raw[at] = raw[at] ^ 1
            publisher.publish_patch(step).result()
    return weights


def _readers(store: FolderStore, weights: dict[str, torch.Tensor], args: argparse.Namespace) -> Iterator[Row]:
    head = args.versions - 1
    for behind in [None, *(each for each in args.behind if each <= head)]:
        held = None if behind is None else head - behind
        tensors: dict[str, torch.Tensor] = {}
        counting = CountingStore(store)
        replica = Replica(counting, tensors)
        if held is not None:
            replica.update(held)
        began = time.perf_counter()
        plan = lineage.read(counting, head, held).plan()
        plan_s = time.perf_counter() - began
        counting.reset()
        began, cpu = time.perf_counter(), time.process_time()
        replica.update(head)
        yield {
            "row": "reader",
            "behind": behind,
            "plan_s": plan_s,
            "update_s": time.perf_counter() - began,
            "update_cpu_s": time.process_time() - cpu,
            "requests": counting.num_requests,
            "bytes": counting.num_bytes,
            "num_deltas": len(plan.deltas),
            "anchor": None if plan.anchor is None else plan.anchor.version,
        }
        wrong = [name for name, each in weights.items() if not torch.equal(bits(tensors[name]), bits(each))]
        assert not wrong, f"the reader has other bits than the trainer: {wrong}"


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
