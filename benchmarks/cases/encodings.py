"""Publish optimiser steps with every encoding, encode them as peers do, and count the stored bytes.

The bytes of an encoding are those of the real payloads with their headers; a second figure adds each
version's manifest. After each step a follower applies the payload, and its weights are compared with the
trace's, bit for bit. Every file of a peer is decoded and compared too; `benchmarks.encodings.peers`
describes such a file. The first row of each source, `entropy`, is the lower bound of positions and values
of the same changes (`benchmarks.encodings.entropy`). `over_entropy` is bytes per change divided by that
bound, given the old exponent.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.encodings.entropy import Entropy, Step, entropy
from benchmarks.encodings.peers import PEERS, Peer
from benchmarks.encodings.trace import Trace
from patchstore import Publisher, Replica
from patchstore.codec import ENCODINGS
from patchstore.stores import layout
from patchstore.stores.memory import MemoryStore
from patchstore.tensors.bits import bits


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, help="folder with base.safetensors and steps.safetensors")
    parser.add_argument(
        "--densities",
        type=float,
        nargs="*",
        default=[],
        help="also a synthetic AdamW step from the trace's first weights that changes each of these shares",
    )
    parser.add_argument(
        "--shape",
        type=int,
        nargs=2,
        metavar=("ROWS", "COLUMNS"),
        help="take synthetic steps from one tensor of this size instead, with normal(0, 0.02) weights",
    )


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the entropy of each source, then one row per encoding and peer, with totals over all steps."""
    if args.trace is None and not (args.shape and args.densities):
        raise SystemExit("nothing to measure: give --trace DIR, or --shape ROWS COLUMNS and --densities")
    trace = Trace.open(args.trace) if args.trace else None
    if trace is not None:
        yield from measure("trace", trace)
    if args.shape:
        random = torch.Generator().manual_seed(0)
        weights = {"weight": (torch.randn(*args.shape, generator=random) * 0.02).to(torch.bfloat16)}
    elif trace is not None:
        weights = trace.weights
    for density in args.densities:
        yield from measure("synthetic", Trace.imitate(weights, density))


def measure(source: str, trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield the rows of one source. The trace stays at its step."""
    steps = list(_steps(trace.copy()))
    least = entropy(steps)
    about = {
        "source": source,
        "density": least.num_changed / (trace.num_elements * trace.num_steps),
        "num_changed": least.num_changed,
    }
    yield {
        "encoding": "entropy",
        **about,
        "entropy_per_change": least.given_exponent,
        "positions_per_change": least.positions,
        "values_per_change": least.values,
        "plain_entropy_per_change": least.plain,
        "plain_positions_per_change": least.plain_positions,
        "plain_values_per_change": least.plain_values,
    }
    for encoding in ENCODINGS:
        yield {"encoding": encoding, **about, **_figures(least, **_publish(trace.copy(), encoding))}
    for peer in PEERS:
        yield {"encoding": peer.name, **about, **_figures(least, **_imitate(peer, steps))}


def _figures(
    least: Entropy,
    *,
    payload_bytes: int,
    manifest_bytes: int | None = None,
    publish_s: float | None = None,
    apply_s: float | None = None,
) -> dict[str, Any]:
    bytes_per_change = payload_bytes / least.num_changed
    return {
        "payload_bytes": payload_bytes,
        "bytes_per_change": bytes_per_change,
        "with_manifest_per_change": None
        if manifest_bytes is None
        else (payload_bytes + manifest_bytes) / least.num_changed,
        "entropy_per_change": least.given_exponent,
        "plain_entropy_per_change": least.plain,
        "over_entropy": bytes_per_change / least.given_exponent if least.given_exponent else None,
        "publish_s": publish_s,
        "apply_s": apply_s,
    }


def _publish(trace: Trace, encoding: str) -> dict[str, Any]:
    store = MemoryStore()
    payload_bytes = manifest_bytes = 0
    publish_s = apply_s = 0.0
    with Publisher(store, trace.weights, encoding=encoding, anchor_every=1_000_000) as publisher:
        publisher.publish_patch(-1).result()
        follower = Replica(store, {})
        follower.update()
        for step in trace.steps():
            began = time.perf_counter()
            version = publisher.publish_patch(step).result()
            published = time.perf_counter()
            follower.update(version.version)
            apply_s += time.perf_counter() - published
            publish_s += published - began
            for name, weights in trace.weights.items():
                if not torch.equal(bits(weights), bits(follower.tensors[name])):
                    raise AssertionError(f"{encoding}: {name} differs after step {step}")
            assert version.delta is not None
            payload_bytes += version.delta.num_bytes
            manifest_bytes += store.size(layout.manifest_key(version.version))
    return {
        "payload_bytes": payload_bytes,
        "manifest_bytes": manifest_bytes,
        "publish_s": publish_s,
        "apply_s": apply_s,
    }


def _imitate(peer: Peer, steps: list[Step]) -> dict[str, Any]:
    """Count the bytes of a peer. This short implementation is no measure of its speed, and is not timed."""
    payload_bytes = 0
    for number, step in enumerate(steps):
        file = peer.encode(step)
        decoded = peer.decode(file, {name: old for name, (old, _) in step.items()})
        for name, (_, new) in step.items():
            if not np.array_equal(decoded[name], new):
                raise AssertionError(f"{peer.name}: {name} differs after step {number}")
        payload_bytes += len(file)
    return {"payload_bytes": payload_bytes}


def _steps(trace: Trace) -> Iterator[Step]:
    """Yield the bits of all tensors before and after each step."""
    before = {name: _flat(weights) for name, weights in trace.weights.items()}
    for _ in trace.steps():
        after = {name: _flat(weights) for name, weights in trace.weights.items()}
        yield {name: (old, after[name]) for name, old in before.items()}
        before = after


def _flat(tensor: torch.Tensor) -> Any:
    if tensor.dtype != torch.bfloat16:
        raise SystemExit(f"a tensor of {tensor.dtype}: peers and entropies are of bf16")
    return bits(tensor).numpy().view(np.uint16).copy()
