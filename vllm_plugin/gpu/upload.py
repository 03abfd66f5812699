"""Ways of host memory to the device."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from patchstore.kernels import pinned
from vllm_plugin.live.copies import memory_of

UPLOAD = 1 << 25
"""Bytes of each of the two pinned buffers through which host memory goes to the device."""
_APART = 64
_TORCH_DTYPES = {"int32": torch.int32, "int64": torch.int64}

Array = npt.NDArray[Any]


def room_on(device: torch.device) -> int:
    """Return how many bytes can be allocated on a device."""
    if device.type != "cuda":
        return 1 << 62
    free, _ = torch.cuda.mem_get_info(device)
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + idle


def send(lists: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Bring flat tensors to a device: those of the host together, in large parts."""
    sent = [aligned(each.contiguous()) for each in lists]
    host = [i for i, each in enumerate(sent) if each.device.type == "cpu"]
    if not host or device.type == "cpu":
        return sent
    addresses = np.array([sent[i].data_ptr() for i in host], dtype=np.int64)
    sizes = np.array([sent[i].numel() * sent[i].element_size() for i in host], dtype=np.int64)
    block, places = send_memory(addresses, sizes, device)
    for i, at, size in zip(host, places.tolist(), sizes.tolist(), strict=True):
        sent[i] = block[at : at + size].view(sent[i].dtype)
    return sent


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor whose address its element size divides, as a device reads elements.

    In a file the header, of any length, is before them.
    """
    return tensor.clone() if tensor.data_ptr() % tensor.element_size() else tensor


def send_memory(addresses: Array, sizes: Array, device: torch.device) -> tuple[torch.Tensor, Array]:
    """Bring memory of the host, which the caller keeps, to a device, in large parts.

    Takes addresses and bytes, int64 [num]. Returns a block on the device, uint8; and int64 [num], where in it
    each lies, with elements aligned as on the host.
    """
    if not len(addresses):
        return torch.empty(0, dtype=torch.uint8, device=device), addresses
    order = np.argsort(addresses, kind="stable")
    firsts, ends = addresses[order], (addresses + sizes)[order]
    # What lies in one mapped file is sent as one run, and the gaps of alignment with it.
    distance = firsts[1:] - ends[:-1]
    begins = np.flatnonzero(np.concatenate([[True], (distance < 0) | (distance >= _APART)]))
    origins = firsts[begins]
    run_sizes = ends[np.concatenate([begins[1:], [len(order)]]) - 1] - origins
    # Every run begins where 8 divides its address as on the host, so that elements are aligned.
    room = -(-(origins % 8 + run_sizes) // 64) * 64
    starts = room.cumsum() - room + origins % 8
    block = torch.empty(int(room.sum()), dtype=torch.uint8, device=device)
    parts = [
        (memory_of(origin, size), start)
        for origin, size, start in zip(origins.tolist(), run_sizes.tolist(), starts.tolist(), strict=True)
        if size
    ]
    if device.type == "cpu":
        for part, start in parts:
            block[start : start + len(part)] = part
    else:
        upload = Upload(block)
        for part, start in parts:
            upload.add(part, start)
        upload.finish()
    places = np.empty_like(addresses)
    run = np.searchsorted(begins, np.arange(len(order)), side="right") - 1
    places[order] = firsts + (starts - origins)[run]
    return block, places


def _is_pinned(part: torch.Tensor) -> bool:
    """Whether all of some memory is pinned: neighbours may be of two kinds."""
    return bool(part.is_pinned() and memory_of(part.data_ptr() + len(part) - 1, 1).is_pinned())


def tables_on(device: torch.device, *arrays: Array) -> list[torch.Tensor]:
    """Bring small arrays to a device, in one copy: each at an address that kernels are compiled for."""
    sizes = [-(-each.nbytes // _APART) * _APART for each in arrays]
    starts = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
    memory = pinned(sum(sizes), device)
    joined = memory.numpy()
    for each, start in zip(arrays, starts, strict=True):
        joined[start : start + each.nbytes] = np.ascontiguousarray(each).reshape(-1).view(np.uint8)
    moved = memory.to(device, non_blocking=memory.is_pinned())
    return [
        moved[start : start + each.nbytes].view(_TORCH_DTYPES[each.dtype.name]).view(each.shape)
        for each, start in zip(arrays, starts, strict=True)
    ]


class Upload:
    """Copies host memory to a block of the device; what is not pinned goes by two pinned buffers in turn."""

    def __init__(self, block: torch.Tensor) -> None:
        self._block = block
        self._buffers: list[torch.Tensor] = []
        """None yet, where all is pinned so far."""
        self._sent: list[Any] = []
        self._number = 0
        self._start = 0
        """Of the buffer in turn, in the block."""
        self._fill = 0

    def add(self, data: torch.Tensor, place: int) -> None:
        """Copy bytes, which stay as they are until `finish`; places ascend."""
        if _is_pinned(data):
            # First what a buffer holds: it goes to the block as one range, which must not have this in it.
            self._flush()
            self._block[place : place + len(data)].copy_(data, non_blocking=True)
            self._start = place + len(data)
            return
        if not self._buffers:
            size = min(UPLOAD, self._block.numel())
            self._buffers = [pinned(size, self._block.device) for _ in range(2)]
            self._sent = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]
        while data.numel():
            if not self._start <= place < self._start + len(self._buffers[0]):
                self._flush()
                self._start = place
            at = place - self._start
            part = data[: len(self._buffers[0]) - at]
            self._buffers[self._number][at : at + len(part)].copy_(part)
            self._fill = at + len(part)
            data, place = data[len(part) :], place + len(part)

    def _flush(self) -> None:
        if not self._fill:
            return
        buffer, number = self._buffers[self._number], self._number
        self._block[self._start : self._start + self._fill].copy_(buffer[: self._fill], non_blocking=True)
        self._sent[number].record()
        self._number, self._fill = 1 - number, 0
        self._sent[self._number].synchronize()

    def finish(self) -> None:
        """Send the rest, and wait until all is there."""
        self._flush()
        torch.cuda.current_stream(self._block.device).synchronize()
