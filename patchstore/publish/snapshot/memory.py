"""Memory for a snapshot, and tensors in the dtype in which they are served."""

import errno
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from patchstore.errors import UsageError
from patchstore.format.records import TensorSpec
from patchstore.publish.snapshot.ranges import Ranges
from patchstore.publish.snapshot.rounded import Roundable
from patchstore.tensors.bits import TORCH_DTYPES

Place = Literal["device", "host"] | os.PathLike[str]
"""Where a snapshot is: on the tensors' device, in host memory, or in a file in this folder."""


def check_place(place: object) -> None:
    """Raise UsageError if this is no place for a snapshot."""
    if isinstance(place, os.PathLike):
        if not Path(place).is_dir():
            raise UsageError(f"snapshot={place!r} is not a folder")
    elif not (isinstance(place, str) and place in {"device", "host"}):
        raise UsageError(f'snapshot must be "device", "host" or the Path of a folder, not {place!r}')


class Stream(NamedTuple):
    """Tensors that exist one after the other."""

    devices: Mapping[str, torch.device]
    """By name."""
    read: Callable[[], Iterable[tuple[str, torch.Tensor]]]
    """Begins a pass, which yields each tensor once, in any order; it may cost a trainer much."""
    rounded: Roundable | None = None
    """Another way to a pass, of what can be rounded while it is compared."""


Tensors = Mapping[str, torch.Tensor] | Stream
"""A model's tensors."""


def in_turn(tensors: Tensors) -> Iterable[tuple[str, torch.Tensor]]:
    """Return names and tensors; a pass of a stream."""
    return tensors.read() if isinstance(tensors, Stream) else tensors.items()


def devices_of(tensors: Tensors) -> Mapping[str, torch.device]:
    if isinstance(tensors, Stream):
        return tensors.devices
    return {name: tensor.device for name, tensor in tensors.items()}


class Served(Mapping[str, torch.Tensor]):
    """A model's tensors in the dtype in which they are served, each converted when it is read."""

    def __init__(
        self, current: Tensors, specs: Sequence[TensorSpec], copied: Callable[[], Mapping[str, torch.Tensor]]
    ) -> None:
        """Read nothing yet.

        Args:
            copied: returns copies of the tensors as they are served. A stream is read there.
        """
        self._current, self._specs = current, {spec.name: spec for spec in specs}
        self._copied = copied

    def __getitem__(self, name: str) -> torch.Tensor:
        if isinstance(self._current, Stream):
            return self._copied()[name]
        return served(self._current[name], self._specs[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)


def served(tensor: torch.Tensor, spec: TensorSpec, device: torch.device | None = None) -> torch.Tensor:
    """Return a tensor in the dtype in which it is served; without a copy if it has that already."""
    # Also without gradients: published tensors are never part of a graph.
    return tensor.detach().to(device=device, dtype=TORCH_DTYPES[spec.dtype]).contiguous()


def copy_each(
    current: Tensors, specs: Mapping[str, TensorSpec], held: Mapping[str, torch.Tensor]
) -> set[str]:
    """Copy tensors as they are served, and return `Ranges.finite`. Raises as `Ranges.end`, after that."""
    ranges = Ranges()
    for name, given in in_turn(current):
        tensor = served(given, specs[name])
        ranges.look(name, given, tensor)
        held[name].copy_(tensor)
    ranges.end()
    return ranges.finite


@contextmanager
def allocating(place: Place, num_bytes: int) -> Iterator[None]:
    """Raise UsageError if memory is short."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as exc:
        short = isinstance(exc, MemoryError | RuntimeError) or exc.errno in {errno.ENOSPC, errno.ENOMEM}
        raise UsageError(
            f"snapshot={place!r} needs {num_bytes:,} bytes there"
            f"{', which are not free; try' if short else ', and that fails; try'} another place "
            f'("device", "host" or the Path of a folder): {exc}'
        ) from exc


def in_file(folder: os.PathLike[str], num_bytes: int) -> torch.Tensor:
    """Return zeros in a mapped file that has no name, and that is gone with the process."""
    file, name = tempfile.mkstemp(prefix="patchstore-snapshot-", dir=folder)
    try:
        # Without reserved space a full disk would be a SIGBUS later.
        os.posix_fallocate(file, 0, max(num_bytes, 1))
        return torch.from_file(name, shared=True, size=max(num_bytes, 1), dtype=torch.uint8)[:num_bytes]
    finally:
        os.close(file)
        Path(name).unlink()


def pinned(num_bytes: int, device: torch.device, owner: object) -> torch.Tensor:
    """Return zeros in host memory that the device can address for as long as `owner` lives.

    Not of torch's pool, which rounds sizes up to a power of 2.

    Raises:
        MemoryError: so much cannot be pinned.
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


def views(
    memory: torch.Tensor, specs: Sequence[TensorSpec], starts: Sequence[int]
) -> dict[str, torch.Tensor]:
    return {
        spec.name: memory[start : start + spec.num_bytes].view(TORCH_DTYPES[spec.dtype]).view(spec.shape)
        for spec, start in zip(specs, starts, strict=True)
    }
