"""A snapshot of which kernels compare all tensors at once.

It is one block of memory, whose layout is the kernels', on the device or in pinned host memory.
Imports Triton, so only what runs kernels may import it.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from patchstore.bucket.records import DTYPE_BYTES, Part, Schema, TensorSpec
from patchstore.codec import Encoding
from patchstore.codec.context import Context
from patchstore.codec.delta import EncodedDelta
from patchstore.codec.part_table import PartTable
from patchstore.kernels import compare, index_encode, new_stream, on, rounded
from patchstore.publish import encode_gpu
from patchstore.publish.encode_gpu import BlockLayout, ChangeBlock, Parent
from patchstore.publish.snapshot import (
    Place,
    Ranges,
    Roundable,
    Rounded,
    Stream,
    Tensors,
    allocating,
    copy_each,
    is_narrowed,
    served,
)
from patchstore.quantization import Form
from patchstore.quantization.forms import Matrix
from patchstore.tensors import parts as part_sums
from patchstore.tensors import state_digest
from patchstore.tensors.bits import TORCH_DTYPES, bits
from patchstore.tensors.columns import Changes, Group
from patchstore.tensors.state_digest import Sums

Array = npt.NDArray[Any]

CONVERTED_BYTES = 1 << 30
"""So many bytes of tensors at a time are converted or made contiguous for a comparison."""
STREAMED_BYTES = 256 << 20
"""Of a stream's tensors so many bytes are held at a time, or one tensor."""
DIGEST_BYTES = 256 << 20
"""Of a snapshot in host memory, so much at a time goes to the device to be digested."""
FIRST_ROOM = 64
"""A comparison begins with room for one changed word in so many; see `kernels.compare.Found`."""


class DeviceChanges(Changes):
    """Changes that kernels found; they stay on the device as words until `block` or `groups` is called."""

    def __init__(self, snapshot: "DeviceSnapshot", nums: Sequence[int]) -> None:
        """Refer to the last comparison's changes; `nums` elements of each width."""
        self.num_changed = sum(nums)
        self.snapshot = snapshot
        self._nums = nums

    def block(self, *, gaps: bool, parts: Sequence[Part] | None = None) -> ChangeBlock:
        """Encode in `gap`, or `raw`, on the device; on the current stream, and waits for it.

        Digest sums are of elements at their positions in the tensors that `parts` are of; they mean nothing
        for parts without `Part.lines`.
        """
        return self.snapshot.block(self._nums, gaps=gaps, parts=parts)

    def groups(self) -> list[Group]:
        with self.snapshot.here(), on(self.snapshot.side):
            return self.block(gaps=False).on_host().groups()


class _Begun(NamedTuple):
    """A pass whose matrices were measured."""

    rest: Mapping[str, torch.Tensor]
    """Scales, flat, and what is published as it is, by key: to be compared like other tensors."""
    operands: torch.Tensor
    """See `Form.operands`."""
    held: Sequence[tuple[int | None, Matrix]]
    """Weights, which must not be freed before they were compared."""


