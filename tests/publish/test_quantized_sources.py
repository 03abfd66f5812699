"""Sources that are quantised already, or of which FP8 cannot be made: published exactly, or refused."""

import pytest
import torch

from patchstore import Publisher
from patchstore.errors import SchemaMismatch, UsageError
from patchstore.quantization import FORMS
from patchstore.stores.memory import MemoryStore
from patchstore.tensors.bits import bits
from tests.support.quantized import UP, assert_served, weights


def test_weights_that_are_quantised_already_are_published_as_they_are(store: MemoryStore) -> None:
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


def test_weights_that_are_in_fp8_already_are_not_quantised_again(store: MemoryStore) -> None:
    codes, scales = FORMS["fp8-block"].quantize(torch.randn(256, 256))
    given = weights() | {"a.weight": codes, "a.weight_scale_inv": scales}
    with pytest.raises(UsageError, match=r"'a.weight_scale_inv' is a scale of .* give dtype=None"):
        Publisher(store, given, quantization="fp8-block")
    with pytest.raises(SchemaMismatch, match=r"'a.weight' is in FP8 already.*without quantization="):
        Publisher(store, given, quantization="fp8-block", dtype=None)
    del given["a.weight"]
    with pytest.raises(SchemaMismatch, match=r"has a tensor 'a.weight_scale_inv', the name that"):
        Publisher(store, given | {"a.weight": torch.randn(256, 256)}, quantization="fp8-block")
    assert list(store.list()) == []


QUANTISED = {
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


@pytest.mark.parametrize("kind", QUANTISED)
def test_scales_of_weights_that_are_quantised_already_are_not_rounded(store: MemoryStore, kind: str) -> None:
    given = QUANTISED[kind] | {"norm.weight": torch.ones(8)}
    with pytest.raises(
        UsageError, match=r"is a scale of the quantised weights 'a.q?weight'.* give dtype=None"
    ):
        Publisher(store, given)
    assert list(store.list()) == []
    with Publisher(store, given, dtype=None) as publisher:
        publisher.publish_patch(0).result()
    assert_served(store, given)


def test_a_gain_that_is_called_scale_is_rounded_like_all_weights(store: MemoryStore) -> None:
    given = {"norm.scale": torch.randn(8), "norm.count": torch.zeros(1, dtype=torch.uint8)}
    with Publisher(store, given) as publisher:
        publisher.publish_patch(0).result()
    assert_served(store, given | {"norm.scale": given["norm.scale"].bfloat16()})


def test_layers_with_transposed_weights_are_refused(store: MemoryStore) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=16)
    )
    with pytest.raises(SchemaMismatch, match=r"is a Conv1D.*publish without quantization="):
        Publisher(store, model, quantization="fp8-channel")


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
    with Publisher(store, given) as publisher:
        publisher.publish_patch(0).result()
    assert_served(store, given)
