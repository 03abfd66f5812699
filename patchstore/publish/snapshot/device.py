"""A snapshot of which kernels compare all tensors at once.

It is one block of memory, whose layout is the kernels'. In host memory it passes through the device in parts
while it is compared.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch

from patchstore.format.records import DTYPE_BYTES, Part, TensorSpec
from patchstore.kernels import new_stream
from patchstore.publish.snapshot.block import Block, Layout
from patchstore.publish.snapshot.memory import (
    Place,
    Stream,
    Tensors,
    allocating,
    copy_each,
    in_file,
    pinned,
    served,
    views,
)
from patchstore.publish.snapshot.plain import write_patches
from patchstore.publish.snapshot.ranges import Ranges, is_narrowed
from patchstore.publish.snapshot.rounded import Begun, Rounder
from patchstore.publish.snapshot.streamed import in_groups, make_room, runs
from patchstore.tensors import parts as part_sums
from patchstore.tensors import state_digest
from patchstore.tensors.bits import TORCH_DTYPES, bits
from patchstore.tensors.changes import Changes, Patches
from patchstore.tensors.state_digest import Sums

CONVERTED_BYTES = 1 << 30
"""So many bytes of tensors at a time are converted or made contiguous for a comparison."""
BUCKET_BYTES = 256 << 20
"""Of a snapshot in a file, two such parts are in memory at a time."""
DIGEST_BYTES = 256 << 20
"""Of a snapshot in host memory, so much at a time goes to the device to be digested."""
FIRST_ROOM = 64
"""A comparison begins with room for one changed word in so many; see `kernels.compare.Found`."""


class Kernels(NamedTuple):
    """Modules of kernels; importing them imports Triton."""

    compare: ModuleType
    """`kernels.compare`"""
    encode: ModuleType
    """`kernels.index_encode`"""
    rounded: ModuleType
    """`kernels.rounded`"""


def on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Launch what the block launches on a stream, where there is one."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


class DeviceChanges(Changes):
    """Changes that kernels found; they stay on the device as words until `block` or `patches` is called."""

    def __init__(self, snapshot: "DeviceSnapshot", nums: Sequence[int]) -> None:
        """Refer to the changes that the snapshot's last comparison found.

        Args:
            nums: changed elements of each element width.
        """
        self.num_changed = sum(nums)
        self.snapshot = snapshot
        self._nums = nums

    def block(self, *, gaps: bool, parts: Mapping[str, Part] | None = None) -> Block:
        """Encode in `gap`, or `raw`, on the device; on the current stream, and waits for it.

        Args:
            parts: by the snapshot's names, if these are parts of tensors. Digest sums are those of elements
                at their positions in the tensors; they mean nothing for parts without `Part.lines`.
        """
        return self.snapshot.block(self._nums, gaps=gaps, parts=parts)

    def patches(self) -> Patches:
        with self.snapshot.here(), on(self.snapshot.side):
            return self.block(gaps=False).on_host().patches()


class DeviceSnapshot:
    """A snapshot that kernels compare, all tensors at once; see `kernels.compare`.

    A comparison is on the caller's stream. Encoding and `apply` are on a stream of their own, `side`, and
    overlap with what the caller does next; the caller waits for both before the next comparison.
    """

    def __init__(
        self,
        current: Tensors,
        specs: Sequence[TensorSpec],
        place: Place,
        device: torch.device,
        kernels: Kernels,
    ) -> None:
        self._kernels, self.device = kernels, device
        self._specs = sorted(specs, key=lambda spec: -DTYPE_BYTES[spec.dtype])
        widths = [DTYPE_BYTES[spec.dtype] for spec in self._specs]
        self._tiles = kernels.compare.cut([spec.num_bytes for spec in self._specs], widths, device)
        self.is_file = isinstance(place, os.PathLike)
        num_bytes = self._tiles.first_bytes[-1]
        with allocating(place, num_bytes):
            self._stages: list[torch.Tensor] = []
            if isinstance(place, os.PathLike):
                self._memory = in_file(place, num_bytes)
                room = max(min(num_bytes, BUCKET_BYTES), self._tiles.words * kernels.compare.WORD)
                # Of torch's pool, which survives a fork: the host writes to them.
                is_cuda = device.type == "cuda"
                self._stages = [
                    torch.empty(room, dtype=torch.uint8, device="cpu", pin_memory=is_cuda) for _ in range(2)
                ]
            elif place == "host":
                self._memory = pinned(num_bytes, device, self)
            else:
                self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            self._least_room = num_bytes // kernels.compare.WORD // FIRST_ROOM
            self._found = kernels.compare.Found(self._tiles, self._least_room)
        self._rounder: Rounder | None = None
        """Of a run in FP8; None if the snapshot is in a file, where codes are made and then compared."""
        if isinstance(current, Stream) and current.rounded is not None and not self.is_file:
            numbers = {spec.name: number for number, spec in enumerate(self._specs)}
            self._rounder = Rounder(kernels.rounded, current.rounded.form, self._found, numbers)
        self._watched: set[int] = set()
        """Tensors that were converted to a dtype of a smaller range."""
        self._finite = self._found_finite = set[str]()
        """`Ranges.finite` of the snapshot's tensors, and as they are after the changes found last."""
        self._num_words = 0
        """What the last comparison found."""
        self.tensors = views(self._memory, self._specs, self._tiles.first_bytes[:-1])
        self._orders = {gaps: self._order(Layout.of(self._specs, gaps=gaps)) for gaps in (False, True)}
        self._pointers: tuple[list[int], torch.Tensor, list[int], torch.Tensor] | None = None
        # An anchor is read on another thread, which must not queue behind the caller's work.
        self.side, self._reader = new_stream(device), new_stream(device)
        self.replace(current)
        if not self.is_file:
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

    def _order(self, layout: Layout) -> tuple[Layout, Any]:
        """Return a layout of blocks, and the kernels' table of it."""

        def table(values: Any) -> torch.Tensor:
            return torch.from_numpy(values).to(self.device)

        order = self._kernels.encode.Order(
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
                counted = self._kernels.encode.count(found)
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

        Args:
            has_strange: whether `count` found some among the changed elements.
        """
        strange = set(self._found.strange.nonzero().view(-1).tolist()) if has_strange else set()
        ranges = Ranges(self._specs[i].name for i in narrowed)
        for i, given in narrowed.items():
            spec = self._specs[i]
            if i in strange or spec.name not in self._finite:
                ranges.look(spec.name, given, served(given, spec))
        ranges.end()
        self._found_finite = ranges.finite

    def apply(self, changes: Changes) -> None:
        self._finite = self._found_finite
        if self.is_file:
            write_patches(self.tensors, changes)
            return
        with self.here(), on(self.side):
            self._kernels.compare.apply(self._found, self._memory.data_ptr())
            if self.side is not None:
                self.side.synchronize()

    def replace(self, current: Tensors) -> None:
        with self.here():
            specs = {spec.name: spec for spec in self._specs}
            self._finite = set()
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
        """Kernels are launched on the current device."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _find(self, current: Tensors) -> Mapping[int, torch.Tensor]:
        """Compare all tensors, and return those whose range is still to be checked, by number."""
        if not isinstance(current, Stream):
            return self._find_given(current)
        ranges = Ranges()
        for group, narrowed, size in in_groups(current, self._specs, self.device):
            # No wait of its own: that for the room, which follows, has less to wait for.
            ranges.look_at([(self._specs[i].name, given, group[i]) for i, given in narrowed.items()])
            # A stream cannot be read again, so there must be room for all that may have changed.
            make_room(self._found, size // self._kernels.compare.WORD + len(group))
            addresses = [group[i].data_ptr() if i in group else 0 for i in range(len(self._specs))]
            for i, end in runs(group):
                self._find_among(addresses, range(*(self._tiles.first_tiles[at] for at in (i, end))))
        ranges.end()
        return {}

    def _find_rounded(self, rounder: Rounder, begun: Begun) -> Mapping[int, torch.Tensor]:
        """Compare codes, and the rest as other tensors."""
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
            for first, end in runs(pending):
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
        """Compare some tiles."""
        if self._pointers is None or self._pointers[0] != addresses:
            slow = self._tiles.slow(addresses)
            self._pointers = (
                addresses.copy(),
                torch.tensor(addresses, dtype=torch.int64, device="cpu").to(self.device, non_blocking=True),
                slow,
                torch.tensor(slow, dtype=torch.int32, device="cpu").to(self.device, non_blocking=True),
            )
        _, tensors, slow, picked = self._pointers

        def launch(snapshot: int, chosen: range) -> None:
            among = self._kernels.compare.slow_among(slow, chosen)
            self._kernels.compare.compare(self._found, tensors, picked, snapshot, chosen, among)

        if self.is_file:
            self._find_in_file(launch, tiles)
        else:
            launch(self._memory.data_ptr(), tiles)

    def _find_in_file(self, launch: Callable[[int, range], None], tiles: range) -> None:
        """Compare tiles with parts of the snapshot in pinned memory."""
        buckets = list(self._buckets(tiles, self._stages[0].numel()))
        events: list[Any] = [None, None]
        for k, (chosen, start, end) in enumerate(buckets):
            stage = self._stages[k % 2][: end - start]
            if k == 0:
                stage.copy_(self._memory[start:end])
            launch(stage.data_ptr() - start, chosen)
            if self.device.type == "cuda":
                events[k % 2] = torch.cuda.current_stream().record_event()
            # Read ahead while the device compares, but not into a part that it still reads.
            if k + 1 < len(buckets):
                _, next_start, next_end = buckets[k + 1]
                if events[(k + 1) % 2] is not None:
                    events[(k + 1) % 2].synchronize()
                self._stages[(k + 1) % 2][: next_end - next_start].copy_(self._memory[next_start:next_end])

    def _buckets(self, tiles: range, num_bytes: int) -> Iterator[tuple[range, int, int]]:
        """Yield runs of tiles whose part of the snapshot is no larger, and where that begins and ends."""
        first_tiles, first_bytes = self._tiles.first_tiles, self._tiles.first_bytes
        tile_bytes = self._tiles.words * self._kernels.compare.WORD
        begin, start, end = tiles.start, -1, 0
        for tensor in range(len(self._specs)):
            tile, stop = max(first_tiles[tensor], tiles.start), min(first_tiles[tensor + 1], tiles.stop)
            while tile < stop:
                at = first_bytes[tensor] + (tile - first_tiles[tensor]) * tile_bytes
                if start < 0:
                    begin, start = tile, at
                room = (num_bytes - (at - start)) // tile_bytes
                if room < 1:
                    yield range(begin, tile), start, end
                    start = -1
                    continue
                tile = min(stop, tile + room)
                end = first_bytes[tensor] + (tile - first_tiles[tensor]) * tile_bytes
                end = min(end, first_bytes[tensor + 1])
        if start >= 0:
            yield range(begin, tiles.stop), start, end

    def block(self, nums: Sequence[int], *, gaps: bool, parts: Mapping[str, Part] | None = None) -> Block:
        """See `DeviceChanges.block`."""
        lines = None
        if parts is not None:
            listed = [parts[spec.name].lines or (0, 1, 0) for spec in self._specs]
            lines = torch.tensor(listed, dtype=torch.int64, device=self.device)
        layout, order = self._orders[gaps]
        head = self._kernels.encode.head_bytes(len(self._specs))
        size = head + self._tiles.max_data_bytes(nums, gaps=gaps)
        memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._kernels.encode.encode(
            self._found, order, self._memory.data_ptr(), memory, gaps=gaps, lines=lines
        )
        return Block(layout, memory, head)
