"""Measure what a bucket takes from day to day, under several policies of retention.

A trainer publishes so many versions a day into a folder. At the end of each day `compact`, `retire` and
`collect` run, once each, with a clock that is so many days ahead. So what is retired on one day is deleted on
the next.
"""

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from patchstore import Publisher
from patchstore.ops.compact.service import Compactor
from patchstore.ops.retention import Retention, collect, retire
from patchstore.stores.folder import FolderStore
from patchstore.tensors.bits import bits

_POLICIES: dict[str, Retention | None] = {
    "all": None,
    "last-100": Retention(keep_last=100),
    "last-100-every-64": Retention(keep_last=100, keep_every=64),
    "last-100-every-100": Retention(keep_last=100, keep_every=100),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--elements", type=int, default=1 << 18, help="of the model, in four tensors")
    parser.add_argument("--density", type=float, default=0.01, help="share of elements that change")
    parser.add_argument("--per-day", type=int, default=480, help="versions a day")
    parser.add_argument("--days", type=int, default=3)
    parser.add_argument("--anchor-every", type=int, default=64, help="of the compactor")
    parser.add_argument("--policies", nargs="+", choices=_POLICIES, default=[*_POLICIES])
    parser.add_argument("--store", type=Path, help="folder for buckets; a temporary one if not given")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each policy."""
    for name in args.policies:
        with tempfile.TemporaryDirectory(dir=args.store) as folder:
            days = list(_days(Path(folder) / "bucket", _POLICIES[name], args))
            yield {
                "policy": name,
                "elements": args.elements,
                "density": args.density,
                "per_day": args.per_day,
                "anchor_every": args.anchor_every,
                "days": days,
                "bytes_per_day": days[-1]["bytes"] - days[-2]["bytes"],
            }


def _days(folder: Path, policy: Retention | None, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what the bucket has at the end of each day."""
    store = FolderStore(folder)
    generator = torch.Generator().manual_seed(0)
    size = args.elements // 4
    weights = {f"layers.{at}.weight": torch.randn(size, generator=generator).bfloat16() for at in range(4)}
    num = max(1, int(size * args.density))
    with Publisher(store, weights, anchor_every=None) as publisher:
        for day in range(1, args.days + 1):
            for step in range(args.per_day):
                for tensor in weights.values():
                    at = torch.randint(size, (num,), generator=generator)
                    raw = bits(tensor)
                    raw[at] = raw[at] ^ 1
                publisher.publish_patch(step).result()
            for _ in Compactor(store, anchor_every=args.anchor_every).compact():
                pass
            num_kept, num_proved = day * args.per_day, 0
            if policy is not None:
                found = retire(store, policy, dry_run=False, clock=partial(_later, day))
                num_kept -= found.num_retired + found.num_before
                num_proved = collect(store, dry_run=False, clock=partial(_later, day)).num_proved
            yield {"kept": num_kept, "proved": num_proved, **_sizes(folder)}


def _later(days: int) -> datetime:
    return datetime.now(UTC) + timedelta(days=days)


def _sizes(folder: Path) -> dict[str, Any]:
    """Return the bytes of all objects, and how many of each kind there are."""
    sizes, counts = Counter[str](), Counter[str]()
    for path in folder.rglob("*"):
        if path.is_file() and ".tmp" not in path.parts:
            kind = path.relative_to(folder).parts[0]
            if kind == "deltas":
                kind = "rollups" if "-of-" not in path.name else kind
            sizes[kind] += path.stat().st_size
            counts[kind] += 1
    kinds = ("anchors", "deltas", "rollups")
    return {
        "bytes": sum(sizes.values()),
        **{f"{kind}_bytes": sizes[kind] for kind in kinds},
        **{f"num_{kind}": counts[kind] for kind in kinds},
    }
