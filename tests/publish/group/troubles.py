"""What goes wrong on ranks in these tests."""

import base64
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from patchstore import LocalPart, Publisher, open_store
from patchstore.errors import PatchstoreError
from patchstore.publish.ranks import Channel
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.model_bits import Bits, bits_of

Outcome = tuple[str, str, list[int], float]
"""Kind of the error, its message, the ranks that it names, and seconds until it came."""

NOTHING: Outcome = ("", "", [], 0.0)
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
    return NOTHING


def publish(publisher: Publisher, step: int) -> Outcome:
    return attempt(lambda: publisher.publish_patch(step).result())


def repaired(
    publisher: Publisher, tensors: dict[str, Any], first: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[str, int, Bits]:
    """Publish until it works again, as a trainer does that goes on after an error."""
    for step in range(first, first + 6):
        train(tensors)
        try:
            manifest = publisher.publish_patch(step).result()
        except PatchstoreError:
            continue
        return manifest.kind, manifest.version, bits_of(tensors, dtype)
    raise AssertionError("it was not repaired")


def close(publisher: Publisher) -> None:
    attempt(publisher.close)


Disturbed = tuple[Outcome, tuple[str, int, Bits]]
"""How a publication went with which something was wrong, and what repaired it."""


def disturbed(
    place: Any,
    call: Callable[[Publisher, dict[str, Any]], Outcome],
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Disturbed:
    """Publish a version, then one with which something is wrong, and go on until it works again.

    Args:
        place: a store, or its URL.
        call: publishes the one with which something is wrong.
    """
    tensors = sharded()
    publisher = Publisher(place, tensors, dtype=dtype, **{"rank_timeout_s": 120, **options})
    publisher.publish_patch(0).result()
    train(tensors)
    found = call(publisher, tensors), repaired(publisher, tensors, 2, dtype)
    close(publisher)
    return found


def one_rank_fails(rank: int, url: str, failing: int, kind: str) -> Disturbed:
    """In one call a rank's weights have another shape, or a number that float16 cannot hold."""

    def call(publisher: Publisher, tensors: dict[str, Any]) -> Outcome:
        kept, local = tensors[WEIGHT], tensors[WEIGHT].to_local()
        number = local[1, 2].clone()
        if rank == failing and kind == "shape":
            tensors[WEIGHT] = torch.zeros(3)
        elif rank == failing:
            local[1, 2] = 1e5
        failed = publish(publisher, 1)
        tensors[WEIGHT] = kept
        local[1, 2] = number
        return failed

    return disturbed(url, call, torch.float16)


def one_store_fails(rank: int, url: str, failing: int) -> Disturbed:
    """A rank cannot upload its part."""
    fault = Fault(verb="upload", key="deltas/*", effect="fail-before", times=5)
    store = FaultyStore(open_store(url), fault)
    place = store if rank == failing else url
    return disturbed(place, lambda publisher, _: publish(publisher, 1), rank_timeout_s=30)


def one_rank_is_late(rank: int, url: str, late: int) -> Disturbed:
    def call(publisher: Publisher, _: dict[str, Any]) -> Outcome:
        if rank == late:
            time.sleep(12)
        failed = publish(publisher, 1)
        dist.barrier()
        return failed

    # Time enough to open it on a busy machine.
    return disturbed(url, call, rank_timeout_s=8)


def steps_differ(rank: int, url: str) -> Disturbed:
    return disturbed(url, lambda publisher, _: publish(publisher, 1 + (rank == 1)))


def only_one_asks_for_changes(rank: int, url: str, asking: int) -> Disturbed:
    """One rank alone publishes with if_changed=True, where an anchor is due."""

    def call(publisher: Publisher, _: dict[str, Any]) -> Outcome:
        return attempt(lambda: publisher.publish_patch(1, if_changed=rank == asking).result())

    return disturbed(url, call, anchor_every=1)


def one_rank_closes(rank: int, url: str, leaving: int) -> Outcome:
    tensors = sharded()
    publisher = Publisher(url, tensors, rank_timeout_s=60)
    publisher.publish_patch(0).result()
    if rank == leaving:
        publisher.close()
        return NOTHING
    found = publish(publisher, 1)
    close(publisher)
    return found


def one_rank_does_not_open(rank: int, url: str, missing: int) -> Outcome:
    tensors = sharded()
    found = NOTHING
    if rank != missing:
        found = attempt(lambda: Publisher(url, tensors, rank_timeout_s=2))
    dist.barrier()
    # All of them together now: what is left of the attempt before is no harm.
    with Publisher(url, tensors, rank_timeout_s=120) as publisher:
        publisher.publish_patch(0).result()
    return found


def opened(url: Any, source: Any, **options: Any) -> Outcome:
    return attempt(lambda: Publisher(url, source, **{"rank_timeout_s": 120, **options}).close())


def opened_otherwise(rank: int, url: str, options: list[dict[str, Any]]) -> Outcome:
    return opened(url, sharded(), **options[rank])


def elsewhere(rank: int, url: str) -> Outcome:
    return opened(f"{url}-{rank == 2}", sharded())


def overlapping(rank: int, url: str) -> Outcome:
    """Plain tensors of one name, of which ranks say that they are different parts."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.randn(4, 8)
    rows = 4 * dist.get_world_size() - (1 if rank else 0)
    tensor = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=torch.Size((rows, 8)), stride=(8, 1)
    )
    return opened(url, {WEIGHT: tensor})


def unreadable(rank: int, url: str) -> Outcome:
    """The first tensor of a rank cannot be published, before any that shows that others have parts."""
    first = torch.zeros(3, device="meta" if rank == 1 else "cpu")
    return opened(url, {"a": first, **sharded()})


def store_unreadable(rank: int, url: str) -> Outcome:
    """One rank cannot read whether there is a run."""
    store = FaultyStore(open_store(url), Fault(verb="get", effect="fail-before", times=None))
    return opened(store if rank == 1 else url, sharded())


def partial(rank: int, url: str) -> Outcome:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return opened(url, {WEIGHT: DTensor.from_local(torch.randn(4, 8), mesh, [Partial()], run_check=False)})


def missing_part(rank: int, url: str) -> Outcome:
    """A group that lacks a rank which has a part."""
    tensors = sharded()
    group = dist.new_group([0, 1])
    return opened(url, tensors, group=group) if rank < 2 else NOTHING


def alone_in_a_job(rank: int, url: str) -> Outcome:
    """Rank 0 publishes plain tensors, and the others know nothing of it."""
    if rank:
        return NOTHING
    with Publisher(url, {WEIGHT: torch.randn(3, 4)}) as publisher:
        return publish(publisher, 0)


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
    rank: int, url: str, version: int, rows: list[Bits], how: Any
) -> tuple[int, int | None, str, Bits]:
    """Continue from given weights in this job's layout; returns the next version, and its parent and kind."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors: dict[str, Any] = {}
    for name, (dtype, shape, data) in rows[0].items():
        whole = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)
        tensors[name] = distribute_tensor(whole.float(), mesh, [Shard(len(shape) - 1)])
    return resumed(url, tensors, how)


def resumed(url: str, tensors: dict[str, Any], how: Any) -> tuple[int, int | None, str, Bits]:
    with Publisher(url, tensors, resume=how, rank_timeout_s=120) as publisher:
        train(tensors)
        manifest = publisher.publish_patch(100).result()
        return manifest.version, manifest.parent, manifest.kind, bits_of(tensors)


def opened_again(rank: int, url: str, how: Any) -> tuple[int, int | None, str, Bits]:
    """Begin a run, and go on from its version 0; returns the next version, and its parent and kind."""
    tensors = sharded()
    with Publisher(url, tensors, rank_timeout_s=120) as publisher:
        publisher.publish_patch(0).result()
    return resumed(url, tensors, how)


def here(rank: int) -> None:
    dist.barrier()


def opened_without_a_store(rank: int, url: str) -> Outcome:
    part = LocalPart(torch.ones(4, 4), (8, 4), start=(4 * rank, 0))
    return opened(url, {WEIGHT: part}, group=dist.group.WORLD, rank_timeout_s=3)


class Rewriting:
    """The ranks' store of keys, in which another process rewrites one message before it is read."""

    def __init__(self, store: Any, key: str, forge: Callable[[list[str]], str]) -> None:
        self._store, self._key, self._forge = store, key, forge
        self._heard: list[str] = []
        """What this rank has read so far."""

    def get(self, key: str) -> bytes:
        if re.search(self._key, key):
            return self._forge(self._heard).encode()
        self._heard.append(found := self._store.get(key).decode())
        return found.encode()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


CHANGED_NOTHING = json.dumps({"ok": {"encoding": "gap", "num_changed": 0, "payloads": [], "growth": {}}})
"""What a rank reports of its part if nothing has changed."""
LARGE = base64.b64encode(np.full(1, 1e9, dtype="<f4").tobytes()).decode()
FORGERIES: dict[str, Callable[[list[str]], str]] = {
    "another message": lambda heard: CHANGED_NOTHING,
    "with a tag of another": lambda heard: heard[-1].partition("{")[0] + CHANGED_NOTHING,
    "its own of before": lambda heard: heard[-1],
    "the answer of before": lambda heard: next(each for each in heard if "manifest" in each),
    "garbage": lambda heard: "\0garbage",
    "other numbers": lambda heard: json.dumps({"ok": {"values": LARGE}}),
}


@contextmanager
def rewritten(key: str, kind: str) -> Iterator[None]:
    """Have publishers of this rank read forged messages."""

    class Overheard(Channel):
        def __init__(self, ranks: Any, rank: int, connect: Callable[[], Any], *more: Any) -> None:
            super().__init__(ranks, rank, lambda: Rewriting(connect(), key, FORGERIES[kind]), *more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("patchstore.publish.ranks.Channel", Overheard)
        yield


def beside_an_intruder(rank: int, url: str, reader: int, key: str, kind: str) -> Disturbed:
    """Publish a version, then one of which a rank reads a message that was rewritten, then go on."""
    with rewritten(key, kind) if rank == reader else nullcontext():
        return disturbed(url, lambda publisher, _: publish(publisher, 1), rank_timeout_s=60)


def quantize_beside_an_intruder(rank: int, url: str, key: str) -> Outcome:
    """The same in FP8, of a matrix that is cut within a block."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = {name: distribute_tensor(torch.randn(320, 128), mesh, [Shard(0)])}
    with rewritten(key, "other numbers"):
        publisher = Publisher(url, tensors, rank_timeout_s=60, quantization="fp8-block")
    publisher.publish_patch(0).result()
    train(tensors)
    found = publish(publisher, 1)
    close(publisher)
    return found
