"""Publish a recorded trace with every encoding, and count what is stored.

The bytes are those of the real payloads, headers and all. After each step a follower has applied the
payload, and its weights are compared with the trace's, bit for bit.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.trace import Trace
from patchstore import Follower, Publisher
from patchstore.encodings import ENCODINGS
from patchstore.stores.memory import MemoryStore
from patchstore.tensors import bits


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", type=Path, required=True, help="folder with base.safetensors and steps.safetensors"
    )


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for each encoding: totals over all steps of the trace."""
    for encoding in ENCODINGS:
        yield measure(Trace.open(args.trace), encoding)


def measure(trace: Trace, encoding: str) -> dict[str, Any]:
    store = MemoryStore()
    num_changed = payload_bytes = 0
    publish_s = apply_s = 0.0
    with Publisher(store, trace.weights, encoding=encoding, anchor_every=1_000_000) as publisher:
        publisher.publish_patch(-1).result()
        follower = Follower(store, {})
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
            num_changed += version.delta.num_changed
            payload_bytes += version.delta.num_bytes
    if num_changed == 0:
        raise SystemExit("nothing changed in this trace: its figures would mean nothing")
    return {
        "encoding": encoding,
        "num_changed": num_changed,
        "density": num_changed / (trace.num_elements * trace.num_steps),
        "payload_bytes": payload_bytes,
        "bytes_per_change": payload_bytes / num_changed,
        "publish_s": publish_s,
        "apply_s": apply_s,
    }
