"""Ranks that publish in FP8: blocks that lie on several of them are rounded as in the whole tensor."""

from collections.abc import Callable
from pathlib import Path

import pytest
import quantized_jobs
import torch

from patchstore import Replica
from patchstore.quantization import FORMS
from patchstore.tensors.bits import bits
from tests.support.ranks import Ranks


def assert_rounded(url: Path, version: int, step: int, form: str) -> None:
    replica = Replica(str(url), {})
    replica.update(version)
    wanted = quantized_jobs.whole(step)
    for name in (quantized_jobs.ROWS, quantized_jobs.COLUMNS):
        wanted[name], wanted[FORMS[form].scale_name(name)] = FORMS[form].quantize(wanted[name])
    assert replica.tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(bits(replica.tensors[name]), bits(tensor)), name


@pytest.mark.parametrize(
    ("num", "form"),
    [(3, "fp8-block"), (2, "fp8-channel"), pytest.param(4, "fp8-block", marks=pytest.mark.exhaustive)],
)
def test_blocks_on_several_ranks_are_rounded_like_those_of_the_whole(
    ranks_of: Callable[[int], Ranks], tmp_path: Path, num: int, form: str
) -> None:
    found = ranks_of(num).run(quantized_jobs.publish, str(tmp_path / "store"), form)
    assert found == [[0, 1, 2]] * num
    for version in range(3):
        assert_rounded(tmp_path / "store", version, version, form)


def test_a_number_without_a_scale_on_one_rank_is_told_to_all_and_the_next_call_goes_on(
    ranks_of: Callable[[int], Ranks], tmp_path: Path
) -> None:
    found = ranks_of(3).run(quantized_jobs.one_is_not_finite, str(tmp_path / "store"))
    assert all("up_proj" in message for _, message, _ in found), found
    (version,) = {version for _, _, version in found}
    assert_rounded(tmp_path / "store", version, 2, "fp8-block")
