"""Measure the memory of both sides while a whole model passes through each kind of store.

Publisher, follower and replay run one after the other, each in a process of its own. Each process reads its
peak, VmHWM, which is reset before the measured call. VmHWM counts mapped files too, so it is an upper bound.
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from benchmarks.support import child_process, store_kinds
from benchmarks.support.child_process import Child
from benchmarks.support.store_kinds import KINDS, place, versions
from benchmarks.support.work_folder import work_folder
from patchstore import Publisher, Replica, Store, open_store, replay
from patchstore.bucket import history
from patchstore.bucket.state_sums import state_total
from patchstore.tensors import state_digest

_SPARE_BYTES = 2 << 30


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--gib", type=float, default=4.0, help="size of the model, and of its anchor")
    parser.add_argument("--tensor-mib", type=int, default=64, help="size of each of its tensors")
    parser.add_argument("--folder", type=Path, help="to work in; takes three times the model's size")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row per side of each kind of store, or one with the reason if memory or disk is short."""
    for kind in args.kinds:
        with work_folder(args.folder, "anchor-memory") as folder, place(kind, folder / "place") as where:
            if reason := _short(where, folder, args):
                print(f"skipped: {kind}: {reason}", file=sys.stderr)
                yield {"kind": kind, "gib": args.gib, "skipped": reason}
                continue
            yield from measure(where, folder, args)


def _short(where: store_kinds.Place, folder: Path, args: argparse.Namespace) -> str:
    """Return which resource is too short; empty if none is."""
    # The model, its snapshot, and two copies in ministack, which joins the parts of an upload.
    copies = 2 + 2 * (where.server == "ministack")
    needed = copies * args.gib * 2**30 + _SPARE_BYTES
    if (available := _status("/proc/meminfo", "MemAvailable")) < needed:
        return f"needs {needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} are available"
    needed, free = 3 * args.gib * 2**30, shutil.disk_usage(folder).free
    return f"needs {needed / 1e9:.1f} GB of disk, and {free / 1e9:.1f} are free" if free < needed else ""


def measure(where: store_kinds.Place, folder: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of one kind.

    Raises:
        RuntimeError: the weights of a side differ from the publisher's.
    """
    job = {
        "url": where.url,
        "options": dict(where.options),
        "num_tensors": max(1, round(args.gib * 1024 / args.tensor_mib)),
        "tensor_bytes": args.tensor_mib << 20,
        "folder": str(folder),
    }
    model_bytes = job["num_tensors"] * job["tensor_bytes"]
    state = None
    for side in ("publisher", "follower", "replay"):
        if where.process is not None:
            _reset(where.process)
        with Child("benchmarks.cases.anchor_memory", side, job, where.environment(folder / side)) as process:
            said = process.hear()
        state = said["state"] if state is None else state
        if said["state"] != state:
            raise RuntimeError(f"{where.kind}: the {side} has {said['state']}, and the publisher {state}")
        # Only a follower holds the model afterwards.
        beside = said["peak_bytes"] - (model_bytes if side == "follower" else 0)
        server = None if where.process is None else _status(f"/proc/{where.process}/status", "VmHWM")
        yield {
            "kind": where.kind,
            "side": side,
            "model_mib": model_bytes / 2**20,
            "tensor_mib": args.tensor_mib,
            "held_before_mib": said["before_bytes"] / 2**20,
            "grown_mib": said["peak_bytes"] / 2**20,
            "grown_beside_model_mib": beside / 2**20,
            "seconds": said["seconds"],
            "server": where.server,
            "server_peak_mib": None if server is None else server / 2**20,
            "state": state,
            "cores": os.cpu_count(),
            **versions(),
        }


def _reset(process: int | str) -> None:
    """Reset VmHWM to the resident memory of now."""
    Path(f"/proc/{process}/clear_refs").write_text("5")


def _status(path: str, field: str) -> int:
    """Return a field of a status file, in bytes."""
    lines = Path(path).read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


# The three processes.


def _peak(call: Callable[[], object]) -> dict[str, Any]:
    """Return the resident memory before a call, its greatest growth during the call, and the seconds."""
    _reset("self")
    before, began = _status("/proc/self/status", "VmRSS"), time.monotonic()
    call()
    seconds = time.monotonic() - began
    return {
        "before_bytes": before,
        "peak_bytes": _status("/proc/self/status", "VmHWM") - before,
        "seconds": seconds,
    }


def _publish(store: Store, job: Mapping[str, Any]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"layers.{number}.weight": torch.empty(job["tensor_bytes"] // 2, dtype=torch.bfloat16).normal_(
            0, 0.02, generator=generator
        )
        for number in range(job["num_tensors"])
    }
    # One file, of the largest size that stores take.
    with Publisher(store, weights, max_shard_bytes=1 << 40) as publisher:
        found = _peak(lambda: publisher.publish_patch(0).result())
    return found | {"state": _state(store, weights.items())}


def _follow(store: Store, job: Mapping[str, Any]) -> dict[str, Any]:
    tensors: dict[str, torch.Tensor] = {}
    follower = Replica(store, tensors, scratch=Path(job["folder"]))
    found = _peak(follower.update)
    return found | {"state": _state(store, tensors.items())}


def _replay(store: Store, job: Mapping[str, Any]) -> dict[str, Any]:
    out = Path(job["folder"], "replayed")
    # Opens connections and imports their modules, so that neither is counted.
    history.head(store)
    found = _peak(lambda: replay(store, out=out))
    return found | {"state": _state(store, _read(out))}


def _read(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)


def _state(store: Store, tensors: Any) -> str:
    header = history.read_header(store)
    assert header is not None
    return state_total(header.schema, state_digest.of_tensors(header.schema, tensors))


if __name__ == "__main__":
    role, given = child_process.arguments()
    opened = open_store(given["url"], **given["options"])
    child_process.say(**{"publisher": _publish, "follower": _follow, "replay": _replay}[role](opened, given))
