"""The last published weights, and what they are compared with: a model's tensors as they are served."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
import numpy.typing as npt
import torch

from patchstore.bucket.records import Part, Schema, TensorSpec
from patchstore.codec import Encoding, delta
from patchstore.codec.delta import EncodedDelta
from patchstore.codec.part_table import PartSums, PartTable
from patchstore.errors import SchemaMismatch, UsageError
from patchstore.kernels import are_usable
from patchstore.quantization import Form
from patchstore.quantization.forms import Matrix
from patchstore.support.threads import Worker
from patchstore.tensors import columns, state_digest
from patchstore.tensors import parts as part_sums
from patchstore.tensors.bits import TOGETHER, TORCH_DTYPES
from patchstore.tensors.columns import Block, Changes, Group, signed_of
from patchstore.tensors.parts import name_of
from patchstore.tensors.state_digest import Sums

Array = npt.NDArray[Any]

Place = Literal["device", "host"]
"""Where a snapshot is: on the tensors' device, or in host memory."""


@contextmanager
def allocating(place: Place, num_bytes: int) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as exc:
        raise UsageError(
            f'snapshot="{place}" needs {num_bytes:,} bytes there, which are not free; try '
            f'"{"host" if place == "device" else "device"}": {exc}'
        ) from exc


class Rounded(NamedTuple):
    """Weights that are published as codes and scales."""

    matrix: Matrix
    codes: str | None
    """Key of the codes; None if this publisher does not publish them."""
    scales: str | None
    """The same of the scales."""
    owned: tuple[slice, slice] | None = None
    """Which scales are published, of those of all blocks that it touches; None for all."""


class Unrounded(NamedTuple):
    """All that is published, matrices before they are rounded."""

    plain: "InPlace"
    """What is published as it is, by key."""
    rounded: Callable[[], Sequence[Rounded]]
    """Lists the matrices, always in one order; they are where others were if `plain` says so."""
    held: object
    """All of it: what holds this keeps its memory."""


Measure = Callable[[Unrounded], tuple[torch.Tensor, Callable[[int], torch.Tensor]]]
"""Returns the largest magnitudes of the blocks of matrices: all, flat, and what returns a view of those of
one matrix, [down, across], by its number. They may be written to."""


class Roundable(NamedTuple):
    """A stream of codes and scales that can also be had as matrices, which are rounded while compared."""

    form: Form
    dtypes: Collection[tuple[torch.dtype, torch.dtype]]
    """Of the matrices: as they are given, and as they are served."""
    read: Callable[[Measure], None]
    """Begins a pass, in the place of `Stream.read`.

    `Measure` is called once. Maxima of blocks of which several processes have parts are then raised to those
    of all. Raises SchemaMismatch where tensors are not those of the first time, and UsageError where a weight
    is not finite."""


class Stream(NamedTuple):
    """Tensors that exist one after the other."""

    devices: Mapping[str, torch.device]
    """By name."""
    read: Callable[[], Iterable[tuple[str, torch.Tensor]]]
    """Begins a pass, which yields each tensor once, in any order; it may cost a trainer much."""
    rounded: Roundable | None = None
    """Another way to a pass, of what can be rounded while it is compared."""


class InPlace(dict[str, torch.Tensor]):
    """Tensors by key, and what says whether they are where others were."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], where: object) -> None:
        """Take tensors whose addresses, strides and dtypes are those of all with the same `where`, if any."""
        super().__init__(tensors)
        self.where = where


Tensors = Mapping[str, torch.Tensor] | Stream
"""A model's tensors."""


def in_turn(tensors: Tensors) -> Iterable[tuple[str, torch.Tensor]]:
    """Return names and tensors; a pass of a stream."""
    return tensors.read() if isinstance(tensors, Stream) else tensors.items()


def devices_of(tensors: Tensors) -> Mapping[str, torch.device]:
    if isinstance(tensors, Stream):
        return tensors.devices
    return {name: tensor.device for name, tensor in tensors.items()}


def served(tensor: torch.Tensor, spec: TensorSpec, device: torch.device | None = None) -> torch.Tensor:
    """Return a tensor in the dtype in which it is served; without a copy if it has that already."""
    # Also without gradients: published tensors are never part of a graph.
    return tensor.detach().to(device=device, dtype=TORCH_DTYPES[spec.dtype]).contiguous()


