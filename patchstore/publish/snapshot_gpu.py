"""A snapshot of which kernels compare all tensors at once.

It is one block of memory, whose layout is the kernels', on the device or in pinned host memory.
Imports Triton, so only what runs kernels may import it.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from patchstore.bucket.records import DTYPE_BYTES, Part, Schema, TensorSpec
from patchstore.codec import Encoding
from patchstore.codec.context import Context
from patchstore.codec.delta import EncodedDelta
from patchstore.codec.index import Gap, Raw
from patchstore.codec.part_table import PartSums, PartTable, Together
from patchstore.kernels import compare, device_guard, index_encode, new_stream, on
from patchstore.kernels.compare import Found
from patchstore.publish import encode_gpu
from patchstore.publish.encode_gpu import BlockLayout, ChangeBlock, Coder, Parent, as_found
from patchstore.publish.rounder_gpu import Rounder
from patchstore.publish.snapshot import (
    Ahead,
    InPlace,
    Place,
    Ranges,
    Stream,
    Tensors,
    allocating,
    copy_each,
    is_narrowed,
    served,
)
from patchstore.support import collector
from patchstore.support.threads import Task, Worker
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
COPIED_BYTES = 1 << 30
"""Of a snapshot in host memory, so much at a time is copied to the device to be compared and coded."""
COPIED_SHARE = 20
"""Copies take at most one in so many bytes of the device's memory."""
SMALLER = 8
"""Where there is no memory for such copies, they are halved, down to this part of their size."""
COPIED_AT_ONCE = 16 << 20
"""Bytes."""
NEAR_BYTES = 6 << 30
"""And of one on the device, so much is coded at a time."""
ROOMS = 4
"""Copies at a time: one is made, one is compared, and the encoder counts in one and reads one again."""
DIGEST_BYTES = 256 << 20
"""Of a snapshot in host memory, so much at a time goes to the device to be digested."""
FIRST_ROOM = 64
"""A comparison begins with room for one changed word in so many; see `kernels.compare.Found`."""


class DeviceChanges(Changes):
    """Changes that kernels found; they stay on the device as words until they are encoded, or `groups`."""

    def __init__(self, snapshot: "DeviceSnapshot", nums: Sequence[int], begun: "_Encoding | None") -> None:
        """Refer to the last comparison's changes; `nums` elements of each width."""
        self.num_changed = sum(nums)
        self.snapshot, self.nums, self.begun = snapshot, nums, begun

    def groups(self) -> list[Group]:
        with self.snapshot.here(), on(self.snapshot.side):
            return self.snapshot.block(self.nums, gaps=False).on_host().groups()


class _Encoding(NamedTuple):
    """What is handed to the encoder during a comparison."""

    encoder: Worker
    coder: Coder
    tasks: list[Task[None]]
    """One for each piece that was compared."""


class _Piece(NamedTuple):
    """Neighbours in a snapshot, which are compared at once, or coded at once."""

    tiles: compare.Tiles
    first_tensor: int
    first_tile: int
    begin: int
    """Its first byte in the snapshot."""
    layout: BlockLayout
    order: index_encode.Order
    """With positions."""

    @property
    def num_bytes(self) -> int:
        return self.tiles.first_bytes[-1]

    @property
    def tensors(self) -> range:
        return range(self.first_tensor, self.first_tensor + len(self.tiles.widths))


