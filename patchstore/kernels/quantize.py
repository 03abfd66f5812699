"""Round matrices to FP8 in blocks, in one pass over their memory; see `quantization.forms`."""

import torch
import triton
import triton.language as tl

from patchstore.kernels.e4m3 import e4m3
from patchstore.quantization.forms import E4M3, LARGEST, SMALLEST_MAXIMUM

_LARGEST = tl.constexpr(LARGEST)
_SMALLEST = tl.constexpr(SMALLEST_MAXIMUM)


@triton.jit
def _quantize(
    weights, codes, scales, rows, columns, scale_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One block: its largest magnitude, its scale, its codes."""
    down = tl.program_id(0) // scale_columns
    across = tl.program_id(0) % scale_columns
    row = down * ROWS + tl.arange(0, ROWS)
    column = across * COLUMNS + tl.arange(0, COLUMNS)
    at = row[:, None].to(tl.int64) * columns + column[None, :]
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    given = tl.load(weights + at, mask=inside, other=0.0).to(tl.float32)
    size = tl.abs(given)
    # The maximum of the hardware passes over NaN.
    most = tl.max(tl.max(size, axis=1), axis=0)
    is_finite = size < float("inf")
    strange = tl.max(tl.max((is_finite == 0).to(tl.int32), axis=1), axis=0)
    usable = (most > _SMALLEST) & (strange == 0)
    factor = tl.where(usable, tl.div_rn(1.0, tl.where(usable, most, 1.0)) * _LARGEST, 1.0)
    scale = tl.where(strange != 0, float("nan"), tl.div_rn(1.0, factor))
    tl.store(scales + tl.program_id(0), scale)
    tl.store(codes + at, e4m3(given * factor), mask=inside)


def quantize(weights: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a matrix in blocks, as `Form.quantize` does.

    Args:
        weights: [rows, columns] in bf16, fp16 or fp32.

    Returns:
        As `Form.quantize`. The scale of a block that is not finite is NaN, and its codes mean nothing.
    """
    weights = weights.detach().contiguous()
    rows, columns = weights.shape
    shape = -(-rows // block[0]), -(-columns // block[1])
    codes = torch.empty(weights.shape, dtype=E4M3, device=weights.device)
    scales = torch.empty(shape, dtype=torch.float32, device=weights.device)
    if codes.numel():
        _quantize[shape[0] * shape[1],](
            *(weights, codes.view(torch.uint8), scales, rows, columns, shape[1]),
            ROWS=block[0],
            COLUMNS=block[1],
            num_warps=8,
        )
    return codes, scales
