"""Tensors of a version between two rounds of a long verification, in a temporary file without a name."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile

import torch

from patchstore.format.records import TensorSpec
from patchstore.tensors.bits import TORCH_DTYPES, batches, bits

Batch = Sequence[tuple[TensorSpec, torch.Tensor]]


class Waypoint:
    """Written once, in batches, and then read once in the same order; the file is gone then."""

    def __init__(self, scratch: Path | None) -> None:
        """Make the file.

        Args:
            scratch: its folder; None for the system's.
        """
        self._file = TemporaryFile(prefix="patchstore-", dir=scratch)  # noqa: SIM115 -- `close` does
        self._specs: list[TensorSpec] = []

    def write(self, batch: Batch) -> None:
        """Add tensors, all of them on the CPU."""
        for spec, tensor in batch:
            self._file.write(bits(tensor).contiguous().view(-1).view(torch.uint8).numpy().data)
            self._specs.append(spec)

    def batches(self) -> Iterator[Batch]:
        """Yield all tensors; each may be written to."""
        file = self._file
        file.seek(0)

        def tensors() -> Iterator[torch.Tensor]:
            for spec in self._specs:
                data = bytearray(file.read(spec.num_bytes))
                assert len(data) == spec.num_bytes
                dtype = TORCH_DTYPES[spec.dtype]
                flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
                yield flat.view(spec.shape)

        yield from batches(self._specs, tensors())
        self.close()

    def close(self) -> None:
        """Remove the file; closing again does nothing."""
        self._file.close()
