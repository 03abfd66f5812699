"""A snapshot of which kernels compare all tensors at once.

It is one block of memory, whose layout is the kernels'. In host memory it passes through the device in parts,
in both directions at once, while it is compared.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import torch

from patchstore import digest
from patchstore.change import Change, Encoded, Listed
from patchstore.digest import Sums
from patchstore.encodings import ENCODINGS, named
from patchstore.kernels import new_stream
from patchstore.model import DTYPE_BYTES, TensorSpec
from patchstore.relative import Coder, Contents, code
from patchstore.snapshot.memory import Place, allocating, in_file, pinned, served, views
from patchstore.snapshot.plain import parent_of
from patchstore.tensors import TORCH_DTYPES, TensorPatch, bits, index_dtype

CONVERTED_BYTES = 1 << 30
"""Of tensors that are converted or made contiguous for a comparison, as many at a time."""
BUCKET_BYTES = 256 << 20
"""Of a snapshot in a file, two such parts are in memory at a time."""
DIGEST_BYTES = 256 << 20
"""Of a snapshot in host memory, so much at a time goes to the device to be digested."""
FIRST_ROOM = 64
"""A comparison begins with room for one changed word in so many; see `kernels.compare.Found`."""


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


class DeviceSnapshot:
    """A snapshot that kernels compare, all tensors at once; see `kernels.compare`.

    Work is on the caller's stream as far as the model's tensors are read, and on a stream of its own from
    there on: encoding and the copy to the host overlap with what the caller does next.
    """

    def __init__(
        self,
        current: Mapping[str, torch.Tensor],
        specs: Sequence[TensorSpec],
        encoding: str,
        place: Place,
        device: torch.device,
        kernels: ModuleType,
    ) -> None:
        self._kernels, self._device, self._gaps = kernels, device, encoding == "gap"
        self._encoding, self._schema = encoding, specs
        self._coder = Coder() if encoding not in ENCODINGS else None
        self._specs = sorted(specs, key=lambda spec: -DTYPE_BYTES[spec.dtype])
        widths = [DTYPE_BYTES[spec.dtype] for spec in self._specs]
        self._tiles = kernels.cut([spec.num_bytes for spec in self._specs], widths, device)
        self._in_file = isinstance(place, os.PathLike)
        num_bytes = self._tiles.first_bytes[-1]
        with allocating(place, num_bytes):
            self._stages: list[torch.Tensor] = []
            if isinstance(place, os.PathLike):
                self._memory = in_file(place, num_bytes)
                room = max(min(num_bytes, BUCKET_BYTES), self._tiles.words * kernels.WORD)
                # Of torch's pool, which survives a fork: the host writes to them.
                is_cuda = device.type == "cuda"
                self._stages = [
                    torch.empty(room, dtype=torch.uint8, device="cpu", pin_memory=is_cuda) for _ in range(2)
                ]
            elif place == "host":
                self._memory = pinned(num_bytes, device, self)
            else:
                self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            self._least_room = num_bytes // kernels.WORD // FIRST_ROOM
            self._found = kernels.Found(self._tiles, self._least_room)
        self._num_words = 0
        """What the last comparison found."""
        self._tensors = views(self._memory, self._specs, self._tiles.first_bytes[:-1])
        self._entries, self._order = self._entry_order(self._gaps and not self._in_file)
        self._pointers: tuple[list[int], torch.Tensor, list[int], torch.Tensor] | None = None
        # An anchor's reader is another thread, and must not queue behind the caller's work.
        self._side, self._reader = new_stream(device), new_stream(device)
        self._encoded: torch.cuda.Event | None = None
        """When what was found, and the snapshot, have been read: a comparison waits for it."""
        self.replace(current)
        if not self._in_file:
            self._compile(current)

    def _compile(self, current: Mapping[str, torch.Tensor]) -> None:
        """Do all that a trainer waits for once, with nothing to find: kernels are compiled here."""
        self.compare(0, current)
        with self._here():
            self._encode(0, [0] * len(self._tiles.by_width())).sums()

    def _entry_order(self, gaps: bool) -> tuple[list[tuple[int, TensorSpec]], Any]:
        """Return the entries of a payload in the order of `payload.aligned`, and the kernels' table of it."""
        wide = [index_dtype(spec.num_elements) == torch.int64 for spec in self._specs]
        entries = []
        for tensor in sorted(range(len(self._specs)), key=lambda tensor: self._specs[tensor].name):
            spec = self._specs[tensor]
            idx = "U16" if gaps else "I64" if wide[tensor] else "I32"
            entries.append((tensor, TensorSpec(name=f"{spec.name}.idx", dtype=idx, shape=())))
            entries.append((tensor, TensorSpec(name=f"{spec.name}.val", dtype=spec.dtype, shape=())))
        entries.sort(key=lambda entry: -DTYPE_BYTES[entry[1].dtype])
        places: list[list[int]] = [[0] * len(self._specs), [0] * len(self._specs)]
        for place, (tensor, entry) in enumerate(entries):
            places[entry.name.endswith(".val")][tensor] = place

        def table(values: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self._device)

        order = self._kernels.Order(
            tensors=table([tensor for tensor, _ in entries]),
            widths=table([DTYPE_BYTES[entry.dtype] for _, entry in entries]),
            idx=table(places[0]),
            val=table(places[1]),
            wide=table(wide, torch.int32),
        )
        return entries, order

    def compare(self, step: int, current: Mapping[str, torch.Tensor]) -> Change:
        found = self._found
        with self._here():
            self._wait_for_encoding()
            # One step that changed everything must not cost its room for ever.
            if found.capacity > 4 * max(self._num_words, self._least_room, 1):
                if self._encoded is not None:
                    self._encoded.synchronize()
                found.shrink(max(self._num_words + self._num_words // 4, self._least_room))
            found.clear()
            while True:
                self._find(current)
                # Counted also where room was short: asking twice would be waiting twice.
                num_words, *nums = torch.cat([found.cursor, self._kernels.count(found)]).tolist()
                if num_words <= found.capacity:
                    break
                found.grow(num_words)
            self._num_words = num_words
            if num_words == 0:
                return Listed(step=step, num_changed=0, encoding="gap")
            if self._coder is not None and self._in_file:
                return self._coded(self._coder, step, nums)
            if self._coder is not None:
                return self._coder.start(step, sum(nums), partial(self._coded_on_device, nums))
            change = self._encode(step, nums)
            return self._bridged(change) if self._in_file else change

    def replace(self, current: Mapping[str, torch.Tensor]) -> None:
        with self._here():
            self._wait_for_encoding()
            for spec in self._specs:
                self._tensors[spec.name].copy_(served(current[spec.name], spec))
            if self._device.type == "cuda":
                torch.cuda.current_stream().synchronize()

    def read(self, name: str) -> tuple[torch.Tensor, Sums]:
        if self._coder is not None:
            # It makes the snapshot the parent's again, for a while.
            self._coder.wait()
        tensor = self._tensors[name]
        if self._reader is None:
            return tensor, digest.of_tensor(tensor)
        with torch.cuda.stream(self._reader):
            host = tensor
            if tensor.device.type == "cuda":
                # Not one buffer for all: an upload may still hold views of the tensor before.
                host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
                host.copy_(tensor, non_blocking=True)
            try:
                sums = self._digested(tensor)
            except torch.OutOfMemoryError:
                sums = None
            self._reader.synchronize()
            return host, digest.of_tensor(host) if sums is None else sums

    def close(self) -> None:
        if self._coder is not None:
            self._coder.close()

    def _digested(self, tensor: torch.Tensor) -> Sums:
        """Digest a tensor on the device, in parts where it is not there."""
        if tensor.device.type == "cuda":
            return digest.of_tensor(tensor)
        sums, flat = Sums(), tensor.view(-1)
        step = DIGEST_BYTES // tensor.element_size()
        for first in range(0, flat.numel(), step):
            sums = sums.plus(digest.of_run(first, flat[first : first + step].to(self._device)))
        return sums

    def _here(self) -> AbstractContextManager[object]:
        """Kernels are launched on the current device."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _wait_for_encoding(self) -> None:
        if self._coder is not None:
            self._coder.wait()
        if self._encoded is not None:
            torch.cuda.current_stream().wait_event(self._encoded)

    def _find(self, current: Mapping[str, torch.Tensor]) -> None:
        """Compare all tensors: at once, but for the memory that converted ones take."""
        addresses, converted = [], []
        for spec in self._specs:
            tensor = current[spec.name]
            as_is = (
                tensor.device == self._device
                and tensor.dtype == TORCH_DTYPES[spec.dtype]
                and tensor.is_contiguous()
            )
            converted.append(not as_is)
            addresses.append(tensor.data_ptr() if as_is else 0)
            assert addresses[-1] or not as_is or not tensor.numel(), f"{spec.name} has no memory"
        if not any(converted):
            self._find_among(addresses, range(self._tiles.num_tiles))
            return
        first, num_bytes, held = 0, 0, []
        for i, spec in enumerate(self._specs):
            if converted[i]:
                held.append(served(current[spec.name], spec, self._device))
                addresses[i] = held[-1].data_ptr()
                num_bytes += spec.num_bytes
            if num_bytes >= CONVERTED_BYTES or i + 1 == len(self._specs):
                tiles = range(self._tiles.first_tiles[first], self._tiles.first_tiles[i + 1])
                self._find_among(addresses, tiles)
                # Freed in the order of the stream, so that the next ones may take their memory.
                first, num_bytes, held = i + 1, 0, []

    def _find_among(self, addresses: list[int], tiles: range) -> None:
        """Compare some tiles."""
        if self._pointers is None or self._pointers[0] != addresses:
            slow = self._tiles.slow(addresses)
            self._pointers = (
                addresses.copy(),
                torch.tensor(addresses, dtype=torch.int64, device="cpu").to(self._device, non_blocking=True),
                slow,
                torch.tensor(slow, dtype=torch.int32, device="cpu").to(self._device, non_blocking=True),
            )
        _, tensors, slow, picked = self._pointers

        def launch(read: int, kept: int, chosen: range) -> None:
            among = self._kernels.slow_among(slow, chosen)
            self._kernels.compare(self._found, tensors, picked, read, kept, chosen, among)

        if self._in_file:
            self._find_in_file(launch, tiles)
        else:
            address = self._memory.data_ptr()
            launch(address, address, tiles)

    def _find_in_file(self, launch: Callable[[int, int, range], None], tiles: range) -> None:
        """Compare tiles with parts of the snapshot in pinned memory, and write back those that changed."""
        buckets = list(self._buckets(tiles, self._stages[0].numel()))
        for k, (chosen, start, end) in enumerate(buckets):
            stage = self._stages[k % 2][: end - start]
            if k == 0:
                stage.copy_(self._memory[start:end])
            seen = self._found.cursor.clone()
            launch(stage.data_ptr() - start, stage.data_ptr() - start, chosen)
            # Read ahead while the device is at it.
            if k + 1 < len(buckets):
                _, next_start, next_end = buckets[k + 1]
                self._stages[(k + 1) % 2][: next_end - next_start].copy_(self._memory[next_start:next_end])
            if int(self._found.cursor - seen):
                self._memory[start:end].copy_(stage)

    def _buckets(self, tiles: range, num_bytes: int) -> Iterator[tuple[range, int, int]]:
        """Yield runs of tiles whose part of the snapshot is no larger, and where that begins and ends."""
        first_tiles, first_bytes = self._tiles.first_tiles, self._tiles.first_bytes
        tile_bytes = self._tiles.words * self._kernels.WORD
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

    def _encode(self, step: int, nums: Sequence[int]) -> Encoded:
        """Encode what was found and start copying it to the host; waits for neither.

        Args:
            nums: changed elements of each element width.
        """
        gaps = self._gaps and not self._in_file
        size = self._kernels.head_bytes(len(self._specs)) + self._tiles.max_data_bytes(nums, gaps=gaps)
        arrived = None
        with _on(self._side):
            block = host = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._kernels.encode(self._found, self._order, self._memory.data_ptr(), block, gaps=gaps)
            if self._side is not None:
                self._encoded = self._side.record_event()
                host = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
                host.copy_(block, non_blocking=True)
                arrived = self._side.record_event()
        return Encoded(
            step,
            sum(nums),
            "gap" if gaps else "raw",
            specs=self._specs,
            entries=self._entries,
            block=host,
            arrived=arrived,
        )

    def _coded_on_device(self, nums: Sequence[int]) -> Contents:
        """Code what was found; the snapshot is the parent's meanwhile."""
        from patchstore import device_coding

        found, address = self._found, self._memory.data_ptr()
        with self._here(), _on(self._side):
            size = self._kernels.head_bytes(len(self._specs)) + self._tiles.max_data_bytes(nums, gaps=False)
            block = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._kernels.encode(found, self._order, address, block, gaps=False)
            # Its head says what `Encoded` would.
            head = Encoded(
                0,
                0,
                "raw",
                specs=self._specs,
                entries=(),
                block=block[: self._kernels.head_bytes(len(self._specs))].cpu(),
                arrived=None,
            )
            raw = device_coding.Raw(self._specs, self._entries, block, head.nums)
            self._kernels.put(found, found.old_words, address)
            try:
                return device_coding.code(
                    self._schema, raw, head.sums(), self._tensors, may_be_gap=self._encoding == "auto"
                )
            finally:
                self._kernels.put(found, found.new_words, address)
                if self._side is not None:
                    self._side.synchronize()

    def _coded(self, coder: Coder, step: int, nums: Sequence[int]) -> Change:
        """Have what was found coded on the CPU."""
        new = self._encode(step, nums)
        self._found.swap()
        old = self._encode(step, nums)
        self._found.swap()
        patches, replaced = _patches(new), {patch.name: patch for _, patch in _patches(old)}
        parents = partial(parent_of, self._tensors, replaced)
        work = partial(code, self._schema, patches, parents, may_be_gap=self._encoding == "auto")
        return coder.start(step, sum(nums), work)

    def _bridged(self, change: Encoded) -> Listed:
        """Return a change found for encoding `raw` with the positions that this encoding wants stated.

        Waits for the device, since what lies between changes is read here, before the snapshot moves on.
        """
        patches = []
        for spec, patch in _patches(change):
            indices = named(self._encoding).stated(patch.indices)
            values = bits(self._tensors[spec.name])[indices].view(TORCH_DTYPES[spec.dtype])
            patches.append((spec, TensorPatch(name=spec.name, indices=indices, values=values)))
        return Listed(
            step=change.step,
            num_changed=change.num_changed,
            encoding=self._encoding,
            patches=tuple(patches),
            grown=change.sums(),
        )


def _patches(change: Encoded) -> list[tuple[TensorSpec, TensorPatch]]:
    """Return what a change in encoding `raw` says, ascending by name; waits for the device."""
    stored = {spec.name: data.view(TORCH_DTYPES[spec.dtype]) for spec, data in change.entries()}
    return [
        (
            spec,
            TensorPatch(
                name=spec.name, indices=stored[f"{spec.name}.idx"], values=stored[f"{spec.name}.val"]
            ),
        )
        for spec in change.specs()
    ]
