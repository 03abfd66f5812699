"""Rounding to FP8 against the quantizers that usually write such checkpoints, bit for bit."""

import types

import pytest
import torch

from patchstore.quantization import FORMS
from patchstore.tensors.bits import bits
from tests.support.interpreted import DEVICE, kernels

BLOCK, CHANNEL = FORMS["fp8-block"], FORMS["fp8-channel"]

MATRICES = {
    "normal": lambda: torch.randn(256, 384) * 0.02,
    "bf16": lambda: 3 * torch.randn(512, 128).bfloat16(),
    "wide": lambda: torch.randn(128, 256) * torch.logspace(-30, 30, 256),
    "zeros": lambda: torch.zeros(128, 128),
    "negative zeros": lambda: -torch.zeros(128, 128),
    "tiny": lambda: torch.randn(128, 128) * 1e-30,
    "large": lambda: torch.randn(128, 128).bfloat16() * 1e37,
}


@pytest.mark.parametrize("name", MATRICES)
def test_blocks_are_rounded_as_transformers_does(name: str) -> None:
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    config = types.SimpleNamespace(weight_block_size=(128, 128), scale_fmt=None)
    reference = finegrained.Fp8Quantize(types.SimpleNamespace(quantization_config=config))
    weights = MATRICES[name]()

    expected = reference.convert({"a.weight": weights})
    codes, scales = BLOCK.quantize(weights)

    assert torch.equal(bits(codes), bits(expected["a.weight"]))
    assert torch.equal(bits(scales), bits(expected["a.weight_scale_inv"]))


@pytest.mark.parametrize("name", MATRICES)
def test_rows_are_rounded_as_compressed_tensors_does(name: str) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments = quantization.QuantizationArgs(num_bits=8, type="float", strategy="channel", symmetric=True)
    weights = MATRICES[name]().float()
    least, most = weights.amin(1, keepdim=True), weights.amax(1, keepdim=True)
    expected, zero = calculate_qparams(least, most, arguments)

    codes, scales = CHANNEL.quantize(weights)

    assert torch.equal(bits(scales), bits(expected))
    assert torch.equal(
        bits(codes), bits(quantize(weights, expected, zero, arguments, dtype=torch.float8_e4m3fn))
    )


@pytest.mark.parametrize("form", FORMS.values(), ids=lambda form: form.name)
def test_a_large_matrix_is_rounded_in_parts_like_a_whole_one(monkeypatch, form) -> None:
    weights = torch.randn(600, 200)
    expected = form.quantize(weights)

    monkeypatch.setattr("patchstore.quantization.forms.TOGETHER", 1)

    for one, other in zip(form.quantize(weights), expected, strict=True):
        assert torch.equal(bits(one), bits(other))


def test_a_block_at_an_edge_is_smaller_and_has_a_scale_of_its_own() -> None:
    weights = torch.randn(300, 200)

    codes, scales = BLOCK.quantize(weights)

    assert scales.shape == (3, 2)
    inner, inner_scales = BLOCK.quantize(weights[256:, 128:])
    assert torch.equal(bits(codes[256:, 128:].contiguous()), bits(inner))
    assert torch.equal(scales[2:, 1:], inner_scales)


def test_a_block_whose_largest_number_has_no_factor_counts_as_zeros() -> None:
    weights = torch.full((128, 128), 1e-38)

    codes, scales = BLOCK.quantize(weights)

    assert scales.item() == 1
    assert not bits(codes).any()


@pytest.mark.parametrize("strange", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("form", FORMS.values(), ids=lambda form: form.name)
def test_the_scale_of_a_number_that_is_not_finite_is_not_either(form, strange: float) -> None:
    weights = torch.randn(256, 128)
    weights[130, 7] = strange

    _, scales = form.quantize(weights)

    assert not scales.flatten()[130 if form is CHANNEL else 1].isfinite()
    assert scales.isfinite().sum() == scales.numel() - 1


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((256, 128), torch.bfloat16),
        pytest.param((300, 200), torch.float32, marks=pytest.mark.exhaustive),
        pytest.param((1, 1), torch.float16, marks=pytest.mark.exhaustive),
    ],
)
def test_the_kernel_rounds_as_plain_torch_does(shape: tuple[int, int], dtype: torch.dtype) -> None:
    kernel = kernels("patchstore.kernels.quantize")
    weights = (torch.randn(shape) * torch.logspace(-4, 2, shape[1])).to(dtype)
    weights[:, 0] = -0.0

    codes, scales = kernel.quantize(weights.to(DEVICE), BLOCK.block)

    expected, expected_scales = BLOCK.quantize(weights)
    assert torch.equal(bits(scales.cpu()), bits(expected_scales))
    assert torch.equal(bits(codes.cpu()), bits(expected))


@pytest.mark.timeout(1200)
def test_the_kernel_rounds_halves_to_even_codes() -> None:
    kernel = kernels("patchstore.kernels.quantize")
    every = torch.arange(128, dtype=torch.uint8)[:127].view(torch.float8_e4m3fn).float()
    halves = (every[1:] + every[:-1]) / 2
    row = torch.cat([every, halves, -every, -halves])[: 128 * 4]
    weights = torch.zeros(128, 640)
    weights[0, : len(row)] = row
    # Each block's maximum is 448, so the factor is 1.
    weights[1, ::128] = 448.0

    codes, _ = kernel.quantize(weights.to(DEVICE), BLOCK.block)

    assert torch.equal(bits(codes.cpu()), bits(weights.to(torch.float8_e4m3fn)))


@pytest.mark.timeout(1200)
def test_the_kernel_marks_the_block_of_a_number_that_is_not_finite() -> None:
    kernel = kernels("patchstore.kernels.quantize")
    weights = torch.randn(128, 384)
    weights[5, 130], weights[6, 300], weights[7, 0] = float("nan"), float("-inf"), 1e-38

    _, scales = kernel.quantize(weights.to(DEVICE), BLOCK.block)

    assert scales.isfinite().flatten().tolist() == [True, False, False]
