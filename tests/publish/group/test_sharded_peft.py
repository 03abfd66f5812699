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


def test_a_layer_that_is_sharded_by_itself_is_refused(ranks_of: RanksOf, tmp_path: Path) -> None:
    found = ranks_of(2).run(adapter_jobs.by_itself, str(tmp_path / "store"))
    assert ["call it for the layer around it" in each for each in found] == [True, True]


def test_adapted_experts_are_published_as_saved(ranks_of: RanksOf, tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    url = str(tmp_path / "store")
    check(url, ranks_of(2).run(adapter_jobs.fused_experts, url, str(tmp_path / "saved")))
