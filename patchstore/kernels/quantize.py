"""Round to FP8: float32 to codes in E4M3, and matrices in blocks, in one pass over their memory.

See `quantization.forms`. Codes are rounded by the device's own instruction, where that rounds as torch does.
"""

import logging
from functools import cache

import torch
import triton
import triton.language as tl

from patchstore.quantization.forms import E4M3, LARGEST, SMALLEST_MAXIMUM

logger = logging.getLogger(__name__)

_LARGEST = tl.constexpr(LARGEST)
_CONVERT = tl.constexpr("""{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}""")
_SMALLEST = tl.constexpr(SMALLEST_MAXIMUM)


@triton.jit
def e4m3(scaled):
    """Round float32 to the nearest code, ties to even, in whole numbers: not every GPU converts to E4M3."""
    bits = scaled.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(tl.abs(scaled), _LARGEST)
    wide = size.to(tl.int32, bitcast=True)
    # 3 of 23 bits of the fraction are kept, and the exponent's bias is 7 in place of 127.
    normal = ((wide + 0x7FFFF + ((wide >> 20) & 1)) >> 20) - (120 << 3)
    # Beside 2**14 a float32 has steps of 2**-9, as codes below 2**-6 have.
    small = (size + 16384.0).to(tl.int32, bitcast=True) & 0xFF
    return (tl.where(size < 0.015625, small, normal) | sign).to(tl.uint8)


@triton.jit
def words_of(scaled, TILE: tl.constexpr, CONVERTS: tl.constexpr):
    """Round [TILE, 8] numbers to codes, and return each 8 of them as an int64."""
    if CONVERTS:
        even, odd = tl.split(tl.reshape(scaled, (TILE, 2, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        halves = tl.inline_asm_elementwise(
            _CONVERT, "=r,f,f,f,f", [first, second, third, fourth], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        shifted = e4m3(scaled).to(tl.int32) << (tl.arange(0, 8) % 4 * 8)[None, :]
        halves = tl.sum(tl.reshape(shifted, (TILE, 2, 4)), axis=2)
    low, high = tl.split(halves)
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _round(numbers, words, TILE: tl.constexpr, CONVERTS: tl.constexpr):
    nth = tl.program_id(0) * TILE + tl.arange(0, TILE)
    given = tl.load(numbers + (nth[:, None] * 8 + tl.arange(0, 8)[None, :]))
    tl.store(words + nth, words_of(given, TILE, CONVERTS))


def rounds_exactly(device: torch.device, *, instruction: bool) -> bool:
    """Whether numbers become the codes that torch makes of them on the CPU.

    Tried with all finite numbers of bf16, and with the numbers half between two codes and beside those.

    Args:
        instruction: whether the device's own is tried, or the way without it.
    """
    every = (
        torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cpu")
        .to(torch.int16)
        .view(torch.bfloat16)
        .float()
    )
    codes = torch.arange(0, 127, dtype=torch.uint8, device="cpu").view(E4M3).float()
    middles = (codes[1:] + codes[:-1]) / 2
    beside = [middles.nextafter(torch.full_like(middles, end)) for end in (0.0, 1e9)]
    numbers = torch.cat(
        [every[every.isfinite()], *(sign * each for sign in (1, -1) for each in (middles, *beside))]
    )
    tile = 128
    room = torch.zeros(-(-len(numbers) // (8 * tile)) * 8 * tile, dtype=torch.float32, device="cpu")
    room[: len(numbers)] = numbers
    words = torch.zeros(len(room) // 8, dtype=torch.int64, device=device)
    _round[(len(words) // tile,)](room.to(device), words, TILE=tile, CONVERTS=instruction)
    expected = room.clamp(-LARGEST, LARGEST).to(E4M3).view(torch.int64)
    return torch.equal(words.cpu(), expected)


@cache
def converts(device: torch.device) -> bool:
    """Whether a device rounds to E4M3 by itself, as Ada and Hopper do, and as torch does."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return False
    try:
        is_exact = rounds_exactly(device, instruction=True)
    except Exception as exc:  # noqa: BLE001 -- whatever is wrong, there is another way
        logger.warning("%s cannot be told to round to FP8, so kernels do that: %s", device, exc)
        return False
    if not is_exact:
        logger.warning("%s does not round to FP8 as torch does, so kernels do that", device)
    return is_exact


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
    """Round a matrix in blocks, as `Form.quantize` does. The scale of a block that is not finite is NaN."""
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
