"""Parts that encoding `context` codes, one by one, as tests make and damage them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from patchstore.bucket.records import TensorSpec
from patchstore.codec.context import Coded, Cuts, RowSets, Tiling, decode_all, encode_all, tiling
from patchstore.codec.context.rows import Sets

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class CodedPart:
    """The change of one part of a tensor."""

    tiling: Tiling
    lo: int
    rows: Array
    """uint8 [K, 3]"""
    lengths: Array
    data: Array
    number: int = 0
    """Place of the tensor in the schema."""
    key: str = "payload"


def parts_of(coded: Coded) -> list[CodedPart]:
    sets = coded.sets.at(coded.row_sets)
    return [
        CodedPart(
            tiling=coded.cuts[at],
            lo=int(sets.lo[at]),
            rows=sets.rows[at, : sets.nums[at]],
            lengths=coded.lengths[first:end],
            data=coded.data[begin:stop],
            number=int(coded.numbers[at]),
            key=coded.key(at),
        )
        for at, ((first, end), (begin, stop)) in enumerate(
            zip(pairwise(coded.tiles_at), pairwise(coded.bytes_at), strict=True)
        )
    ]


def coded_of(parts: Sequence[CodedPart]) -> Coded:
    sets = Sets.of(
        np.array([part.lo for part in parts]),
        np.array([len(part.rows) for part in parts]),
        np.concatenate([part.rows for part in parts]),
    )
    lengths, data = (np.concatenate(each) for each in zip(*((p.lengths, p.data) for p in parts), strict=True))
    numbers, every = np.array([part.number for part in parts]), np.arange(len(parts))
    keys = [part.key for part in parts]
    return Coded(numbers, Cuts.of(part.tiling for part in parts), sets, every, lengths, data, keys, every)


def encode(spec: TensorSpec, old: Array, positions: Array, new: Array, number: int = 0) -> CodedPart:
    cuts, counts = Cuts.of([tiling(spec.shape)]), np.array([len(positions)])
    numbers = np.array([number])
    return parts_of(encode_all(spec.dtype, numbers, cuts, old, counts, positions, new, RowSets()))[0]


def decode(spec: TensorSpec, part: CodedPart, old: Array, tiles: Array | None = None) -> tuple[Array, Array]:
    """The changed positions, ascending, and their new bits; `old` is of the whole tensor."""
    specs, coded = {part.number: spec}, coded_of([part])
    some = None if tiles is None else [tiles]
    _, positions, new = decode_all(specs, coded, part.tiling.of_whole(old), some)  # type: ignore[arg-type]
    return positions, new
