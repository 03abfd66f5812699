"""Measure `patchstore mirror`: the time from a new version to its folder, and what is fetched for it."""

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from patchstore import Publisher, replay
from patchstore.ops.mirror.place import Place
from patchstore.ops.mirror.service import Mirror
from patchstore.stores.folder import FolderStore

_TENSORS = 16


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=int, default=512, help="size of the checkpoint")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.0001, 0.01])
    parser.add_argument("--repeats", type=int, default=3, help="versions of each density")
    parser.add_argument("--folder", default=None, help="where bucket and mirror are; a temporary one")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row for the anchor and one per density; each version's folder is verified again, untimed."""
    num = args.mib * 2**20 // 2 // _TENSORS
    weights = {f"layers.{at}.weight": torch.randn(num).bfloat16() for at in range(_TENSORS)}
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        store = FolderStore(Path(scratch) / "bucket")
        with (
            Publisher(store, weights, anchor_every=10**6) as publisher,
            closing(Place(Path(scratch) / "mirror")) as place,
        ):
            mirror = Mirror(store, place)
            publisher.publish_patch(0).result()
            yield {
                "made_from": "anchor",
                "density": 1.0,
                **_step(mirror),
                "replay_s": None,
            }
            for density in args.densities:
                rows = []
                for _ in range(args.repeats):
                    for tensor in weights.values():
                        at = torch.randint(num, (max(1, round(density * num)),))
                        tensor.view(torch.int16)[at] ^= 1
                    publisher.publish_patch(1).result()
                    rows.append(_step(mirror))
                row = sorted(rows, key=lambda each: each["seconds"])[len(rows) // 2]
                out = Path(scratch) / "replayed"
                began = time.perf_counter()
                replay(store, mirror.version, out=out)
                replay_s = time.perf_counter() - began
                for path in out.iterdir():
                    path.unlink()
                out.rmdir()
                yield {
                    "made_from": "delta",
                    "density": density,
                    **row,
                    "replay_s": replay_s,
                }


def _step(mirror: Mirror) -> dict[str, Any]:
    cpu = time.process_time()
    (event,) = mirror.work()
    folder = Path(event.detail or "")
    return {
        "checkpoint_bytes": sum(path.stat().st_size for path in folder.iterdir()),
        "fetched_bytes": event.num_bytes,
        "seconds": event.seconds,
        "cpu_s": time.process_time() - cpu,
    }
