"""Versions of several payloads, each of some parts of the tensors: they mean what one payload means."""

from collections.abc import Callable

import pytest
import torch

from patchstore import Publisher
from patchstore.errors import CorruptObject
from patchstore.format import history
from patchstore.format.records import Part, TensorSpec
from patchstore.read.replay import verify
from patchstore.stores.memory import MemoryStore
from patchstore.tensors import state_digest
from patchstore.tensors.bits import bits, spec_of
from tests.support import sharded
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


def along_first(spec: TensorSpec, num: int) -> list[Part]:
    return sharded.chunks(spec, 0, num) if spec.shape else [Part.whole(spec)] + [Part.whole(spec)] * 0


def along_last(spec: TensorSpec, num: int) -> list[Part]:
    return sharded.chunks(spec, len(spec.shape) - 1, num) if spec.shape else [Part.whole(spec)]


def uneven(spec: TensorSpec, num: int) -> list[Part]:
    if not spec.shape:
        return [Part.whole(spec)]
    dim = len(spec.shape) // 2
    random = torch.Generator().manual_seed(len(spec.name))
    edges = torch.randint(0, spec.shape[dim] + 1, (num - 1,), generator=random).tolist()
    return sharded.cut(spec, dim, [0, *sorted(edges), spec.shape[dim]])


def boxes(spec: TensorSpec, num: int) -> list[Part]:
    """Two dimensions cut at once."""
    if len(spec.shape) < 2:
        return along_first(spec, num)
    found = []
    for part in sharded.chunks(spec, len(spec.shape) - 2, 2):
        for other in sharded.cut(spec, len(spec.shape) - 1, [0, spec.shape[-1] // 3, spec.shape[-1]]):
            start = tuple(max(a, b) for a, b in zip(part.start, other.start, strict=True))
            size = tuple(min(a, b) for a, b in zip(part.size, other.size, strict=True))
            found.append(Part(spec, start, size))
    return found


SHARDINGS = [along_first, along_last, uneven, boxes]


def ranks_of(
    old: dict[str, torch.Tensor], how: Callable[[TensorSpec, int], list[Part]], num: int
) -> list[list[Part]]:
    """Some ranks have several parts of a tensor, and some have none."""
    ranks: list[list[Part]] = [[] for _ in range(num)]
    for name in sorted(old):
        for number, part in enumerate(how(spec_of(name, old[name]), num)):
            ranks[(number * 2) % num if how is boxes else number].append(part)
    return ranks


def first_version(old: dict[str, torch.Tensor]) -> MemoryStore:
    store = MemoryStore()
    with Publisher(store, old, dtype=None, encoding="context", anchor_every=100) as publisher:
        publisher.publish_patch(0).result()
    return store


@pytest.mark.parametrize("how", SHARDINGS, ids=lambda how: how.__name__)
@pytest.mark.parametrize("num", [1, 3, 8])
@pytest.mark.parametrize("encoding", ["context", "gap", "raw"])
def test_parts_are_read_as_the_whole(
    how: Callable[[TensorSpec, int], list[Part]], num: int, encoding: str
) -> None:
    old = state()
    store = first_version(old)
    before = old
    ranks = ranks_of(old, how, num)
    for version, density in enumerate((0.02, 0.001, 0.9), 1):
        new = moved(before, density, version)
        manifest, deltas = sharded.publish(store, ranks, before, new, encoding)
        assert manifest.version == version
        for name, sums in sharded.added([each.sum_growth for each in deltas]).items():
            expected = state_digest.of_tensor(new[name]).minus(state_digest.of_tensor(before[name]))
            assert sums == expected, name
        before = new
        assert_same_bits(newest(store), new)
    verify(store, 3)


def test_what_parts_say_of_their_parent_adds_up_to_the_parents_sums() -> None:
    old = state()
    new = moved(old, 0.5)
    store = first_version(old)
    for how in SHARDINGS:
        _, deltas = sharded.publish(first_version(old), ranks_of(old, how, 3), old, new, "context")
        found = sharded.added([each.parent_sums for each in deltas])
        for name, tensor in old.items():
            if tensor.numel() > 1000:
                assert found[name] == state_digest.of_tensor(tensor), name
    assert history.head(store) is not None


def test_a_rank_codes_its_part_and_another_lists_its_own() -> None:
    """Two leading dimensions are cut at once, so that the part is no box; and a part of few tiles."""
    old = {"experts": state()["pairs"].repeat(2, 2, 1, 1)}
    new = moved(old, 0.1)
    spec = spec_of("experts", old["experts"])
    assert spec.shape == (4, 6, 16, 8)
    held = [
        [Part(spec, (0, 0, 0, 0), (4, 2, 16, 8))],
        [Part(spec, (0, 2, 0, 0), (1, 4, 16, 8)), Part(spec, (1, 2, 0, 0), (1, 4, 16, 8))],
        [Part(spec, (2, 2, 0, 0), (2, 4, 16, 8))],
    ]
    store = first_version(old)
    _, deltas = sharded.publish(store, held, old, new, "context")
    assert [sorted(each.entries) for each in deltas] == [
        ["experts.idx", "experts.val"],
        ["table", "tiles"],
        ["experts.idx", "experts.val"],
    ]
    assert_same_bits(newest(store), new)


def overlapping(first: Part, second: Part, encodings: tuple[str, str] = ("context", "context")) -> None:
    old = {first.spec.name: state()[first.spec.name]}
    new = moved(old, 1.0)
    store = first_version(old)
    sharded.publish(store, [[first], [second]], old, new, "context")
    with pytest.raises(CorruptObject):
        newest(store)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (((0, 0), (96, 80)), ((0, 0), (96, 80))),
        (((0, 0), (50, 80)), ((49, 0), (47, 80))),
        (((0, 0), (96, 50)), ((0, 40), (96, 40))),
        (((0, 0), (50, 50)), ((49, 49), (40, 10))),
        (((49, 49), (40, 10)), ((0, 0), (50, 50))),
    ],
)
def test_parts_that_overlap_are_refused(
    first: tuple[tuple[int, int], ...], second: tuple[tuple[int, int], ...]
) -> None:
    spec = TensorSpec(name="bf16", dtype="BF16", shape=(96, 80))
    overlapping(Part(spec, *first), Part(spec, *second))


def test_an_element_that_is_coded_must_not_be_listed_too() -> None:
    spec = TensorSpec(name="pairs", dtype="BF16", shape=(2, 3, 16, 8))
    listed = Part(spec, (0, 1, 0, 0), (2, 2, 16, 8))
    assert listed.box is None
    overlapping(Part(spec, (0, 2, 0, 0), (1, 1, 16, 8)), listed)
    overlapping(listed, Part(spec, (1, 2, 0, 0), (1, 1, 16, 8)))
    overlapping(listed, listed)