def copy_each(current: Tensors, specs: Mapping[str, TensorSpec], held: Mapping[str, torch.Tensor]) -> Array:
    """Copy tensors as they are served, and return `Ranges.finite`. Raises as `Ranges.end`, after that.

    They are numbered in the order of `specs`.
    """
    numbers = {name: number for number, name in enumerate(specs)}
    ranges = Ranges(np.zeros(len(specs), dtype=np.bool_))
    for name, given in in_turn(current):
        tensor = served(given, specs[name])
        if is_narrowed(given.dtype, tensor.dtype):
            ranges.look([(numbers[name], name, given, tensor)])
        held[name].copy_(tensor)
    ranges.end()
    return ranges.finite


def is_narrowed(given: torch.dtype, served: torch.dtype) -> bool:
    """Whether a finite number of one dtype may be beyond the range of the other."""
    return given != served and torch.finfo(given).max > torch.finfo(served).max


class Ranges:
    """Looks for finite numbers that are infinite in the dtype in which they are served, in one pass.

    A number beyond the range has the bits of an infinity that the trainer published before: it is no change.
    So changed elements are enough only of a tensor that had neither an infinity nor a NaN.
    """

    def __init__(self, finite: Array) -> None:
        """`finite`: of each tensor, by number, whether that is known of what it was."""
        self.finite = finite.copy()
        """Which were converted to a smaller range, and have neither an infinity nor a NaN there."""
        self._error: SchemaMismatch | None = None

    def look(self, tensors: Sequence[tuple[int, str, torch.Tensor, torch.Tensor]]) -> None:
        """Look at tensors on one device, with one wait for it.

        Each is given with its number and its name, as the model has it, and as it is served.
        """
        self.finite[[number for number, *_ in tensors]] = False
        narrowed = [each for each in tensors if is_narrowed(each[2].dtype, each[3].dtype)]
        self.finite[[number for number, _, _, served in narrowed if not served.numel()]] = True
        narrowed = [each for each in narrowed if each[3].numel()]
        if not narrowed:
            return
        # A NaN is the least and the greatest number.
        ends = torch.stack([end for *_, served in narrowed for end in served.aminmax()])
        for each, is_finite in zip(narrowed, ends.isfinite().view(-1, 2).all(dim=1).tolist(), strict=True):
            if is_finite:
                self.finite[each[0]] = True
            elif self._error is None:
                self._error = _beyond(*each[1:])

    def end(self) -> None:
        """End the pass, or raise SchemaMismatch where a number was beyond the range.

        Not earlier: other processes may take part in the pass of a stream, and would wait for this one.
        """
        if self._error is not None:
            raise self._error


def _beyond(name: str, given: torch.Tensor, served: torch.Tensor) -> SchemaMismatch | None:
    """Return what is wrong, if not all that is not finite was given so."""
    numbers = given.detach().reshape(-1)
    lost = numbers.isfinite() & ~served.isfinite().reshape(-1).to(numbers.device)
    if not bool(lost.any()):
        return None
    num = int(lost.sum())
    noun = "number" if num == 1 else "numbers"
    wider = "with " if served.dtype == torch.bfloat16 else "as torch.bfloat16, or with "
    return SchemaMismatch(
        f"{name_of(name)!r} has {num} {noun} beyond the range of {served.dtype}, "
        f"such as {float(numbers[lost][0])}; nothing was published, and once they are smaller the next call "
        f"goes on. Publish {wider}dtype=None, in its own dtype"
    )


class Ahead(NamedTuple):
    """Lets a comparison hand what it has found so far to the thread that encodes."""

    schema: Schema
    table: PartTable
    encoding: Encoding
    encoder: Worker
    """It does nothing else until the comparison ends."""


class Snapshot(Protocol):
    """The tensors of a run as they were published last: memory, and a comparison with it.

    `compare` leaves it as it is, so that changes can be encoded against it. `apply` then writes them to it.
    """

    has_kernels: bool
    """Whether changes are found and encoded on a GPU."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """By name, contiguous, where the snapshot is; views of its memory."""
        ...

    def compare(self, current: Tensors, ahead: Ahead | None = None) -> Changes:
        """Return how the model's tensors differ from the snapshot, which stays as it is.

        The tensors may change once this returns. What it returns is valid until the next call. If this
        raises, the encoder of `ahead` may still have tasks, of which nothing is kept.
        """
        ...

    def apply(self, changes: Changes) -> None:
        """Write the changes that the last comparison found. If this raises, some of them may be missing."""
        ...

    def replace(self, current: Tensors) -> None:
        """Copy all of the model's tensors. If this raises, the snapshot may have parts of two states."""
        ...

    def encode(self, schema: Schema, table: PartTable, changes: Changes, encoding: Encoding) -> EncodedDelta:
        """Encode the changes that the last comparison found; the snapshot stays as it is.

        `table` says what the snapshot's tensors are, in the order in which it was given them.
        """
        ...

    def warm_up(self, table: PartTable, encoding: Encoding) -> None:
        """Compile what `encode` runs, while no change waits for it; the snapshot stays as it is."""
        ...

    def sums(self, table: PartTable) -> PartSums:
        """Return the digest sums of all parts; `table` as of `encode`. Another thread may `read` then."""
        ...

    def read(self, part: Part) -> torch.Tensor:
        """Return a part in host memory; one thread at a time."""
        ...

    def digest(self, tensor: torch.Tensor) -> Sums:
        """Return the digest sums of a tensor in host memory, computed where that is fastest."""
        ...


