"""Parts of tensors: where their elements stand, and which boxes they are."""

from itertools import product

import numpy as np
import pytest
import torch

from patchstore.bucket.records import Box, Part, Schema, TensorSpec, view_of
from patchstore.codec.part_table import PartTable
from patchstore.tensors import parts
from tests.support.sharded import table_of


def spec(*shape: int) -> TensorSpec:
    return TensorSpec(name="a", dtype="BF16", shape=shape)


def ranges(side: int) -> list[tuple[int, int]]:
    return [(start, size) for start in range(side) for size in range(side - start + 1)]


@pytest.mark.parametrize(
    "shape", [(), (1,), (5,), (3, 4), (1, 4), (2, 3, 2), (2, 2, 1, 3), (3, 0), (2, 1, 2, 2, 2)]
)
def test_every_part_of_a_shape(shape: tuple[int, ...]) -> None:
    whole = torch.arange(max(int(np.prod(shape)), 0)).reshape(shape)
    levels, rows, cols = view_of(shape)
    keys = set()
    for each in product(*(ranges(side)[:: 1 + len(shape) // 4] for side in shape)):
        part = Part(spec(*shape), tuple(start for start, _ in each), tuple(size for _, size in each))
        wanted = parts.of_whole(part, whole).reshape(-1)
        assert part.num_elements == len(wanted)
        assert part.is_whole == (part.size == shape)
        assert part.key not in keys
        keys.add(part.key)
        assert parts.positions(part, torch.arange(len(wanted), dtype=torch.int32)).tolist() == wanted.tolist()
        assert part.positions(np.arange(len(wanted))).tolist() == wanted.tolist()
        if part.lines is not None:
            first, length, distance = part.lines
            each_at = np.arange(len(wanted))
            assert (first + each_at // length * distance + each_at % length).tolist() == wanted.tolist()
        else:
            assert len(shape) > 2
        if len(wanted) and part.box is not None:
            box = part.box
            view = whole.reshape(levels, rows, cols)[
                box.level : box.level + box.levels, box.row : box.row + box.rows, box.col : box.col + box.cols
            ]
            assert view.reshape(-1).tolist() == wanted.tolist()
        elif len(wanted):
            assert len(shape) > 3  # two leading dimensions are cut


def test_leading_dimensions() -> None:
    assert Part(spec(4, 2, 6, 8), (1, 0, 2, 0), (2, 2, 3, 8)).box == Box(2, 4, 2, 3, 0, 8)
    assert Part(spec(4, 2, 6, 8), (1, 1, 0, 0), (1, 1, 6, 8)).box == Box(3, 1, 0, 6, 0, 8)
    assert Part(spec(4, 2, 6, 8), (1, 1, 0, 0), (2, 1, 6, 8)).box is None


def test_keys() -> None:
    assert Part.whole(spec(4, 2)).key == "a"
    assert Part(spec(4, 2), (1, 0), (2, 2)).key == "a\t1+2,0+2"
    with pytest.raises(ValueError, match="no part"):
        Part(spec(4, 2), (3, 0), (2, 2))


def test_boxes_that_share_an_element_overlap() -> None:
    box = Box(1, 2, 3, 4, 5, 6)
    assert box.overlaps(box)
    assert box.overlaps(Box(2, 1, 6, 1, 10, 1))
    for other in (Box(3, 1, 3, 4, 5, 6), Box(1, 2, 7, 4, 5, 6), Box(1, 2, 3, 4, 0, 5)):
        assert not box.overlaps(other)
        assert not other.overlaps(box)


def test_columns_of_a_table_are_what_each_of_its_parts_says() -> None:
    shapes = {"a": (4, 6), "b": (4, 6), "c": (), "d": (2, 2, 1, 3), "e": (3, 0), "f": (2, 3, 4, 5)}
    cuts = {
        "b": [((0, 0), (3, 6)), ((3, 0), (1, 2)), ((3, 2), (1, 4)), ((4, 6), (0, 0))],
        "f": [((0, 0, 0, 0), (2, 2, 4, 5)), ((0, 2, 0, 0), (1, 1, 2, 5)), ((0, 2, 2, 0), (2, 1, 2, 5))],
    }
    schema = Schema(
        tensors=tuple(
            TensorSpec(name=name, dtype="I64" if name == "d" else "BF16", shape=shape)
            for name, shape in shapes.items()
        )
    )
    held = [Part.whole(each) for each in schema.tensors if each.name not in cuts]
    held += [Part(schema.by_name()[name], *cut) for name, its in cuts.items() for cut in its]
    table = table_of(schema, held)
    assert sorted(part.key for part in table.parts) == sorted(part.key for part in held)
    boxes = [part.box for part in table.parts]
    assert table.sizes.tolist() == [part.num_elements for part in table.parts]
    assert table.whole_sizes.tolist() == [part.spec.num_elements for part in table.parts]
    assert table.widths.tolist() == [8 if part.spec.dtype == "I64" else 2 for part in table.parts]
    assert table.is_whole.tolist() == [part.is_whole for part in table.parts]
    assert table.lines.tolist() == [list(part.lines or (-1, 1, 0)) for part in table.parts]
    assert table.runs.tolist() == [-1 if part.run is None else part.run for part in table.parts]
    starts = [(0, 0, 0) if box is None else (box.level, box.row, box.col) for box in boxes]
    keys = [(owner, *start) for owner, start in zip(table.owners.tolist(), starts, strict=True)]
    assert [keys[number] for number in table.ranks.argsort()] == sorted(keys)
    ways = [(part.spec.shape, part.start, part.size) for part in table.parts]
    assert [ways[one] == ways[other] for one in range(len(ways)) for other in range(len(ways))] == [
        one == other for one in table.alike for other in table.alike
    ]


def test_a_table_without_parts() -> None:
    table = PartTable([], [])
    columns = (table.sizes, table.alike, table.runs, table.ranks, table.is_whole, table.is_scattered)
    assert [column.shape for column in columns] == [(0,)] * len(columns)
    assert (table.lines.shape, table.is_whole.dtype) == ((0, 3), np.bool_)
