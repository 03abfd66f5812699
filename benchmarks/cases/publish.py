"""How long `publish_patch` blocks a trainer, with anchors between the deltas: in bf16 and in FP8.

Each step adds noise to weights whose masters are anywhere in the interval that rounds to them, so small
weights are likelier to change, as with AdamW; or to masters, with `--trainer-dtype float32`. `blocking_ms` is
what the trainer waits for in `publish_patch`, `stored_s` the time until the version exists. Calls after an
anchor are told apart: they may wait for it. `bus_gb_per_s` is what a snapshot in host memory is compared at,
at most.
"""

import argparse
import dataclasses
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.support.shapes import SHAPES
from benchmarks.support.software import software
from benchmarks.support.trainer import PART, RATE, STANDARD_DEVIATION, take_step
from patchstore import Publisher, open_store
from patchstore.quantization import CHOICES

BUS_BYTES = 1 << 30


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen2.5-0.5b", help="of the model")
    parser.add_argument("--layers", type=int, help="of the model; all, if not given")
    parser.add_argument("--snapshot", choices=["device", "host"], default="device", help="where it is")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--forms", nargs="+", choices=["bf16", *CHOICES], default=["bf16", *CHOICES])
    parser.add_argument("--trainer-dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--steps", type=int, default=6, help="deltas after the first anchor")
    parser.add_argument("--anchor-at", type=int, default=4, help="the publication that is an anchor too")
    parser.add_argument("--rate", type=float, default=RATE, help="standard deviation of a step's updates")
    parser.add_argument(
        "--store", type=Path, help="new folder, removed afterwards; a temporary one, if not given"
    )


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row per form."""
    device = torch.device(args.device)
    for form in args.forms:
        folder = args.store or Path(tempfile.mkdtemp(prefix="patchstore-bench-"))
        try:
            with closing(open_store(folder)) as store:
                found = _publish(args, device, store, form)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        about = {"shape": args.shape, "layers": args.layers, "snapshot": args.snapshot, "form": form}
        about["trainer_dtype"] = args.trainer_dtype
        yield {**about, **software(device), **found}


def _publish(args: argparse.Namespace, device: torch.device, store: Any, form: str) -> dict[str, Any]:
    shape = SHAPES[args.shape]
    if args.layers is not None:
        shape = dataclasses.replace(shape, layers=args.layers)
    random = torch.Generator(device).manual_seed(7)
    weights = {
        name: torch.empty(size, dtype=getattr(torch, args.trainer_dtype), device=device).normal_(
            0, STANDARD_DEVIATION, generator=random
        )
        for name, size in shape.tensors().items()
    }
    blocking: list[float] = []
    stored: list[float] = []
    sizes: list[int] = []
    began = time.perf_counter()
    with Publisher(
        store,
        weights,
        quantization=None if form == "bf16" else form,
        anchor_every=args.anchor_at,
        snapshot=args.snapshot,
    ) as publisher:
        open_s = time.perf_counter() - began
        began = time.perf_counter()
        anchor = publisher.publish_patch(0).result()
        anchor_s = time.perf_counter() - began
        assert anchor.anchor is not None
        last = None
        for step in range(1, args.steps + 1):
            for tensor in weights.values():
                for some in torch.split(tensor.view(-1), PART):
                    take_step(some, args.rate, random)
            _wait(device)
            began = time.perf_counter()
            publication = publisher.publish_patch(step)
            blocking.append(time.perf_counter() - began)
            if step != args.anchor_at:
                manifest = publication.result()
                stored.append(time.perf_counter() - began)
                assert manifest.delta is not None
                sizes.append(manifest.delta.num_bytes)
                num_changed = manifest.delta.num_changed
            last = publication
        assert last is not None
        last.result()
        usual = [each for step, each in enumerate(blocking, 1) if step not in {1, args.anchor_at + 1}]
        num_elements = publisher.schema.num_elements
    return {
        "open_s": open_s,
        "anchor_bytes": anchor.anchor.num_bytes,
        "anchor_s": anchor_s,
        "anchor_gb_per_s": anchor.anchor.num_bytes / anchor_s / 1e9,
        "blocking_ms": 1e3 * median(usual),
        "all_blocking_ms": [1e3 * each for each in blocking],
        "stored_s": median(stored),
        "all_stored_s": stored,
        "payload_bytes": int(median(sizes)),
        "num_changed": num_changed,
        "density": num_changed / num_elements,
        **(_bus(device) if args.snapshot == "host" else {}),
    }


def _bus(device: torch.device) -> dict[str, float]:
    """Measure how fast pinned memory reaches a GPU: no comparison with a snapshot there can be faster."""
    if device.type != "cuda":
        return {}
    here = torch.empty(BUS_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    there = here.to(device)
    _wait(device)
    began = time.perf_counter()
    for _ in range(8):
        there.copy_(here, non_blocking=True)
    _wait(device)
    return {"bus_gb_per_s": 8 * BUS_BYTES / (time.perf_counter() - began) / 1e9}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
