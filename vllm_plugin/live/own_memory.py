"""Whether the memory that updates write to belongs to this process alone.

Weights are written where they lie. Every process that has mapped the same memory, such as another engine with
weights of the same daemon, would be given each version too: while it generates, and without a number.
"""

import ctypes
import logging
from bisect import bisect_right
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import torch

from patchstore.errors import UsageError

# vLLM configures only loggers below its own name.
_logger = logging.getLogger("vllm.patchstore")

_MAPPINGS = Path("/proc/self/maps")
_ELSEWHERE = "memory that this process's CUDA allocator did not give out, as if mapped through CUDA IPC"


def check_own(storages: Iterable[tuple[str, torch.UntypedStorage]]) -> None:
    """Refuse to write to memory that other processes may have mapped too."""
    memory = _Memory()
    found = {name: where for name, storage in storages if (where := memory.foreign(storage)) is not None}
    if found:
        name, where = next(iter(found.items()))
        others = f", as are {len(found) - 1:,} more" if len(found) > 1 else ""
        raise UsageError(
            f"the delta backend writes weights where they lie, and {name!r} is in {where}{others}. Other "
            "processes that use that memory would get each version too, while they generate: start vllm "
            "without --load-format ipc_cache, or with another --load-format, so that the server has weights "
            "of its own"
        )


class _Ranges:
    """Ranges of addresses that do not overlap, and what each is."""

    def __init__(self, ranges: Iterable[tuple[int, int, str]]) -> None:
        """Take ranges as first address, address behind the last one, and text."""
        self._ranges = sorted(ranges)
        self._ends = [end for _, end, _ in self._ranges]

    def find(self, start: int, end: int) -> str | None:
        """Return what the first range is that has an address of these; None if none has."""
        at = bisect_right(self._ends, start)
        return self._ranges[at][2] if at < len(self._ranges) and self._ranges[at][0] < end else None


class _Memory:
    """This process's memory, as it was when something of it was first asked."""

    def foreign(self, storage: torch.UntypedStorage) -> str | None:
        """Say where a storage is, if other processes may have mapped it; None if it is this process's own."""
        if not storage.nbytes():
            return None
        if storage.device.type == "cuda":
            return self._foreign_on_device(storage)
        return self._foreign_on_host(storage) if storage.device.type == "cpu" else None

    def _foreign_on_host(self, storage: torch.UntypedStorage) -> str | None:
        if self._shared is None:
            return "shared memory" if storage.device.type == "cpu" and storage.is_shared() else None
        path = self._shared.find(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
        return None if path is None else f"shared memory, mapped from {path}"

    def _foreign_on_device(self, storage: torch.UntypedStorage) -> str | None:
        start = storage.data_ptr()
        if self._given is None or self._given.find(start, start + storage.nbytes()) is not None:
            return None
        # With --cpu-offload-gb a device reads weights in pinned memory of the host, at the host's address.
        at = torch.frombuffer((ctypes.c_byte * 1).from_address(start), dtype=torch.uint8)
        return self._foreign_on_host(storage) if at.is_pinned() else _ELSEWHERE

    @cached_property
    def _shared(self) -> _Ranges | None:
        """What is mapped shared from files, shared memory included. None where the system does not tell.

        What is mapped private is copied when it is written to. Devices are left out: drivers map memory of
        their own from these, and the kernel calls shared memory without a file, which only forks of this
        process can have, /dev/zero.
        """
        try:
            lines = _MAPPINGS.read_text(errors="replace").splitlines()
        except OSError:
            return None
        found = []
        for line in lines:
            addresses, permissions, _, _, _, *path = line.split(maxsplit=5)
            if permissions.endswith("s") and path and _is_file(path[0].removesuffix(" (deleted)")):
                start, end = (int(each, 16) for each in addresses.split("-"))
                found.append((start, end, path[0]))
        return _Ranges(found)

    @cached_property
    def _given(self) -> _Ranges | None:
        """What torch's allocator of CUDA devices got from the driver, for all its pools. None where it does
        not tell. What another process sent is mapped beside it, whichever way that was sent.
        """
        try:
            probe = torch.empty(1, device="cuda").untyped_storage()
            segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        except RuntimeError:  # Such as cudaMallocAsync, which keeps no list.
            probe, segments = None, []
        ranges = _Ranges(
            (each["address"], each["address"] + each["total_size"], "a segment") for each in segments
        )
        # Without caching torch keeps no list either, and says so by an empty one.
        if probe is not None and ranges.find(probe.data_ptr(), probe.data_ptr() + 1) is not None:
            return ranges
        _logger.warning(
            "torch's CUDA allocator does not list its memory, so it is not known whether other processes use "
            "this server's weights too: do not start it with --load-format ipc_cache"
        )
        return None


def _is_file(path: str) -> bool:
    """Whether what the kernel calls a mapping is a file, or was one. `/anon_hugepage` is as `/dev/zero`."""
    # A path that is gone is a file that was removed, as shared memory mostly is.
    return path.startswith("/") and path != "/anon_hugepage" and not Path(path).is_char_device()
