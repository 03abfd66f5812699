"""What Megatron-Bridge exports is published from every rank, traced through a stand-in of its interface."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from patchstore import Publisher
from patchstore.errors import SchemaMismatch, UsageError
from patchstore.integrations.megatron import as_exported
from tests.support import stand_in_bridge as bridges
from tests.support.model_bits import Versions, bits_of, check
from tests.support.ranks import RanksOf

pytestmark = pytest.mark.timeout(600)


def mappings() -> dict[str, bridges.Mapping]:
    return {
        "column": bridges.column("column"),
        "row": bridges.row("row"),
        "norm": bridges.replicated("norm"),
        "transposed": bridges.transposed("transposed"),
        "qkv.weight": bridges.qkv("qkv.weight", 8, 4),
        "qkv.bias": bridges.qkv("qkv.bias", 8, 4),
        "gated": bridges.gated("gated"),
        "embedding": bridges.padded("embedding", 21),
        "counts": bridges.column("counts"),
        "zero_centred": bridges.plus_one("zero_centred"),
        "cast": bridges.cast_if_float("cast", torch.float16),
        "averaged": bridges.averaged("averaged"),
        "doubled": bridges.doubled("doubled"),
        "reversed": bridges.reversed_rows("reversed"),
        "imported": bridges.imported_before("imported"),
        **{f"experts.{number}": bridges.expert("experts", number) for number in range(3)},
        **{f"stage{number}.up": bridges.replicated(f"stage{number}.up") for number in range(2)},
        "stage1.norm": bridges.plus_one("stage1.norm"),
    }


def weights(rank: int) -> dict[str, torch.Tensor]:
    """Return what a rank has: shards of its own, and copies of what all have."""
    own, common = torch.Generator().manual_seed(rank + 1), torch.Generator().manual_seed(0)
    shapes = {
        "column": (6, 5),
        "row": (4, 7),
        "transposed": (5, 3),
        "qkv.weight": (48, 3),
        "qkv.bias": (48,),
        "gated": (10, 4),
        "embedding": (12, 3),
        "averaged": (3, 3),
        "doubled": (3, 3),
        "reversed": (4, 3),
        "imported": (4, 3),
        **{f"experts.{number}": (4, 3) for number in range(3)},
    }
    found = {name: torch.randn(shape, generator=own).bfloat16() for name, shape in shapes.items()}
    found["counts"] = torch.randint(0, 9, (5,), generator=own)
    for name, shape in {"norm": (9,), "zero_centred": (9,), "cast": (3, 2)}.items():
        found[name] = torch.randn(shape, generator=common).bfloat16()
    if rank < 2:
        found[f"stage{rank}.up"] = torch.randn(4, 4, generator=own).bfloat16()
    if rank == 1:
        found["stage1.norm"] = torch.randn(4, generator=own).bfloat16()
    found["column"][0, :2] = torch.tensor([float("nan"), -0.0])
    return found


def publish(rank: int, url: str) -> tuple[Versions, set[str], set[str], int]:
    """Publish some steps.

    Returns:
        Versions, with what the stand-in gathers of each; which parameters are gathered, which are converted
        here, and how often the stand-in exported in the last publication.
    """
    bridge, model = bridges.Bridge(mappings()), weights(rank)
    source = as_exported(bridge, model)
    published = []
    with Publisher(url, source, group=dist.group.WORLD, rank_timeout_s=60, anchor_every=2) as publisher:
        for step in range(4):
            before = bridge.num_exports
            version = publisher.publish_patch(step).result().version
            num_exports = bridge.num_exports - before
            published.append((version, bits_of(dict(bridge.export_hf_weights([model])))))
            for name, each in model.items():
                flat = each.view(-1)
                flat[step :: step + 2] += 1 if name == "counts" else flat[step :: step + 2]
    return published, {*source.gathered}, {*source.converted}, num_exports


def moves_alone(rank: int, url: str) -> tuple[Versions, int, bool]:
    """Publish parameters that are only moved, and watch for collectives."""
    names = ("column", "row", "norm", "qkv.weight", "gated", "embedding", *(f"experts.{i}" for i in range(3)))
    bridge = bridges.Bridge({name: mappings()[name] for name in names})
    model = {name: each for name, each in weights(rank).items() if name in names}
    source = as_exported(bridge, [model])
    published, real, calls = [], dist.all_gather, []
    with Publisher(url, source, group=dist.group.WORLD, rank_timeout_s=60) as publisher:
        for step in range(2):
            dist.all_gather = lambda *args, **kwargs: calls.append(args)
            try:
                before = bridge.num_exports
                version = publisher.publish_patch(step).result().version
                num_exports = bridge.num_exports - before
            finally:
                dist.all_gather = real
            published.append((version, bits_of(dict(bridge.export_hf_weights([model])))))
            model["gated"] *= 3
    storages = {each.untyped_storage().data_ptr() for each in model.values()}
    parts = [part for parts in source().values() for part in parts]
    return (
        published,
        num_exports + len(calls),
        {part.tensor.untyped_storage().data_ptr() for part in parts} <= storages,
    )


@pytest.mark.parametrize("num", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_each_version_has_the_bits_of_the_export(ranks_of: RanksOf, url: str, num: int) -> None:
    results = ranks_of(num).run(publish, url)
    check(url, [versions for versions, *_ in results])
    for _, gathered, _, _ in results:
        # With three ranks the last has padding alone of the embedding, and no element to show where it goes.
        padded = {"embedding"} if num == 3 else set()
        assert gathered == {"averaged", "doubled", "reversed", "imported"} | padded
    # A pipeline stage converts what it has.
    assert [converted for _, _, converted, _ in results] == [
        {"zero_centred", "cast"} | ({"stage1.norm"} if rank == 1 else set()) for rank in range(num)
    ]


def test_what_is_only_moved_is_published_without_any_collective(ranks_of: RanksOf, url: str) -> None:
    results = ranks_of(2).run(moves_alone, url)
    check(url, [versions for versions, *_ in results])
    assert [(num, is_shared) for _, num, is_shared in results] == [(0, True)] * 2


def test_what_is_no_bridge_is_refused() -> None:
    with pytest.raises(UsageError, match="takes an AutoBridge"):
        as_exported(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))


class Other(bridges.Bridge):
    """Lists what it is told to."""

    def __init__(self, tasks: Any) -> None:
        super().__init__({})
        self._tasks = tasks

    def get_conversion_tasks(self, models: Any) -> Any:
        if isinstance(self._tasks, Exception):
            raise self._tasks
        return self._tasks


@pytest.mark.parametrize(
    ("tasks", "error", "says"),
    [
        (ValueError("hf_path is required"), UsageError, "hf_path is required"),
        ([None], SchemaMismatch, "no conversion of a parameter"),
        (
            [bridges.Task("q.to_wrap.weight", bridges.replicated("q"), torch.ones(2))],
            SchemaMismatch,
            "adapter.*export_hf_weights",
        ),
    ],
)
def test_what_cannot_be_exported_from_each_rank_is_refused(
    tasks: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        as_exported(Other(tasks), [{}])


def test_a_parameter_that_is_not_contiguous_any_more_is_refused(tmp_path: Path) -> None:
    bridge = bridges.Bridge({"norm": bridges.replicated("norm")})
    parameter = torch.nn.Parameter(torch.randn(3, 4))
    source = as_exported(bridge, {"norm": parameter})
    with Publisher(str(tmp_path), source) as publisher:
        publisher.publish_patch(0).result()
        parameter.data = torch.randn(4, 3).T
        with pytest.raises(SchemaMismatch, match="not contiguous any more"):
            publisher.publish_patch(1)
