"""Measure for how long `publish_patch` blocks around anchors: of the publisher, of another process, and none.

A trainer changes some elements, publishes, and computes for a while. Which calls come behind an anchor is the
same for all ways. Of the first anchor, which all of them have, nothing is measured.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from patchstore import Publication, Publisher
from patchstore.bucket import history, shortcuts
from patchstore.stores.folder import FolderStore
from patchstore.tensors.bits import bits

_WAYS: dict[str, dict[str, Any]] = {"none": {}, "publisher": {}, "beside": {"compact": True}}
_BEHIND = 3
"""Calls behind an anchor that may wait for it."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--elements", type=int, default=1 << 26, help="of the model, in eight tensors")
    parser.add_argument("--density", type=float, default=0.01, help="share of elements that change")
    parser.add_argument("--publications", type=int, default=72)
    parser.add_argument("--anchor-every", type=int, default=16)
    parser.add_argument("--compute", type=float, default=0.25, help="seconds between two calls")
    parser.add_argument("--ways", nargs="+", choices=_WAYS, default=[*_WAYS])
    parser.add_argument("--store", type=Path, help="folder for buckets; a temporary one if not given")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each way."""
    for way in args.ways:
        with tempfile.TemporaryDirectory(dir=args.store) as name:
            yield {
                "way": way,
                "elements": args.elements,
                "density": args.density,
                "compute_s": args.compute,
                "anchor_every": args.anchor_every,
                **_row(FolderStore(Path(name) / "bucket"), way, args),
            }


def _row(store: FolderStore, way: str, args: argparse.Namespace) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    size = args.elements // 8
    weights = {f"layers.{at}.weight": torch.randn(size, generator=generator).bfloat16() for at in range(8)}
    num = max(1, int(size * args.density))
    every = None if way == "none" else args.anchor_every
    done: list[Publication] = []
    with Publisher(store, weights, anchor_every=every, **_WAYS[way]) as publisher:
        publisher.publish_patch(0).result()
        for step in range(1, args.publications):
            for tensor in weights.values():
                at = torch.randint(size, (num,), generator=generator)
                raw = bits(tensor)
                raw[at] = raw[at] ^ 1
            done.append(publisher.publish_patch(step))
            time.sleep(args.compute)
        for each in done:
            each.result()
        ends = time.monotonic() + 120
        while way == "beside" and not _has_last_anchor(store, args) and time.monotonic() < ends:
            time.sleep(0.5)
        compaction = publisher.compaction
    behind = [each.waited_s for each in done if 0 < each.step % args.anchor_every <= _BEHIND < each.step]
    others = [each.waited_s for each in done if not 0 < each.step % args.anchor_every <= _BEHIND]
    manifests = list(history.read_back(store, args.publications - 1))
    return {
        "publications": len(done),
        "anchors_by_publisher": sum(each.anchor is not None for each in manifests) - 1,
        "anchors_beside": sum(each.parent is None for each in shortcuts.listed(store)),
        "failures_beside": None if compaction is None else compaction.num_failures,
        "blocked_behind_anchors_s": statistics.median(behind),
        "blocked_behind_anchors_max_s": max(behind),
        "blocked_elsewhere_s": statistics.median(others),
        "blocked_elsewhere_max_s": max(others),
        "published_s": statistics.median(each.publish_s or 0 for each in done),
    }


def _has_last_anchor(store: FolderStore, args: argparse.Namespace) -> bool:
    last = (args.publications - 1) // args.anchor_every * args.anchor_every
    return any(each.parent is None and each.version == last for each in shortcuts.listed(store))
