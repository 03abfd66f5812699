"""Sources of vLLM's weight transfer on many ranks: each publishes what it has, and nothing is gathered."""

import re
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jobs
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from patchstore import Publisher
from patchstore.errors import SchemaMismatch
from tests.support.model_bits import Versions
from tests.support.ranks import Published, RanksOf

pytestmark = pytest.mark.timeout(600)


class Replicate:
    """As vLLM names it."""


class Cut:
    """Cuts a dimension as torch.chunk does. vLLM calls it Shard."""

    def __init__(self, dim: int) -> None:
        self.dim = dim


Cut.__name__ = "Shard"


def meta(name: str, shape: tuple[int, ...], **layout: Any) -> SimpleNamespace:
    return SimpleNamespace(name=name, dtype=torch.float32, shape=shape, **layout)


class Local:
    """A source as those of vLLM 0.33 are: each rank yields its part. Whole tensors must not be asked for."""

    def __init__(self, metadata: list[SimpleNamespace], local: Callable[[], dict[str, torch.Tensor]]) -> None:
        self._metadata, self._local = metadata, local

    @cached_property
    def metadata(self) -> list[SimpleNamespace]:
        return self._metadata

    def implements_iter_local(self) -> bool:
        return True

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._local().items()

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("this would gather")


def chunks(
    whole: torch.Tensor, owners: list[int], mesh: tuple[int, ...], dims: tuple[int | None, ...]
) -> Any:
    """Return this rank's part, cut by torch itself."""
    grid = torch.tensor(owners).reshape(mesh)
    place = (grid == dist.get_rank()).nonzero()[0].tolist()
    for axis, dim in enumerate(dims):
        if dim is not None:
            found = whole.chunk(mesh[axis], dim)
            none = whole.narrow(dim, 0, 0)
            whole = found[place[axis]] if place[axis] < len(found) else none
    return whole


LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int | None, ...]]] = {
    # The shape; the mesh of owners; which dimension each axis cuts.
    "even": ((8, 3), (4,), (0,)),
    "uneven": ((9, 3), (4,), (0,)),
    "empty on some": ((2, 3), (4,), (0,)),
    "columns": ((3, 7, 2), (4,), (1,)),
    "hsdp": ((5, 3), (2, 2), (None, 0)),
    "both": ((5, 7), (2, 2), (0, 1)),
    "twice": ((7, 2), (2, 2), (0, 0)),
    "everywhere": ((4,), (2, 2), (None, None)),
}


def publish_layouts(rank: int, url: str) -> Versions:
    """Publish tensors in every layout, owned by ranks in another order than theirs."""
    torch.manual_seed(0)
    owners = [2, 0, 3, 1]
    whole = {name: torch.randn(shape) for name, (shape, _, _) in LAYOUTS.items()}
    whole |= {"scalar": torch.tensor(2.0), "of one": torch.randn(3), "of two": torch.randn(5, 2)}
    metadata = [
        meta(
            name,
            shape,
            owners=tuple(owners),
            mesh_shape=mesh,
            placements=tuple(Replicate() if dim is None else Cut(dim) for dim in dims),
        )
        for name, (shape, mesh, dims) in LAYOUTS.items()
    ]
    metadata += [
        meta("scalar", (), owners=None, mesh_shape=None, placements=None),
        meta("of one", (3,), owners=(1,), mesh_shape=(1,), placements=None),
        meta("of two", (5, 2), owners=(3, 1), mesh_shape=None, placements=(Cut(0),)),
    ]

    def local() -> dict[str, torch.Tensor]:
        found = {name: chunks(whole[name], owners, mesh, dims) for name, (_, mesh, dims) in LAYOUTS.items()}
        found["scalar"] = whole["scalar"]
        if rank == 1:
            found["of one"] = whole["of one"]
        if rank in {1, 3}:
            found["of two"] = chunks(whole["of two"], [3, 1], (2,), (0,))
        return found

    return jobs.publish(
        url, Local(metadata, local), 4, lambda: whole, jobs.change_each(whole), anchor_every=2
    )


def publish_stages(rank: int, url: str) -> Versions:
    """Publish a pipeline of two stages from three ranks, of which the last owns nothing."""
    torch.manual_seed(0)
    whole = {f"layers.{stage}.weight": torch.randn(6, 5) for stage in range(2)}
    metadata = [
        meta(name, (6, 5), owners=(stage,), mesh_shape=None, placements=None)
        for stage, name in enumerate(whole)
    ]
    mine = {f"layers.{rank}.weight": whole[f"layers.{rank}.weight"]} if rank < 2 else {}
    source = Local(metadata, lambda: mine)
    return jobs.publish(url, source, 3, lambda: whole, jobs.change_each(whole), group=dist.group.WORLD)


