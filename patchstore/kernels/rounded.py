"""Compare matrices with a snapshot of their FP8 codes, all matrices at once; the codes are never stored.

`measure` finds the largest magnitude of each block or row, which gives the scales. `compare` then rounds a
word of codes at a time, compares it with the snapshot, and keeps it if it changed, as `kernels.compare` does.
Both read the weights where the trainer has them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from patchstore.kernels.compare import WORD, Found, bfloat16_of, keep, overlap, within
from patchstore.kernels.quantize import converts, e4m3, words_of
from patchstore.quantization.forms import Matrix

_WORD = tl.constexpr(WORD)
_FIELDS = tl.constexpr(9)
"""Of a row of the table of matrices; see `plan`."""
_SIZE = tl.constexpr(0x7FFFFFFF)
_INFINITE = tl.constexpr(0x7F800000)
"""Bits of float32."""
_CHUNK = tl.constexpr(1024)
"""Elements of a row that a program measures at a time."""
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
"""Of weights."""


@triton.jit
def _as_served(given, GIVEN: tl.constexpr, SERVED: tl.constexpr):
    """Round weights to the dtype in which they would be served; float32."""
    if GIVEN != SERVED and SERVED == tl.bfloat16:  # noqa: SIM300 -- these are no constants
        wide = given.to(tl.float32).to(tl.int32, bitcast=True)
        found = (bfloat16_of(wide) << 16).to(tl.float32, bitcast=True)
    else:
        found = given.to(SERVED).to(tl.float32)
    return found


@triton.jit(do_not_specialize=["first_group"])
def _measure(
    matrices, owners, first_group, maxima,
    GIVEN: tl.constexpr, SERVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write the largest magnitude of a block, or of a row where COLUMNS is 0; NaN if one is not finite."""
    group = first_group + tl.program_id(0)
    matrix = matrices + tl.load(owners + group).to(tl.int64) * _FIELDS
    source = tl.load(matrix).to(tl.pointer_type(GIVEN))
    rows, columns = tl.load(matrix + 1), tl.load(matrix + 2)
    row_stride, column_stride = tl.load(matrix + 3), tl.load(matrix + 4)
    index = group - tl.load(matrix + 7)
    if ALIGNED:
        # So that 16 bytes are read at once.
        source = tl.multiple_of(source, 16)
        columns = tl.multiple_of(columns, 8)
        row_stride = tl.multiple_of(row_stride, 8)
        column_stride = 1
    # Without their signs, bits of numbers are ordered as the numbers are, and those of NaN are above all.
    if COLUMNS == 0:
        most = tl.zeros((_CHUNK,), tl.int32)
        source += index * row_stride
        # Groups between matrices have no row.
        if index < rows:
            for begin in range(0, columns, _CHUNK):
                column = begin + tl.arange(0, _CHUNK)
                given = tl.load(source + column * column_stride, mask=column < columns, other=0.0)
                most = tl.maximum(most, _as_served(given, GIVEN, SERVED).to(tl.int32, bitcast=True) & _SIZE)
        largest = tl.max(most, axis=0)
    else:
        across = tl.load(matrix + 8)
        row = index // across * ROWS - tl.load(matrix + 5) + tl.arange(0, ROWS)
        left = tl.load(matrix + 6)
        if ALIGNED:
            left = tl.multiple_of(left, 8)
        column = index % across * COLUMNS - left + tl.arange(0, COLUMNS)
        inside = ((row >= 0) & (row < rows))[:, None] & ((column >= 0) & (column < columns))[None, :]
        at = row[:, None] * row_stride + column[None, :] * column_stride
        given = tl.load(source + at, mask=inside, other=0.0)
        size = _as_served(given, GIVEN, SERVED).to(tl.int32, bitcast=True) & _SIZE
        largest = tl.max(tl.max(size, axis=1), axis=0)
    found = tl.where(largest < _INFINITE, largest.to(tl.float32, bitcast=True), float("nan"))
    tl.store(maxima + group, found)


