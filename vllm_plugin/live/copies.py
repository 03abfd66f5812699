"""Copies between a checkpoint's tensors in host memory and where they are served.

A GPU copies from pinned memory at the speed of its bus, and from other memory at a tenth of it. One thread
fills pinned memory at a sixth of that speed. So each thread has pinned buffers of its own, and a stream.

A model of experts has thousands of tensors of a megabyte. What lies side by side in a file is brought
together, so that the cost of a copy does not grow with their number.

vLLM keeps some bfloat16 weights of a checkpoint as float32. Their bits are widened and narrowed here.
"""

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from patchstore.bucket.records import TensorSpec
from patchstore.kernels import new_stream, pinned
from patchstore.tensors.bits import TORCH_DTYPES, bits
from patchstore.tensors.state_digest import Sums
from vllm_plugin.map.provenance import Runtime

_APART = 64
"""Bytes between two parts of a file that are brought together."""

Array = npt.NDArray[Any]

PIECE = 1 << 23
"""Elements that are digested at a time. Bounds what a device needs beside the weights: about 0.5 GB, as
temporaries are int64."""


def flat(runtime: Runtime) -> torch.Tensor:
    """All of a runtime's memory as integers of its element width, [num_elements]."""
    width = bits(torch.empty(0, dtype=runtime.dtype)).dtype
    num_elements = runtime.storage.nbytes() // width.itemsize
    return torch.empty(0, dtype=width, device=runtime.storage.device).set_(
        runtime.storage, 0, (num_elements,), (1,)
    )


def widened(new: torch.Tensor, spec: TensorSpec, memory: torch.Tensor) -> torch.Tensor:
    """The checkpoint's bits as the runtime's: bfloat16 is the upper half of float32."""
    if new.element_size() == memory.element_size():
        return new
    assert spec.dtype == "BF16" and memory.element_size() == 4
    return new.to(torch.int32) << 16


UNMATCHED = Sums(1, 0)
"""Added to the sums of elements that are no checkpoint's, so that they match none."""


def is_widened(held: torch.Tensor, spec: TensorSpec) -> bool:
    """Whether the runtime's bits are what some bits of the checkpoint become."""
    is_same = held.element_size() == TORCH_DTYPES[spec.dtype].itemsize
    return is_same or not bool((held & 0xFFFF).any())


