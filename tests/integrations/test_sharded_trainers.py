"""Trainers of several gloo ranks: each publishes its part, and versions have the bits of all of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from training import Remember, State, assert_replayed, build, prepare, trainer_of, versions

from patchstore.errors import RankFailed, SchemaMismatch
from patchstore.integrations.transformers import PublishCallback
from tests.support import tiny_qwen
from tests.support.ranks import RanksOf


def train(rank: int, kind: str, bucket: str, folder: str) -> tuple[dict[int, State], list[dict[str, Any]]]:
    prepare(rank)
    seen = Remember()
    publish = PublishCallback(bucket, rank_timeout_s=60)
    out = Path(folder) / f"out-{rank}"
    trainer = trainer_of(build(rank, kind, folder), out, publish, seen, max_steps=3)
    trainer.train()
    return seen.states, trainer.state.log_history


@pytest.mark.parametrize(
    ("num", "kind"),
    [
        (2, "ddp"),
        pytest.param(3, "ddp", marks=pytest.mark.exhaustive),
        pytest.param(2, "tied", marks=pytest.mark.exhaustive),
        (2, "lora"),
        (2, "fsdp2"),
        pytest.param(3, "fsdp2", marks=pytest.mark.exhaustive),
    ],
)
def test_every_version_has_the_bits_of_all_ranks(
    ranks_of: RanksOf, tmp_path: Path, num: int, kind: str
) -> None:
    tiny_qwen.save(tiny_qwen.build(), tmp_path / "base")
    found = ranks_of(num).run(train, kind, str(tmp_path / "bucket"), str(tmp_path / "base"))
    steps = versions(tmp_path / "bucket")
    assert steps == [(0, "anchor"), (1, "delta"), (2, "delta"), (3, "delta")]
    assert_replayed(tmp_path / "bucket", tmp_path, found[0][0])
    for _, log in found:
        assert [entry["weight_sync/version"] for entry in log if "weight_sync/version" in entry][-1] == 3


def train_with_fsdp1(rank: int, bucket: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    prepare(rank)
    model = FullyShardedDataParallel(tiny_qwen.build().float(), device_id=torch.device("cpu"))
    publish = PublishCallback(bucket, rank_timeout_s=20)
    with pytest.raises(SchemaMismatch, match="FSDP"):
        publish.on_train_begin(None, None, None, model=model)


def test_fsdp1_is_refused_with_advice(ranks_of: RanksOf, tmp_path: Path) -> None:
    ranks_of(2).run(train_with_fsdp1, str(tmp_path / "bucket"))


def fail_on_one_rank(rank: int, bucket: str, folder: str) -> str:
    prepare(rank)
    publish = PublishCallback(bucket, rank_timeout_s=20)
    trainer = trainer_of(tiny_qwen.build(), Path(folder) / str(rank), publish)
    model = tiny_qwen.build()
    publish.on_train_begin(trainer.args, trainer.state, trainer.control, model=model)
    if rank == 1:
        model.lm_head = torch.nn.Linear(3, 3)
    trainer.state.global_step = 9
    try:
        publish.on_step_end(trainer.args, trainer.state, trainer.control)
        publish.on_train_end(trainer.args, trainer.state, trainer.control)
    except (RankFailed, SchemaMismatch) as exc:
        return type(exc).__name__
    return "published"


def test_a_rank_that_fails_ends_the_training_of_all(ranks_of: RanksOf, tmp_path: Path) -> None:
    found = ranks_of(2).run(fail_on_one_rank, str(tmp_path / "bucket"), str(tmp_path))
    assert found == ["RankFailed", "SchemaMismatch"]
    assert versions(tmp_path / "bucket") == [(0, "anchor")]
