"""Ways of host memory to the device."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

UPLOAD = 1 << 25
"""Bytes of each of the two pinned buffers through which host memory goes to the device."""
_APART = 64


def send(lists: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Bring flat tensors to a device: those of the host together, in large parts."""
    sent = [each.contiguous() for each in lists]
    host = [i for i, each in enumerate(sent) if each.device.type == "cpu"]
    if not host or device.type == "cpu":
        return sent
    # What lies in one mapped file is sent as one run, and the gaps of alignment with it.
    runs = [[host[i] for i in run] for run in neighbours([sent[i] for i in host])]
    sizes = [memory_end(sent[run[-1]]) - sent[run[0]].data_ptr() for run in runs]
    # Every run begins where 8 divides its address as on the host, so that elements are aligned.
    firsts = [sent[run[0]].data_ptr() % 8 for run in runs]
    places = np.cumsum([0] + [-(-(f + size) // 64) * 64 for f, size in zip(firsts, sizes, strict=True)])
    block = torch.empty(int(places[-1]), dtype=torch.uint8, device=device)
    upload = _Upload(block)
    for run, place, first, size in zip(runs, places, firsts, sizes, strict=False):
        origin = sent[run[0]].data_ptr()
        upload.add(memory_of(origin, size), int(place) + first)
        for i in run:
            at = int(place) + first + sent[i].data_ptr() - origin
            num_bytes = sent[i].numel() * sent[i].element_size()
            sent[i] = block[at : at + num_bytes].view(sent[i].dtype)
    upload.finish()
    return sent


class _Upload:
    """Copies host memory into a block on the device, through two pinned buffers in turn."""

    def __init__(self, block: torch.Tensor) -> None:
        self._block = block
        size = min(UPLOAD, block.numel())
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._sent: list[Any] = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]
        self._number = 0
        self._start = 0
        """Of the buffer in turn, in the block."""
        self._fill = 0

    def add(self, data: torch.Tensor, place: int) -> None:
        """Copy bytes; places ascend."""
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
        """Send the rest, and wait until it is there."""
        self._flush()
        self._sent[1 - self._number].synchronize()


def neighbours(tensors: Sequence[torch.Tensor], most: int | None = None) -> list[list[int]]:
    """Sort contiguous tensors of the host by address, and join those that lie side by side, as in a file.

    Args:
        most: bytes of a run; None for no bound. A longer tensor is a run of its own.

    Returns:
        Runs of numbers of tensors. Between two of a run there are fewer than 64 bytes.
    """
    runs: list[list[int]] = []
    for i in sorted(range(len(tensors)), key=lambda i: tensors[i].data_ptr()):
        is_near = bool(runs) and 0 <= tensors[i].data_ptr() - memory_end(tensors[runs[-1][-1]]) < _APART
        if is_near and (most is None or memory_end(tensors[i]) - tensors[runs[-1][0]].data_ptr() <= most):
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def memory_of(address: int, num_bytes: int) -> torch.Tensor:
    """Bytes of this process's memory, which the caller keeps alive, as a tensor."""
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address)))


def memory_end(tensor: torch.Tensor) -> int:
    """Return the address behind a contiguous tensor."""
    return tensor.data_ptr() + tensor.numel() * tensor.element_size()
