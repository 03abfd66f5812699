"""Measure a trainer whose weights are sharded over several processes, one GPU each (or CPUs with gloo).

Three ways, in one run, of the same weights and changes: each rank publishes its shards; every rank gathers
whole tensors, and one publisher takes them; the gather alone, tensor by tensor, as trainers do it that send
weights themselves. The weights are random, and between two versions a share of them gets other bits.
"""

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks.support.shapes import SHAPES
from benchmarks.support.work_folder import work_folder
from patchstore import Publisher
from patchstore.bucket.records import Manifest

Row = dict[str, Any]
_torch: Any = torch
"""Torch, whose stubs lack some of what it exports."""
FLIPPED = 1 << 26
"""Elements changed at a time."""
WAYS = ("shards", "gather", "full_tensor")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-8b", help="of the model")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="processes; a GPU each, if any")
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=list(WAYS))
    parser.add_argument(
        "--density", type=float, default=0.01, help="share of elements that a version changes"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="versions that are timed, after one that is not"
    )
    parser.add_argument("--encoding", default="auto")
    parser.add_argument("--store", type=Path, help="folder for buckets; a temporary one if not given")
    parser.add_argument("--experts-sharded", action="store_true", help="shard experts by number")


def run(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each way and number of ranks."""
    with work_folder(args.store, "shards") as folder:
        for num in args.ranks:
            for way in args.ways:
                if num == 1 and way != "shards":
                    continue
                server = _torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                context = _torch.multiprocessing.get_context("spawn")
                rows: Any = context.SimpleQueue()
                bucket = folder / f"{way}-{num}"
                ranks = _torch.multiprocessing.spawn(
                    _rank, (num, server.port, way, str(bucket), vars(args), rows), nprocs=num, join=False
                )
                while not ranks.join():
                    pass
                found = sorted((rows.get() for _ in range(num)), key=lambda row: int(row["rank"]))
                # A folder in memory may not hold the anchors of two.
                shutil.rmtree(bucket, ignore_errors=True)
                yield _joined(way, found, args)


def _joined(way: str, found: list[Row], args: argparse.Namespace) -> Row:
    """Return what all ranks measured: the slowest of each version, and the median of versions."""
    row: Row = {"way": way, "shape": args.shape, "ranks": len(found), "density": args.density}
    for name in ("block_s", "publish_s", "cpu_s"):
        each = [max(times) for times in zip(*(its[name] for its in found), strict=True)]
        row[name] = statistics.median(each)
        row[f"{name}_max"] = max(each)
    row["bytes"] = found[0]["bytes"]
    row["bytes_per_change"] = found[0]["bytes"] / max(found[0]["num_changed"], 1)
    row["bytes_per_rank"] = max(its["own_bytes"] for its in found)
    row["memory_mib"] = max(its["memory_mib"] for its in found)
    row["weights_mib"] = max(its["weights_mib"] for its in found)
    row["anchor_s"] = found[0]["anchor_s"]
    return {**row, "device": found[0]["device"], "encoding": found[0]["encoding"]}


def _rank(rank: int, num: int, port: int, way: str, bucket: str, args: dict[str, Any], rows: Any) -> None:
    """One process of the trainer."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    store = _torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=num, timeout=timedelta(minutes=5)
    )
    tensors = _weights(args, device)
    trainer = _Trainer(tensors, args["density"], device)
    found = {"shards": _shards, "gather": _gather, "full_tensor": _full_tensor}[way](trainer, bucket, args)
    rows.put({"rank": rank, **found})
    dist.destroy_process_group()


