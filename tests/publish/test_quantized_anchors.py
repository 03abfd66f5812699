"""Anchors of runs in FP8 are checkpoints that transformers opens."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from patchstore import Publisher, as_saved, replay
from patchstore.quantization import FORMS
from patchstore.stores.memory import MemoryStore
from patchstore.tensors.bits import bits

transformers = pytest.importorskip("transformers")


def saved(folder: Path, *, is_tied: bool) -> Any:
    """A tiny model in bf16, whose checkpoint is in this folder."""
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=128, tie_word_embeddings=is_tied,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return model


def test_anchors_are_checkpoints_that_transformers_opens(store: MemoryStore, tmp_path: Path) -> None:
    model = saved(tmp_path / "base", is_tied=False)
    with Publisher(store, as_saved(model), quantization="fp8-block", files=tmp_path / "base") as publisher:
        publisher.publish_patch(0).result()
    replay(store, out=tmp_path / "replayed")

    opened = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "replayed",
        dtype=torch.bfloat16,
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True),
    )

    form = FORMS["fp8-block"]
    for name, tensor in model.state_dict().items():
        found = opened.state_dict()[name]
        if name.endswith("_proj.weight"):
            codes, scales = form.quantize(tensor)
            whole = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            assert torch.equal(bits(found), bits((codes.float() * whole).to(torch.bfloat16))), name
        else:
            assert torch.equal(bits(found), bits(tensor)), name


@pytest.mark.parametrize("form", FORMS)
def test_a_tied_output_layer_stays_as_it_is_where_a_replay_is_opened(
    store: MemoryStore, tmp_path: Path, form: str
) -> None:
    model = saved(tmp_path / "base", is_tied=True)
    base = json.loads((tmp_path / "base" / "config.json").read_text())
    key = "modules_to_not_convert" if form == "fp8-block" else "ignore"
    base["quantization_config"] = FORMS[form].config(["re:visual.*"])
    (tmp_path / "base" / "config.json").write_text(json.dumps(base))
    (tmp_path / "base" / "model.safetensors").unlink()
    with Publisher(store, model, quantization=form, files=tmp_path / "base") as publisher:
        publisher.publish_patch(0).result()
    replay(store, out=tmp_path / "replayed")

    found = json.loads((tmp_path / "replayed" / "config.json").read_text())["quantization_config"][key]
    assert found == ["lm_head", "model.embed_tokens", "re:visual.*"]
    if form == "fp8-channel":
        pytest.importorskip("compressed_tensors")
        opened = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "replayed", dtype=torch.bfloat16
        )
        tokens = torch.arange(8)[None]
        with torch.no_grad():
            logits, wanted = opened(tokens).logits, model(tokens).logits
        assert logits.isfinite().all()
        assert (logits - wanted).abs().max() < wanted.abs().max()