@triton.jit
def _scaled(given, operand, COLUMNS: tl.constexpr):
    """Scale weights to the range of E4M3; `operand` is what `Form.operands` returns."""
    if COLUMNS == 0:
        found = tl.div_rn(given, operand) + 0.0
    else:
        found = given * operand
    return found


@triton.jit(do_not_specialize=["first_tile", "capacity"])
def _compare(
    matrices, matrix_of, operands,
    sizes, starts, owners, indices, picked, first_tile, snapshot,
    places, new_words, old_words, offsets, counts, cursor, capacity,
    TILE: tl.constexpr, WHOLE: tl.constexpr,
    GIVEN: tl.constexpr, SERVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    CONVERTS: tl.constexpr,
):  # fmt: skip
    """Compare the codes of a tile of TILE words with the snapshot, as `kernels.compare._compare` does."""
    tile = first_tile + tl.program_id(0)
    if not WHOLE:
        tile = tl.load(picked + tile)
    owner = tl.load(owners + tile)
    # A code is one byte, so that this counts elements too.
    at = tl.load(indices + tile).to(tl.int64) * (TILE * _WORD)
    left_over = tl.load(sizes + owner) - at
    if not WHOLE or left_over >= TILE * _WORD:
        matrix = matrices + tl.load(matrix_of + owner).to(tl.int64) * _FIELDS
        source = tl.load(matrix).to(tl.pointer_type(GIVEN))
        columns = tl.load(matrix + 2)
        row_stride, column_stride = tl.load(matrix + 3), tl.load(matrix + 4)
        above, left = tl.load(matrix + 5).to(tl.int32), tl.load(matrix + 6).to(tl.int32)
        group, across = tl.load(matrix + 7).to(tl.int32), tl.load(matrix + 8).to(tl.int32)
        first_row = (at // columns).to(tl.int32)
        first_column = (at - first_row * columns).to(tl.int32)
        width = columns.to(tl.int32)
        words = tl.arange(0, TILE)
        held = (snapshot + tl.load(starts + owner) + at).to(tl.pointer_type(tl.int64))
        held = tl.multiple_of(held, _WORD)
        if WHOLE:
            along = first_column + words * _WORD
            down = along // width
            column = along - down * width
            row = first_row + down
            if COLUMNS == 0:
                which = group + row
            else:
                which = group + (row + above) // ROWS * across + (column + left) // COLUMNS
            operand = tl.load(operands + which)
            begins = tl.multiple_of(row.to(tl.int64) * row_stride + column, 8)
            eight = tl.arange(0, 8)[None, :]
            given = tl.load(tl.multiple_of(source, 16) + (begins[:, None] + eight))
            scaled = _scaled(_as_served(given, GIVEN, SERVED), operand[:, None], COLUMNS)
            new = words_of(scaled, TILE, CONVERTS)
            old = tl.load(held + words)
        else:
            new = tl.zeros((TILE,), tl.int64)
            for k in tl.static_range(8):
                inside = words * _WORD + k < left_over
                along = first_column + words * _WORD + k
                row = first_row + along // width
                column = along % width
                if COLUMNS == 0:
                    which = group + row
                else:
                    which = group + (row + above) // ROWS * across + (column + left) // COLUMNS
                operand = tl.load(operands + which, mask=inside, other=1.0)
                element = row.to(tl.int64) * row_stride + column * column_stride
                given = tl.load(source + element, mask=inside, other=0.0)
                code = e4m3(_scaled(_as_served(given, GIVEN, SERVED), operand, COLUMNS))
                new |= tl.where(inside, code.to(tl.int64), 0) << (8 * k)
            # The snapshot is padded with zeros up to whole words.
            old = tl.load(held + words, mask=words * _WORD < left_over, other=0)
        keep(
            tile, words, new, old,
            places, new_words, old_words, offsets, counts, cursor, capacity,
        )  # fmt: skip


class _Launch(NamedTuple):
    """Matrices of one kind, which follow each other in the table."""

    given: torch.dtype
    served: torch.dtype
    is_aligned: bool
    groups: range
    fast: tuple[range, ...]
    """Tiles of 8 elements a word, but for those cut short."""
    slow: range
    """Places in `Rounding.slow` of all the other tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """How matrices are cut into groups that share a scale, and where their weights are; on the device."""

    block: tuple[int, int] | None
    firsts: tuple[int, ...]
    """The first group of each matrix, as given."""
    shapes: tuple[tuple[int, int], ...]
    """Groups of each matrix, down and across."""
    sizes: list[int]
    """Groups of each row of the table, and those after it that belong to none; `num_groups` in all."""
    pieces: tuple[int, ...]
    """Which of `sizes` each matrix, as given, has."""
    num_groups: int
    table: torch.Tensor
    """int64 [num_matrices, 9]."""
    owners: torch.Tensor
    """int32 [num_groups]: the row in the table."""
    matrix_of: torch.Tensor
    """int32 [num_tensors]: the row in the table, of tensors that are codes."""
    slow: list[int]
    """Tiles that are read an element at a time, ascending within each of `launches`."""
    picked: torch.Tensor
    """int32: `slow`."""
    launches: tuple[_Launch, ...]


WARPS = 4
ALIGNMENT = 64
"""The groups of a matrix begin at a multiple of this, so that its scales can be compared as words."""


def plan(
    found: Found, matrices: Sequence[tuple[int | None, Matrix]], block: tuple[int, int] | None
) -> Rounding:
    """Make the tables for matrices, on the device of `found`.

    Each has the number of its codes in `found.tiles`; None if only its scales are wanted. Without a `block`
    each row has a scale.
    """
    tiles, device = found.tiles, found.cursor.device

    def kind(number: int) -> tuple[str, str, bool]:
        matrix = matrices[number][1]
        return str(matrix.weights.dtype), str(matrix.served), matrix.is_aligned

    order = sorted(range(len(matrices)), key=lambda number: (kind(number), number))
    shapes = [matrix.groups(block) for _, matrix in matrices]
    sizes = [-(-prod(shapes[number]) // ALIGNMENT) * ALIGNMENT for number in order]
    begins = list(accumulate(sizes, initial=0))
    rows, matrix_of = [], [0] * len(tiles.num_bytes)
    picked: list[int] = []
    launches: list[_Launch] = []
    for place, number in enumerate(order):
        tensor, matrix = matrices[number]
        weights = matrix.weights
        given = (weights.data_ptr(), *weights.shape, *weights.stride(), matrix.above, matrix.left)
        rows.append((*given, begins[place], shapes[number][1]))
        if tensor is not None:
            matrix_of[tensor] = place
    place = 0
    while place < len(order):
        end = place
        while end < len(order) and kind(order[end]) == kind(order[place]):
            end += 1
        tensors = sorted(t for number in order[place:end] if (t := matrices[number][0]) is not None)
        matrix = matrices[order[place]][1]
        first = len(picked)
        for tensor in tensors:
            its = range(tiles.first_tiles[tensor], tiles.first_tiles[tensor + 1])
            if not matrix.is_aligned:
                picked.extend(its)
            elif tiles.num_bytes[tensor] % (tiles.words * WORD):
                picked.append(its[-1])
        launches.append(
            _Launch(
                given=matrix.weights.dtype,
                served=matrix.served,
                is_aligned=matrix.is_aligned,
                groups=range(begins[place], begins[end]),
                fast=tuple(_runs(tiles.first_tiles, tensors)) if matrix.is_aligned else (),
                slow=range(first, len(picked)),
            )
        )
        place = end

    def table(values: Sequence[object], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device="cpu").to(device)

    owners = torch.repeat_interleave(
        torch.arange(len(order), device="cpu"), torch.tensor(sizes, dtype=torch.int64, device="cpu")
    )
    firsts = dict(zip(order, begins, strict=False))
    places = {number: place for place, number in enumerate(order)}
    own = [prod(shapes[number]) for number in order]
    return Rounding(
        block=block,
        firsts=tuple(firsts[number] for number in range(len(matrices))),
        shapes=tuple(shapes),
        sizes=[each for size, its in zip(sizes, own, strict=True) for each in (its, size - its)],
        pieces=tuple(2 * places[number] for number in range(len(matrices))),
        num_groups=begins[-1],
        table=table(rows, torch.int64).view(len(rows), 9),
        owners=owners.to(device, torch.int32),
        matrix_of=table(matrix_of, torch.int32),
        slow=picked,
        picked=table(picked, torch.int32),
        launches=tuple(launches),
    )


def _runs(first_tiles: Sequence[int], tensors: Iterable[int]) -> list[range]:
    """Return the tiles of tensors, those that follow each other together."""
    found: list[range] = []
    for tensor in tensors:
        tiles = range(first_tiles[tensor], first_tiles[tensor + 1])
        if found and found[-1].stop == tiles.start:
            found[-1] = range(found[-1].start, tiles.stop)
        else:
            found.append(tiles)
    return found


def measure(rounding: Rounding, maxima: torch.Tensor) -> None:
    """Write the largest magnitude of each block or row, float32; one launch for each kind of matrix.

    NaN where a weight is not finite, and 0 between matrices.
    """
    rows, columns = rounding.block or (1, 0)
    for each in rounding.launches:
        if each.groups:
            _measure[(len(each.groups),)](
                *(rounding.table, rounding.owners, each.groups.start, maxima),
                GIVEN=DTYPES[each.given],
                SERVED=DTYPES[each.served],
                ROWS=rows,
                COLUMNS=columns,
                ALIGNED=each.is_aligned,
                num_warps=8 if columns else 4,
            )


def compare(rounding: Rounding, found: Found, operands: torch.Tensor, snapshot: int, some: range) -> None:
    """Add to `found` how codes differ from the snapshot, which stays as it is, as `kernels.compare.compare`.

    At most two launches for each kind of matrix whose codes follow each other; `operands` are those of
    `Form.operands`, and `some` the tiles to compare.
    """
    tiles = found.tiles
    rows, columns = rounding.block or (1, 0)
    for each in rounding.launches:
        fast = [overlap(its, some) for its in each.fast]
        slow = within(rounding.slow, some, each.slow)
        for chosen, whole in (*((its, True) for its in fast), (slow, False)):
            if len(chosen) == 0:
                continue
            _compare[(len(chosen),)](
                *(rounding.table, rounding.matrix_of, operands),
                *(tiles.sizes, tiles.starts, tiles.owners, tiles.indices, rounding.picked),
                *(chosen.start, snapshot, found.places, found.new_words, found.old_words),
                *(found.offsets, found.counts, found.cursor, found.capacity),
                TILE=tiles.words,
                WHOLE=whole,
                GIVEN=DTYPES[each.given],
                SERVED=DTYPES[each.served],
                ROWS=rows,
                COLUMNS=columns,
                CONVERTS=converts(found.cursor.device),
                num_warps=WARPS,
            )


def warm_up(
    found: Found,
    tensor: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    block: tuple[int, int] | None,
    snapshot: int,
) -> None:
    """Compile the kernels, by comparing one tile of codes with zeros, and forget what was found."""
    converts(found.cursor.device)
    tile = found.tiles.first_tiles[tensor]
    # At least as large as a tile.
    weights = torch.zeros(found.tiles.words, WORD, dtype=dtypes[0], device=found.cursor.device)
    rounding = plan(found, [(tensor, Matrix(weights, dtypes[1]))], block)
    (launch,) = rounding.launches
    rounding = replace(
        rounding,
        slow=[tile],
        picked=torch.full_like(rounding.owners[:1], tile),
        launches=(launch._replace(fast=(range(tile, tile + 1),), slow=range(1)),),
    )
    maxima = torch.zeros(rounding.num_groups, dtype=torch.float32, device=weights.device)
    measure(rounding, maxima)
    compare(rounding, found, maxima + 1, snapshot, range(found.tiles.num_tiles))
    found.clear()
