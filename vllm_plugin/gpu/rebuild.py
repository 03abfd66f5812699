"""Rebuild the tensors of a version on the device; `read.rebuild` does the same on the CPU.

A server that starts at a version brings every tensor of the anchor to the device anyway. Deltas are decoded
and written there, and the sums for the digest counted, for many tensors at a time.
"""

import logging
from collections.abc import Iterator, Sequence
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch

from patchstore.bucket.records import Schema, TensorSpec
from patchstore.codec.context import is_coded
from patchstore.codec.delta_file import Content
from patchstore.kernels import device_guard, digest, sent
from patchstore.kernels.segments import Kind
from patchstore.read.rebuild import Batch, Rebuilt
from patchstore.tensors.bits import INTEGERS, from_bytes
from patchstore.tensors.state_digest import Sums
from vllm_plugin.gpu.decode import Places, change_of_one, jobs_of, list_changes
from vllm_plugin.gpu.upload import room_on
from vllm_plugin.live.copies import Transfers

Array = npt.NDArray[np.int64]

_ALIGNED = 16

logger = logging.getLogger("vllm.patchstore")


class DeviceRebuilder:
    """Brings batches of an anchor's tensors to the device, and to a version. Several threads may call it."""

    together = 256 << 20
    """Elements of a batch before its last tensor, at most: launches take little time beside them."""
    under_way_bytes = 2 << 30
    """Two such batches of bf16: one is copied while another is decoded. vLLM has only its weights in the
    device's memory then."""

    def __init__(self, schema: Schema, device: torch.device, later_bytes: int = 0) -> None:
        """Look how much of the device's memory is free; `later_bytes` of it are the model's."""
        self.contents: Sequence[Content] = ()
        """What each delta after the anchor states, oldest first, all by gaps; see `Deltas`."""
        self._schema, self._device = schema, device
        self._places = Places.served(schema, {}, {})
        self._transfers, self._copying, self._lock = Transfers(device), Lock(), Lock()
        self._kept = max(room_on(device) - later_bytes, 0) // 2
        """Bytes that stay free: some loaders keep what they are given until they have all of it."""
        self._is_short = False
        """Whether that was said."""

    def __call__(self, batch: Batch) -> Rebuilt:
        """Return the tensors as they are in the version, on the device, and their digest sums.

        Raises:
            CorruptObject: a delta is no change of these tensors.
            torch.OutOfMemoryError: less than half of the memory that was free at first would be left.
        """
        try:
            with device_guard(self._device):
                return self._rebuilt(batch, self.contents)
        except torch.OutOfMemoryError as exc:
            if not self._is_short:
                logger.info("the CPU rebuilds tensors that have no room on the device: %s", exc)
                self._is_short = True
            raise

    def warm_up(self) -> None:
        """Have kernels compiled, by a change of the smallest tensor of each dtype; keeps nothing."""
        smallest: dict[str, TensorSpec] = {}
        for spec in sorted(self._schema.tensors, key=lambda spec: spec.num_elements):
            if spec.num_elements:
                smallest.setdefault(spec.dtype, spec)
        for spec in smallest.values():
            zeros = from_bytes(spec, bytearray(spec.num_bytes))
            coded = [change_of_one(self._schema, spec.name, zeros)] if is_coded(spec.dtype) else []
            with device_guard(self._device):
                self._rebuilt([(spec, zeros)], [Content([], each) for each in coded])

    def _rebuilt(self, batch: Batch, contents: Sequence[Content]) -> Rebuilt:
        numbers = np.array([self._schema.places[spec.name] for spec, _ in batch], dtype=np.int64)
        sizes = np.array([tensor.nbytes for _, tensor in batch], dtype=np.int64)
        room = -(-sizes // _ALIGNED) * _ALIGNED
        firsts = room.cumsum() - room
        num_bytes = int(room.sum())
        if room_on(self._device) - num_bytes < self._kept:
            raise torch.OutOfMemoryError(
                f"with {num_bytes:,} bytes more, less than half of what was free on {self._device} "
                "would be left"
            )
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        addresses = np.array([tensor.data_ptr() for _, tensor in batch], dtype=np.int64)
        # Of one batch at a time, whose buffers are enough to fill the bus.
        with self._copying:
            self._transfers.bring(addresses, sizes, memory, firsts)
        found = [
            (spec, memory[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            for (spec, tensor), first in zip(batch, firsts.tolist(), strict=True)
        ]
        widths = np.array([tensor.element_size() for _, tensor in batch], dtype=np.int64)
        order = numbers.argsort()
        held = _Held(memory, numbers[order], firsts[order], widths[order], sizes[order] // widths[order])
        # Triton compiles for one thread at a time. Copies, which take longer, go on beside.
        with self._lock:
            for content in contents:
                self._write(content, held)
            sums = held.digested()
        names = [batch[place][0].name for place in order.tolist()]
        return found, {name: Sums(*each) for name, each in zip(names, sums.tolist(), strict=True)}

    def _write(self, content: Content, held: "_Held") -> None:
        """Write what a delta states of these tensors."""
        for width, its in held.by_width():
            numbers, firsts, some = held.numbers[its], held.firsts[its], content.of(held.numbers[its])
            coded = np.unique(some.coded.numbers)
            places = self._places.copies(self._schema, coded, np.ones(len(coded), dtype=np.bool_))
            at = np.searchsorted(numbers, coded)
            places = places.at(coded, held.memory.data_ptr() + firsts[at])
            flat = held.memory.view(INTEGERS[width])
            for to, values in list_changes(
                some, numbers, firsts // width, places, self._schema, self._device
            ):
                flat[to] = values


class _Held:
    """Tensors in one memory of the device, ascending by number."""

    def __init__(
        self, memory: torch.Tensor, numbers: Array, firsts: Array, widths: Array, sizes: Array
    ) -> None:
        """int64 [T] each: places in the schema, at which byte each begins, bytes of an element, elements."""
        self.memory, self.numbers, self.firsts = memory, numbers, firsts
        self._widths, self._sizes = widths, sizes

    def by_width(self) -> Iterator[tuple[int, Array]]:
        """Yield the bytes of an element, and which tensors have elements of so many."""
        for width in np.unique(self._widths).tolist():
            yield width, np.flatnonzero(self._widths == width)

    def digested(self) -> npt.NDArray[np.uint64]:
        """Return the digest sums of all, uint64 [T, 2]; waits for the device."""
        device, found = self.memory.device, np.zeros((len(self.numbers), 2), dtype=np.uint64)
        for width, its in self.by_width():
            sizes, nothing = self._sizes[its], np.zeros_like(its)
            addresses = self.memory.data_ptr() + self.firsts[its]
            rows = np.stack([nothing, nothing, sizes, nothing, addresses, nothing, sizes, nothing], axis=1)
            kind = Kind(
                value_width=width,
                memory_width=width,
                num_dims=0,
                is_narrow=bool((sizes < 2**31).all()),
                is_aligned=True,
            )
            jobs = jobs_of(sizes, digest.BLOCK).astype(np.int32)
            sums = digest.digest(kind, sent(rows, device), sent(jobs, device))
            found[its] = sums[:, :2].cpu().numpy().view(np.uint64)
        return found