def narrowed(held: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The runtime's bits as the checkpoint's. What was copied there loses nothing."""
    if held.element_size() == TORCH_DTYPES[spec.dtype].itemsize:
        return held
    return (held >> 16).to(torch.int16)


PAGE_BYTES = 4096
"""No page of memory is smaller."""
BLOCK_BYTES = 16 << 20
"""The most that one call copies. Each thread has two buffers of so many bytes in pinned memory."""
MAX_THREADS = 16


class Lane:
    """What a job copies with, where weights are in host memory. Tensors have integers."""

    def write(self, given: torch.Tensor, target: torch.Tensor) -> None:
        """Begin to copy a tensor of the host, perhaps strided, to one of the device, alike in all else."""
        target.copy_(given)

    def scatter(self, given: torch.Tensor, parts: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Begin to copy parts of a flat tensor to the device: where each begins, and its target."""
        scatter(given, parts)

    def to_device(self, given: torch.Tensor) -> torch.Tensor:
        return given

    def read(self, given: torch.Tensor, target: torch.Tensor) -> None:
        """Begin to copy a tensor of the device to one of the host. It is there when `run` returns."""
        target.copy_(given)


Job = Callable[[Lane], object]


class Transfers:
    """Runs jobs that copy to and from one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        num = min(MAX_THREADS, os.cpu_count() or 1) if device.type == "cuda" else 0
        # Kept, as torch keeps memory for each stream.
        self._streams = [new_stream(device) for _ in range(num)]

    def run(self, jobs: Iterable[Job]) -> None:
        """Do jobs in any order, several at a time; no copy is under way any more when this ends.

        After a job that raises none begins; others may be done. They take Python's lock many times for each
        block: what else runs in Python beside them takes several times as long.
        """
        if not self._streams:
            for job in jobs:
                job(Lane())
            return
        # Made first: threads that wait for each other's turn to make the next one copy half as fast.
        work, has_failed = deque(jobs), False
        if not work:
            return
        before = torch.cuda.current_stream(self._device).record_event()
        is_inference = torch.is_inference_mode_enabled()

        def loop(stream: torch.cuda.Stream) -> None:
            nonlocal has_failed
            try:
                with (
                    torch.inference_mode(is_inference),
                    torch.cuda.device(self._device),
                    torch.cuda.stream(stream),
                ):
                    stream.wait_event(before)
                    lane = _PinnedLane(self._device)
                    while not has_failed:
                        try:
                            job = work.popleft()
                        except IndexError:
                            break
                        job(lane)
                    lane.finish()
            except BaseException:
                has_failed = True
                raise
            finally:
                with suppress(Exception):
                    stream.synchronize()

        loops = list[Future[None]]()
        with ThreadPoolExecutor(len(self._streams), thread_name_prefix="patchstore-transfer") as pool:
            try:
                loops.extend(
                    pool.submit(loop, each) for each in self._streams[: len(work)] if each is not None
                )
                wait(loops)
            except BaseException:
                # Such as an interrupt: its handler, such as an undo, must be the only one that writes.
                # Futures, not threads: Python takes a running thread for ended if an interrupt meets `join`.
                has_failed = True
                wait(loops)
                raise
        for each in loops:
            each.result()

    def bring(self, addresses: Array, sizes: Array, block: torch.Tensor, places: Array) -> None:
        """Copy memory of the host, which the caller keeps, to a block, uint8, on the device.

        Takes int64 [num] each: where what is copied lies, how many bytes, and where in the block it goes.
        What lies side by side in both is copied at once.
        """
        is_next = (addresses[1:] == addresses[:-1] + sizes[:-1]) & (places[1:] == places[:-1] + sizes[:-1])
        begins = np.flatnonzero(np.concatenate([[len(addresses) > 0], ~is_next]))
        runs = np.stack([addresses[begins], np.add.reduceat(sizes, begins), places[begins]], axis=1)

        def one(address: int, size: int, place: int, lane: Lane) -> None:
            lane.write(memory_of(address, size), block[place : place + size])

        self.run(
            partial(one, address + at, min(BLOCK_BYTES, size - at), place + at)
            for address, size, place in runs.tolist()
            for at in range(0, size, BLOCK_BYTES)
        )


def scatter(given: torch.Tensor, parts: Iterable[tuple[int, torch.Tensor]]) -> None:
    """Begin to copy parts of a flat tensor, pinned or of the device; see `Lane.scatter`."""
    for at, target in parts:
        target.copy_(given[at : at + target.numel()], non_blocking=True)


class _PinnedLane(Lane):
    """Two pinned buffers in turn, on the current stream: one is filled while the other is copied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Torch keeps pinned memory for the next time.
        self._buffers = [pinned(BLOCK_BYTES, device) for _ in range(2)]
        self._events: list[Any] = [None, None]
        self._targets: list[torch.Tensor | None] = [None, None]
        """Of the host: what a buffer is copied to once the device has filled it."""
        self._turn = 0

    def write(self, given: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(self._filled(given), non_blocking=True)
        self._record()

    def scatter(self, given: torch.Tensor, parts: Iterable[tuple[int, torch.Tensor]]) -> None:
        scatter(self._filled(given), parts)
        self._record()

    def to_device(self, given: torch.Tensor) -> torch.Tensor:
        found = self._filled(given).to(self._device, non_blocking=True)
        self._record()
        return found

    def read(self, given: torch.Tensor, target: torch.Tensor) -> None:
        self._free_buffer(given).copy_(given, non_blocking=True)
        self._targets[self._turn] = target
        self._record()

    def finish(self) -> None:
        for _ in self._buffers:
            self._empty()
            self._turn = 1 - self._turn

    def _filled(self, given: torch.Tensor) -> torch.Tensor:
        buffer = self._free_buffer(given)
        # Torch's own copy would start threads of its own in each of these.
        np.copyto(buffer.numpy(), given.numpy())
        return buffer

    def _free_buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Return the buffer whose turn it is, as integers of some dtype and shape."""
        self._empty()
        num_bytes = like.numel() * like.element_size()
        return self._buffers[self._turn][:num_bytes].view(like.dtype).view(like.shape)

    def _empty(self) -> None:
        """Wait for the copy that the buffer whose turn it is was part of."""
        event, target = self._events[self._turn], self._targets[self._turn]
        self._events[self._turn] = self._targets[self._turn] = None
        if event is not None:
            event.synchronize()
        if target is not None:
            num_bytes = target.numel() * target.element_size()
            held = self._buffers[self._turn][:num_bytes].view(target.dtype).view(target.shape)
            np.copyto(target.numpy(), held.numpy())

    def _record(self) -> None:
        self._events[self._turn] = torch.cuda.current_stream().record_event()
        self._turn = 1 - self._turn


class Piece(NamedTuple):
    """A part of a checkpoint's tensor, and where it is served."""

    spec: TensorSpec
    given: torch.Tensor
    """Integers, of the checkpoint."""
    held: torch.Tensor
    """Integers of the same shape, perhaps wider: live."""


class Batch(NamedTuple):
    """Pieces that are moved as bytes."""

    given: torch.Tensor
    """uint8 [num_bytes], from the first piece to the last: a file's memory, or a copy on the device."""
    parts: tuple[tuple[int, torch.Tensor], ...]
    """Where each begins, and where it is served: uint8, flat. One for pieces that are neighbours in both."""
    pieces: tuple[Piece, ...]
    """Keep the memory."""


def touch(tensors: Sequence[torch.Tensor]) -> Iterator[Job]:
    """Yield jobs that read from each page of tensors of the CPU, of which strided ones have integers: what is
    mapped is in memory then. Mapping takes as long as copying.
    """
    flats = [bits(each) for each in tensors if each.numel() and each.is_contiguous()]

    def one(memory: Array, _: Lane) -> None:
        memory[..., :: PAGE_BYTES // memory.itemsize].max()

    for run in neighbours(flats):
        yield partial(one, _between(flats[run[0]], flats[run[-1]]).numpy())
    for each in tensors:
        if not each.is_contiguous():
            yield partial(one, each.numpy())


def batched(pieces: Iterable[Piece]) -> tuple[list[Batch], list[Piece]]:
    """Join pieces on the CPU that lie side by side into batches. Pieces and batches have at most
    `BLOCK_BYTES`.

    Returns the batches, and the pieces that are not contiguous on both sides, or served in wider numbers.
    """
    whole: list[Piece] = []
    others: list[Piece] = []
    for piece in pieces:
        given, held = piece.given, piece.held
        if not given.numel():
            continue
        is_wider = given.element_size() != held.element_size()
        is_apart = is_wider or not (given.is_contiguous() and held.is_contiguous())
        (others if is_apart else whole).append(piece)
    runs = neighbours([piece.given for piece in whole])
    return [_joined([whole[number] for number in run]) for run in runs], others


def _joined(run: Sequence[Piece]) -> Batch:
    start, parts = run[0].given.data_ptr(), list[tuple[int, torch.Tensor]]()
    for piece in run:
        at, target = piece.given.data_ptr() - start, piece.held.reshape(-1).view(torch.uint8)
        # Such as what an expert's gate and up projection have: one copy takes less time than two.
        if parts and at == parts[-1][0] + len(parts[-1][1]) and _follows(target, parts[-1][1]):
            first, before = parts.pop()
            at, target = first, before.as_strided((len(before) + len(target),), (1,))
        parts.append((at, target))
    return Batch(given=_between(run[0].given, run[-1].given), parts=tuple(parts), pieces=tuple(run))


def _follows(flat: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether a tensor of bytes begins where another ends, in the same storage."""
    is_same = flat.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
    return is_same and flat.data_ptr() == before.data_ptr() + len(before)


def neighbours(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Sort contiguous tensors by address, and join those that lie side by side, as in a file.

    Returns runs of their numbers. A run has at most `BLOCK_BYTES`, or one tensor.
    """
    runs: list[list[int]] = []
    for i in sorted(range(len(tensors)), key=lambda i: tensors[i].data_ptr()):
        is_near = bool(runs) and 0 <= tensors[i].data_ptr() - memory_end(tensors[runs[-1][-1]]) < _APART
        if is_near and memory_end(tensors[i]) - tensors[runs[-1][0]].data_ptr() <= BLOCK_BYTES:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def memory_of(address: int, num_bytes: int) -> torch.Tensor:
    """Bytes of this process's memory, which the caller keeps alive, as a tensor."""
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address)))


def _between(first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return the memory from one tensor to the end of another, as `memory_of` does."""
    return memory_of(first.data_ptr(), memory_end(last) - first.data_ptr())


def memory_end(tensor: torch.Tensor) -> int:
    """Return the address behind a contiguous tensor."""
    return tensor.data_ptr() + tensor.numel() * tensor.element_size()
