"""Publish the same optimiser steps in bf16 and in FP8, encoded in `context`, and count the stored bytes.

Both runs publish the same bf16 weights at every step. Each has a follower, whose tensors are compared bit for
bit with the weights, or with their codes and scales. The entropy is that of positions and of differences,
given the old exponent (`benchmarks.encodings.entropy`, and the same for the bits of E4M3). `stream` leaves
out the file's header and tables, which do not grow with the number of tensors as changes do.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.encodings.entropy import split_bits
from benchmarks.encodings.trace import Trace
from patchstore import Publisher, Replica
from patchstore.codec.context.classes import exponents, steps
from patchstore.codec.tensor_file import open_buffer
from patchstore.quantization import CHOICES, FORMS
from patchstore.stores.memory import MemoryStore
from patchstore.tensors.bits import bits, unsigned


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, help="folder with base.safetensors and steps.safetensors")
    parser.add_argument(
        "--shape",
        type=int,
        nargs=2,
        metavar=("ROWS", "COLUMNS"),
        help="one tensor of random weights",
    )
    parser.add_argument(
        "--densities",
        type=float,
        nargs="*",
        default=[],
        help="share of the bf16 elements of --shape that a synthetic AdamW step changes",
    )


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row per source and form."""
    if args.trace is None and not (args.shape and args.densities):
        raise SystemExit("nothing to measure: give --trace DIR, or --shape ROWS COLUMNS and --densities")
    if args.trace is not None:
        yield from _measure("trace", Trace.open(args.trace))
    for density in args.densities:
        random = torch.Generator().manual_seed(0)
        weights = {"a.weight": (torch.randn(*args.shape, generator=random) * 0.02).to(torch.bfloat16)}
        yield from _measure("x".join(map(str, args.shape)), Trace.imitate(weights, density))


def _measure(source: str, trace: Trace) -> Iterator[dict[str, Any]]:
    for form in (None, *CHOICES):
        found = _publish(trace.copy(), form)
        yield {"source": source, "form": form or "bf16", "num_steps": trace.num_steps, **found}


def _publish(trace: Trace, name: str | None) -> dict[str, Any]:
    store = MemoryStore()
    payload_bytes = stream_bytes = num_changed = num_scales = num_elements = 0
    entropy_bits = publish_s = 0.0
    before = _served(trace.weights, name)
    with Publisher(
        store, trace.weights, encoding="context", anchor_every=1_000_000, quantization=name
    ) as publisher:
        publisher.publish_patch(-1).result()
        follower = Replica(store, {})
        follower.update()
        for step in trace.steps():
            began = time.perf_counter()
            version = publisher.publish_patch(step).result()
            publish_s += time.perf_counter() - began
            follower.update(version.version)
            after = _served(trace.weights, name)
            for tensor, wanted in after.items():
                if not torch.equal(bits(wanted), bits(follower.tensors[tensor])):
                    raise AssertionError(f"{name}: {tensor} differs after step {step}")
            assert version.delta is not None
            payload_bytes += version.delta.num_bytes
            for payload in version.delta.payloads:
                _, entries = open_buffer(
                    payload.key, memoryview(bytearray(b"".join(store.read(payload.key))))
                )
                stream_bytes += entries["tiles"].numel() if "tiles" in entries else 0
            for tensor, old in before.items():
                one, other = unsigned(old), unsigned(after[tensor])
                at = np.flatnonzero(one != other)
                if "_scale" in tensor:
                    num_scales += len(at)
                    continue
                num_changed += len(at)
                num_elements += len(one)
                dtype = "BF16" if old.dtype == torch.bfloat16 else "F8_E4M3"
                classes = exponents(one, dtype).astype(np.int64)
                entropy_bits += sum(split_bits(classes, at, steps(one[at], other[at])))
            before = after
    return {
        "density": num_changed / num_elements,
        "num_changed": num_changed,
        "num_scales_changed": num_scales,
        "payload_bytes": payload_bytes,
        "bytes_per_change": payload_bytes / num_changed,
        "stream_per_change": stream_bytes / num_changed,
        "entropy_per_change": entropy_bits / 8 / num_changed,
        "over_entropy": payload_bytes * 8 / entropy_bits,
        "stream_over_entropy": stream_bytes * 8 / entropy_bits,
        "publish_s": publish_s,
    }


def _served(weights: dict[str, torch.Tensor], name: str | None) -> dict[str, torch.Tensor]:
    """Return copies of the weights as they are served."""
    found: dict[str, torch.Tensor] = {}
    for tensor, given in weights.items():
        if name is None or given.dim() != 2:
            found[tensor] = given.clone()
        else:
            found[tensor], found[FORMS[name].scale_name(tensor)] = FORMS[name].quantize(given)
    return found
