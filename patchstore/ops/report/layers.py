"""How much of each layer changed: from the headers of the deltas of some versions. Imports torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from patchstore.bucket.records import Manifest, Schema
from patchstore.errors import DataError
from patchstore.read.deltas import stated_sizes
from patchstore.stores.base import Store

MOST_COLUMNS = 96
MOST_BYTES = 256 << 20
"""Of headers: those of a model with tens of thousands of tensors have some megabytes each."""
_MOST_ROWS = 128

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Changes by layer and version."""

    names: Sequence[str]
    """Of the rows."""
    versions: Sequence[int]
    """Of the columns, evenly spaced."""
    shares: Array
    """[rows, columns], changed elements by all elements; NaN where no delta is stored, or none any more."""
    num_versions: int
    """Of which these are some."""
    is_estimated: bool
    """Whether a delta of these is in `context`, whose headers have bytes and no numbers of changes."""


class Sampler:
    """Reads headers of deltas, each once, also if it is asked again while the run grows."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[tuple[str, int], tuple[Array, bool] | None] = {}
        self._most_read = 1

    def read(self, schema: Schema, versions: Sequence[Manifest]) -> Layers | None:
        """Return the changes of evenly spaced versions; None where no version has a delta with changes.

        Raises:
            StoreUnavailable: the store does not answer.
        """
        changed = [each for each in versions if each.delta is not None and each.delta.payloads]
        if not changed or not schema.tensors:
            return None
        names, rows = _rows(schema)
        sizes = np.bincount(rows, weights=np.array(schema.sizes, dtype=np.float64), minlength=len(names))
        if not self._known:
            # It tells how many bytes the others take.
            self._column(schema, changed[-1], rows)
        most = max(8, min(MOST_COLUMNS, MOST_BYTES // self._most_read))
        # By powers of two, so that a column stays one while the run grows.
        stride = 1
        while len(some := [each for each in versions if each.version % stride == 0]) > most:
            stride *= 2
        shown = some or changed[-1:]
        # Others are forgotten: there are always more of them.
        self._known = {(each.run_id, each.version): self._column(schema, each, rows) for each in shown}
        found = [*self._known.values()]
        nothing = np.full(len(names), np.nan)
        columns = [nothing if each is None else each[0] / np.maximum(sizes, 1) for each in found]
        return Layers(
            names=names,
            versions=[each.version for each in shown],
            shares=np.stack(columns, axis=1),
            num_versions=len(versions),
            is_estimated=any(each is not None and each[1] for each in found),
        )

    def _column(
        self, schema: Schema, found: Manifest, rows: npt.NDArray[np.int64]
    ) -> tuple[Array, bool] | None:
        if found.delta is None:
            return None
        key = (found.run_id, found.version)
        if key not in self._known:
            try:
                self._known[key] = self._read(schema, found, rows)
            except DataError:
                # Its payloads were deleted, or are damaged; `patchstore verify` says which.
                self._known[key] = None
        return self._known[key]

    def _read(self, schema: Schema, found: Manifest, rows: npt.NDArray[np.int64]) -> tuple[Array, bool]:
        assert found.delta is not None
        listed, coded, num_read = stated_sizes(self._store, found, schema)
        self._most_read = max(self._most_read, num_read)
        changes = listed.astype(np.float64)
        if is_coded := bool(coded.any()):
            changes += coded * (max(0, found.delta.num_changed - int(listed.sum())) / int(coded.sum()))
        changes = np.minimum(changes, np.array(schema.sizes, dtype=np.float64))
        by_row: Array = np.bincount(rows, weights=changes, minlength=int(rows.max()) + 1).astype(np.float64)
        return by_row, is_coded


def _rows(schema: Schema) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Return the names of the rows, and which row each tensor is in."""
    layers = [_layer(spec.name) for spec in schema.tensors]
    ordered = sorted(set(layers), key=_natural)
    # Neighbours share a row where there are too many.
    width = -(-len(ordered) // _MOST_ROWS)
    groups = [ordered[at : at + width] for at in range(0, len(ordered), width)]
    names = [each[0] if len(each) == 1 else f"{each[0]} to {each[-1]}" for each in groups]
    rows = {layer: row for row, each in enumerate(groups) for layer in each}
    return names, np.array([rows[layer] for layer in layers], dtype=np.int64)


def _layer(name: str) -> str:
    """Return a tensor's layer: its name up to the first number, or without its last part.

    Example: model.layers.12.mlp.up_proj.weight -> model.layers.12, lm_head.weight -> lm_head.
    """
    numbered = re.match(r"(?:.*?\.)?\d+(?=\.|$)", name)
    return numbered[0] if numbered else name.rpartition(".")[0] or name


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [
        (0, int(part[:18]), part) if part.isascii() and part.isdigit() else (1, 0, part)
        for part in name.split(".")
    ]