class Rounder:
    """Compares matrices that are published in FP8 with the codes in a snapshot, all at once.

    The codes are not made: see `kernels.rounded`. What a snapshot compares beside them are the scales, and
    the tensors that are published as they are. Tables are kept while weights stay where they are.
    """

    def __init__(self, form: Form, found: compare.Found, numbers: Mapping[str, int]) -> None:
        """Take what differs into `found`; `numbers` are of its tensors, by key."""
        self._form, self._found, self._numbers = form, found, numbers
        self._places: list[object] | None = None
        """Of the matrices that `_plan` was made for."""
        self._plan: rounded.Rounding
        self._maxima: torch.Tensor

    def warm_up(self, source: Roundable, snapshot: int) -> None:
        """Compile kernels now, and not while a trainer waits."""
        tiles = self._found.tiles
        codes = [n for n, width in enumerate(tiles.widths) if width == 1 and tiles.num_bytes[n]]
        for dtypes in source.dtypes if codes else ():
            if dtypes[0] in rounded.DTYPES:
                rounded.warm_up(self._found, codes[0], dtypes, self._form.block, snapshot)

    def begin(self, source: Roundable) -> _Begun:
        """Begin a pass, and measure the matrices. Raises as `Roundable.read`."""
        held: list[tuple[int | None, Matrix]] = []

        def measure(matrices: Sequence[Rounded]) -> tuple[torch.Tensor, Callable[[int], torch.Tensor]]:
            held.extend(self._numbered(each) for each in matrices)
            self._plan_for(held)
            rounded.measure(self._plan, self._maxima)
            return self._maxima, partial(self._of_matrix, self._maxima)

        given = source.read(measure)
        operands, scales = self._form.operands(self._maxima)
        rest = dict(given.plain)
        # One call for all, as there may be thousands.
        pieces = torch.split(scales, self._plan.sizes)
        for number, each in enumerate(given.rounded):
            if each.scales is None:
                continue
            if each.owned is None:
                rest[each.scales] = pieces[self._plan.pieces[number]]
            else:
                rest[each.scales] = self._of_matrix(scales, number)[each.owned].contiguous()
        return _Begun(rest, operands, held)

    def compare(self, begun: _Begun, snapshot: int) -> None:
        """Compare the codes of the pass that began last with those in the snapshot; may be repeated."""
        rounded.compare(self._plan, self._found, begun.operands, snapshot)

    def _numbered(self, each: Rounded) -> tuple[int | None, Matrix]:
        matrix, device = each.matrix, self._found.cursor.device
        weights = matrix.weights
        if weights.device != device or weights.dtype not in rounded.DTYPES:
            matrix = matrix._replace(weights=weights.to(device, matrix.served))
        return None if each.codes is None else self._numbers[each.codes], matrix

    def _plan_for(self, held: Sequence[tuple[int | None, Matrix]]) -> None:
        places: list[object] = [(number, *matrix.place) for number, matrix in held]
        if self._places == places:
            return
        self._places = None
        self._plan = rounded.plan(self._found, held, self._form.block)
        device = self._found.cursor.device
        self._maxima = torch.zeros(self._plan.num_groups, dtype=torch.float32, device=device)
        self._places = places

    def _of_matrix(self, flat: torch.Tensor, number: int) -> torch.Tensor:
        """Return a view, [down, across], of one matrix in what has a number for each block."""
        first, (down, across) = self._plan.firsts[number], self._plan.shapes[number]
        return flat[first : first + down * across].view(down, across)


