"""Every layout of a sharded trainer: each version has the trainer's bits, whichever rank has them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from safetensors.torch import save_file

from patchstore import Manifest, Replica
from patchstore.format import history
from patchstore.stores import opened
from patchstore.tensors.bits import bits
from tests.support.ranks import Ranks

RanksOf = Callable[[int], Ranks]

# Ranks wait for each other, and a busy machine is slow.
pytestmark = pytest.mark.timeout(600)


def check(url: str, results: list[list[tuple[int, jobs.Bits]]]) -> list[Manifest]:
    """Fail unless all ranks published the same versions, and a reader finds the trainer's bits in each."""
    versions = results[0]
    for other in results[1:]:
        assert [version for version, _ in other] == [version for version, _ in versions]
    manifests = []
    with opened(url) as store:
        for version, expected in versions:
            found: dict[str, torch.Tensor] = {}
            Replica(store, found).update(version)
            same: dict[str, Any] = {
                name: (each.dtype, tuple(each.shape), bits(each).numpy().tobytes())
                for name, each in found.items()
            }
            names = {name for name in expected if name in same}
            assert same == {name: expected[name] for name in names}, version
            header = history.read_header(store)
            assert header is not None
            assert expected.keys() == names | header.schema.tied.keys()
            manifests.append(history.read_manifest(store, version))
        assert not [key for key in store.list() if key.startswith(("pieces/", "probes/"))]
    return manifests


@pytest.mark.sample(7)
@pytest.mark.parametrize("encoding", ["gap", "context"])
@pytest.mark.parametrize(
    ("make", "num", "world"),
    [
        (jobs.tied, 3, False),
        (jobs.fsdp2, 2, False),
        (jobs.fsdp2, 3, False),
        (jobs.fsdp2, 4, False),
        (jobs.hsdp, 4, False),
        (jobs.fsdp2_and_tp, 4, False),
        (jobs.ddp, 2, True),
        (jobs.fsdp2, 3, True),
    ],
)
def test_each_version_has_the_bits_of_the_full_state_dict(
    ranks_of: RanksOf, tmp_path: Path, make: Any, num: int, world: bool, encoding: str
) -> None:
    url = str(tmp_path / "store")
    options = {"anchor_every": 3, "encoding": encoding}
    results = ranks_of(num).run(jobs.train_and_publish, make, url, 5, options, world)
    manifests = check(url, results)
    assert [manifest.kind for manifest in manifests] == ["anchor", "delta", "delta", "anchor", "delta"]
    assert all(manifest.delta is not None for manifest in manifests[1:])


def test_ranks_that_change_different_shares_publish_in_one_encoding(
    ranks_of: RanksOf, tmp_path: Path
) -> None:
    url = str(tmp_path / "store")
    shares = [[1.0, 0.001], [0.001, 0.002], [0.0, 1.0], [0.0, 0.0], [0.003, 0.0]]
    manifests = check(url, ranks_of(2).run(jobs.unevenly, url, shares, {}))
    found = [(each.delta.encoding, len(each.delta.payloads)) for each in manifests if each.delta]
    assert found == [("context", 2), ("gap", 2), ("context", 1), ("gap", 0), ("gap", 1)]


def test_ranks_store_the_model_where_their_changes_together_would_take_more(
    ranks_of: RanksOf, tmp_path: Path
) -> None:
    url = str(tmp_path / "store")
    # As AdamW does in fp32, where no step leaves a weight as it is.
    shares = [[1.0, 1.0], [1.0, 0.1], [1.0, 1.0], [0.6, 1.0], [1.0, 0.001], [0.01, 0.0]]
    manifests = check(url, ranks_of(2).run(jobs.unevenly, url, shares, {"dtype": None, "anchor_every": 3}))
    assert [each.kind for each in manifests] == ["anchor", "delta", "anchor", "anchor", "delta", "delta"]
    assert all(each.num_bytes < 1.05 * 512 * 512 * 4 for each in manifests)


@pytest.mark.sample(2)
@pytest.mark.parametrize("encoding", ["gap", "context"])
@pytest.mark.parametrize("num", [2, 4])
def test_experts_columns_and_replicas(ranks_of: RanksOf, tmp_path: Path, num: int, encoding: str) -> None:
    url = str(tmp_path / "store")
    check(url, ranks_of(num).run(jobs.experts, url, {"encoding": encoding, "anchor_every": 2}))


@pytest.mark.sample(1)
@pytest.mark.parametrize("num_rows", [7, 8, 5])
def test_shards_whose_rows_do_not_follow_each_other(ranks_of: RanksOf, tmp_path: Path, num_rows: int) -> None:
    url = str(tmp_path / "store")
    check(url, ranks_of(4).run(jobs.strided, url, num_rows))


def test_what_changed_on_one_rank_alone_is_a_version_and_what_changed_on_none_is_not(
    ranks_of: RanksOf, tmp_path: Path
) -> None:
    found = ranks_of(2).run(jobs.change_one_rank, str(tmp_path / "store"))
    assert found == [[(0, True), (1, False), (1, True)]] * 2


def test_every_third_version_of_ranks_is_an_anchor_also_if_only_changes_are_published(
    ranks_of: RanksOf, tmp_path: Path
) -> None:
    url = str(tmp_path / "store")
    first, second = ranks_of(2).run(jobs.change_in_turn, url)
    assert first == second
    assert [(version, is_anchor) for version, is_anchor, _ in first] == [(i, i % 3 == 0) for i in range(15)]
    check(url, [[(version, state) for version, _, state in first]])


def test_as_many_calls_of_ranks_return_as_max_pending_says(ranks_of: RanksOf, tmp_path: Path) -> None:
    assert ranks_of(2).run(jobs.calls_while_held, str(tmp_path / "store"), "gap") == [6, 6]


def test_each_rank_of_a_pipeline_publishes_its_layers(ranks_of: RanksOf, tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    manifests = check(url, ranks_of(3).run(jobs.stages, url, {}))
    assert manifests[1].delta is not None
    assert len(manifests[1].delta.payloads) == 3


@pytest.mark.parametrize("is_changed", [False, True])
def test_what_the_base_checkpoint_has_is_not_sent_between_ranks(
    ranks_of: RanksOf, tmp_path: Path, is_changed: bool
) -> None:
    folder, url = tmp_path / "base", str(tmp_path / "store")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    torch.manual_seed(0)
    tensors = {"one": torch.randn(40, 60).bfloat16(), "two": torch.randn(31).bfloat16()}
    if is_changed:
        tensors["changed"] = torch.randn(20, 30).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    results = ranks_of(3).run(jobs.from_checkpoint, url, str(folder), is_changed)
    check(url, [[(version, found)] for version, found, _ in results])
    assert any(pieces for _, _, pieces in results) == is_changed


@pytest.mark.parametrize("num", [2, 3])
def test_flat_ranges_and_boxes_that_a_trainer_names(ranks_of: RanksOf, tmp_path: Path, num: int) -> None:
    url = str(tmp_path / "store")
    check(url, ranks_of(num).run(jobs.flat_ranges, url, {"anchor_every": 2}))


@pytest.mark.parametrize("num", [2, 3])
def test_sharded_tensors_in_the_checkpoints_layout(ranks_of: RanksOf, tmp_path: Path, num: int) -> None:
    url = str(tmp_path / "store")
    check(url, ranks_of(num).run(jobs.fused, url, {"anchor_every": 2}))
