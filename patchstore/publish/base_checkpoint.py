"""The weights of the checkpoint folder that a run starts from: what is equal is not sent between ranks."""

import mmap
import os
from pathlib import Path
from typing import NamedTuple

import torch

from patchstore.errors import DataError
from patchstore.format.records import TensorSpec
from patchstore.payloads import tensor_file


class _Place(NamedTuple):
    file: Path
    spec: TensorSpec
    start: int
    """Bytes from the file's beginning."""


class BaseCheckpoint:
    """The tensors of a folder's safetensors files, mapped one at a time."""

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        """List a folder's tensors; a folder that cannot be read has none."""
        self._places: dict[str, _Place] = {}
        if folder is None:
            return
        try:
            for file in sorted(Path(folder).glob("*.safetensors")):
                self._list(file)
        except (OSError, DataError):
            # It only saves work, and what it would save is not known.
            self._places = {}

    def _list(self, file: Path) -> None:
        with file.open("rb") as opened:

            def beginning(num_bytes: int) -> bytes:
                opened.seek(0)
                return opened.read(num_bytes)

            header = tensor_file.read_header(file.name, file.stat().st_size, beginning)
        for entry in header.entries:
            start = header.data_start + entry.start
            self._places[entry.spec.name] = _Place(file, entry.spec, start)

    @property
    def specs(self) -> list[TensorSpec]:
        """What the folder has."""
        return [place.spec for place in self._places.values()]

    def has(self, spec: TensorSpec) -> bool:
        """Whether the folder has a tensor of this name, dtype and shape, with elements."""
        return spec.name in self._places and self._places[spec.name].spec == spec and spec.num_bytes > 0

    def read(self, spec: TensorSpec) -> torch.Tensor | None:
        """Return a tensor of this name, dtype and shape; None if the folder has none."""
        if not self.has(spec):
            return None
        place = self._places[spec.name]
        try:
            with place.file.open("rb") as opened:
                view = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            data = memoryview(view)[place.start : place.start + spec.num_bytes]
            return tensor_file.tensor_of(place.file.name, spec, data)
        except (OSError, ValueError, DataError):
            return None
