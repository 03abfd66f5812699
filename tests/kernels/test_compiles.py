"""Kernels that tests interpret are compiled for a GPU too."""

import json

import pytest
import torch

from tests.support.compiled import Compiler
from tests.support.interpreted import DEVICE, LAUNCHED, kernels

compare = kernels("patchstore.kernels.compare")

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="kernels are not interpreted here")


def test_what_only_the_interpreter_takes_is_said(compiler: Compiler) -> None:
    tiles = compare.cut([4096], [2], DEVICE, tile_bytes=1024)
    compare.apply(compare.Found(tiles, 8), torch.zeros(4096, dtype=torch.uint8).data_ptr())
    (launch,) = (each for each in LAUNCHED if json.loads(each)[1] == "_apply")
    compiler.check(launch)
    # The interpreter would take a range of any length.
    wrong = launch.replace(f'"BLOCK": {compare.BLOCK}', '"BLOCK": 48')
    assert wrong != launch
    with pytest.raises(AssertionError, match=r"does not compile for .*_apply.*\n.*Error"):
        compiler.check(wrong)
