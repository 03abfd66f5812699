"""What goes wrong on ranks in these tests."""

import time
from pathlib import Path
from typing import Any

import jobs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from patchstore import LocalPart, Publisher, open_store
from patchstore.errors import PatchstoreError
from patchstore.stores.folder import FolderStore
from patchstore.testing.faults import Fault, FaultyStore

Outcome = tuple[str, str, list[int], float]
"""Kind of the error, its message, the ranks that it names, and seconds until it came."""

WEIGHT = "weight"


def sharded(num_rows: int = 10) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    return {WEIGHT: distribute_tensor(torch.randn(num_rows, 8), mesh, [Shard(0)])}


def train(tensors: dict[str, Any]) -> None:
    for each in tensors.values():
        local = each.to_local() if isinstance(each, DTensor) else each
        local.view(-1)[::3] += 1


def attempt(call: Any) -> Outcome:
    began = time.monotonic()
    try:
        call()
    except PatchstoreError as exc:
        return exc.kind, str(exc), list(getattr(exc, "ranks", ())), time.monotonic() - began
    return "", "", [], time.monotonic() - began


def publish(publisher: Publisher, step: int) -> Outcome:
    return attempt(lambda: publisher.publish_patch(step).result())


def repaired(
    publisher: Publisher, tensors: dict[str, Any], first: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[str, int, jobs.Bits]:
    """Publish until it works again, as a trainer does that goes on after an error."""
    for step in range(first, first + 6):
        train(tensors)
        try:
            manifest = publisher.publish_patch(step).result()
        except PatchstoreError:
            continue
        return manifest.kind, manifest.version, jobs.serve_bits(tensors, dtype)
    raise AssertionError("it was not repaired")


def close(publisher: Publisher) -> None:
    attempt(publisher.close)


def one_rank_fails(rank: int, url: str, failing: int) -> tuple[Outcome, tuple[str, int, jobs.Bits]]:
    """A rank's weights have another shape in one call."""
    tensors = sharded()
    publisher = Publisher(url, tensors, rank_timeout_s=120)
    publisher.publish_patch(0).result()
    train(tensors)
    kept = tensors[WEIGHT]
    if rank == failing:
        tensors[WEIGHT] = torch.zeros(3)
    failed = publish(publisher, 1)
    tensors[WEIGHT] = kept
    found = failed, repaired(publisher, tensors, 2)
    close(publisher)
    return found


def one_number_is_too_large(rank: int, url: str, failing: int) -> tuple[Outcome, tuple[str, int, jobs.Bits]]:
    """A rank's part has a number in one step that float16 cannot hold."""
    tensors = sharded()
    publisher = Publisher(url, tensors, dtype="float16", rank_timeout_s=120)
    publisher.publish_patch(0).result()
    train(tensors)
    local = tensors[WEIGHT].to_local()
    kept = local.clone()
    if rank == failing:
        local[1, 2] = 1e5
    failed = publish(publisher, 1)
    local.copy_(kept)
    found = failed, repaired(publisher, tensors, 2, torch.float16)
    close(publisher)
    return found


def one_store_fails(rank: int, url: str, failing: int) -> tuple[Outcome, tuple[str, int, jobs.Bits]]:
    """A rank cannot upload its part."""
    tensors = sharded()
    fault = Fault(verb="upload", key="deltas/*", effect="fail-before", times=5)
    store = FaultyStore(open_store(url), fault)
    publisher = Publisher(store if rank == failing else url, tensors, rank_timeout_s=30)
    publisher.publish_patch(0).result()
    train(tensors)
    failed = publish(publisher, 1)
    found = failed, repaired(publisher, tensors, 2)
    close(publisher)
    return found


def one_rank_is_late(rank: int, url: str, late: int) -> tuple[Outcome, tuple[str, int, jobs.Bits]]:
    tensors = sharded()
    # Time enough to open it on a busy machine.
    publisher = Publisher(url, tensors, rank_timeout_s=8)
    publisher.publish_patch(0).result()
    train(tensors)
    if rank == late:
        time.sleep(12)
    failed = publish(publisher, 1)
    dist.barrier()
    found = failed, repaired(publisher, tensors, 2)
    close(publisher)
    return found


def steps_differ(rank: int, url: str) -> tuple[Outcome, tuple[str, int, jobs.Bits]]:
    tensors = sharded()
    publisher = Publisher(url, tensors, rank_timeout_s=120)
    publisher.publish_patch(0).result()
    failed = publish(publisher, 1 + (rank == 1))
    found = failed, repaired(publisher, tensors, 2)
    close(publisher)
    return found


def only_one_asks_for_changes(rank: int, url: str, asking: int) -> tuple[Outcome, tuple[str, int, jobs.Bits]]:
    """One rank alone publishes with if_changed=True, where an anchor is due."""
    tensors = sharded()
    publisher = Publisher(url, tensors, anchor_every=1, rank_timeout_s=120)
    publisher.publish_patch(0).result()
    failed = attempt(lambda: publisher.publish_patch(1, if_changed=rank == asking).result())
    found = failed, repaired(publisher, tensors, 2)
    close(publisher)
    return found


def one_rank_closes(rank: int, url: str, leaving: int) -> Outcome:
    tensors = sharded()
    publisher = Publisher(url, tensors, rank_timeout_s=60)
    publisher.publish_patch(0).result()
    if rank == leaving:
        publisher.close()
        return "", "", [], 0.0
    found = publish(publisher, 1)
    close(publisher)
    return found


def one_rank_does_not_open(rank: int, url: str, missing: int) -> Outcome:
    tensors = sharded()
    found: Outcome = "", "", [], 0.0
    if rank != missing:
        found = attempt(lambda: Publisher(url, tensors, rank_timeout_s=2))
    dist.barrier()
    # All of them together now: what is left of the attempt before is no harm.
    with Publisher(url, tensors, rank_timeout_s=120) as publisher:
        publisher.publish_patch(0).result()
    return found


def opened_otherwise(rank: int, urls: list[str], options: list[dict[str, Any]]) -> Outcome:
    tensors = sharded()
    return attempt(lambda: Publisher(urls[rank], tensors, rank_timeout_s=120, **options[rank]).close())


def overlapping(rank: int, url: str) -> Outcome:
    """Plain tensors of one name, of which ranks say that they are different parts."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.randn(4, 8)
    rows = 4 * dist.get_world_size() - (1 if rank else 0)
    tensor = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=torch.Size((rows, 8)), stride=(8, 1)
    )
    return attempt(lambda: Publisher(url, {WEIGHT: tensor}, rank_timeout_s=120).close())


def unreadable(rank: int, url: str) -> Outcome:
    """The first tensor of a rank cannot be published, before any that shows that others have parts."""
    tensors = sharded()
    first = torch.zeros(3, device="meta" if rank == 1 else "cpu")
    return attempt(lambda: Publisher(url, {"a": first, **tensors}, rank_timeout_s=60).close())


def store_unreadable(rank: int, url: str) -> Outcome:
    """One rank cannot read whether there is a run."""
    store = FaultyStore(open_store(url), Fault(verb="get", effect="fail-before", times=None))
    return attempt(lambda: Publisher(store if rank == 1 else url, sharded(), rank_timeout_s=60))


def partial(rank: int, url: str) -> Outcome:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor = DTensor.from_local(torch.randn(4, 8), mesh, [Partial()], run_check=False)
    return attempt(lambda: Publisher(url, {WEIGHT: tensor}, rank_timeout_s=120).close())


def alone_in_a_job(rank: int, url: str) -> Outcome:
    """Rank 0 publishes plain tensors, and the others know nothing of it."""
    if rank:
        return "", "", [], 0.0

    def call() -> None:
        with Publisher(url, {WEIGHT: torch.randn(3, 4)}) as publisher:
            publisher.publish_patch(0).result()

    return attempt(call)


def missing_part(rank: int, url: str) -> Outcome:
    """A group that lacks a rank which has a part."""
    tensors = sharded()
    group = dist.new_group([0, 1])
    if rank > 1:
        return "", "", [], 0.0
    return attempt(lambda: Publisher(url, tensors, group=group, rank_timeout_s=120).close())


def publish_until_killed(rank: int, url: str, ready: str) -> None:
    """Publish for ever; touch a file once two versions exist."""
    tensors = sharded(1000)
    publisher = Publisher(url, tensors, rank_timeout_s=10, resume="auto", anchor_every=4)
    for step in range(100_000):
        publish(publisher, step)
        train(tensors)
        if step == 2:
            Path(f"{ready}-{rank}").touch()


def resume(
    rank: int, url: str, version: int, rows: list[jobs.Bits], how: Any
) -> tuple[int, int | None, str, jobs.Bits]:
    """Continue from given weights in this job's layout; returns the next version, and its parent and kind."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors: dict[str, Any] = {}
    for name, (dtype, shape, data) in rows[0].items():
        whole = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)
        tensors[name] = distribute_tensor(whole.float(), mesh, [Shard(len(shape) - 1)])
    with Publisher(url, tensors, resume=how, rank_timeout_s=30) as publisher:
        train(tensors)
        manifest = publisher.publish_patch(100).result()
        return manifest.version, manifest.parent, manifest.kind, jobs.serve_bits(tensors)