def check_place(place: object) -> None:
    if not (isinstance(place, str) and place in get_args(Place)):
        raise UsageError(f'snapshot must be "device" or "host", not {place!r}')


def have_kernels(devices: set[torch.device]) -> bool:
    """Whether kernels can do the work: Triton is there, and all tensors are on one GPU."""
    return {device.type for device in devices} == {"cuda"} and len(devices) == 1 and are_usable(*devices)


_Given = tuple[Array, list[torch.Tensor]]
"""Numbers of tensors, ascending, and the trainer's tensors; of one block, dtype and device."""


class PlainSnapshot:
    """A snapshot that is compared in plain torch and numpy, on any devices.

    Large tensors are compared one after the other, and small ones on the CPU many at a time.
    """

    has_kernels = False

    def __init__(self, current: Tensors, specs: Sequence[TensorSpec], place: Place) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._names = [spec.name for spec in specs]
        devices = devices_of(current) if place == "device" else {}
        self._finite = self._found_finite = np.zeros(len(specs), dtype=np.bool_)
        """`Ranges.finite` of the snapshot's tensors, and as they are after the changes found last."""
        alike: dict[tuple[str, torch.device], list[int]] = {}
        for number, spec in enumerate(specs):
            alike.setdefault((spec.dtype, devices.get(spec.name, torch.device("cpu"))), []).append(number)
        self._block_of = np.zeros(len(specs), dtype=np.int64)
        """Of each tensor, by number, its block."""
        self._blocks: list[Block] = []
        """Those of one dtype and device side by side."""
        self._plan: tuple[object, list[Array]] | None = None
        """Tensors that are compared together, while `InPlace.where` is what it was."""
        self.tensors = {}
        with allocating(place, sum(spec.num_bytes for spec in specs)):
            for (dtype, device), some in sorted(alike.items(), key=lambda each: each[0][0]):
                sizes = [specs[number].num_elements for number in some]
                memory = torch.empty(sum(sizes), dtype=TORCH_DTYPES[dtype], device=device)
                self._block_of[some] = len(self._blocks)
                self._blocks.append(Block(memory, np.array(some, dtype=np.int64), np.array(sizes)))
                for number, tensor in zip(some, torch.split(memory, sizes), strict=True):
                    self.tensors[specs[number].name] = tensor.view(specs[number].shape)
        self.replace(current)

    def compare(self, current: Tensors, ahead: Ahead | None = None) -> Changes:
        ranges = Ranges(self._finite)
        groups = list(self._differing(current, ranges))
        ranges.end()
        self._found_finite = ranges.finite
        return Changes(groups)

    def _differing(self, current: Tensors, ranges: Ranges) -> Iterator[Group]:
        if isinstance(current, Stream):
            yield from self._ascending(self._compare(run, ranges) for run in self._streamed(current))
            return
        given = [current[name] for name in self._names]
        where = current.where if isinstance(current, InPlace) else None
        if where is None or self._plan is None or self._plan[0] is not where:
            self._plan = where, list(self._runs([(each.dtype, each.device) for each in given]))
        for numbers in self._plan[1]:
            yield self._compare((numbers, [given[number] for number in numbers.tolist()]), ranges)

    def _runs(self, kinds: Sequence[tuple[torch.dtype, torch.device]]) -> Iterator[Array]:
        """Yield the numbers of tensors that are compared together, which lie side by side in a block."""
        for block in self._blocks:
            its = [kinds[number] for number in block.numbers.tolist()]
            sizes = [
                size if device.type == "cpu" else TOGETHER
                for size, (_, device) in zip(block.sizes.tolist(), its, strict=True)
            ]
            for first, end in columns.runs(sizes, TOGETHER, its):
                yield block.numbers[first:end]

    def _streamed(self, stream: Stream) -> Iterator[_Given]:
        """Yield tensors of a stream that are compared together; they must not be kept."""
        places = {name: number for number, name in enumerate(self._names)}
        some: list[tuple[int, torch.Tensor]] = []
        kind, num = None, 0
        for name, tensor in stream.read():
            number = places[name]
            size = tensor.numel() if tensor.device.type == "cpu" else TOGETHER
            its = self._block_of[number], tensor.dtype, tensor.device
            if some and (its != kind or num + size > TOGETHER):
                yield _in_order(some)
                some, num = [], 0
            some.append((number, tensor))
            kind, num = its, num + size
            del tensor
        if some:
            yield _in_order(some)

    def _compare(self, given: _Given, ranges: Ranges) -> Group:
        numbers, tensors = given
        block, given_dtype = self._block(numbers), tensors[0].dtype
        dtype = block.memory.dtype
        found = block.changed(tensors, numbers)
        if len(tensors) > 1 and dtype != given_dtype and _has_nan(found, dtype):
            # Which NaN a conversion makes depends on the place in the tensor, so each is converted alone.
            found = block.changed([each.detach().to(dtype) for each in tensors], numbers)
        if not is_narrowed(given_dtype, dtype):
            ranges.finite[numbers] = False
        elif not ranges.finite[numbers].all() or not signed_of(found.values).view(dtype).isfinite().all():
            names = [self._names[number] for number in numbers.tolist()]
            served = [each.detach().to(dtype) for each in tensors]
            ranges.look(list(zip(numbers.tolist(), names, tensors, served, strict=True)))
        return found

    def _block(self, numbers: Array) -> Block:
        """Return the block of tensors that lie in one."""
        return self._blocks[int(self._block_of[numbers[0]])]

    def _ascending(self, groups: Iterable[Group]) -> list[Group]:
        """Return the same changes in the order in which they come of tensors that are not streamed."""
        by_block: dict[int, list[Group]] = {}
        for group in groups:
            if len(group.numbers):
                by_block.setdefault(int(self._block_of[group.numbers[0]]), []).append(group)
        found = []
        for number, some in sorted(by_block.items()):
            joined, block = columns.in_order(some), self._blocks[number]
            sizes = block.sizes[block.places(joined.numbers)]
            ends = np.concatenate([[0], joined.counts.cumsum()]).tolist()
            for first, end in columns.runs(sizes, TOGETHER):
                mine = slice(ends[first], ends[end])
                found.append(
                    Group(
                        joined.numbers[first:end],
                        joined.counts[first:end],
                        joined.positions[mine],
                        joined.values[mine],
                    )
                )
        return found

    def apply(self, changes: Changes) -> None:
        for group in changes.groups():
            if len(group.numbers):
                self._block(group.numbers).write(group)
        self._finite = self._found_finite
        self._wait({block.memory.device for block in self._blocks})

    # The tensors before a change: see `delta.Parents`.

    def at(self, group: Group) -> Array:
        return self._block(group.numbers).at(group)

    def whole(self, numbers: Array) -> Array:
        return self._block(numbers).whole(numbers)

    def replace(self, current: Tensors) -> None:
        self._finite = np.zeros(len(self._names), dtype=np.bool_)
        self._finite = copy_each(current, self._specs, self.tensors)
        self._wait({*devices_of(current).values()})

    def _wait(self, devices: Iterable[torch.device]) -> None:
        # Other threads, and so other streams, read the snapshot next.
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def encode(self, schema: Schema, table: PartTable, changes: Changes, encoding: Encoding) -> EncodedDelta:
        return delta.encode(schema, table, changes.groups(), self, encoding)

    def warm_up(self, table: PartTable, encoding: Encoding) -> None:
        pass

    def sums(self, table: PartTable) -> PartSums:
        sums = np.empty((len(table.parts), 2), dtype=np.uint64)
        tensors = [self.tensors[part.key] for part in table.parts]
        whole = np.flatnonzero(table.is_whole)
        sums[whole] = state_digest.of_each([tensors[number] for number in whole])
        for number in np.flatnonzero(~table.is_whole):
            sums[number] = part_sums.digest(table.parts[number], tensors[number])
        return PartSums(np.arange(len(tensors)), sums)

    def read(self, part: Part) -> torch.Tensor:
        return self.tensors[part.key].cpu()

    def digest(self, tensor: torch.Tensor) -> Sums:
        return state_digest.of_tensor(tensor)


def _has_nan(group: Group, dtype: torch.dtype) -> bool:
    values = signed_of(group.values).view(dtype)
    return dtype.is_floating_point and bool(values.float().isnan().any())


def _in_order(some: Sequence[tuple[int, torch.Tensor]]) -> _Given:
    some = sorted(some, key=lambda each: each[0])
    return np.array([number for number, _ in some], dtype=np.int64), [tensor for _, tensor in some]
