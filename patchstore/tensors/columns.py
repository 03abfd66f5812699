"""Tensors, and what changed of them, as columns: no object and no step for each tensor.

A model of experts has tens of thousands of tensors. Those of one element width lie in one array, tensor after
tensor, beside an array of how many elements each has.

Bit patterns are compared, not values: 0.0 and -0.0 differ and a NaN equals itself,
because replay promises the trainer's bytes, not its numbers.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol
from weakref import ref

import numpy as np
import numpy.typing as npt
import torch
from torch._utils import _flatten_dense_tensors

from patchstore.bucket.records import Schema
from patchstore.tensors import elements
from patchstore.tensors.bits import INTEGERS, TOGETHER, TORCH_DTYPES, TensorPatch, bits, unsigned

Array = npt.NDArray[Any]


class Group(NamedTuple):
    """What changed of some tensors, or parts of tensors, of one element width: tensor after tensor.

    Columns, and no object for each tensor: a model of experts has tens of thousands.
    """

    numbers: Array
    """int64 [T], which tensors, ascending as the caller numbers them; those with changes alone."""
    counts: Array
    """int64 [T], changes of each."""
    positions: Array
    """[num], in the flattened tensor, or part, that each is of; ascending in each. int32 where all fit."""
    values: Array
    """[num], new bit patterns, unsigned integers."""
    replaced: Array | None = None
    """[num], the bit patterns before, where the comparison has read them."""

    @property
    def stated(self) -> tuple[Array, Array, Array, Array]:
        """All columns but `replaced`."""
        return self.numbers, self.counts, self.positions, self.values

    def of(self, numbers: Array) -> "Group":
        """Return what changed of some tensors, ascending; neighbours without a copy."""
        return self.at(within(self.numbers, numbers))

    def at(self, at: Array) -> "Group":
        """Return what changed of the tensors at these places of `numbers`, in that order."""
        if len(at) == len(self.numbers) and (at[1:] > at[:-1]).all():
            return self
        its, counts = self.numbers[at], self.counts[at]
        starts = (self.counts.cumsum() - self.counts)[at]
        if len(at) and (np.diff(at) == 1).all():
            mine: slice | Array = slice(int(starts[0]), int(starts[-1] + counts[-1]))
        else:
            mine = ramps(counts, starts)
        replaced = None if self.replaced is None else self.replaced[mine]
        return Group(its, counts, self.positions[mine], self.values[mine], replaced)

    @property
    def owner(self) -> Array:
        """int64 [num], of each change the place in `numbers` of its tensor."""
        return np.repeat(np.arange(len(self.numbers)), self.counts)


def within(numbers: Array, some: Array) -> Array:
    """Return where in `numbers` those of `some` are that are there; both ascend, and so does the result."""
    at = np.searchsorted(numbers, some)
    found: Array = at[np.append(numbers, -1)[at] == some]
    return found


def ramps(counts: Array, firsts: Array | None = None) -> Array:
    """Return as many numbers for each count, one after the other: from 0 on, or from each of `firsts` on."""
    begins = counts.cumsum() - counts
    found: Array = np.arange(int(counts.sum())) - np.repeat(
        begins if firsts is None else begins - firsts, counts
    )
    return found


def changed(new: Sequence[torch.Tensor], old: torch.Tensor, sizes: Array, numbers: Array) -> Group:
    """Compare tensors that lie side by side, on any device; returns what differs, in host memory.

    Reads both once, a few hundred thousand elements at a time; changes nothing.

    Args:
        new: flat, of any dtype, [num] together; so many as there are pieces.
        old: [num], of the same dtype.
        sizes: int64 [T], elements of each tensor.
        numbers: int64 [T], what each is called.
    """
    found, values, replaced = elements.differing([bits(each) for each in new], bits(old))
    ends = sizes.cumsum()
    counts = np.diff(np.searchsorted(found, ends), prepend=0)
    some = np.flatnonzero(counts)
    starts = (ends - sizes)[some]
    counts = counts[some]
    positions = found - np.repeat(starts, counts)
    if sizes.max(initial=0) < 2**31:
        positions = positions.astype(np.int32)
    return Group(numbers[some], counts, positions, values, replaced)


def signed_of(flat: Array) -> torch.Tensor:
    """Return unsigned integers as a tensor of integers of their width, in the same memory."""
    width = flat.itemsize
    return torch.from_numpy(flat.view("u1" if width == 1 else f"i{width}")).view(INTEGERS[width])


class Changes:
    """The elements whose bits differ from the state before, in host memory."""

    def __init__(self, groups: Sequence[Group]) -> None:
        """Take what changed, tensors of each element width and dtype apart."""
        self.num_changed = sum(len(group.positions) for group in groups)
        self._groups = groups

    def groups(self) -> Sequence[Group]:
        """Return what changed; a tensor is in one of them alone."""
        return self._groups


def patches(group: Group, schema: Schema) -> Iterator[TensorPatch]:
    """Yield what changed of each tensor; numbers are places in the schema, and positions in whole tensors."""
    cuts = group.counts.tolist()
    indices = torch.split(torch.from_numpy(group.positions), cuts)
    values = torch.split(signed_of(group.values), cuts)
    for number, at, its in zip(group.numbers.tolist(), indices, values, strict=True):
        spec = schema.tensors[number]
        yield TensorPatch(name=spec.name, indices=at, values=its.view(TORCH_DTYPES[spec.dtype]))


def in_order(groups: Sequence[Group]) -> Group:
    """Join groups of tensors of one dtype; the result ascends by tensor, and in each by position."""
    numbers, counts, positions, values = (
        each[0] if len(each) == 1 else np.concatenate(each)
        for each in zip(*(group.stated for group in groups), strict=True)
    )
    if (numbers[1:] > numbers[:-1]).all():
        return Group(numbers, counts, positions, values)
    order, distinct, ranks = _order(numbers, counts, positions)
    totals = np.bincount(ranks, weights=counts, minlength=len(distinct)).astype(np.int64)
    return Group(distinct, totals, positions[order], values[order])


def last_of(groups: Sequence[Group]) -> Group:
    """Join groups of tensors of one dtype, oldest first; of values at one position the last counts."""
    if len(groups) == 1:
        return groups[0]
    every = zip(*(group.stated for group in groups), strict=True)
    numbers, counts, positions, values = map(np.concatenate, every)
    order, distinct, ranks = _order(numbers, counts, positions)
    owners, positions = np.repeat(ranks, counts)[order], positions[order]
    is_last = np.ones(len(order), dtype=np.bool_)
    is_last[:-1] = (positions[1:] != positions[:-1]) | (owners[1:] != owners[:-1])
    totals = np.bincount(owners[is_last], minlength=len(distinct))
    return Group(distinct, totals, positions[is_last], values[order[is_last]])


def _order(numbers: Array, counts: Array, positions: Array) -> tuple[Array, Array, Array]:
    """Return what sorts changes by tensor and position, those of one position as they come; and the distinct
    numbers, ascending, and of each number the place among them.
    """
    distinct, ranks = np.unique(numbers, return_inverse=True)
    sides = np.zeros(len(distinct), dtype=np.int64)
    np.maximum.at(sides, ranks, positions[counts.cumsum() - 1].astype(np.int64) + 1)
    # As if the tensors lay one after the other. The parts ascend, and this sort merges what does.
    keys = positions + np.repeat((sides.cumsum() - sides)[ranks], counts)
    return keys.argsort(kind="stable"), distinct, ranks


def runs(sizes: Sequence[int] | Array, most: int, keys: Sequence[Hashable] = ()) -> Iterator[tuple[int, int]]:
    """Cut what lies side by side into runs of one key: large items alone, small ones together.

    Yields the first of each run, and one more than its last; a run has about `most` elements. Without keys
    all have the same.
    """
    each = np.array(sizes, dtype=np.int64)
    ends, is_first = each.cumsum(), np.zeros(len(each) + 1, dtype=np.bool_)
    is_large = each > most // 2
    is_first[:-1], is_first[-1:] = is_large, len(each) > 0
    is_first[1:] |= is_large
    known: dict[Hashable, int] = {}
    is_first[1:-1] |= np.diff([known.setdefault(key, len(known)) for key in keys or (0,) * len(each)]) != 0
    first = 0
    for stop in np.flatnonzero(is_first).tolist():
        while first < stop:
            enough = int(np.searchsorted(ends, ends[first] - each[first] + most)) + 1
            yield first, (first := min(max(enough, first + 1), stop))


class Block:
    """Tensors of one dtype, on any device; the caller numbers them, ascending."""

    def __init__(self, memory: torch.Tensor, numbers: Array, sizes: Array) -> None:
        """Take over flat memory that has tensors of so many elements, one after the other."""
        self.memory, self.numbers, self.sizes = memory, numbers, sizes
        self._starts = sizes.cumsum() - sizes

    @classmethod
    def of(cls, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> "Block":
        """Copy tensors of one dtype and device; one alone shares its memory if it is contiguous."""
        sizes = np.array([tensor.numel() for tensor in tensors], dtype=np.int64)
        return cls(flattened(tensors), np.array(numbers, dtype=np.int64), sizes)

    def places(self, numbers: Array) -> Array:
        """Return where in `numbers` these are; all are there."""
        found: Array = np.searchsorted(self.numbers, numbers)
        return found

    def held(self, numbers: Array) -> torch.Tensor:
        """Return tensors, ascending, one after the other; neighbours without a copy."""
        at = self.places(numbers)
        cuts = np.flatnonzero(np.diff(at) != 1) + 1
        firsts, lasts = at[np.concatenate([[0], cuts])], at[np.concatenate([cuts - 1, [len(at) - 1]])]
        starts, ends = self._starts[firsts].tolist(), (self._starts[lasts] + self.sizes[lasts]).tolist()
        found = [self.memory[start:end] for start, end in zip(starts, ends, strict=True)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def changed(self, new: Sequence[torch.Tensor], numbers: Array) -> Group:
        """Compare tensors with new ones of any dtype on one device, which are converted; see `changed`."""
        sizes, dtype = self.sizes[self.places(numbers)], self.memory.dtype
        # Small ones in one piece. Large ones are not copied, which would take a third of the comparison.
        is_large = sizes > elements.HOST_CHUNK // 4
        cuts = [0, *(np.flatnonzero(is_large[1:] | is_large[:-1]) + 1).tolist(), len(new)]
        pieces = [flattened(new[first:end]).to(dtype) for first, end in pairwise(cuts)]
        return changed(pieces, self.held(numbers).to(new[0].device), sizes, numbers)

    def at(self, group: Group) -> Array:
        """Return the bit patterns at a group's positions, in host memory."""
        at = self._flat(group)
        if self.memory.device.type == "cpu":
            found: Array = unsigned(self.memory)[at]
            return found
        return unsigned(bits(self.memory)[torch.from_numpy(at).to(self.memory.device)].cpu())

    def whole(self, numbers: Array) -> Array:
        """Return all bit patterns of tensors, in host memory."""
        return unsigned(self.held(numbers).cpu())

    def write(self, group: Group) -> None:
        at, held = self._flat(group), bits(self.memory)
        if held.device.type == "cpu":
            unsigned(self.memory)[at] = group.values
        else:
            held[torch.from_numpy(at).to(held.device)] = signed_of(group.values).to(held.device)

    def _flat(self, group: Group) -> Array:
        starts = self._starts[self.places(group.numbers)]
        found: Array = np.repeat(starts, group.counts) + group.positions
        return found