class _Located(NamedTuple):
    """Where tensors of a piece are that a trainer has."""

    where: object
    """See `InPlace`."""
    addresses: list[int]
    """See `compare.Given`; 0 also of those that are converted."""
    runs: list[tuple[int, int]]
    """Those that are there: the first of each run in the piece, and one more than its last."""
    converted: list[int]
    """Places in the piece of those that are converted to be compared, or copied to this device."""
    narrowed: Array
    """int64: which of all tensors are served in a dtype of a smaller range."""


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
        dtypes = {dtype: code for code, dtype in enumerate(sorted({spec.dtype for spec in specs}))}
        # What is coded together is neighbours.
        together = Together.of(
            np.array([dtypes[spec.dtype] for spec in specs], dtype=np.int64),
            np.array([spec.num_elements for spec in specs], dtype=np.int64),
        )
        order = sorted(
            range(len(specs)), key=lambda number: (-DTYPE_BYTES[specs[number].dtype], together.groups[number])
        )
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
        self._watched = np.zeros(len(specs), dtype=np.bool_)
        """Of each tensor, whether it was converted to a dtype of a smaller range."""
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
        self._whole = self._piece(range(len(specs)), self._tiles)
        self._with_gaps = self._order(BlockLayout.of(self._specs, self._numbers, gaps=True))
        kinds, groups = together.kinds[self._numbers], together.groups[self._numbers]
        self._cut = partial(_cut, kinds, groups, self._tiles.first_bytes)
        self._most = copied_bytes(device) if is_far(self._memory, device) else NEAR_BYTES
        """Bytes of a piece, where a group has no more."""
        self._least = self._most // SMALLER
        self._pieces = [self._piece(each) for each in self._cut(self._most)]
        self._given: dict[range, compare.Given] = {}
        """Of each piece, by its tensors: where the trainer's were when kernels looked last."""
        self._places: dict[range, _Located] = {}
        """The same, as the trainer's tensors were given last."""
        # An anchor is read on another thread, which must not queue behind the caller's work.
        self.side, self._reader, self._copier = (new_stream(device) for _ in range(3))
        self.replace(current)
        self._compile(current)

    def _compile(self, current: Tensors) -> None:
        """Compare once without changes, so that kernels are compiled here and not while a trainer waits."""
        found = self.compare(self._like(current) if isinstance(current, Stream) else current)
        with self.here():
            # Such as a NaN that came back from float32 with other bits, or what a thread has trained already.
            self._found.clear()
            self.block([0] * len(self._tiles.by_width), gaps=False)
        self.apply(found)
        if self._rounder is not None and isinstance(current, Stream) and current.rounded is not None:
            with self.here():
                self._rounder.warm_up(current.rounded, self._memory.data_ptr())

    def _like(self, stream: Stream) -> Mapping[str, torch.Tensor]:
        """Return the snapshot's tensors; one in float32 if what a pass has beside matrices may be so."""
        some = [spec for spec in self._specs if spec.dtype == "BF16" and spec.num_elements]
        dtypes = () if stream.rounded is None else stream.rounded.dtypes
        if not some or all(given != torch.float32 for given, _ in dtypes):
            return self.tensors
        name = min(some, key=lambda spec: spec.num_elements).name
        return self.tensors | {name: self.tensors[name].to(self.device, torch.float32)}

    def _order(self, layout: BlockLayout) -> tuple[BlockLayout, index_encode.Order]:
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

    def _piece(self, its: range, tiles: compare.Tiles | None = None) -> _Piece:
        if tiles is None:
            sizes, widths = self._tiles.num_bytes, self._tiles.widths
            tiles = compare.cut(sizes[its.start : its.stop], widths[its.start : its.stop], self.device)
        layout = BlockLayout.of(
            self._specs[its.start : its.stop], self._numbers[its.start : its.stop], gaps=False
        )
        at = self._tiles.first_tiles[its.start], self._tiles.first_bytes[its.start]
        return _Piece(tiles, its.start, *at, *self._order(layout))

    def compare(self, current: Tensors, ahead: Ahead | None = None) -> Changes:
        found = self._found
        with self.here(), _without_collections(current):
            if self.side is not None:
                # After a comparison or an encoding that failed, kernels may still read what was found.
                torch.cuda.current_stream().wait_stream(self.side)
            # The buffer of one step that changed everything must not stay for ever.
            if found.capacity > 4 * max(self._num_words, self._least_room, 1):
                found.resize(max(self._num_words + self._num_words // 4, self._least_room))
            found.clear()
            rooms = None if ahead is None else self._rooms(current, ahead.encoding)
            if rooms is None or ahead is None:
                return self._compared(current, [(self._whole, self._parent)], None)
            coder = Coder(ahead.schema, ahead.table, ahead.encoding, self.device)
            begun = _Encoding(ahead.encoder, coder, [])
            pieces = self._copied(self._pieces, rooms, lambda number: begun.tasks[number].wait())
            return self._compared(current, pieces, begun)

    def _compared(
        self,
        current: Tensors,
        pieces: Iterable[tuple[_Piece, Parent]],
        begun: _Encoding | None,
    ) -> DeviceChanges:
        """Compare pieces of a snapshot, each with what has its parts; hand what was found to the encoder."""
        found, num_words, is_strange = self._found, 0, False
        nums, narrowed = dict.fromkeys(self._tiles.by_width, 0), list[Array]()
        rounder, rounding = self._rounder, None
        given = current
        if rounder is not None and isinstance(current, Stream) and current.rounded is not None:
            # Once: other processes may wait for this one there.
            rounding = rounder.begin(current.rounded)
            given = rounding.rest
        for piece, held in pieces:
            before = num_words
            while True:
                if rounder is not None and rounding is not None and piece.tensors:
                    # As if all of the snapshot lay there.
                    address = self._address(piece, held) - piece.begin
                    tiles = range(piece.first_tile, piece.first_tile + piece.tiles.num_tiles)
                    rounder.compare(rounding, address, tiles)
                some_narrowed = self._find(given, piece, held)
                # Counted also if the buffer was too small: a second question would be a second wait.
                its = self._among(piece)
                counted = index_encode.count(its)
                num_words, strange, *some = torch.cat(
                    [found.cursor, its.strange.sum()[None], counted]
                ).tolist()
                if num_words <= found.capacity:
                    break
                self._grow(num_words + num_words // 4, before, its)
            narrowed.append(some_narrowed)
            is_strange |= bool(strange)
            for width, num in zip(piece.tiles.by_width, some, strict=True):
                nums[width] += num
            if begun is not None:
                begun.tasks.append(task := Task(partial(self._code, begun.coder, its, piece, held, some)))
                begun.encoder.hand_over(task)
        self._num_words = num_words
        if not isinstance(given, Stream):
            numbers = np.concatenate([np.zeros(0, dtype=np.int64), *narrowed])
            self._check_range(given, numbers, has_strange=is_strange)
        return DeviceChanges(self, [*nums.values()], begun)

    def _grow(self, capacity: int, kept: int, its: Found) -> None:
        """Make room, and forget what was found of one piece, the last one."""
        if kept:
            # Others follow.
            self._found.grow(max(capacity, self._found.capacity * 3 // 2), kept, self.side)
            its.counts.zero_()
            self._found.cursor.fill_(kept)
        else:
            self._found.resize(capacity)

    def _among(self, piece: _Piece) -> Found:
        return self._found.among(piece.tiles, piece.first_tensor, piece.first_tile)

    def _rooms(self, current: Tensors, encoding: Encoding) -> torch.Tensor | None:
        """Return memory for copies of pieces, if they are to be coded while others are compared."""
        is_given = not isinstance(current, Stream) or current.rounded is not None
        if not is_given or not isinstance(encoding, Context) or not is_far(self._memory, self.device):
            return None
        with suppress(torch.OutOfMemoryError):
            while True:
                with suppress(torch.OutOfMemoryError):
                    return rooms_for(self._pieces, self.device)
                if self._most < 2 * self._least:
                    break
                # Smaller ones take longer, and are all the trainer has left memory for.
                self._most //= 2
                self._pieces = [self._piece(each) for each in self._cut(self._most)]
        # The trainer goes on: the comparison takes no memory, and what is not encoded will be an anchor.
        return None

    def _copied(
        self, pieces: Sequence[_Piece], rooms: torch.Tensor, wait_for: Callable[[int], object]
    ) -> Iterator[tuple[_Piece, Parent]]:
        """Yield pieces, each with a copy of it that what is launched next may read.

        While the caller works with one, the next is copied. `wait_for` waits until what was done with a piece
        is launched, by its place: with that, all is that reads the piece before it.
        """
        current = None if self._copier is None else torch.cuda.current_stream()
        if self._copier is not None and current is not None and self.side is not None:
            # The memory may be that of something that is still read.
            self._copier.wait_stream(current)
            for stream in (self._copier, self.side):
                rooms.record_stream(stream)

        def copy(number: int) -> torch.cuda.Event | None:
            if number >= ROOMS:
                wait_for(number - ROOMS + 1)
                if self._copier is not None and self.side is not None:
                    self._copier.wait_stream(self.side)
            piece = pieces[number]
            with on(self._copier):
                # Small copies of the encoder take the same way, between two of these.
                for start in range(0, piece.num_bytes, COPIED_AT_ONCE):
                    end = min(start + COPIED_AT_ONCE, piece.num_bytes)
                    source = self._memory[piece.begin + start : piece.begin + end]
                    rooms[number % ROOMS, start:end].copy_(source, non_blocking=True)
            return None if self._copier is None else self._copier.record_event()

        copied = copy(0) if pieces else None
        for number, piece in enumerate(pieces):
            is_there, copied = copied, copy(number + 1) if number + 1 < len(pieces) else None
            if current is not None and is_there is not None:
                current.wait_event(is_there)
            yield piece, Parent(rooms[number % ROOMS], self._parent.firsts - piece.begin)

    def _code(self, coder: Coder, found: Found, piece: _Piece, held: Parent, nums: Sequence[int]) -> None:
        """Encode what was found of a piece; on the thread that encodes."""
        with self.here(), on(self.side):
            coder.add(self._block(found, piece.layout, piece.order, nums, coder.lines(piece.layout)), held)

    def _check_range(
        self, current: Mapping[str, torch.Tensor], narrowed: Array, *, has_strange: bool
    ) -> None:
        """Check those of some tensors, as the model has them, that have infinities or NaN, or may have some.

        Args:
            narrowed: int64, numbers of those that are served in a dtype of a smaller range.
            has_strange: whether `count` found some among the changed elements.
        """
        doubtful = ~self._finite
        if has_strange:
            doubtful[self._found.strange.nonzero().view(-1).cpu().numpy()] = True
        finite = np.zeros(len(self._specs), dtype=np.bool_)
        finite[narrowed] = True
        ranges = Ranges(finite)
        for i in narrowed[doubtful[narrowed]].tolist():
            spec = self._specs[i]
            given = current[spec.name]
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

    def read(self, part: Part) -> torch.Tensor:
        tensor = self.tensors[part.key]
        if self._reader is None or tensor.device.type == "cpu":
            return tensor
        with torch.cuda.stream(self._reader):
            # Not one buffer for all: an upload may still hold views of the tensor before.
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            self._reader.synchronize()
            return host

    def digest(self, tensor: torch.Tensor) -> Sums:
        if self._reader is None:
            return state_digest.of_tensor(tensor)
        with torch.cuda.stream(self._reader):
            try:
                return self._digested(tensor)
            except torch.OutOfMemoryError:
                return state_digest.of_tensor(tensor)

    def warm_up(self, table: PartTable, encoding: Encoding) -> None:
        if isinstance(encoding, Context):
            with self.here(), on(self.side):
                encode_gpu.warm_up(table, self._parent, self.device)

    def sums(self, table: PartTable) -> PartSums:
        try:
            # Over the bus where it is in host memory.
            with self.here(), on(self._reader):
                return encode_gpu.digested(table, self._parent, self.device)
        except torch.OutOfMemoryError:
            # The trainer has left the device nothing.
            return table.listed(
                {part.key: part_sums.digest(part, self.tensors[part.key].cpu()) for part in table.parts}
            )

    @collector.paused()
    def encode(self, schema: Schema, table: PartTable, changes: Changes, encoding: Encoding) -> EncodedDelta:
        assert isinstance(changes, DeviceChanges)
        with self.here(), on(self.side):
            if changes.begun is not None:
                for task in changes.begun.tasks:
                    task.result()
                return changes.begun.coder.delta(changes.num_changed)
            if isinstance(encoding, Raw) and bool(table.is_whole.all()):
                block = self.block(changes.nums, gaps=isinstance(encoding, Gap))
                return as_found(table, encoding, block, changes.num_changed)
            coder = Coder(schema, table, encoding, self.device)
            if isinstance(encoding, Context):
                nums = torch.stack([self._among(piece).nums.sum() for piece in self._pieces]).tolist()
                some = [(piece, num) for piece, num in zip(self._pieces, nums, strict=True) if num]
                held = self._held([piece for piece, _ in some])
                for (piece, parent), (_, num) in zip(held, some, strict=True):
                    self._code(coder, self._among(piece), piece, parent, [num])
            else:
                self._code(coder, self._found, self._whole, self._parent, changes.nums)
            return coder.delta(changes.num_changed)

    def _held(self, pieces: Sequence[_Piece]) -> Iterator[tuple[_Piece, Parent]]:
        """Yield pieces, each with what has its parts on the device."""
        if is_far(self._memory, self.device):
            # On the same stream, whatever is launched is in order.
            return self._copied(pieces, rooms_for(pieces, self.device), lambda _: None)
        return ((piece, self._parent) for piece in pieces)

    def _digested(self, tensor: torch.Tensor) -> Sums:
        """Digest a tensor of the host on the device, in pieces."""
        sums, flat = Sums(), tensor.view(-1)
        step = DIGEST_BYTES // tensor.element_size()
        for start in range(0, flat.numel(), step):
            some = flat[start : start + step].to(self.device)
            sums = sums.plus(state_digest.of_run(start, some))
        return sums

    def here(self) -> AbstractContextManager[object]:
        return device_guard(self.device)

    def _find(self, current: Tensors, piece: _Piece, held: Parent) -> Array:
        """Compare a piece; return the numbers of those tensors whose range is still to be checked, int64."""
        if not isinstance(current, Stream):
            return self._find_given(current, piece, held)
        ranges = Ranges(np.zeros(len(self._specs), dtype=np.bool_))
        for group, narrowed, size in _in_groups(current, self._specs, self.device):
            # No wait of its own: that for the room, which follows, has less to wait for.
            ranges.look([(i, self._specs[i].name, given, group[i]) for i, given in narrowed.items()])
            # A stream cannot be read again, so there must be room for all that may have changed.
            used, more = int(self._found.cursor), size // compare.WORD + len(group)
            if self._found.capacity < used + more:
                self._found.grow(used + more, used, None)
            addresses = [group[i].data_ptr() if i in group else 0 for i in range(len(self._specs))]
            for i, end in _runs(group):
                self._find_among(addresses, range(i, end), piece, held)
        ranges.end()
        return np.zeros(0, dtype=np.int64)

    def _watch(self, narrowed: Array) -> None:
        """Have `count` look for elements of these tensors that are infinite or NaN."""
        new = narrowed[~self._watched[narrowed]]
        if not len(new):
            return
        dtypes = [self._specs[i].dtype for i in new.tolist()]
        infinite = {
            dtype: int(bits(torch.tensor([torch.inf], device="cpu").to(TORCH_DTYPES[dtype]))[0])
            for dtype in {*dtypes}
        }
        masks = torch.tensor([infinite[dtype] for dtype in dtypes], dtype=torch.int64, device="cpu")
        self._found.masks[torch.from_numpy(new).to(self.device)] = masks.to(self.device)
        self._watched[new] = True

    def _find_given(self, current: Mapping[str, torch.Tensor], piece: _Piece, parent: Parent) -> Array:
        """Compare tensors of a piece that are given: at once, but for the memory that converted ones take.

        Returns as `_find`.
        """
        given = self._located(current, piece)
        # Converted ones have addresses of their own each time.
        addresses = given.addresses.copy() if given.converted else given.addresses
        held: list[torch.Tensor] = []
        first = num_bytes = 0
        for place in given.converted:
            spec = self._specs[piece.first_tensor + place]
            held.append(tensor := served(current[spec.name], spec, self.device))
            addresses[place] = tensor.data_ptr()
            num_bytes += spec.num_bytes
            if num_bytes >= CONVERTED_BYTES:
                self._find_runs(addresses, given.runs, range(first, place + 1), piece, parent)
                # Freed in the order of the stream, so that the next ones may take their memory.
                held.clear()
                first, num_bytes = place + 1, 0
        self._find_runs(addresses, given.runs, range(first, len(addresses)), piece, parent)
        return given.narrowed

    def _located(self, current: Mapping[str, torch.Tensor], piece: _Piece) -> _Located:
        """Return where the tensors of a piece are; of tensors that did not move, that is known."""
        where = current.where if isinstance(current, InPlace) else None
        known = self._places.get(piece.tensors)
        if known is not None and where is not None and known.where is where:
            return known
        addresses, there, converted = [0] * len(piece.tensors), list[int](), list[int]()
        narrowed: list[int] = []
        for place, spec in enumerate(self._specs[piece.first_tensor : piece.tensors.stop]):
            if (tensor := current.get(spec.name)) is None:
                continue
            there.append(place)
            dtype = TORCH_DTYPES[spec.dtype]
            is_rounded = tensor.dtype == torch.float32 and dtype == torch.bfloat16
            if is_narrowed(tensor.dtype, dtype):
                narrowed.append(piece.first_tensor + place)
            if not tensor.is_contiguous() or tensor.device != self.device:
                converted.append(place)
            elif tensor.dtype == dtype or is_rounded:
                address = tensor.data_ptr()
                assert address or not tensor.numel(), f"{spec.name} has no memory"
                addresses[place] = -address if is_rounded else address
            else:
                converted.append(place)
        numbers = np.array(narrowed, dtype=np.int64)
        self._watch(numbers)
        found = self._places[piece.tensors] = _Located(where, addresses, _runs(there), converted, numbers)
        return found

    def _find_runs(
        self,
        addresses: list[int],
        runs: Sequence[tuple[int, int]],
        some: range,
        piece: _Piece,
        parent: Parent,
    ) -> None:
        """Compare those of some tensors of a piece that are there."""
        for first, end in runs:
            if mine := range(max(first, some.start), min(end, some.stop)):
                self._find_among(addresses, mine, piece, parent)

    def _find_among(self, addresses: list[int], some: range, piece: _Piece, parent: Parent) -> None:
        """Compare some tensors of a piece, by their places in it, as `addresses` are."""
        known = self._given.get(piece.tensors)
        if known is None or known.addresses != addresses:
            known = self._given[piece.tensors] = compare.Given(piece.tiles, addresses)
        tiles = range(*(piece.tiles.first_tiles[at] for at in (some.start, some.stop)))
        compare.compare(self._among(piece), known, self._address(piece, parent), tiles)

    def _address(self, piece: _Piece, parent: Parent) -> int:
        """Return where a piece of the snapshot begins."""
        return parent.memory.data_ptr() + int(parent.firsts[self._numbers[piece.first_tensor]])

    def block(self, nums: Sequence[int], *, gaps: bool) -> ChangeBlock:
        """Encode the last comparison's changes in `gap`, or `raw`, on the current stream, and wait for it."""
        layout, order = self._with_gaps if gaps else (self._whole.layout, self._whole.order)
        return self._block(self._found, layout, order, nums, None)

    def _block(
        self,
        found: Found,
        layout: BlockLayout,
        order: index_encode.Order,
        nums: Sequence[int],
        lines: torch.Tensor | None,
    ) -> ChangeBlock:
        head = index_encode.head_bytes(len(layout.specs))
        size = head + found.tiles.max_data_bytes(nums, gaps=layout.gaps)
        memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        held = self._memory.data_ptr()
        index_encode.encode(found, order, held, memory, gaps=layout.gaps, lines=lines)
        return ChangeBlock(layout, memory, head)


def _without_collections(current: Tensors) -> AbstractContextManager[object]:
    """Keep the garbage collector away from a comparison, but for a pass through what a caller yields."""
    is_callers = isinstance(current, Stream) and current.rounded is None
    return nullcontext() if is_callers else collector.paused()


def copied_bytes(device: torch.device) -> int:
    """Return `COPIED_BYTES`, or what the device's memory has room for."""
    if device.type != "cuda":
        return COPIED_BYTES
    return min(COPIED_BYTES, torch.cuda.get_device_properties(device).total_memory // (COPIED_SHARE * ROOMS))


def _cut(kinds: Array, groups: Array, starts: Sequence[int], most: int) -> Iterator[range]:
    """Yield neighbours of one kind: whole groups, of at most so many bytes where one is not larger.

    Args:
        kinds, groups: int64 [num_tensors], of `Together`.
        starts: where each begins in the snapshot, and the end.
    """
    firsts, begin = np.flatnonzero(np.diff(groups, prepend=-1)).tolist(), 0
    for first, end in pairwise([*firsts, len(groups)]):
        if first > begin and (kinds[first] != kinds[begin] or starts[end] - starts[begin] > most):
            yield range(begin, first)
            begin = first
    if len(groups):
        yield range(begin, len(groups))


def rooms_for(pieces: Sequence[_Piece], device: torch.device) -> torch.Tensor:
    """Return memory for copies of pieces, uint8 [ROOMS, bytes], or fewer."""
    size = max((piece.num_bytes for piece in pieces), default=0)
    return torch.empty((min(ROOMS, len(pieces)), size), dtype=torch.uint8, device=device)


def is_far(memory: torch.Tensor, device: torch.device) -> bool:
    """Whether kernels read memory over a bus."""
    return memory.device != device


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
