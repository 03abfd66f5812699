"""Bring a served model from one version to the next in several ways, and compare their times.

Every way starts from the same weights in a real vLLM engine of one rank, in this process. Each update is
undone before the next one begins. In the first round, which is not timed, the live weights are compared bit
for bit after each way; a difference ends the benchmark.

The time of an update and the pause of generation are two figures. patchstore stages a version while
generation goes on, and pauses for the commit only. The other ways write from the first moment.
"""

import argparse
import gc
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from benchmarks.apply.engine import start_worker, upstream_loader
from benchmarks.apply.ways import WAYS, Server, Spent, Way
from benchmarks.support.shapes import SHAPES
from benchmarks.support.software import software
from benchmarks.support.trainer import Trainer


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen2.5-0.5b", help="of the model")
    parser.add_argument(
        "--densities",
        type=float,
        nargs="+",
        default=[0.001, 0.01, 0.05],
        help="share of every tensor's elements that a version changes",
    )
    parser.add_argument("--repeats", type=int, default=3, help="timed rounds for each density")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), help="all that this vLLM has, if not given")
    parser.add_argument(
        "--upstream", type=Path, help="checkpoint_weight_patch.py of a newer vLLM, where this one has none"
    )
    parser.add_argument(
        "--no-store",
        action="store_true",
        help="publish nothing: build versions on the model's device, and leave out the way `patchstore`",
    )
    parser.add_argument(
        "--engine", type=json.loads, default={}, metavar="JSON", help="further arguments of vLLM's engine"
    )


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row about the model, then one per density and way."""
    upstream = upstream_loader(args.upstream)
    ways = _ways(args.ways, has_upstream=upstream is not None, has_store=not args.no_store)
    shape = SHAPES[args.shape]
    with tempfile.TemporaryDirectory(prefix="patchstore-apply-") as temporary:
        folder = Path(temporary)
        with closing(Server(start_worker(shape, folder / "model", args.engine), upstream)) as server:
            device = server.device if args.no_store else torch.device("cpu")
            with Trainer(shape, device, None if args.no_store else folder / "store") as trainer:
                about = {"shape": shape.name, "tensors_on": device.type, **software(server.device)}
                yield about | server.open(trainer, folder / "spool")
                for density in args.densities:
                    for row in _rounds(server, trainer, ways, density, args.repeats):
                        yield about | row


def _ways(asked: Sequence[Way] | None, *, has_upstream: bool, has_store: bool) -> list[Way]:
    missing = set[str]() if has_store else {"patchstore"}
    if not has_upstream:
        missing |= {"vllm-patch", "vllm-patch-unchecked"}
    if wrong := missing & set(asked or ()):
        raise SystemExit(f"not possible here: {', '.join(sorted(wrong))}; see --upstream and --no-store")
    return [way for way in WAYS if way in (asked or WAYS) and way not in missing]


def _rounds(
    server: Server, trainer: Trainer, ways: Sequence[Way], density: float, repeats: int
) -> Iterator[dict[str, Any]]:
    """Publish one version, bring the server to it in every way in turn, and leave the server at it."""
    step = trainer.step(density)
    prepared = server.prepare(step)
    found: dict[Way, dict[str, str]] = {}
    spent: dict[Way, list[Spent]] = {way: [] for way in ways}
    for number in range(repeats + 1):
        for way in ways:
            gc.collect()
            once = server.update(way, prepared)
            if number == 0:
                found[way] = server.fingerprint()
                _compare(found)
            else:
                spent[way].append(once)
            server.undo(way, prepared)
    server.advance(prepared)
    for way in ways:
        totals = [each.total_s for each in spent[way]]
        yield {
            "density": density,
            "way": way,
            "num_changed": step.num_changed,
            "payload_bytes": step.payload_bytes if way == "patchstore" else None,
            "total_s": statistics.median(totals),
            "total_min_s": min(totals),
            "total_max_s": max(totals),
            "stage_s": statistics.median(each.stage_s for each in spent[way]),
            "prove_s": statistics.median(each.prove_s for each in spent[way]),
            "pause_s": statistics.median(each.pause_s for each in spent[way]),
            "repeats": repeats,
        }


def _compare(found: Mapping[Way, Mapping[str, str]]) -> None:
    """Check that all ways so far led to the same weights.

    Raises:
        SystemExit: they did not, so their times mean nothing.
    """
    first, last = next(iter(found)), list(found)[-1]
    if wrong := [name for name, digest in found[first].items() if found[last].get(name) != digest]:
        raise SystemExit(f"{last} and {first} differ in {len(wrong)} tensors, such as {wrong[0]}")
