"""Large copies between host memory and a device: by several threads, through pinned memory.

A GPU copies from pinned memory at the speed of its bus, and from other memory at a tenth of it. One thread
fills pinned memory at a sixth of that speed. So each thread has pinned buffers of its own, and a stream.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import torch

from patchstore.kernels import new_stream

BLOCK_BYTES = 16 << 20
"""The most that one call copies. Each thread has two buffers of so many bytes in pinned memory."""
MAX_THREADS = 16


class Lane(Protocol):
    """What a job copies with. Tensors have integers; those of the host may be strided."""

    def write(self, given: torch.Tensor, target: torch.Tensor) -> None:
        """Begin to copy a tensor of the host to one of the device, of the same dtype and shape."""
        ...

    def scatter(self, given: torch.Tensor, parts: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Begin to copy parts of a flat tensor of the host to the device.

        Args:
            parts: where each begins, and a flat tensor of the device of the same dtype that takes it.
        """
        ...

    def to_device(self, given: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor of the host to the device."""
        ...

    def read(self, given: torch.Tensor, target: torch.Tensor) -> None:
        """Begin to copy a tensor of the device to one of the host. It is there when `run` returns."""
        ...


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

        Raises:
            What a job raises: no job begins after that one, and others may be done.
        """
        if not self._streams:
            for job in jobs:
                job(_Direct())
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
                    lane = _Pinned(self._device)
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

        with ThreadPoolExecutor(len(self._streams), thread_name_prefix="patchstore-transfer") as pool:
            loops = [pool.submit(loop, stream) for stream in self._streams[: len(work)] if stream is not None]
        for each in loops:
            each.result()


def scatter(given: torch.Tensor, parts: Iterable[tuple[int, torch.Tensor]]) -> None:
    """Begin to copy parts of a flat tensor, pinned or of the device; see `Lane.scatter`."""
    for at, target in parts:
        target.copy_(given[at : at + target.numel()], non_blocking=True)


class _Direct:
    """Where weights are in host memory."""

    def write(self, given: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(given)

    def scatter(self, given: torch.Tensor, parts: Iterable[tuple[int, torch.Tensor]]) -> None:
        scatter(given, parts)

    def to_device(self, given: torch.Tensor) -> torch.Tensor:
        return given

    def read(self, given: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(given)


class _Pinned:
    """Two pinned buffers in turn, on the current stream: one is filled while the other is copied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Torch keeps pinned memory for the next time.
        self._buffers = [
            torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)
        ]
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
        """Wait for all copies."""
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
