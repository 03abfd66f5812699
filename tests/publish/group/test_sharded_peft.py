"""Adapters of sharded models: each rank publishes its part of what PEFT merges of the whole model."""

from collections.abc import Callable
from pathlib import Path

import adapter_jobs
import pytest
import torch
from test_layouts import check

from tests.support.ranks import Ranks

pytest.importorskip("peft")

RanksOf = Callable[[int], Ranks]

pytestmark = pytest.mark.timeout(600)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("kind", "num", "dtype"),
    [
        ("linear", 2, torch.bfloat16),
        ("dora", 3, torch.bfloat16),
        ("saved", 2, torch.bfloat16),
        ("several", 3, torch.float32),
        ("tied", 2, torch.bfloat16),
        ("linear", 3, torch.float32),
        ("dora", 2, torch.float32),
        ("saved", 3, torch.float32),
        ("several", 2, torch.bfloat16),
        ("embedding", 3, torch.bfloat16),
        ("bias", 2, torch.bfloat16),
        ("tied", 3, torch.float32),
        ("injected", 2, torch.bfloat16),
        ("nothing else", 2, torch.bfloat16),
    ],
)
def test_each_version_is_what_peft_merges_of_the_whole_model(
    ranks_of: RanksOf, tmp_path: Path, kind: str, num: int, dtype: torch.dtype
) -> None:
    url = str(tmp_path / "store")
    check(url, ranks_of(num).run(adapter_jobs.publish, url, kind, dtype, 3))


def test_a_run_of_adapters_goes_on_with_another_number_of_ranks(ranks_of: RanksOf, tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    check(url, ranks_of(2).run(adapter_jobs.publish, url, "linear", torch.bfloat16, 2))
    results = ranks_of(3).run(adapter_jobs.publish, url, "linear", torch.bfloat16, 3)
    check(url, results)
    assert results[0][0][0] >= 2


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("linear", "call it for the layer around it"),
        ("tied, head alone", "are one tensor, and only the first has an adapter"),
    ],
    ids=["a layer sharded by itself", "a tied head alone"],
)
def test_what_cannot_be_merged_of_a_sharded_model_is_refused_on_all_ranks(
    ranks_of: RanksOf, tmp_path: Path, kind: str, reason: str
) -> None:
    found = ranks_of(2).run(adapter_jobs.refused, str(tmp_path / "store"), kind)
    assert [reason in each for each in found] == [True, True]


def test_adapted_experts_are_published_as_saved(ranks_of: RanksOf, tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    url = str(tmp_path / "store")
    check(url, ranks_of(2).run(adapter_jobs.fused_experts, url, str(tmp_path / "saved")))


def test_adapters_of_a_sharded_and_quantised_model_are_merged_into_what_it_computes_with(
    ranks_of: RanksOf, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    url = str(tmp_path / "store")
    check(url, ranks_of(2).run(adapter_jobs.quantised, url, str(tmp_path / "base")))