def _weights(args: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return this rank's shards: of every tensor's first dimension, or whole experts."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    found = {}
    experts = 0
    for name, shape in SHAPES[args["shape"]].tensors().items():
        rank, num = dist.get_rank(), dist.get_world_size()
        if args["experts_sharded"] and ".experts." in name:
            # An expert is on one rank alone, whole: the other ranks do not know its name.
            experts += 1
            if experts // 3 % num != rank:
                continue
            rows, placement = shape[0], None
        else:
            size = -(-shape[0] // num)
            rows, placement = max(0, min(size, shape[0] - rank * size)), Shard(0)
        local = torch.empty((rows, *shape[1:]), dtype=torch.bfloat16, device=device)
        local.normal_(0, 0.02, generator=generator)
        found[name] = (
            local
            if placement is None
            else DTensor.from_local(
                local, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=_stride(shape)
            )
        )
    return found


def _stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


class _Trainer:
    """Weights that change between versions."""

    def __init__(self, tensors: dict[str, Any], density: float, device: torch.device) -> None:
        self.tensors, self._density, self.device = tensors, density, device
        self._generator = torch.Generator(device).manual_seed(1 + dist.get_rank())

    def step(self) -> None:
        """Flip the lowest bit of some elements."""
        for tensor in self.tensors.values():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for part in local.view(-1).view(torch.int16).split(FLIPPED):
                drawn = torch.rand(part.shape, device=part.device, generator=self._generator)
                part.bitwise_xor_(drawn < self._density)
        self.settle()

    def settle(self) -> None:
        """Wait until the device is done, and all ranks are here."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def memory_mib(self) -> float:
        """Return the most memory of the device that was used; on a CPU, of the process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 2**20
        with Path("/proc/self/status").open() as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 2**10

    def row(self) -> Row:
        num_bytes = sum(
            each.to_local().nbytes if isinstance(each, DTensor) else each.nbytes
            for each in self.tensors.values()
        )
        name = torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"
        return {"memory_mib": self.memory_mib(), "weights_mib": num_bytes / 2**20, "device": name}


def _timed(
    trainer: _Trainer, repeats: int, publish: Callable[[int], tuple[float, float, Manifest | None]]
) -> Row:
    """Publish version 0, and then versions that are timed, after one that is not."""
    _, anchor_s, _ = publish(0)
    found: Row = {"block_s": [], "publish_s": [], "cpu_s": []}
    manifest = None
    for step in range(1, repeats + 2):
        trainer.step()
        began = time.process_time()
        block_s, publish_s, manifest = publish(step)
        if step > 1:
            found["block_s"].append(block_s)
            found["publish_s"].append(publish_s)
            found["cpu_s"].append(time.process_time() - began)
    delta = None if manifest is None else manifest.delta
    sizes = [] if delta is None else [payload.size for payload in delta.payloads]
    return {
        **found,
        **trainer.row(),
        "anchor_s": anchor_s,
        "bytes": sum(sizes),
        "own_bytes": max(sizes, default=0),
        "num_changed": 0 if delta is None else delta.num_changed,
        "encoding": None if delta is None else delta.encoding,
    }


def _shards(trainer: _Trainer, bucket: str, args: dict[str, Any]) -> Row:
    """Each rank publishes what it has."""
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    with Publisher(
        bucket, trainer.tensors, encoding=args["encoding"], anchor_every=10**6, group=group
    ) as publisher:

        def publish(step: int) -> tuple[float, float, Manifest]:
            began = time.perf_counter()
            publication = publisher.publish_patch(step)
            block_s = time.perf_counter() - began
            manifest = publication.result()
            return block_s, time.perf_counter() - began, manifest

        return _timed(trainer, args["repeats"], publish)


def _gather(trainer: _Trainer, _bucket: str, args: dict[str, Any]) -> Row:
    """Every rank gathers whole tensors one after the other, and lets go of each."""

    def publish(_step: int) -> tuple[float, float, None]:
        began = time.perf_counter()
        for tensor in trainer.tensors.values():
            if isinstance(tensor, DTensor):
                tensor.full_tensor()
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
        took_s = time.perf_counter() - began
        return took_s, took_s, None

    return _timed(trainer, args["repeats"], publish)


def _full_tensor(trainer: _Trainer, bucket: str, args: dict[str, Any]) -> Row:
    """Every rank gathers all tensors, and the first publishes them."""
    if not all(isinstance(each, DTensor) for each in trainer.tensors.values()):
        raise SystemExit("full_tensor needs sharded experts to be DTensors; leave out --experts-sharded")
    leads = dist.get_rank() == 0

    def whole() -> dict[str, torch.Tensor]:
        found = {}
        for name, tensor in trainer.tensors.items():
            full = tensor.redistribute(placements=[Replicate()]).to_local()
            if leads:
                found[name] = full
        return found

    first = whole()
    publisher = None
    if leads:
        publisher = Publisher(bucket, first, encoding=args["encoding"], anchor_every=10**6)

    def publish(step: int) -> tuple[float, float, Manifest | None]:
        began = time.perf_counter()
        found = whole()
        if publisher is None:
            took_s = time.perf_counter() - began
            return took_s, took_s, None
        first.update(found)
        publication = publisher.publish_patch(step)
        block_s = time.perf_counter() - began
        manifest = publication.result()
        return block_s, time.perf_counter() - began, manifest

    try:
        return _timed(trainer, args["repeats"], publish)
    finally:
        if publisher is not None:
            publisher.close()
        sys.stdout.flush()
