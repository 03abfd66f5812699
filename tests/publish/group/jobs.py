"""What ranks do in these tests: train a sharded model, and publish every step."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
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
from patchstore.ops.retention import Retention, collect, retire
from patchstore.signing import KeySigner
from patchstore.stores import opened
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.model_bits import Versions, bits_of


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


def publish(
    url: str,
    source: Any,
    num_steps: int,
    whole: Callable[[], dict[str, torch.Tensor]],
    change: Callable[[int], None],
    **options: Any,
) -> Versions:
    """Publish steps, and change the weights after each; return the versions, and the whole model at each."""
    published = []
    with Publisher(url, source, rank_timeout_s=60, **options) as publisher:
        for step in range(num_steps):
            published.append((publisher.publish_patch(step).result().version, bits_of(whole())))
            change(step)
    return published


def change_each(tensors: dict[str, torch.Tensor]) -> Callable[[int], None]:
    """Return what adds to some elements, others in each step."""

    def change(step: int) -> None:
        for each in tensors.values():
            local = each.to_local() if isinstance(each, DTensor) else each
            local.view(-1)[:: step + 2] += 1

    return change


def trained(model: nn.Module) -> Callable[[int], None]:
    """Return what takes a step of training."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(step: int) -> None:
        tokens = torch.randint(0, 17, (4, 5), generator=torch.Generator().manual_seed(step))
        model(tokens).square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()

    return train


def train_and_publish(
    rank: int,
    url: str,
    make: Callable[[int], nn.Module],
    num_steps: int,
    options: dict[str, Any],
    world: bool,
) -> Versions:
    """Publish each step of training."""
    model = make(rank)
    group = dist.group.WORLD if world else None

    def whole() -> dict[str, torch.Tensor]:
        return {name.removeprefix("module."): each for name, each in model.state_dict().items()}

    return publish(url, model, num_steps, whole, trained(model), group=group, **options)


def experts(rank: int, url: str, options: dict[str, Any]) -> Versions:
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

    def change(step: int) -> None:
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

    return publish(url, tensors, 4, lambda: tensors, change, **options)


def stages(rank: int, url: str, options: dict[str, Any]) -> Versions:
    """Publish a pipeline: each rank has layers of its own, and all have the norm."""
    torch.manual_seed(rank)
    mine = {f"layers.{rank}.weight": torch.randn(20, 30), "norm.weight": torch.ones(30)}

    def whole() -> dict[str, torch.Tensor]:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return {name: each for its in everyone for name, each in its.items()}

    def change(step: int) -> None:
        mine[f"layers.{rank}.weight"][::3] += 1
        mine["norm.weight"][step] = 7

    return publish(url, mine, 3, whole, change, group=dist.group.WORLD, **options)


def from_checkpoint(rank: int, url: str, folder: str, is_changed: bool) -> tuple[Versions, int]:
    """Publish the weights of a checkpoint folder, one of which was changed, sharded by columns.

    Returns:
        The version with its bits, and how many objects with pieces this rank stored.
    """
    from safetensors.torch import load_file

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = load_file(f"{folder}/model.safetensors")
    if is_changed:
        whole["changed"] = whole["changed"] + 1
    tensors = {name: distribute_tensor(each, mesh, [Shard(each.dim() - 1)]) for name, each in whole.items()}
    store = FaultyStore(open_store(url))
    with Publisher(store, tensors, files=folder, rank_timeout_s=60) as publisher:
        version = publisher.publish_patch(0).result().version
        pieces = [key for verb, key in store.calls if verb == "upload" and key.startswith("pieces/")]
        return [(version, bits_of(tensors))], len(pieces)


