"""Rebuild a version of a large checkpoint in a process of its own, and read its peak memory.

The peak is the kernel's VmHWM of the process, less its resident memory after the import of torch. VmHWM
counts mapped files too, so it is an upper bound of what the replay allocates.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from patchstore import Publisher, open_store

_CHILD = """
import sys
import torch
from patchstore import open_store, replay

def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) * 1024

torch.zeros(1)
before = status("VmRSS")
replay(open_store(sys.argv[1]), out=sys.argv[2])
print(status("VmHWM") - before)
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gib", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="sizes of the checkpoint"
    )
    parser.add_argument("--tensor-mib", type=int, default=64, help="size of its largest tensor")
    parser.add_argument(
        "--density", type=float, default=0.01, help="share of elements changed by each of 3 deltas"
    )


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row per size."""
    for gib in args.gib:
        with tempfile.TemporaryDirectory() as folder:
            yield measure(Path(folder), int(gib * 2**30), args.tensor_mib * 2**20, args.density)


def measure(folder: Path, checkpoint_bytes: int, tensor_bytes: int, density: float) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shape = (tensor_bytes // 2 // 1024, 1024)
    weights = {
        f"layers.{i}.weight": torch.randn(shape, generator=generator).to(torch.bfloat16)
        for i in range(checkpoint_bytes // tensor_bytes)
    }
    with Publisher(
        open_store(folder / "bucket"), weights, max_shard_bytes=checkpoint_bytes // 2
    ) as publisher:
        for step in range(4):
            head = publisher.publish_patch(step).result()
            for tensor in weights.values():
                count = int(density * tensor.numel())
                tensor.view(-1)[torch.randint(tensor.numel(), (count,), generator=generator)] += 1
    began = time.perf_counter()
    child = [sys.executable, "-c", _CHILD, str(folder / "bucket"), str(folder / "out")]
    peak = int(subprocess.run(child, check=True, capture_output=True, text=True).stdout)
    seconds = time.perf_counter() - began
    return {
        "checkpoint_mib": sum(tensor.nbytes for tensor in weights.values()) / 2**20,
        "largest_tensor_mib": tensor_bytes / 2**20,
        "deltas_mib": 3 * (head.delta.num_bytes if head.delta else 0) / 2**20,
        "peak_mib": peak / 2**20,
        "seconds": seconds,
    }
