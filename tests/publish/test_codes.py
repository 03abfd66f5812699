"""Codes and scales that a trainer made by itself are published and rebuilt as bytes, whatever they mean."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from patchstore import Publisher, Replica
from patchstore.errors import UsageError
from patchstore.read import replay
from patchstore.stores.folder import FolderStore
from patchstore.stores.memory import MemoryStore
from patchstore.tensors.bits import bits
from tests.format import independent_reader
from tests.support.weights import State, assert_same_bits

codes = pytest.importorskip("tests.support.codes", exc_type=ImportError)

FORMS = (*codes.FORMATS, codes.GPT_OSS)
TYPED = {"weight_packed": torch.float4_e2m1fn_x2, "_blocks": torch.float4_e2m1fn_x2}
TYPED |= dict.fromkeys(("weight_scale", "_scales"), torch.float8_e8m0fnu)
"""Dtypes of what most checkpoints have as U8."""


def weights(seed: int) -> State:
    random = torch.Generator().manual_seed(seed)
    experts = {
        "mlp.experts.gate_up_proj": torch.randn(2, 32, 96, generator=random),
        "mlp.experts.down_proj": torch.randn(2, 96, 32, generator=random),
        "mlp.experts.down_proj_bias": torch.randn(2, 32, generator=random),
    }
    linear = {"q_proj.weight": torch.randn(32, 128, generator=random), "norm.weight": torch.ones(64)}
    return {name: (0.05 * tensor).bfloat16() for name, tensor in (experts | linear).items()}


def coded(model: State, form: str, *, is_typed: bool) -> State:
    """A model's codes and scales, in which the last of each is NaN."""
    found = codes.quantized(model, form)
    for name, tensor in found.items():
        if tensor.dtype in {torch.uint8, torch.float8_e4m3fn}:
            bits(tensor)[-1] = 0xFF
            dtype = next((each for end, each in TYPED.items() if name.endswith(end)), None)
            if is_typed and dtype is not None and tensor.dtype == torch.uint8:
                found[name] = tensor.view(dtype)
    return found


@pytest.mark.parametrize("encoding", ["raw", "gap", "context"])
@pytest.mark.parametrize("is_typed", [False, True], ids=["bytes", "typed"])
@pytest.mark.parametrize("form", FORMS)
def test_every_version_is_what_the_reference_quantizer_made(
    tmp_path: Path, form: str, is_typed: bool, encoding: str
) -> None:
    store, model = FolderStore(tmp_path / "store"), weights(1)
    tensors = coded(model, form, is_typed=is_typed)
    held: State = {}
    with Publisher(store, tensors, dtype=None, encoding=encoding, anchor_every=3) as publisher:
        follower = Replica(store, held)
        for step in range(5):
            manifest = publisher.publish_patch(step).result()
            follower.update()
            assert_same_bits(held, tensors)
            assert step == 0 or manifest.delta is not None
            for tensor in model.values():
                chosen = torch.rand(tensor.shape) < 0.02
                tensor[chosen] = (tensor[chosen].float() * 1.1).bfloat16()
            for name, tensor in coded(model, form, is_typed=is_typed).items():
                bits(tensors[name]).copy_(bits(tensor))
        publisher.publish_patch(5).result()
    rebuilt = independent_reader.rebuild(tmp_path / "store", 5)
    assert {name: data for name, (_, _, data) in rebuilt.items()} == {
        name: bytes(bits(tensor).view(torch.uint8).numpy()) for name, tensor in tensors.items()
    }
    replay.verify(store, 5)
    replay.replay(store, 5, out=tmp_path / "out")
    assert_same_bits(load_file(tmp_path / "out" / "model.safetensors"), tensors)


def test_a_base_checkpoint_in_this_form_is_taken_and_scales_stay_exact(tmp_path: Path) -> None:
    tensors = coded(weights(1), "nvfp4", is_typed=True)
    assert any(tensor.dtype == torch.float32 for tensor in tensors.values())
    save_file(tensors, tmp_path / "model.safetensors")
    settings = {"quantization_config": codes.config("nvfp4")}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UsageError, match=r"'q_proj\..*_scale' is a scale of .* give dtype=None"):
        Publisher(MemoryStore(), tensors)
    with Publisher(store := MemoryStore(), tensors, dtype=None, files=tmp_path) as publisher:
        publisher.publish_patch(0).result()
    replay.replay(store, out=tmp_path / "out")
    assert_same_bits(load_file(tmp_path / "out" / "model.safetensors"), tensors)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == settings