def refused(rank: int, url: str, kind: str) -> str:
    """Return how a source of rows is refused, once it was changed."""
    rows = torch.randn(5, 3)
    metadata = [
        meta("rows", (5, 3), owners=(0, 1), mesh_shape=(2,), placements=(Cut(0),)),
        meta("norm", (3,), owners=(0, 1), mesh_shape=(2,), placements=(Replicate(),)),
    ]
    given = SimpleNamespace(
        metadata=metadata, local={"rows": chunks(rows, [0, 1], (2,), (0,)), "norm": torch.ones(3)}
    )
    CONTRADICTIONS[kind][0](given)
    source: Any = Local(given.metadata, lambda: given.local)
    with pytest.raises(SchemaMismatch) as error, Publisher(url, source, rank_timeout_s=20):
        pass
    return str(error.value)


CONTRADICTIONS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "yields too few": (
        lambda given: given.local.update(rows=given.local["rows"][:-1]),
        r"so that rank \d has \(\d, 3\) of it from \(\d, 0\) on, but yields",
    ),
    "lacks one": (
        lambda given: given.local.pop("norm"),
        "declares 1 tensors that it does not yield on rank",
    ),
    "yields another": (
        lambda given: given.local.update(head=torch.ones(2)),
        "yields 'head', which its metadata lack",
    ),
    "cuts what is not there": (
        lambda given: vars(given.metadata[0]).update(placements=(Cut(2),)),
        "cut in dimension 2, but it has 2",
    ),
    "misses an owner": (
        lambda given: vars(given.metadata[0]).update(mesh_shape=(3,)),
        r"2 owners of 'rows' on a mesh of \(3,\)",
    ),
    "is a sum": (
        lambda given: vars(given.metadata[0]).update(placements=(SimpleNamespace(reduce_op="sum"),)),
        "the placement namespace.*which is unknown",
    ),
}


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_a_source_that_contradicts_itself_is_refused_on_all_ranks(
    ranks_of: RanksOf, url: str, kind: str
) -> None:
    for message in ranks_of(2).run(refused, url, kind):
        assert re.search(CONTRADICTIONS[kind][1], message), message
    assert not list(Path(url).glob("versions/*"))


class Gathered:
    """A source that can only gather."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @property
    def metadata(self) -> list[SimpleNamespace]:
        owners = tuple(range(dist.get_world_size()))
        return [
            meta(name, tuple(each.shape), owners=owners, mesh_shape=None, placements=(Cut(0),))
            for name, each in self._model.named_parameters()
        ]

    def implements_iter_local(self) -> bool:
        return False

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise NotImplementedError

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, each in self._model.named_parameters():
            yield name, each.full_tensor() if isinstance(each, DTensor) else each


def publish_gathered(rank: int, url: str) -> Versions:
    return train_and_publish(rank, jobs.fsdp2, Gathered, url)


@pytest.mark.parametrize(("num", "job"), [(4, publish_layouts), (3, publish_stages), (3, publish_gathered)])
def test_each_rank_publishes_what_the_source_says_it_has(published: Published, num: int, job: Any) -> None:
    published(num, job)


def train_and_publish(
    rank: int, make: Callable[[int], nn.Module], source_of: Callable[[nn.Module], Any], url: str
) -> Versions:
    """Publish each step through a source; return the versions, and all parameters at each."""
    model = make(rank)
    return jobs.publish(
        *(url, source_of(model), 4, lambda: dict(model.named_parameters()), jobs.trained(model)),
        group=dist.group.WORLD,
    )


def whole(rank: int) -> nn.Module:
    return jobs.plain()


def publish_module_source(rank: int, url: str, make: Any, is_gathered: bool) -> Versions:
    """Publish through vLLM's own source, which must not gather unless that is expected."""
    from vllm.distributed.weight_transfer import base

    with pytest.MonkeyPatch.context() as patched:
        if not is_gathered and hasattr(base.WeightSource, "iter_local"):
            patched.setattr(base, "materialize_full_tensor", lambda tensor: pytest.fail("this gathers"))
        return train_and_publish(rank, make, base.ModuleSource, url)


@pytest.mark.vllm
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("make", "num", "is_gathered"),
    [
        (jobs.fsdp2, 3, False),
        (jobs.fsdp2, 2, False),
        (jobs.hsdp, 4, False),
        (whole, 3, False),
        # vLLM declares strided shards as replicated, and gathers them.
        (jobs.fsdp2_and_tp, 4, True),
    ],
)
def test_the_module_source_of_vllm(published: Published, make: Any, num: int, is_gathered: bool) -> None:
    pytest.importorskip("vllm.distributed.weight_transfer.base")
    published(num, publish_module_source, make, is_gathered)


def publish_m2n(rank: int, url: str, make: Any) -> Versions:
    from vllm.distributed.weight_transfer.m2n_source import DTensorModuleSource

    return train_and_publish(rank, make, lambda model: DTensorModuleSource(model, dist.get_world_size()), url)


@pytest.mark.vllm
@pytest.mark.sample(1)
@pytest.mark.parametrize(("make", "num"), [(jobs.fsdp2, 3), (jobs.fsdp2, 2), (jobs.hsdp, 4)])
def test_sources_of_shards_before_vllm_0_33(published: Published, make: Any, num: int) -> None:
    pytest.importorskip("vllm.distributed.weight_transfer.m2n_source")
    published(num, publish_m2n, make)
