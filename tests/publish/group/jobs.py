"""What ranks do in these tests: train a sharded model, and publish every step."""

from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from patchstore import LocalPart, Publisher, mapped, open_store
from patchstore.errors import PatchstoreError
from patchstore.signing import KeySigner
from patchstore.stores.folder import FolderStore
from patchstore.tensors.bits import bits
from patchstore.testing.faults import Fault, FaultyStore

Bits = dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]
"""A model as it is served."""


class Layers(nn.Module):
    """Sides that no number of ranks divides, a bias, a buffer of integers, and one of fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, 24)
        self.up = nn.Linear(24, 50, bias=True)
        self.down = nn.Linear(50, 24, bias=False)
        self.norm = nn.LayerNorm(24)
        self.register_buffer("steps", torch.arange(5))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.norm(self.down(torch.relu(self.up(hidden)))) * self.scale


def plain() -> Layers:
    torch.manual_seed(0)
    return Layers()


def fsdp2(rank: int) -> nn.Module:
    model = plain()
    for layer in (model.up, model.down):
        fully_shard(layer)
    return fully_shard(model)


class Tied(nn.Module):
    """One tensor as embedding and as head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(17, 8), nn.Linear(8, 17, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.lm_head(self.embed(tokens))
        return found


def tied(rank: int) -> nn.Module:
    torch.manual_seed(0)
    return fully_shard(Tied())


def hsdp(rank: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(plain(), mesh=mesh)


def fsdp2_and_tp(rank: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Layers()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])


def ddp(rank: int) -> nn.Module:
    return nn.parallel.DistributedDataParallel(plain())


def serve_bits(tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> Bits:
    """Return whole tensors as they are served."""
    found = {}
    for name, tensor in tensors.items():
        given = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        kept = given.detach().to(dtype) if given.is_floating_point() else given.detach()
        found[name] = kept.dtype, tuple(kept.shape), bits(kept.contiguous()).numpy().tobytes()
    return found


def train_and_publish(
    rank: int,
    make: Callable[[int], nn.Module],
    url: str,
    num_steps: int,
    options: dict[str, Any],
    world: bool,
) -> list[tuple[int, Bits]]:
    """Publish each step; return the versions, and the whole model at each."""
    model = make(rank)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    group = dist.group.WORLD if world else None
    published = []
    with Publisher(url, model, group=group, rank_timeout_s=60, **options) as publisher:
        for step in range(num_steps):
            tokens = torch.randint(0, 17, (4, 5), generator=torch.Generator().manual_seed(step))
            model(tokens).square().mean().backward()
            optimiser.step()
            optimiser.zero_grad()
            manifest = publisher.publish_patch(step).result()
            state = {name.removeprefix("module."): each for name, each in model.state_dict().items()}
            published.append((manifest.version, serve_bits(state)))
    return published


def experts(rank: int, url: str, options: dict[str, Any]) -> list[tuple[int, Bits]]:
    """Publish tensors with other placements: experts on two dimensions, columns, scalars, and plain ones."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ep", "fsdp"))
    torch.manual_seed(0)
    whole = {
        "experts.down": torch.randn(6, 10, 7),
        "experts.up": torch.randn(6, 9, 5),
        "columns": torch.randn(9, 70_001),
        "empty_on_some": torch.randn(1, 3),
        "nothing": torch.randn(0, 4),
        "replicated": torch.randn(33),
        "scalar": torch.tensor(1.5),
        "bytes": torch.arange(60, dtype=torch.uint8).reshape(6, 10),
    }
    placements = {
        "experts.down": [Shard(0), Shard(1)],
        "experts.up": [Shard(0), Shard(2)],
        "columns": [Replicate(), Shard(1)],
        "empty_on_some": [Shard(0), Shard(0)],
        "nothing": [Shard(0), Replicate()],
        "replicated": [Replicate(), Replicate()],
        "scalar": [Replicate(), Replicate()],
        "bytes": [Shard(1), Replicate()],
    }
    tensors = {name: distribute_tensor(each, mesh, placements[name]) for name, each in whole.items()}
    tensors["plain"] = torch.randn(5)
    published = []
    with Publisher(url, tensors, rank_timeout_s=60, **options) as publisher:
        for step in range(4):
            published.append((publisher.publish_patch(step).result().version, serve_bits(tensors)))
            for name, each in tensors.items():
                local = each.to_local() if isinstance(each, DTensor) else each
                if local.dtype == torch.uint8:
                    local += 1
                elif local.numel():
                    # The same on all replicas: by position, and no random number.
                    flat = local.view(-1)
                    flat[:: step + 2] *= -1.0 if step else -0.0
                    flat[-1] = float("nan") if step == 1 else float(step)
                    if name == "columns":
                        flat[: -len(flat) // 3] = float(step)
    return published


def stages(rank: int, url: str, options: dict[str, Any]) -> list[tuple[int, Bits]]:
    """Publish a pipeline: each rank has layers of its own, and all have the norm."""
    torch.manual_seed(rank)
    mine = {f"layers.{rank}.weight": torch.randn(20, 30), "norm.weight": torch.ones(30)}
    published = []
    with Publisher(url, mine, group=dist.group.WORLD, rank_timeout_s=60, **options) as publisher:
        for step in range(3):
            version = publisher.publish_patch(step).result().version
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, serve_bits(mine))
            published.append((version, {name: each for its in everyone for name, each in its.items()}))
            mine[f"layers.{rank}.weight"][::3] += 1
            mine["norm.weight"][step] = 7
    return published


def from_checkpoint(rank: int, url: str, folder: str, is_changed: bool) -> tuple[int, Bits, int]:
    """Publish the weights of a checkpoint folder, one of which was changed, sharded by columns.

    Returns:
        The version, its bits, and how many objects with pieces this rank stored.
    """
    from safetensors.torch import load_file

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = load_file(f"{folder}/model.safetensors")
    if is_changed:
        whole["changed"] = whole["changed"] + 1
    tensors = {name: distribute_tensor(each, mesh, [Shard(each.dim() - 1)]) for name, each in whole.items()}
    sent: list[str] = []

    class Watched(FolderStore):
        def upload(self, key: str, chunks: Any) -> None:
            sent.append(key)
            super().upload(key, chunks)

    store = Watched(Path(url))
    with Publisher(store, tensors, files=folder, rank_timeout_s=60) as publisher:
        version = publisher.publish_patch(0).result().version
        pieces = [key for key in sent if key.startswith("pieces/")]
        return version, serve_bits(tensors), len(pieces)


def strided(rank: int, url: str, num_rows: int) -> list[tuple[int, Bits]]:
    """Publish shards of which a rank's rows do not follow each other, where torch's own offsets are wrong."""
    mesh = init_device_mesh("cpu", (2, 2))
    placements = [Shard(0), _StridedShard(0, split_factor=2)]
    torch.manual_seed(0)
    whole = torch.randn(num_rows, 6)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    local = whole
    for placement, place in zip(placements, coordinate, strict=True):
        parts, _ = placement._split_tensor(local, 2, with_padding=False, contiguous=True)
        local = parts[place]
    local = local.clone()
    tensor = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    published = []
    with Publisher(url, {"weight": tensor}, rank_timeout_s=60) as publisher:
        for step in range(3):
            version = publisher.publish_patch(step).result().version
            published.append((version, serve_bits({"weight": whole})))
            local.mul_(1.5)
            whole.mul_(1.5)
    return published


def flat_ranges(rank: int, url: str, options: dict[str, Any]) -> list[tuple[int, Bits]]:
    """Publish flat ranges that end anywhere, and boxes, from a function that yields them."""
    world = dist.get_world_size()
    torch.manual_seed(0)
    whole = {"deep": torch.randn(3, 4, 5, 7), "short": torch.randn(1), "rows": torch.randn(9, 4)}
    ends = [(place + 1) * whole["deep"].numel() // world + place for place in range(world - 1)]
    bounds = [0, *ends, whole["deep"].numel()][rank : rank + 2]
    rows = slice(rank, 9) if rank + 1 == world else slice(rank, rank + 1)

    def parts() -> Any:
        yield (
            "deep",
            LocalPart(whole["deep"].view(-1)[slice(*bounds)], whole["deep"].shape, offset=bounds[0]),
        )
        yield "short", LocalPart(whole["short"][: max(1 - rank, 0)], (1,), offset=0 if rank == 0 else 1)
        yield "rows", LocalPart(whole["rows"][rows], (9, 4), start=(rows.start, 0))

    published = []
    with Publisher(url, parts, group=dist.group.WORLD, rank_timeout_s=60, **options) as publisher:
        for step in range(4):
            published.append((publisher.publish_patch(step).result().version, serve_bits(whole)))
            for each in whole.values():
                each.view(-1)[:: step + 2] += 1
    return published


def _checkpoint_layout(name: str, tensor: torch.Tensor) -> Any:
    if name == "qkv":
        return zip(("q", "k", "v"), tensor.split([8, 2, 2]), strict=True)
    return {
        f"experts.{number}.{part}": half.T
        for number, each in enumerate(tensor)
        for part, half in zip(("gate", "up"), each.chunk(2), strict=True)
    }


def fused(rank: int, url: str, options: dict[str, Any]) -> list[tuple[int, Bits]]:
    """Publish sharded tensors that are fused otherwise than in the checkpoint."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    whole = {"qkv": torch.randn(12, 5), "by_row": torch.randn(3, 8, 4), "by_expert": torch.randn(3, 8, 4)}
    dims = {"qkv": 0, "by_row": 1, "by_expert": 0}
    tensors = {name: distribute_tensor(each, mesh, [Shard(dims[name])]) for name, each in whole.items()}

    def rule(name: str, tensor: torch.Tensor) -> Any:
        found = dict(_checkpoint_layout(name, tensor))
        return found if name == "qkv" else {f"{name}.{new}": each for new, each in found.items()}

    published = []
    with Publisher(url, mapped(tensors, rule), rank_timeout_s=60, **options) as publisher:
        for step in range(3):
            version = publisher.publish_patch(step).result().version
            full = {name: each.full_tensor() for name, each in tensors.items()}
            expected = {new: each for name in full for new, each in dict(rule(name, full[name])).items()}
            published.append((version, serve_bits(expected)))
            for each in tensors.values():
                each.to_local().view(-1)[:: step + 2] += 1
    return published


def halves(rank: int, url: str, num: int, **options: Any) -> tuple[list[str], bool]:
    """Publish a tensor of which two ranks have a half each; return kinds, and if a process ran beside."""
    whole = torch.zeros(2000, 10)
    mine = slice(1000 * rank, 1000 * rank + 1000)
    source = {"w": LocalPart(whole[mine], (2000, 10), start=(1000 * rank, 0))}
    kinds = []
    with Publisher(url, source, group=dist.group.WORLD, max_pending=2, **options) as publisher:
        for step in range(num):
            # One rank changes more than the other, so that neither could tell from its own bytes.
            whole[mine][step % 10 :: 7 + 20 * rank] += 1
            kinds.append(publisher.publish_patch(step))
        found = [each.result().kind for each in kinds]
        beside = publisher.compaction is not None
    return found, beside


def beside(rank: int, url: str) -> tuple[list[str], bool]:
    return halves(rank, url, 6, anchor_every=2, compact=True)


def auto(rank: int, url: str) -> tuple[list[str], bool]:
    return halves(rank, url, 30, anchor_every="auto")


def train_and_sign(rank: int, url: str, keys: list[str | None], num_steps: int) -> Any:
    """Publish with a signer; return the versions and their bits, or the kind of the error that ended it.

    Args:
        keys: the file of each rank's private key; None for a rank without a signer.
    """
    key = keys[rank]
    options = {} if key is None else {"signer": KeySigner(key)}
    try:
        return train_and_publish(rank, fsdp2, url, num_steps, {"anchor_every": 2, **options}, False)
    except PatchstoreError as exc:
        return exc.kind


def change_one_rank(rank: int, url: str) -> list[tuple[int, bool]]:
    """Publish only what changed: nothing, then what one rank has; return versions, and if unchanged."""
    model = fsdp2(rank)
    found = []
    with Publisher(url, model, rank_timeout_s=60) as publisher:
        publisher.publish_patch(0)
        for step in (1, 2, 3):
            if step == 2 and rank == 1:
                with torch.no_grad():
                    model.embed.weight.to_local().add_(1)
            publication = publisher.publish_patch(step, if_changed=True)
            found.append((publication.result().version, publication.is_unchanged))
    return found


def change_in_turn(rank: int, url: str) -> list[tuple[int, bool, Bits]]:
    """Publish only what changed, every third version an anchor: in one call each rank alone has changes, then
    both, then none. Several calls are under way at once.

    Returns:
        Of each version its number, whether it is an anchor, and the bits.
    """
    torch.manual_seed(0)
    tensor = distribute_tensor(torch.randn(64, 64), init_device_mesh("cpu", (2,)), [Shard(0)])
    published = []
    with Publisher(url, {"w": tensor}, anchor_every=3, rank_timeout_s=60) as publisher:
        for step in range(20):
            if step % 4 in {rank, 2}:
                tensor.to_local()[step] += 1
            bits_now = serve_bits({"w": tensor})
            published.append((publisher.publish_patch(step, if_changed=True), bits_now))
        found = [(each.result(), each.is_unchanged, state) for each, state in published]
    return [(each.version, each.anchor is not None, state) for each, same, state in found if not same]


def calls_while_held(rank: int, url: str, encoding: str) -> int:
    """Count the calls that return while no delta can be stored, of six that may be under way."""
    torch.manual_seed(0)
    tensor = distribute_tensor(torch.randn(64, 64), init_device_mesh("cpu", (2,)), [Shard(0)])
    gate = Event()
    held = Fault(verb="upload", key="deltas/*", effect="delay", times=None)
    store = FaultyStore(open_store(url), held, sleep=lambda _: gate.wait(120))
    options: dict[str, Any] = {"max_pending": 6, "encoding": encoding, "rank_timeout_s": 120}
    with Publisher(store, {"w": tensor}, **options) as publisher:
        publisher.publish_patch(0).result()
        under_way = []

        def publish() -> None:
            for step in range(1, 7):
                tensor.to_local()[step] += 1
                under_way.append(publisher.publish_patch(step))

        calls = Thread(target=publish)
        calls.start()
        calls.join(60)
        dist.barrier()
        num = len(under_way)
        gate.set()
        calls.join()
        assert [each.result().kind for each in under_way] == ["delta"] * 6
    return num


def unevenly(
    rank: int, url: str, shares: list[list[float]], options: dict[str, Any]
) -> list[tuple[int, Bits]]:
    """Publish steps in which ranks change different shares of their rows, all of them under way at once.

    Args:
        shares: of each step, of each rank.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    tensor = distribute_tensor(torch.randn(512, 512), mesh, [Shard(0)])
    local = tensor.to_local()
    dtype = torch.float32 if "dtype" in options else torch.bfloat16
    with Publisher(url, {"w": tensor}, rank_timeout_s=60, **options) as publisher:
        publisher.publish_patch(0)
        under_way = []
        for step, share in enumerate(shares, 1):
            local.view(-1)[: int(share[rank] * local.numel())] *= 1.01
            state = serve_bits({"w": tensor}, dtype)
            under_way.append((publisher.publish_patch(step), state))
        return [(publication.result().version, state) for publication, state in under_way]
