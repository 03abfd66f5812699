"""What Megatron-Bridge exports is published from every rank, traced through a stand-in of its interface."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import exported_jobs as jobs
import pytest
import torch

from patchstore import Publisher, Replica
from patchstore.errors import SchemaMismatch, UsageError
from patchstore.integrations.megatron import as_exported
from patchstore.stores import opened
from patchstore.tensors.bits import bits
from tests.support import stand_in_bridge as bridges
from tests.support.ranks import Ranks

RanksOf = Callable[[int], Ranks]

pytestmark = pytest.mark.timeout(600)


def check(url: str, versions: list[tuple[int, jobs.Bits]]) -> None:
    with opened(url) as store:
        for version, expected in versions:
            found: dict[str, torch.Tensor] = {}
            Replica(store, found).update(version)
            same = {
                name: (each.dtype, tuple(each.shape), bits(each).numpy().tobytes())
                for name, each in found.items()
            }
            assert same.keys() == expected.keys()
            assert [name for name in same if same[name] != expected[name]] == [], version


@pytest.mark.parametrize("num", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_each_version_has_the_bits_of_the_export(ranks_of: RanksOf, tmp_path: Path, num: int) -> None:
    url = str(tmp_path / "store")
    results = ranks_of(num).run(jobs.publish, url)
    check(url, results[0][0])
    for _, gathered, _, _ in results:
        # With three ranks the last has padding alone of the embedding, and no element to show where it goes.
        padded = {"embedding"} if num == 3 else set()
        assert gathered == {"averaged", "doubled", "reversed", "imported"} | padded
    # A pipeline stage converts what it has.
    assert [converted for _, _, converted, _ in results] == [
        {"zero_centred", "cast"} | ({"stage1.norm"} if rank == 1 else set()) for rank in range(num)
    ]


def test_what_is_only_moved_is_published_without_any_collective(ranks_of: RanksOf, tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    results = ranks_of(2).run(jobs.moves_alone, url)
    check(url, results[0][0])
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