def flattened(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors of one dtype and device one after the other; one alone without a copy."""
    if len(tensors) == 1:
        return tensors[0].detach().reshape(-1)
    with torch.no_grad():
        # One call in C++, where views of thousands of tensors would take as long as comparing them.
        flat: torch.Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
        return flat


Flat = Array | torch.Tensor
"""The bit patterns of a tensor: unsigned integers on the CPU, and a tensor of integers elsewhere."""


def flat_of(tensor: torch.Tensor) -> Flat:
    """Return the bits of a tensor, in its memory."""
    return unsigned(tensor) if tensor.device.type == "cpu" else bits(tensor)


class ByAddress(Protocol):
    """Reads and writes elements anywhere in the memory of a GPU by one launch: `kernels.scattered`."""

    def read(self, addresses: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...

    def write(self, addresses: torch.Tensor, values: torch.Tensor) -> None: ...


ByAddressOf = Callable[[torch.device], ByAddress | None]
"""Returns what does so on a device; None where there is nothing, and tensors are gone through one by one."""


class Places(NamedTuple):
    """Where the bits of some tensors are: int64 [T] each."""

    devices: Array
    """Indices of devices, -1 where numpy reads and writes."""
    firsts: Array
    """Addresses of the first elements, 0 where numpy does."""
    sizes: Array
    """Elements."""
    widths: Array
    """Bytes of an element."""

    @classmethod
    def of(cls, flats: Sequence[Flat]) -> "Places":
        each = [_place(flat) for flat in flats]
        return cls(*np.array(each, dtype=np.int64).reshape(-1, 4).T)

    def at(self, some: Array) -> "Places":
        return Places(*(column[some] for column in self))


class Located:
    """Tensors that lie anywhere, on any devices; all are contiguous."""

    def __init__(
        self,
        numbers: Array,
        tensors: Sequence[torch.Tensor],
        flats: Sequence[Flat] | None = None,
        by_address: ByAddressOf = lambda _: None,
        places: Places | None = None,
    ) -> None:
        """Take tensors by number, which ascend where some of them are asked for; their bits, and where these
        are, if known.
        """
        self.numbers, self.tensors = numbers, tensors
        self._flats = [*map(flat_of, tensors)] if flats is None else flats
        self._by_address = by_address
        self._places = places

    def copied(self) -> "Located":
        """Return copies of all."""
        return Located(self.numbers, [each.clone() for each in self.tensors], by_address=self._by_address)

    def of(self, numbers: Array) -> "Located":
        """Return some of them, in this order."""
        if np.array_equal(numbers, self.numbers):
            return self
        at = np.searchsorted(self.numbers, numbers)
        its = at.tolist()
        tensors, flats = [self.tensors[each] for each in its], [self._flats[each] for each in its]
        return Located(numbers, tensors, flats, self._by_address, self._places and self._places.at(at))

    def whole(self) -> list[Array]:
        """Return all bit patterns of each, in host memory."""
        return _brought(self._flats)

    def at(self, group: Group) -> Array:
        """Return the bit patterns at a group's positions, in host memory."""
        its = self.of(group.numbers)
        if (there := its._there(group)) is not None:
            kernels, addresses = there
            return unsigned(kernels.read(addresses, signed_of(group.values[:0]).dtype).cpu())
        each = zip(its._flats, _sent(group.positions, its._flats), _cuts(group), strict=True)
        found = [flat[positions[mine]] for flat, positions, mine in each]
        return np.concatenate([group.values[:0], *_brought(found)])

    def write(self, group: Group) -> None:
        """Write a group's values. If this raises, some of them may be written."""
        its = self.of(group.numbers)
        if (there := its._there(group)) is not None:
            kernels, addresses = there
            kernels.write(addresses, signed_of(group.values).to(addresses.device))
            untold = [*its.tensors]
        else:
            columns = _sent(group.positions, its._flats), _sent(group.values, its._flats)
            for flat, positions, values, mine in zip(its._flats, *columns, _cuts(group), strict=True):
                flat[positions[mine]] = values[mine]
            here = zip(its.tensors, its._flats, strict=True)
            untold = [tensor for tensor, flat in here if isinstance(flat, np.ndarray)]
        # Neither numpy nor a kernel tells autograd, which refuses to go back through what was overwritten.
        torch.autograd.graph.increment_version(untold)

    def _there(self, group: Group) -> tuple[ByAddress, torch.Tensor] | None:
        """Return the addresses of what a group states, int64 [num], and what reads and writes there, if all
        of these tensors, and no others, are on one device that has it.
        """
        devices, firsts, sizes, widths = self._places or Places.of(self._flats)
        if not len(devices) or devices[0] < 0 or (devices != devices[0]).any():
            return None
        device = self.tensors[0].device
        if (kernels := self._by_address(device)) is None:
            return None
        ends, width = group.counts.cumsum(), group.values.itemsize
        # A kernel would write anywhere. Positions of a tensor ascend.
        is_beyond = (group.positions[ends - group.counts] < 0) | (group.positions[ends - 1] >= sizes)
        if is_beyond.any() or (widths != width).any():
            raise IndexError("a change is beyond its tensor")
        first, count = torch.from_numpy(np.stack([firsts, group.counts])).to(device)
        addresses = signed_of(group.positions).to(device).to(torch.int64) * width
        addresses += torch.repeat_interleave(first, count, output_size=len(addresses))
        return kernels, addresses


class Scattered:
    """Tensors that are looked up again and again: where their bits are is known from one time to the next."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        names: Sequence[str],
        check: Callable[[str, torch.Tensor], None],
        by_address: ByAddressOf,
    ) -> None:
        """Take tensors by name, which may be others each time; names are numbered.

        Args:
            check: is called with each tensor that was not there before, and raises if it cannot be used.
        """
        self._tensors, self._names, self._check, self._by_address = tensors, names, check, by_address
        self._known: dict[int, tuple[ref[torch.Tensor], Hashable, Flat]] = {}
        """By number the tensor, what it was, and its bits; a tensor is kept only while other code has it."""
        self._places = Places(*np.zeros((4, len(names)), dtype=np.int64))
        """Of each that is known."""

    def located(self, numbers: Array) -> Located:
        """Return tensors as they are now."""
        tensors, flats = [self._tensors[self._names[each]] for each in numbers.tolist()], list[Flat]()
        for number, tensor in zip(numbers.tolist(), tensors, strict=True):
            known = self._known.get(number)
            is_known = known is not None and known[0]() is tensor and known[1] == _kind(tensor)
            flats.append(known[2] if known is not None and is_known else self._learn(number, tensor))
        return Located(numbers, tensors, flats, self._by_address, self._places.at(numbers))

    def _learn(self, number: int, tensor: torch.Tensor) -> Flat:
        """Return the bits of a tensor, in its memory: to make them takes longer than a few changes do."""
        self._check(self._names[number], tensor)
        flat, known = flat_of(tensor), self._known
        # First: after an interrupt the one that is known would be sought where this one is.
        known.pop(number, None)
        for column, value in zip(self._places, _place(flat), strict=True):
            column[number] = value
        # There may be another in its place, so with the tensor its memory is free.
        known[number] = ref(tensor, lambda _: known.pop(number, None)), _kind(tensor), flat
        return flat


def _kind(tensor: torch.Tensor) -> Hashable:
    """What may become another in place, so that the bits are no longer where they were."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.is_contiguous()


def _place(flat: Flat) -> tuple[int, int, int, int]:
    """Return a row of `Places`."""
    if isinstance(flat, torch.Tensor):
        return flat.device.index or 0, flat.data_ptr(), flat.numel(), flat.element_size()
    return -1, 0, flat.size, flat.itemsize


def _brought(flats: Sequence[Flat]) -> list[Array]:
    """Return all in host memory; what is on a GPU is joined there, as each copy waits for the device."""
    found: list[Any] = [*flats]
    kinds: dict[tuple[torch.device, torch.dtype], list[tuple[int, torch.Tensor]]] = {}
    for place, flat in enumerate(flats):
        if isinstance(flat, torch.Tensor):
            kinds.setdefault((flat.device, flat.dtype), []).append((place, flat))
    for its in kinds.values():
        sizes = np.array([flat.numel() for _, flat in its], dtype=np.int64)
        for first, end in runs(sizes, TOGETHER):
            joined = unsigned(flattened([flat for _, flat in its[first:end]]).cpu())
            ends = sizes[first:end].cumsum().tolist()
            for (place, _), start, stop in zip(its[first:end], [0, *ends], ends, strict=False):
                found[place] = joined[start:stop]
    return found


def _cuts(group: Group) -> Iterator[slice]:
    """Yield which changes are of each tensor of a group."""
    ends = group.counts.cumsum().tolist()
    return map(slice, [0, *ends[:-1]], ends)


def _sent(column: Array, flats: Sequence[Flat]) -> list[Any]:
    """Return for each tensor a column of a group where the tensor is."""
    # numpy indexes by 64 bits: of each of thousands of tensors, to convert a few took longer.
    here = column.astype(np.int64) if column.dtype == np.int32 else column
    if {*map(type, flats)} <= {np.ndarray}:
        return [here] * len(flats)
    devices = {flat.device for flat in flats if not isinstance(flat, np.ndarray)}
    sent = {device: signed_of(column).to(device) for device in devices}
    return [here if isinstance(flat, np.ndarray) else sent[flat.device] for flat in flats]
