"""Elements of many tensors on a GPU, read and written by one launch, beside one tensor after the other."""

from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest
import torch

from patchstore import Publisher, Replica
from patchstore.apply import replica as replicas
from patchstore.stores.memory import MemoryStore
from patchstore.tensors import columns, state_digest
from patchstore.tensors.bits import INTEGERS, bits
from patchstore.tensors.columns import Group, Located
from tests.support.interpreted import DEVICE, kernels
from tests.support.interrupts import Interrupter

scattered = kernels("patchstore.kernels.scattered")

SIZES = [1, 1500, 7, 3000, 2]


def tensors_of(width: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(width)
    found = [torch.randint(-(2**31), 2**31, (size,), generator=random) for size in SIZES]
    # One begins within its memory, at an address that few numbers divide.
    found[2] = found[2].new_zeros(size := len(found[2]) + 3)[size - len(found[2]) :].copy_(found[2])
    return [each.to(INTEGERS[width]).to(DEVICE) for each in found]


def group_of(width: int, numbers: list[int]) -> Group:
    positions = [np.arange(SIZES[number] - 1, -1, -3, dtype=np.int32)[::-1] for number in numbers]
    counts = np.array([len(each) for each in positions], dtype=np.int64)
    values = np.arange(counts.sum(), dtype=np.uint64).astype(f"u{width}")
    return Group(np.array(numbers, dtype=np.int64), counts, np.concatenate(positions), values)


def located(tensors: list[torch.Tensor], *, by_launch: bool) -> Located:
    numbers = np.arange(len(tensors), dtype=np.int64)
    found = (lambda _: scattered) if by_launch else (lambda _: None)
    # As of a GPU, wherever they are.
    return Located(numbers, tensors, [*map(bits, tensors)], found)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_elements_are_read_and_written_as_one_tensor_after_the_other(width: int, launches: list[int]) -> None:
    some, others = tensors_of(width), tensors_of(width)
    ours, theirs = located(some, by_launch=True), located(others, by_launch=False)
    group = group_of(width, [0, 1, 3, 4])
    before = ours.at(group)
    assert before.dtype == group.values.dtype
    assert np.array_equal(before, theirs.at(group))
    ours.write(group)
    assert len(launches) == 2
    theirs.write(group)
    assert all(torch.equal(one, other) for one, other in zip(some, others, strict=True))
    assert np.array_equal(ours.at(group), group.values)
    ours.write(Group(group.numbers, group.counts, group.positions, before))
    assert all(torch.equal(one, other) for one, other in zip(some, tensors_of(width), strict=True))


def test_a_change_beyond_its_tensor_is_refused_before_anything_is_written() -> None:
    ours = located(some := tensors_of(2), by_launch=True)
    group = group_of(2, [0, 2])
    for place, position in ((0, -1), (len(group.positions) - 1, SIZES[2])):
        wrong = group.positions.copy()
        wrong[place] = position
        for use in (ours.write, ours.at):
            with pytest.raises(IndexError, match="beyond its tensor"):
                use(Group(group.numbers, group.counts, wrong, group.values))
    narrow = located([each.to(torch.uint8) for each in tensors_of(2)], by_launch=True)
    with pytest.raises(IndexError, match="beyond its tensor"):
        narrow.write(group)
    assert all(torch.equal(one, other) for one, other in zip(some, tensors_of(2), strict=True))


def test_whole_tensors_are_brought_and_digested_together() -> None:
    tensors = [*tensors_of(2), *tensors_of(8), torch.zeros(0, dtype=torch.int16, device=DEVICE)]
    found = located(tensors, by_launch=True)
    for one, tensor in zip(found.whole(), tensors, strict=True):
        assert torch.equal(columns.signed_of(one), tensor.cpu())
    expected = [state_digest.of_tensor(tensor) for tensor in tensors]
    assert state_digest.of_each(tensors).tolist() == [[*each] for each in expected]


@pytest.mark.usefixtures("_elsewhere")
def test_after_an_interrupt_no_tensor_is_said_to_be_where_another_one_is() -> None:
    first, second = torch.zeros(3, dtype=torch.int16, device=DEVICE), torch.ones(3, dtype=torch.int16)
    second, number = second.to(DEVICE), np.zeros(1, dtype=np.int64)
    group = Group(number, number + 3, np.arange(3), np.zeros(3, dtype=np.uint16))
    for point in count(1):
        held = {"a": first}
        known = columns.Scattered(held, ["a"], lambda name, tensor: None, lambda device: scattered)
        known.located(number)
        held["a"] = second
        at = Interrupter(point, within="tensors/columns.py")
        is_interrupted = at.during(known.located, number)
        for held["a"] in (first, second):
            assert known.located(number).at(group).tolist() == held["a"].tolist()
        if not is_interrupted:
            break


@pytest.fixture
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors on the CPU are taken as those of a GPU."""
    monkeypatch.setattr(columns, "flat_of", bits)
    monkeypatch.setattr(replicas, "are_usable", lambda device: True)
    return


@pytest.mark.usefixtures("_elsewhere")
@pytest.mark.parametrize("encoding", ["context", "gap", "raw"])
def test_a_replica_of_many_tensors_goes_to_each_version_and_back(encoding: str, launches: list[int]) -> None:
    random = torch.Generator().manual_seed(0)
    shapes = {f"layers.{number}.weight": (16, 8 + number % 3) for number in range(60)}
    shapes |= {"norm.weight": (24,), "none.weight": (0, 4)}
    model = {name: (0.02 * torch.randn(shape, generator=random)).bfloat16() for name, shape in shapes.items()}
    model["router.weight"] = torch.randn(30, generator=random)
    model = {name: tensor.to(DEVICE) for name, tensor in model.items()}
    store, states = MemoryStore(), []
    with Publisher(store, model, encoding=encoding, dtype=None, anchor_every=100) as publisher:
        for version in range(4):
            publisher.publish_patch(version).result()
            states.append({name: tensor.clone() for name, tensor in model.items()})
            for name, tensor in model.items():
                if tensor.numel() and name != "norm.weight":
                    flat = bits(tensor)
                    flat[torch.randint(len(flat), (2,), generator=random).to(DEVICE)] ^= 1
    held = {name: tensor.clone() for name, tensor in states[0].items()}
    replica = Replica(store, held, held=0)
    launches.clear()
    weight = held["layers.0.weight"]
    loss = (torch.ones_like(weight, requires_grad=True) * weight).sum()
    replica.update(1)
    # Read twice, to stage and to write, and written once, for each width of elements.
    assert len(launches) == 6
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    replica.update(3)
    undo = replica.apply(replica.stage(2))
    for version in (2, 3):
        assert all(torch.equal(bits(held[name]), bits(tensor)) for name, tensor in states[version].items())
        assert replica.held == version
        if version == 2:
            undo.rollback()
