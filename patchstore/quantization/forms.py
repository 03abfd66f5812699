"""Forms of FP8 weights: codes in E4M3, and one scale per block or per row; in plain torch.

A code times its scale is about the weight. Both forms round as the quantizer does that usually writes such
checkpoints, bit for bit; `kernels.quantize` does the same on a GPU.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from patchstore.errors import UsageError

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of E4M3."""
SMALLEST_MAXIMUM = LARGEST / torch.finfo(torch.float32).max
"""Below this, 448 / maximum is infinite in float32."""
TOGETHER = 1 << 22
"""Elements that are rounded at a time: their temporaries in float32 take a few times 16 MiB."""


@dataclass(frozen=True, slots=True)
class Form:
    """One way to store a matrix in FP8."""

    name: str
    """As `Publisher(quantization=)` takes it."""
    suffix: str
    """Takes the place of `weight` at the end of a name, for its scales."""
    block: tuple[int, int] | None
    """Rows and columns that share a scale; None where each row has one."""

    def scale_name(self, name: str) -> str:
        """Return the name of the scales of a tensor, whose name ends in `weight`."""
        return name.removesuffix("weight") + self.suffix

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of the scales of a matrix; a block at an edge may be smaller."""
        rows, columns = shape
        if self.block is None:
            return rows, 1
        return -(-rows // self.block[0]), -(-columns // self.block[1])

    def maxima(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the largest magnitude of each block or row, float32, in the shape of the scales."""
        if self.block is None:
            return weights.float().abs().amax(dim=1, keepdim=True)
        return _blocks(weights.float(), self.block).abs().amax(dim=(1, 3))

    def quantize(
        self, weights: torch.Tensor, maxima: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Round a matrix.

        `fp8-block`: transformers' `Fp8Quantize`. The scale of a block is 1 / (448 / maximum), and a code is
        weight * (448 / maximum). A block of zeros has scale 1. There is one difference: a block whose maximum
        is below 1.4e-36 counts as zeros, where the reference computes NaN.

        `fp8-channel`: compressed-tensors, for weights in float32. The scale of a row is maximum / 448, and a
        code is weight / scale. A row of zeros has the scale 2**-23.

        Args:
            weights: [rows, columns], floating-point.
            maxima: float32, in the shape of the scales: those of whole blocks or rows, where `weights` has
                only parts of some.

        Returns:
            The codes, E4M3 [rows, columns]; the scales, float32 in the shape of `scale_shape`. Both are on
            the device of the weights. A number that is not finite makes the scale infinite or NaN.
        """
        weights = weights.detach()
        codes = torch.empty(weights.shape, dtype=E4M3, device=weights.device)
        shape = self.scale_shape(tuple(weights.shape))
        scales = torch.empty(shape, dtype=torch.float32, device=weights.device)
        if not codes.numel():
            return codes, scales
        step = 1 if self.block is None else self.block[0]
        rows = max(step, TOGETHER // weights.shape[1] // step * step)
        for first in range(0, len(weights), rows):
            given = weights[first : first + rows].float()
            at = slice(first // step, -(-(first + len(given)) // step))
            most = self.maxima(given) if maxima is None else maxima[at]
            operands, scales[at] = self.operands(most)
            # To a row the reference adds a zero point of 0, which makes -0.0 to 0.0.
            scaled = _spread(given, operands, self.block) if self.block else given / operands + 0.0
            codes[first : first + rows] = scaled.clamp(-LARGEST, LARGEST).to(E4M3)
        return codes, scales

    def operands(self, maxima: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what weights are multiplied by (blocks) or divided by (rows), and the scales."""
        if self.block is None:
            scales = _row_scales(maxima)
            return scales, scales
        factors = block_factors(maxima)
        return factors, torch.where(maxima.isfinite(), factors.reciprocal(), maxima)

    def block_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return how many rows and columns of a matrix share a scale."""
        return (1, max(shape[1], 1)) if self.block is None else self.block

    def part(self, weights: torch.Tensor, start: tuple[int, ...]) -> torch.Tensor:
        """Return a part of a matrix with zeros before it, so that it begins where a block does."""
        if self.block is None:
            return weights
        above, left = start[0] % self.block[0], start[1] % self.block[1]
        return torch.nn.functional.pad(weights, (left, 0, above, 0)) if above or left else weights

    def config(self, kept: list[str]) -> dict[str, Any]:
        """Return the `quantization_config` of a checkpoint in this form, where the modules `kept` are not."""
        if self.block is not None:
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": list(self.block),
                "modules_to_not_convert": kept,
            }
        of_weights = {"num_bits": 8, "type": "float", "symmetric": True}
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {**of_weights, "strategy": "channel", "dynamic": False},
                    "input_activations": {**of_weights, "strategy": "token", "dynamic": True},
                }
            },
            "ignore": kept,
        }


FORMS = {
    form.name: form
    for form in (
        Form("fp8-block", "weight_scale_inv", (128, 128)),
        Form("fp8-channel", "weight_scale", None),
    )
}
CHOICES = tuple(FORMS)


def form_of(name: object) -> Form:
    """Return a form by its name."""
    if not isinstance(name, str) or name not in FORMS:
        raise UsageError(f"quantization must be None or one of {', '.join(CHOICES)}, not {name!r}")
    return FORMS[name]


def block_factors(maxima: torch.Tensor) -> torch.Tensor:
    """Return what weights of blocks with these maxima are multiplied by, float32."""
    # A block that is not finite keeps finite factors; `Publisher` refuses its scale.
    usable = (maxima > SMALLEST_MAXIMUM) & maxima.isfinite()
    # The reference writes 448 / maxima, which torch computes so: it rounds twice.
    return torch.where(usable, torch.where(usable, maxima, 1.0).reciprocal() * LARGEST, 1.0)


def _row_scales(maxima: torch.Tensor) -> torch.Tensor:
    # By a tensor: a GPU multiplies by 1 / 448 otherwise, which rounds twice.
    scales = maxima / maxima.new_full((), LARGEST)
    return torch.where(scales == 0, torch.finfo(torch.float32).eps, scales)


def _blocks(weights: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return a matrix as [block rows, rows of a block, block columns, columns of a block], zeros at edges."""
    rows, columns = weights.shape
    down, across = -rows % block[0], -columns % block[1]
    if down or across:
        weights = torch.nn.functional.pad(weights, (0, across, 0, down))
    return weights.view(-1, block[0], (columns + across) // block[1], block[1])


def _spread(weights: torch.Tensor, factors: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return each element times the factor of its block."""
    rows, columns = weights.shape
    found = _blocks(weights, block) * factors[:, None, :, None]
    return found.view(found.shape[0] * block[0], -1)[:rows, :columns]


class Matrix(NamedTuple):
    """Weights, and where they lie in the blocks that share a scale."""

    weights: torch.Tensor
    """[rows, columns] in bf16, fp16 or fp32, with any strides."""
    served: torch.dtype
    """bf16, fp16 or fp32: what the weights are rounded to before they are quantized."""
    above: int = 0
    """Rows of its first blocks that are not part of it, where it is a part of a larger matrix."""
    left: int = 0
    """The same of columns."""

    @property
    def is_aligned(self) -> bool:
        """Whether 8 elements from a multiple of 8 on are one run of one block, aligned to 16 bytes."""
        row_stride, column_stride = self.weights.stride()
        sizes = self.weights.shape[1], row_stride, self.left
        return column_stride == 1 and not any(n % 8 for n in sizes) and self.weights.data_ptr() % 16 == 0

    @property
    def place(self) -> tuple[object, ...]:
        """Where and what the weights are, to be compared with those of another time."""
        weights = self.weights
        where = weights.data_ptr(), tuple(weights.shape), weights.stride()
        return (*where, weights.dtype, self.served, self.above, self.left)

    def groups(self, block: tuple[int, int] | None) -> tuple[int, int]:
        """Return how many blocks it touches, down and across; rows and 1 where each row has a scale."""
        rows, columns = self.weights.shape
        if block is None:
            return rows, 1
        return -(-(rows + self.above) // block[0]), -(-(columns + self.left) // block[1])