def go_back(rank: int, url: str) -> Versions:
    """Publish six versions, and go on from version 2, which is given up while the publisher opens."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    tensors = {"weight": distribute_tensor(torch.randn(12, 20), mesh, [Shard(0)])}
    local, held = tensors["weight"].to_local(), []
    with Publisher(url, tensors, anchor_every=3, rank_timeout_s=60) as publisher:
        for step in range(6):
            publisher.publish_patch(step).result()
            held.append(local.clone())
            local[:, step] += 1
    local.copy_(held[2])

    def give_up(_: float) -> None:
        """Retire it, and collect a day later."""
        with opened(url) as store:
            retire(store, Retention(keep_last=2), dry_run=False)
            collect(store, dry_run=False, clock=lambda: datetime.now(UTC) + timedelta(hours=27))

    fault = Fault(verb="put", key="versions/00000006.json", effect="delay")
    published = []
    with Publisher(
        FaultyStore(open_store(url), fault, sleep=give_up), tensors, resume=2, rank_timeout_s=60
    ) as publisher:
        for step in range(3):
            local[:, -step] += 1
            version = publisher.publish_patch(6 + step).result().version
            published.append((version, bits_of({"weight": tensors["weight"].full_tensor()})))
    return published


def strided(rank: int, url: str, num_rows: int) -> Versions:
    """Publish shards of which a rank's rows do not follow each other, where torch's own offsets are wrong."""
    mesh = init_device_mesh("cpu", (2, 2))
    placements = [Shard(0), _StridedShard(0, split_factor=2)]
    torch.manual_seed(0)
    whole = torch.randn(num_rows, 6)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None

    def half(of: torch.Tensor, place: int) -> torch.Tensor:
        halves = of.chunk(2)
        return halves[place] if place < len(halves) else of[:0]

    first, second = coordinate
    local = torch.cat([half(part, second) for part in half(whole, first).chunk(2)])
    tensor = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )

    def change(step: int) -> None:
        local.mul_(1.5)
        whole.mul_(1.5)

    return publish(url, {"weight": tensor}, 3, lambda: {"weight": whole}, change)


def flat_ranges(rank: int, url: str, options: dict[str, Any]) -> Versions:
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

    return publish(url, parts, 4, lambda: whole, change_each(whole), group=dist.group.WORLD, **options)


def _checkpoint_layout(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if name == "qkv":
        return dict(zip(("q", "k", "v"), tensor.split([8, 2, 2]), strict=True))
    return {
        f"{name}.{number}.{part}": half.T
        for number, each in enumerate(tensor)
        for part, half in zip(("gate", "up"), each.chunk(2), strict=True)
    }


def fused(rank: int, url: str, options: dict[str, Any]) -> Versions:
    """Publish sharded tensors that are fused otherwise than in the checkpoint."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    whole = {"qkv": torch.randn(12, 5), "by_row": torch.randn(3, 8, 4), "by_expert": torch.randn(3, 8, 4)}
    dims = {"qkv": 0, "by_row": 1, "by_expert": 0}
    tensors = {name: distribute_tensor(each, mesh, [Shard(dims[name])]) for name, each in whole.items()}

    def expected() -> dict[str, torch.Tensor]:
        full = {name: each.full_tensor() for name, each in tensors.items()}
        return {new: each for name in full for new, each in _checkpoint_layout(name, full[name]).items()}

    source = mapped(tensors, _checkpoint_layout)
    return publish(url, source, 3, expected, change_each(tensors), **options)


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


def train_and_sign(rank: int, url: str, keys: list[str | None], num_steps: int) -> Any:
    """Publish with a signer; return the versions and their bits, or the kind of the error that ended it.

    Args:
        keys: the file of each rank's private key; None for a rank without a signer.
    """
    key = keys[rank]
    options = {} if key is None else {"signer": KeySigner(key)}
    try:
        return train_and_publish(rank, url, fsdp2, num_steps, {"anchor_every": 2, **options}, False)
    except PatchstoreError as exc:
        return exc.kind


def steps_reported(rank: int, url: str) -> list[int]:
    """Publish three steps; return those whose figures this rank was given."""
    model, found = fsdp2(rank), []
    with Publisher(url, model, metrics=lambda step, values: found.append(step)) as publisher:
        for step in range(3):
            publisher.publish_patch(step)
            trained(model)(step)
    return found


def change_in_turn(rank: int, url: str) -> Versions:
    """Publish only what changed, every third version an anchor: in one call each rank alone has changes, then
    both, then none. Several calls are under way at once.
    """
    torch.manual_seed(0)
    tensor = distribute_tensor(torch.randn(64, 64), init_device_mesh("cpu", (2,)), [Shard(0)])
    published = []
    with Publisher(url, {"w": tensor}, anchor_every=3, rank_timeout_s=60) as publisher:
        for step in range(20):
            if step % 4 in {rank, 2}:
                tensor.to_local()[step] += 1
            bits_now = bits_of({"w": tensor})
            published.append((publisher.publish_patch(step, if_changed=True), bits_now))
        found = [(each.result().version, each.is_unchanged, state) for each, state in published]
    return [(version, state) for version, is_unchanged, state in found if not is_unchanged]


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


def unevenly(rank: int, url: str, shares: list[list[float]], options: dict[str, Any]) -> Versions:
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
            state = bits_of({"w": tensor}, dtype)
            under_way.append((publisher.publish_patch(step), state))
        return [(publication.result().version, state) for publication, state in under_way]
