"""Versions of several payloads, each of some parts of the tensors: they mean what one payload means."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from patchstore import Publisher
from patchstore.bucket import history
from patchstore.bucket.records import Box, Part, Schema, TensorSpec
from patchstore.bucket.state_sums import by_name
from patchstore.codec.context import tiling
from patchstore.codec.delta_file import Content
from patchstore.errors import CorruptObject
from patchstore.read.deltas import check_boxes
from patchstore.read.replay import verify
from patchstore.stores.memory import MemoryStore
from patchstore.tensors import state_digest
from patchstore.tensors.bits import bits, spec_of
from tests.support import sharded
from tests.support.coded import CodedPart, coded_of
from tests.support.weights import assert_same_bits, newest

SHAPES = {
    "bf16": (96, 80),
    "norm": (64,),
    "odd": (50, 31),
    "experts": (5, 48, 32),
    "scalar": (),
    "nothing": (0, 4),
    "pairs": (2, 3, 16, 8),
    "wide": (3, 70000),
}
DTYPES = {"f16": torch.float16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "f32": torch.float32}


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    found = {
        name: (0.02 * torch.randn(shape, generator=random)).to(torch.bfloat16)
        for name, shape in SHAPES.items()
    }
    return found | {
        name: (0.02 * torch.randn((48, 33), generator=random)).to(dtype) for name, dtype in DTYPES.items()
    }


def moved(old: dict[str, torch.Tensor], density: float, seed: int = 1) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    new = {name: tensor.clone() for name, tensor in old.items()}
    for tensor in new.values():
        flat = bits(tensor)
        chosen = torch.rand(len(flat), generator=random) < density
        steps = torch.randint(1, 4, (len(flat),), generator=random).to(flat.dtype)
        flat[chosen] = (flat + steps)[chosen]
    return new


def uneven(spec: TensorSpec, num: int) -> list[Part]:
    dim = len(spec.shape) // 2
    random = torch.Generator().manual_seed(len(spec.name))
    edges = torch.randint(0, spec.shape[dim] + 1, (num - 1,), generator=random).tolist()
    return sharded.cut(spec, dim, [0, *sorted(edges), spec.shape[dim]])


def boxes(spec: TensorSpec, num: int) -> list[Part]:
    """Two dimensions cut at once."""
    if len(spec.shape) < 2:
        return sharded.chunks(spec, 0, num)
    found = []
    for part in sharded.chunks(spec, len(spec.shape) - 2, 2):
        for other in sharded.cut(spec, len(spec.shape) - 1, [0, spec.shape[-1] // 3, spec.shape[-1]]):
            start = tuple(max(a, b) for a, b in zip(part.start, other.start, strict=True))
            size = tuple(min(a, b) for a, b in zip(part.size, other.size, strict=True))
            found.append(Part(spec, start, size))
    return found


Sharding = Callable[[TensorSpec, int], list[Part]]
SHARDINGS: dict[str, Sharding] = {
    "along the first": lambda spec, num: sharded.chunks(spec, 0, num),
    "along the last": lambda spec, num: sharded.chunks(spec, len(spec.shape) - 1, num),
    "uneven": uneven,
    "boxes": boxes,
}


def schema_of(state: dict[str, torch.Tensor]) -> Schema:
    return Schema(tensors=tuple(spec_of(name, state[name]) for name in sorted(state)))


def ranks_of(old: dict[str, torch.Tensor], how: Sharding, num: int) -> list[list[Part]]:
    """Some ranks have several parts of a tensor, and some have none."""
    ranks: list[list[Part]] = [[] for _ in range(num)]
    for name in sorted(old):
        spec = spec_of(name, old[name])
        for number, part in enumerate(how(spec, num) if spec.shape else [Part.whole(spec)]):
            ranks[(number * 2) % num if how is boxes else number].append(part)
    return ranks


def first_version(old: dict[str, torch.Tensor]) -> MemoryStore:
    store = MemoryStore()
    with Publisher(store, old, dtype=None, encoding="context", anchor_every=100) as publisher:
        publisher.publish_patch(0).result()
    return store


@pytest.mark.sample(12)
@pytest.mark.parametrize("how", SHARDINGS.values(), ids=SHARDINGS)
@pytest.mark.parametrize("num", [1, 3, 8])
@pytest.mark.parametrize("encoding", ["context", "gap", "raw"])
def test_parts_are_read_as_the_whole(how: Sharding, num: int, encoding: str) -> None:
    old = state()
    store = first_version(old)
    before = old
    ranks = ranks_of(old, how, num)
    for version, density in enumerate((0.02, 0.001, 0.9), 1):
        new = moved(before, density, version)
        manifest, deltas = sharded.publish(store, ranks, before, new, encoding)
        assert manifest.version == version
        growth = sharded.added(schema_of(old), ranks, [each.growth for each in deltas])
        for name, sums in by_name(schema_of(old), growth).items():
            expected = state_digest.of_tensor(new[name]).minus(state_digest.of_tensor(before[name]))
            assert sums == expected, name
        before = new
        assert_same_bits(newest(store), new)
    verify(store, 3)


def test_what_parts_say_of_their_parent_adds_up_to_the_parents_sums() -> None:
    old = state()
    new = moved(old, 0.5)
    store = first_version(old)
    for how in SHARDINGS.values():
        ranks = ranks_of(old, how, 3)
        _, deltas = sharded.publish(first_version(old), ranks, old, new, "context")
        schema = schema_of(old)
        found = by_name(schema, sharded.added(schema, ranks, [each.parents for each in deltas]))
        for name, tensor in old.items():
            if tensor.numel() > 1000:
                assert found[name] == state_digest.of_tensor(tensor), name
    assert history.head(store) is not None


# Coded parts of one tensor that have an element in common are refused, however many there are.


def check(shape: tuple[int, int, int], boxes: Sequence[Box]) -> None:
    nothing = np.zeros(0, dtype=np.int64)
    rows, data = np.zeros((1, 3), dtype=np.uint8), np.zeros(0, dtype=np.uint8)
    parts = []
    for number, box in enumerate(boxes):
        parts.append(CodedPart(tiling(shape, box, (1, 1)), 0, rows, nothing, data, key=f"deltas/{number}"))
    check_boxes(
        7, Content([], coded_of(parts)), Schema(tensors=(TensorSpec(name="a", dtype="BF16", shape=shape),))
    )


def some_box(rng: np.random.Generator, shape: Sequence[int], most: int) -> Box:
    firsts = [int(rng.integers(side)) for side in shape]
    sizes = [
        int(rng.integers(1, min(most, side - first) + 1)) for first, side in zip(firsts, shape, strict=True)
    ]
    return Box(firsts[0], sizes[0], firsts[1], sizes[1], firsts[2], sizes[2])


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(
        itertools.product(
            range(box.level, box.level + box.levels),
            range(box.row, box.row + box.rows),
            range(box.col, box.col + box.cols),
        )
    )


@pytest.mark.parametrize("num_boxes", [2, 3, 8, 16, 30])
def test_parts_are_refused_exactly_if_two_have_an_element_in_common(num_boxes: int) -> None:
    rng, shape = np.random.default_rng(num_boxes), (4, 6, 8)
    seen = set()
    for _ in range(100):
        boxes: list[Box] = []
        for _ in range(20 * num_boxes):
            box = some_box(rng, shape, 3 if num_boxes < 10 else 1)
            if not any(elements(box) & elements(other) for other in boxes):
                boxes.append(box)
            if len(boxes) == num_boxes:
                break
        if is_apart := bool(rng.integers(2)):
            check(shape, boxes)
        else:
            first = boxes[int(rng.integers(len(boxes)))]
            boxes.insert(int(rng.integers(len(boxes) + 1)), first)
            with pytest.raises(CorruptObject, match=f"deltas/{boxes.index(first)} codes too, in version 7"):
                check(shape, boxes)
        seen.add(is_apart)
    assert seen == {True, False}


def test_a_part_for_each_element_takes_no_look_at_each_pair() -> None:
    sides = (1, 100, 100)
    boxes = [Box(0, 1, row, 1, col, 1) for row in range(100) for col in range(100)]
    check(sides, boxes)
    with pytest.raises(CorruptObject, match="deltas/99 codes too"):
        check(sides, [*boxes, boxes[99]])
