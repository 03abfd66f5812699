"""The weights of the checkpoint folder that a run starts from: what is equal is not sent between ranks."""

import json
import mmap
import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import torch

from patchstore.errors import DataError
from patchstore.format.records import TensorSpec
from patchstore.payloads import tensor_file

_INDEX = "model.safetensors.index.json"


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
        self.unread: str | None = None
        """Why some of its tensors are not known, if so."""
        if folder is None:
            return
        files = sorted(Path(folder).glob("*.safetensors"))
        for file in files:
            try:
                self._list(file)
            except (OSError, DataError) as exc:
                self.unread = f"{file.name} cannot be read: {exc}"
        try:
            if lacking := _listed(Path(folder)) - {file.name for file in files}:
                self.unread = f"{min(lacking)} is missing, which {_INDEX} lists"
        except (OSError, ValueError) as exc:
            self.unread = f"{_INDEX} cannot be read: {exc}"

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

    def named_as(self, names: Collection[str]) -> dict[str, TensorSpec]:
        """Return what the folder has as a model names it that has one module more around it, or one less.

        Example: "wte.weight" of GPT-2's checkpoint is "transformer.wte.weight" in a model with a head.

        Args:
            names: of the model.
        """
        theirs = {spec.name: spec for spec in self.specs}
        ours = frozenset(names)
        if not theirs.keys().isdisjoint(ours):
            return theirs
        for name in ours:
            prefix, _, rest = name.partition(".")
            if rest in theirs:
                return {f"{prefix}.{each}": spec for each, spec in theirs.items()}
        for each in theirs:
            prefix, _, rest = each.partition(".")
            if rest in ours:
                return {name.removeprefix(f"{prefix}."): spec for name, spec in theirs.items()}
        return theirs

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


def _listed(folder: Path) -> set[str]:
    """Return the files that a folder's index lists, if it has one."""
    if not (folder / _INDEX).is_file():
        return set()
    index = json.loads((folder / _INDEX).read_bytes())
    found = index.get("weight_map") if isinstance(index, dict) else None
    return {each for each in found.values() if isinstance(each, str)} if isinstance(found, dict) else set()
