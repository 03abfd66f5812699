"""Runs in FP8: every version has the codes and scales of its weights, or the source is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from patchstore import LocalPart, Publisher, as_saved, mapped, replay
from patchstore.errors import SchemaMismatch, UsageError
from patchstore.quantization import FORMS
from patchstore.stores.memory import MemoryStore
from patchstore.tensors.bits import bits
from tests.support.quantized import UP, assert_served, weights
from tests.support.small_models import assert_refused, causal, published
from tests.support.weights import State, assert_same_bits


def step(tensors: State) -> None:
    for tensor in tensors.values():
        tensor.add_((torch.randn(tensor.shape) * 1e-3).to(tensor.dtype))


def expected(tensors: State, form: str) -> State:
    found = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    codes, scales = FORMS[form].quantize(found[UP])
    return found | {UP: codes, FORMS[form].scale_name(UP): scales}


BOXES = {
    "whole blocks": [(0, 0, 256, 256), (256, 0, 128, 256)],
    "cut rows": [(0, 0, 200, 256), (200, 0, 184, 256)],
    "cut columns": [(0, 0, 384, 100), (0, 100, 384, 156)],
    "cut both": [(0, 0, 100, 60), (0, 60, 100, 196), (100, 0, 1, 256), (101, 0, 27, 256), (128, 0, 256, 256)],
}


def in_parts(trained: State, boxes: str) -> dict[str, Any]:
    parts = [
        LocalPart(trained[UP][row : row + rows, column : column + columns], (384, 256), start=(row, column))
        for row, column, rows, columns in BOXES[boxes]
    ]
    return trained | {UP: parts}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["mapping", "stream", "fp32", "mapped", *BOXES])
def test_each_version_has_the_codes_of_its_weights(store: MemoryStore, form: str, kind: str) -> None:
    trained = weights(torch.float32 if kind == "fp32" else torch.bfloat16)
    source: Any = trained
    if kind == "stream":
        source = lambda: iter(trained.items())  # noqa: E731
    elif kind == "mapped":
        source = mapped({f"x.{name}": tensor for name, tensor in trained.items()}, lambda name, _: name[2:])
    elif kind in BOXES:
        source = in_parts(trained, kind)
    with Publisher(store, source, quantization=form) as publisher:
        for number in range(3):
            manifest = publisher.publish_patch(number).result()
            assert_served(store, expected(trained, form))
            assert (manifest.anchor is None) == (number > 0)
            step(trained)


@pytest.mark.parametrize("form", FORMS)
def test_another_default_device_or_dtype_changes_nothing(store: MemoryStore, form: str) -> None:
    trained = weights()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            publisher = Publisher(store, trained, quantization=form)
        for number in range(2):
            with torch.device("meta"):
                publisher.publish_patch(number).result()
            torch.set_default_dtype(torch.float32)
            assert_served(store, expected(trained, form))
            step(trained)
            torch.set_default_dtype(torch.float64)
        publisher.close()
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_run_in_fp8_is_continued(store: MemoryStore) -> None:
    trained = weights()
    published(store, trained, quantization="fp8-block")
    with Publisher(store, trained, quantization="fp8-block", resume=True) as publisher:
        step(trained)
        assert publisher.publish_patch(1).result().anchor is None
    assert_served(store, expected(trained, "fp8-block"))

    for other in (None, "fp8-channel"):
        with pytest.raises(SchemaMismatch):
            Publisher(store, trained, quantization=other, resume=True)


def test_numbers_without_a_scale_publish_nothing_and_the_next_call_goes_on(store: MemoryStore) -> None:
    trained = weights()
    with Publisher(store, trained, quantization="fp8-block") as publisher:
        publisher.publish_patch(0).result()
        before = trained[UP][3, 4].clone()
        trained[UP][3, 4] = float("inf")
        with pytest.raises(UsageError, match=r"up_proj.*infinite or NaN"):
            publisher.publish_patch(1)
        trained[UP][3, 4] = before
        step(trained)
        assert publisher.publish_patch(2).result().version == 1
        assert_served(store, expected(trained, "fp8-block"))


CHANGES = {
    "added": ({"b.weight": torch.ones(256, 256)}, "'b.weight' was not there"),
    "codes": ({UP: torch.ones(384, 256).to(torch.float8_e4m3fn)}, r"was BF16 \[384, 256\], but is F8_E4M3"),
    "whole": ({UP: torch.ones(384, 256, dtype=torch.int8)}, "but is I8 "),
    "complex": ({UP: torch.ones(384, 256, dtype=torch.complex64)}, "has dtype torch.complex64"),
    "levels": ({UP: torch.ones(3, 128, 256)}, r"\[384, 256\].*but is .*\[3, 128, 256\] now"),
    "norm": ({"model.norm.weight": torch.ones(64)}, r"\[128\].*, but is .*\[64\] now"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_source_that_changes_publishes_nothing_and_goes_on_when_it_is_back(
    store: MemoryStore, change: str, is_stream: bool
) -> None:
    trained = weights()
    now, says = CHANGES[change]
    current = dict(trained)
    with Publisher(
        store, (lambda: iter(current.items())) if is_stream else current, quantization="fp8-block"
    ) as publisher:
        publisher.publish_patch(0).result()
        current |= now
        with pytest.raises(SchemaMismatch, match=says):
            publisher.publish_patch(1)
        current.clear()
        with pytest.raises(SchemaMismatch):
            publisher.publish_patch(1)
        step(trained)
        current |= trained
        assert publisher.publish_patch(2).result().version == 1
        assert_served(store, expected(trained, "fp8-block"))


def test_a_stream_of_parts_that_cut_blocks_is_refused(store: MemoryStore) -> None:
    source = in_parts(weights(), "cut rows")
    assert_refused(store, lambda: iter(source.items()), "must yield whole blocks", quantization="fp8-block")


def test_a_source_without_linear_layers_is_refused(store: MemoryStore) -> None:
    with pytest.raises(SchemaMismatch, match="no weight of a linear layer among 2 tensors"):
        Publisher(store, {"a": torch.ones(8, 8), "norm.weight": torch.ones(8)}, quantization="fp8-block")


def test_weights_that_are_quantized_already_are_published_as_they_are(store: MemoryStore) -> None:
    codes, scales = FORMS["fp8-block"].quantize(torch.randn(256, 256))
    scales[0, 0], scales[0, 1], scales[1, 0] = 0.0, float("inf"), float("nan")
    given = {
        UP: codes,
        UP + "_scale_inv": scales,
        "packed.weight": torch.randint(0, 255, (64, 64), dtype=torch.uint8),
    }
    with Publisher(store, given, dtype=None) as publisher:
        publisher.publish_patch(0).result()
        assert_served(store, given)
        bits(codes)[::7] ^= 1
        scales[1, 1] *= 2
        publisher.publish_patch(1).result()
        assert_served(store, given)


def test_weights_that_are_in_fp8_already_are_not_quantized_again(store: MemoryStore) -> None:
    codes, scales = FORMS["fp8-block"].quantize(torch.randn(256, 256))
    given = weights() | {"a.weight": codes, "a.weight_scale_inv": scales}
    with pytest.raises(UsageError, match=r"'a.weight_scale_inv' is a scale of .* give dtype=None"):
        Publisher(store, given, quantization="fp8-block")
    with pytest.raises(SchemaMismatch, match=r"'a.weight' is in FP8 already.*without quantization="):
        Publisher(store, given, quantization="fp8-block", dtype=None)
    del given["a.weight"]
    assert_refused(
        store,
        given | {"a.weight": torch.randn(256, 256)},
        r"has a tensor 'a.weight_scale_inv', the name that",
        quantization="fp8-block",
    )


QUANTIZED = {
    "blocks": {
        "a.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.ones(1, 1),
    },
    "nvfp4": {
        "a.weight": torch.zeros(8, 4, dtype=torch.uint8),
        "a.weight_scale": torch.ones(8, 1).to(torch.float8_e4m3fn),
        "a.weight_scale_2": torch.ones(()),
    },
    "inputs": {"a.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn), "a.input_scale": torch.ones(())},
    "awq": {"a.qweight": torch.zeros(8, 8, dtype=torch.int32), "a.scales": torch.ones(8, 1).half()},
}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_scales_of_weights_that_are_quantized_already_are_not_rounded(store: MemoryStore, kind: str) -> None:
    given = QUANTIZED[kind] | {"norm.weight": torch.ones(8)}
    assert_refused(
        store, given, r"is a scale of the quantized weights 'a.q?weight'.* give dtype=None", UsageError
    )
    assert_same_bits(published(store, given, dtype=None), given)


def test_a_gain_that_is_called_scale_is_rounded_like_all_weights(store: MemoryStore) -> None:
    given = {"norm.scale": torch.randn(8), "norm.count": torch.zeros(1, dtype=torch.uint8)}
    assert_same_bits(published(store, given), given | {"norm.scale": given["norm.scale"].bfloat16()})


def test_layers_with_transposed_weights_are_refused(store: MemoryStore) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=16)
    )
    assert_refused(store, model, r"is a Conv1D.*publish without quantization=", quantization="fp8-channel")


def test_blocks_that_do_not_divide_a_matrix_are_named(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"a.q_proj.weight": torch.randn(192, 256)}
    Publisher(store, given, quantization="fp8-block").close()
    assert (
        "do not divide 'a.q_proj.weight', BF16 [192, 256] (in all, matrices of such a size: 1)" in caplog.text
    )
    caplog.clear()
    Publisher(MemoryStore(), given, quantization="fp8-channel").close()
    assert not caplog.text


def test_positions_beside_a_bias_are_no_codes(store: MemoryStore) -> None:
    given = {
        "a.weight": torch.randn(64, 64).bfloat16(),
        "a.index": torch.arange(5000, dtype=torch.int32),
        "a.bias": torch.randn(64),
    }
    published(store, given)
    assert_served(store, given)


def saved(folder: Path, *, is_tied: bool) -> Any:
    """A tiny model in bf16, whose checkpoint is in this folder."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 128}
    model = causal("Qwen3", **sizes, tie_word_embeddings=is_tied)
    model.save_pretrained(folder)
    return model


def test_anchors_are_checkpoints_that_transformers_opens(store: MemoryStore, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = saved(tmp_path / "base", is_tied=False)
    published(store, as_saved(model), quantization="fp8-block", files=tmp_path / "base")
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
    transformers = pytest.importorskip("transformers")
    model = saved(tmp_path / "base", is_tied=True)
    base = json.loads((tmp_path / "base" / "config.json").read_text())
    key = "modules_to_not_convert" if form == "fp8-block" else "ignore"
    base["quantization_config"] = FORMS[form].config(["re:visual.*"])
    (tmp_path / "base" / "config.json").write_text(json.dumps(base))
    (tmp_path / "base" / "model.safetensors").unlink()
    published(store, model, quantization=form, files=tmp_path / "base")
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