def opened_again(rank: int, url: str, how: Any) -> tuple[int, int | None, str, jobs.Bits]:
    """Begin a run, and go on from its version 0; returns the next version, and its parent and kind."""
    tensors = sharded()
    with Publisher(url, tensors, rank_timeout_s=120) as publisher:
        publisher.publish_patch(0).result()
    with Publisher(url, tensors, resume=how, rank_timeout_s=120) as publisher:
        train(tensors)
        manifest = publisher.publish_patch(1).result()
        return manifest.version, manifest.parent, manifest.kind, jobs.serve_bits(tensors)


def here(rank: int) -> None:
    dist.barrier()


def opened_without_a_store(rank: int, url: str) -> Outcome:
    part = LocalPart(torch.ones(4, 4), (8, 4), start=(4 * rank, 0))
    return attempt(lambda: Publisher(url, {WEIGHT: part}, group=dist.group.WORLD, rank_timeout_s=3))


class SlowStore(FolderStore):
    """Takes its time for uploads, so that others look for what is told after them before it is."""

    def upload(self, key: str, chunks: Any) -> None:
        time.sleep(0.5)
        super().upload(key, chunks)


def publish_beside_an_intruder(
    rank: int, url: str, ready: str, slow: int
) -> tuple[Outcome, tuple[str, int, jobs.Bits]]:
    """Publish one version, then one while another process writes into the ranks' store, then go on."""
    tensors = sharded()
    publisher = Publisher(SlowStore(url) if rank == slow else url, tensors, rank_timeout_s=60)
    publisher.publish_patch(0).result()
    wait_for(ready)
    train(tensors)
    failed = publish(publisher, 1)
    found = failed, repaired(publisher, tensors, 2)
    close(publisher)
    return found


def quantize_beside_an_intruder(rank: int, url: str, ready: str) -> Outcome:
    """The same in FP8, of a matrix that is cut within a block."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = {name: distribute_tensor(torch.randn(320, 128), mesh, [Shard(0)])}
    publisher = Publisher(url, tensors, rank_timeout_s=60, quantization="fp8-block")
    publisher.publish_patch(0).result()
    wait_for(ready)
    train(tensors)
    # The leader looks for what this rank tells before that is told.
    time.sleep(0.5 * rank)
    found = publish(publisher, 1)
    close(publisher)
    return found


def wait_for(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.01)