class DeviceSnapshot:
    """A snapshot that kernels compare, all tensors at once; see `kernels.compare`.

    A comparison is on the caller's stream. Encoding and `apply` are on a stream of their own, `side`, and
    overlap with what the caller does next; the caller waits for both before the next comparison.
    """

    has_kernels = True

    def __init__(
        self,
        current: Tensors,
        specs: Sequence[TensorSpec],
        place: Place,
        device: torch.device,
    ) -> None:
        self.device = device
        order = sorted(range(len(specs)), key=lambda number: -DTYPE_BYTES[specs[number].dtype])
        self._specs = [specs[number] for number in order]
        self._numbers = np.array(order, dtype=np.int64)
        """Of each, which it is of those that were given."""
        widths = [DTYPE_BYTES[spec.dtype] for spec in self._specs]
        self._tiles = compare.cut([spec.num_bytes for spec in self._specs], widths, device)
        num_bytes = self._tiles.first_bytes[-1]
        with allocating(place, num_bytes):
            if place == "host":
                self._memory = _pinned(num_bytes, device, self)
            else:
                self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            self._least_room = num_bytes // compare.WORD // FIRST_ROOM
            self._found = compare.Found(self._tiles, self._least_room)
        self._rounder: Rounder | None = None
        """Of a run in FP8."""
        if isinstance(current, Stream) and current.rounded is not None:
            numbers = {spec.name: number for number, spec in enumerate(self._specs)}
            self._rounder = Rounder(current.rounded.form, self._found, numbers)
        self._watched: set[int] = set()
        """Tensors that were converted to a dtype of a smaller range."""
        self._finite = self._found_finite = np.zeros(len(specs), dtype=np.bool_)
        """`Ranges.finite` of the snapshot's tensors, and as they are after the changes found last."""
        self._num_words = 0
        """What the last comparison found."""
        self.tensors = {
            spec.name: self._memory[start : start + spec.num_bytes]
            .view(TORCH_DTYPES[spec.dtype])
            .view(spec.shape)
            for spec, start in zip(self._specs, self._tiles.first_bytes[:-1], strict=True)
        }
        firsts = np.empty(len(specs), dtype=np.int64)
        firsts[self._numbers] = self._tiles.first_bytes[:-1]
        self._parent = Parent(self._memory, firsts)
        self._orders = {
            gaps: self._order(BlockLayout.of(self._specs, self._numbers, gaps=gaps)) for gaps in (False, True)
        }
        self._pointers: tuple[list[int], torch.Tensor, list[int], torch.Tensor] | None = None
        # An anchor is read on another thread, which must not queue behind the caller's work.
        self.side, self._reader = new_stream(device), new_stream(device)
        self.replace(current)
        self._compile(current)

    def _compile(self, current: Tensors) -> None:
        """Compare once without changes, so that kernels are compiled here and not while a trainer waits."""
        found = self.compare(self.tensors if isinstance(current, Stream) else current)
        with self.here():
            DeviceChanges(self, [0] * len(self._tiles.by_width())).block(gaps=False)
        self.apply(found)
        if self._rounder is not None and isinstance(current, Stream) and current.rounded is not None:
            with self.here():
                self._rounder.warm_up(current.rounded, self._memory.data_ptr())

    def _order(self, layout: BlockLayout) -> tuple[BlockLayout, Any]:
        def table(values: Any) -> torch.Tensor:
            return torch.from_numpy(values).to(self.device)

        order = index_encode.Order(
            tensors=table(layout.tensors),
            widths=table(layout.widths),
            idx=table(layout.indices),
            val=table(layout.values),
            wide=table(layout.widths[layout.indices] == 8).to(torch.int32),
        )
        return layout, order

    def compare(self, current: Tensors) -> Changes:
        found = self._found
        with self.here():
            # The buffer of one step that changed everything must not stay for ever.
            if found.capacity > 4 * max(self._num_words, self._least_room, 1):
                found.resize(max(self._num_words + self._num_words // 4, self._least_room))
            find = partial(self._find, current)
            if self._rounder is not None and isinstance(current, Stream) and current.rounded is not None:
                # Once: other processes may wait for this one there.
                find = partial(self._find_rounded, self._rounder, self._rounder.begin(current.rounded))
            while True:
                found.clear()
                narrowed = find()
                # Counted also if the buffer was too small: a second question would be a second wait.
                counted = index_encode.count(found)
                num_words, strange, *nums = torch.cat(
                    [found.cursor, found.strange.sum()[None], counted]
                ).tolist()
                if num_words <= found.capacity:
                    break
                found.resize(num_words + num_words // 4)
            self._num_words = num_words
            self._check_range(narrowed, has_strange=bool(strange))
            return DeviceChanges(self, nums)

    def _check_range(self, narrowed: Mapping[int, torch.Tensor], *, has_strange: bool) -> None:
        """Check those tensors, as the model has them, that have infinities or NaN, or may have some.

        `has_strange`: whether `count` found some among the changed elements.
        """
        strange = set(self._found.strange.nonzero().view(-1).tolist()) if has_strange else set()
        finite = np.zeros(len(self._specs), dtype=np.bool_)
        finite[list(narrowed)] = True
        ranges = Ranges(finite)
        for i, given in narrowed.items():
            spec = self._specs[i]
            if i in strange or not self._finite[i]:
                ranges.look([(i, spec.name, given, served(given, spec))])
        ranges.end()
        self._found_finite = ranges.finite

    def apply(self, changes: Changes) -> None:
        self._finite = self._found_finite
        with self.here(), on(self.side):
            compare.apply(self._found, self._memory.data_ptr())
            if self.side is not None:
                self.side.synchronize()

    def replace(self, current: Tensors) -> None:
        with self.here():
            specs = {spec.name: spec for spec in self._specs}
            self._finite = np.zeros(len(specs), dtype=np.bool_)
            self._finite = copy_each(current, specs, self.tensors)
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()

    def read(self, part: Part) -> tuple[torch.Tensor, Sums]:
        tensor = self.tensors[part.key]
        if self._reader is None:
            return tensor, part_sums.digest(part, tensor)
        with torch.cuda.stream(self._reader):
            host = tensor
            if tensor.device.type == "cuda":
                # Not one buffer for all: an upload may still hold views of the tensor before.
                host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
                host.copy_(tensor, non_blocking=True)
            try:
                sums = self._digested(part, tensor)
            except torch.OutOfMemoryError:
                sums = None
            self._reader.synchronize()
            return host, part_sums.digest(part, host) if sums is None else sums

    def digest(self, tensor: torch.Tensor) -> Sums:
        if self._reader is None:
            return state_digest.of_tensor(tensor)
        with torch.cuda.stream(self._reader):
            try:
                return self._digested_run(0, tensor)
            except torch.OutOfMemoryError:
                return state_digest.of_tensor(tensor)

    def warm_up(self, table: PartTable, encoding: Encoding) -> None:
        if isinstance(encoding, Context):
            with self.here(), on(self.side):
                encode_gpu.warm_up(table, self._parent, self.device)

    def sums(self, parts: Sequence[Part]) -> dict[str, Sums]:
        found = {}
        for part in parts:
            tensor = self.tensors[part.key]
            try:
                found[part.key] = self._digested(part, tensor)
            except torch.OutOfMemoryError:
                found[part.key] = part_sums.digest(part, tensor)
        return found

    def encode(self, schema: Schema, table: PartTable, changes: Changes, encoding: Encoding) -> EncodedDelta:
        assert isinstance(changes, DeviceChanges)
        with self.here(), on(self.side):
            return encode_gpu.encode(
                *(schema, table, encoding),
                num_changed=changes.num_changed,
                block_of=changes.block,
                parent=self._parent,
            )

    def _digested(self, part: Part, tensor: torch.Tensor) -> Sums:
        """Digest a part on the device, in pieces where it is not there."""
        if tensor.device.type == "cuda":
            return part_sums.digest(part, tensor)
        if (first := part.run) is not None:
            return self._digested_run(first, tensor)
        return part_sums.digest(part, tensor)

    def _digested_run(self, first: int, tensor: torch.Tensor) -> Sums:
        """Digest elements that follow each other from position `first` on, on the device."""
        sums, flat = Sums(), tensor.view(-1)
        step = DIGEST_BYTES // tensor.element_size()
        for start in range(0, flat.numel(), step):
            some = flat[start : start + step].to(self.device)
            sums = sums.plus(state_digest.of_run(first + start, some))
        return sums

    def here(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _find(self, current: Tensors) -> Mapping[int, torch.Tensor]:
        """Compare all tensors, and return those whose range is still to be checked, by number."""
        if not isinstance(current, Stream):
            return self._find_given(current)
        ranges = Ranges(np.zeros(len(self._specs), dtype=np.bool_))
        for group, narrowed, size in _in_groups(current, self._specs, self.device):
            # No wait of its own: that for the room, which follows, has less to wait for.
            ranges.look([(i, self._specs[i].name, given, group[i]) for i, given in narrowed.items()])
            # A stream cannot be read again, so there must be room for all that may have changed.
            _make_room(self._found, size // compare.WORD + len(group))
            addresses = [group[i].data_ptr() if i in group else 0 for i in range(len(self._specs))]
            for i, end in _runs(group):
                self._find_among(addresses, range(*(self._tiles.first_tiles[at] for at in (i, end))))
        ranges.end()
        return {}

    def _find_rounded(self, rounder: Rounder, begun: _Begun) -> Mapping[int, torch.Tensor]:
        rounder.compare(begun, self._memory.data_ptr())
        return self._find_given(begun.rest)

    def _watch(self, narrowed: Iterable[int]) -> None:
        """Have `count` look for elements of these tensors that are infinite or NaN."""
        for i in narrowed:
            if i not in self._watched:
                self._watched.add(i)
                infinite = torch.tensor([torch.inf], device="cpu").to(TORCH_DTYPES[self._specs[i].dtype])
                self._found.masks[i] = int(bits(infinite)[0])

    def _find_given(self, current: Mapping[str, torch.Tensor]) -> Mapping[int, torch.Tensor]:
        """Compare these tensors: at once, but for the memory that converted ones take. Returns as `_find`."""
        addresses = [0] * len(self._specs)
        pending: list[int] = []
        held: list[torch.Tensor] = []
        narrowed: dict[int, torch.Tensor] = {}
        num_bytes = 0

        def find() -> None:
            nonlocal num_bytes
            for first, end in _runs(pending):
                self._find_among(addresses, range(*(self._tiles.first_tiles[at] for at in (first, end))))
            # Freed in the order of the stream, so that the next ones may take their memory.
            num_bytes = 0
            pending.clear()
            held.clear()

        for i, spec in enumerate(self._specs):
            if (tensor := current.get(spec.name)) is None:
                continue
            as_is = (
                tensor.device == self.device
                and tensor.dtype == TORCH_DTYPES[spec.dtype]
                and tensor.is_contiguous()
            )
            if not as_is:
                if is_narrowed(tensor.dtype, TORCH_DTYPES[spec.dtype]):
                    narrowed[i] = tensor
                held.append(tensor := served(tensor, spec, self.device))
                num_bytes += spec.num_bytes
            addresses[i] = tensor.data_ptr()
            assert addresses[i] or not as_is or not tensor.numel(), f"{spec.name} has no memory"
            pending.append(i)
            if num_bytes >= CONVERTED_BYTES:
                find()
        find()
        self._watch(narrowed)
        return narrowed

    def _find_among(self, addresses: list[int], tiles: range) -> None:
        if self._pointers is None or self._pointers[0] != addresses:
            slow = self._tiles.slow(addresses)
            self._pointers = (
                addresses.copy(),
                torch.tensor(addresses, dtype=torch.int64, device="cpu").to(self.device, non_blocking=True),
                slow,
                torch.tensor(slow, dtype=torch.int32, device="cpu").to(self.device, non_blocking=True),
            )
        _, tensors, slow, picked = self._pointers

        among = compare.slow_among(slow, tiles)
        compare.compare(self._found, tensors, picked, self._memory.data_ptr(), tiles, among)

    def block(self, nums: Sequence[int], *, gaps: bool, parts: Sequence[Part] | None = None) -> ChangeBlock:
        lines = None
        if parts is not None:
            listed = [parts[number].lines or (0, 1, 0) for number in self._numbers.tolist()]
            lines = torch.tensor(listed, dtype=torch.int64, device=self.device)
        layout, order = self._orders[gaps]
        head = index_encode.head_bytes(len(self._specs))
        size = head + self._tiles.max_data_bytes(nums, gaps=gaps)
        memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        index_encode.encode(self._found, order, self._memory.data_ptr(), memory, gaps=gaps, lines=lines)
        return ChangeBlock(layout, memory, head)


def _in_groups(
    stream: Stream, specs: Sequence[TensorSpec], device: torch.device
) -> Iterator[tuple[dict[int, torch.Tensor], dict[int, torch.Tensor], int]]:
    """Yield tensors as they are served, some at a time, by their places in `specs`.

    And those as they were given whose range is to be checked; and the bytes of the first.
    """
    numbers = {spec.name: number for number, spec in enumerate(specs)}
    held: dict[int, torch.Tensor] = {}
    narrowed: dict[int, torch.Tensor] = {}
    num_bytes = given_bytes = 0
    for name, given in stream.read():
        number = numbers[name]
        held[number] = served(given, specs[number], device)
        num_bytes += specs[number].num_bytes
        if is_narrowed(given.dtype, TORCH_DTYPES[specs[number].dtype]):
            narrowed[number] = given
            given_bytes += given.nbytes
        if num_bytes + given_bytes >= STREAMED_BYTES:
            yield held, narrowed, num_bytes
            held, narrowed, num_bytes, given_bytes = {}, {}, 0, 0
    yield held, narrowed, num_bytes


def _runs(held: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first of each run of numbers that follow each other, and one more than its last."""
    found: list[tuple[int, int]] = []
    for number in sorted(held):
        if found and found[-1][1] == number:
            found[-1] = found[-1][0], number + 1
        else:
            found.append((number, number + 1))
    return found


def _make_room(found: Any, num_words: int) -> None:
    """Give `kernels.compare.Found` room for so many more changed words, and keep those that it has."""
    used = int(found.cursor)
    if found.capacity >= used + num_words:
        return
    for name in ("places", "new_words", "old_words"):
        old = getattr(found, name)
        new = torch.empty(used + num_words, dtype=old.dtype, device=old.device)
        new[:used].copy_(old[:used])
        setattr(found, name, new)


def _pinned(num_bytes: int, device: torch.device, owner: object) -> torch.Tensor:
    """Return zeros in host memory that the device can address for as long as `owner` lives.

    Not of torch's pool, which rounds sizes up to a power of 2. Raises MemoryError.
    """
    memory = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
    if device.type == "cuda" and num_bytes:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0))
        if code:
            raise MemoryError(f"host memory cannot be pinned: CUDA error {code}")
        # Holds the memory until then. At exit the driver may be gone already.
        weakref.finalize(owner, _unpin, memory).atexit = False
    return memory


def _unpin(memory: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
