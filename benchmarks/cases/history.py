"""Measure `log`, resuming and publishing in a run of many small tensors with a long history.

The first versions are published. The rest of the history consists of manifests alone, each with the one
before as parent, so that it takes seconds to make. `log` and the search for the head read nothing else of a
version.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from patchstore import Publisher
from patchstore.bucket import history
from patchstore.bucket.records import Manifest
from patchstore.stores import layout
from patchstore.stores.folder import FolderStore

_CHILD = """
import atexit
from patchstore.cli import main

def peak():
    with open("/proc/self/status") as file:
        print(next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024)

atexit.register(peak)
main.main()
"""

_PUBLISHED = 5
"""Versions that have payloads too."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tensors", type=int, default=20_000, help="tensors of the model")
    parser.add_argument("--elements", type=int, default=64, help="elements of each")
    parser.add_argument("--versions", type=int, default=5_000, help="versions of the history")
    parser.add_argument("--encoding", default="context")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"model.layers.{number}.weight": torch.randn(args.elements, generator=generator).bfloat16()
        for number in range(args.tensors)
    }
    with tempfile.TemporaryDirectory() as folder:
        store = FolderStore(Path(folder) / "bucket")
        publish_s = []
        with Publisher(store, weights, encoding=args.encoding, anchor_every=10**6) as publisher:
            for step in range(_PUBLISHED):
                for tensor in weights.values():
                    tensor[step % args.elements] += 1
                began = time.perf_counter()
                newest = publisher.publish_patch(step).result()
                publish_s.append(time.perf_counter() - began)
        _lengthen(store, newest, args.versions)
        log_s, log_bytes = _logged(store.url, args.versions)
        began = time.perf_counter()
        with Publisher(store, weights, encoding=args.encoding, resume=True):
            resume_s = time.perf_counter() - began
        yield {
            "encoding": args.encoding,
            "tensors": args.tensors,
            "elements": args.tensors * args.elements,
            "versions": args.versions,
            "manifest_bytes": store.size(layout.manifest_key(args.versions - 1)),
            "sums_bytes": newest.state.sums.size,
            "anchor_s": publish_s[0],
            "publish_s": min(publish_s[1:]),
            "log_s": log_s,
            "log_peak_mib": log_bytes / 2**20,
            "resume_s": resume_s,
        }


def _lengthen(store: FolderStore, newest: Manifest, num_versions: int) -> None:
    """Commit manifests of empty deltas after the newest version."""
    assert newest.delta is not None
    empty = replace(newest.delta, num_changed=0, payloads=())
    for version in range(newest.version + 1, num_versions):
        newest = replace(
            newest,
            version=version,
            parent=version - 1,
            parent_digest=history.stored_digest(store, version - 1),
            step=version,
            delta=empty,
        )
        history.commit(store, newest)


def _logged(url: str, num_versions: int) -> tuple[float, int]:
    """Run `patchstore log` over all versions; return its seconds and its peak memory in bytes."""
    began = time.perf_counter()
    command = [sys.executable, "-c", _CHILD, "log", url, "-n", str(num_versions)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    seconds = time.perf_counter() - began
    assert len(lines) > num_versions
    return seconds, int(lines[-1])
