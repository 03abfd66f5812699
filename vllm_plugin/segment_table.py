"""Segments of served weights, of which the tables of a change are picked; see `patchstore.kernels.patch`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from patchstore.kernels.gap_decode import TILE
from patchstore.kernels.segments import Column, Kind
from vllm_plugin.decode_gpu import Patches
from vllm_plugin.regions import View
from vllm_plugin.stored_gpu import jobs_of, num_tiles

Array = npt.NDArray[Any]


class Segment(NamedTuple):
    """One region of one name."""

    name: str
    source: View
    number: int
    """See `WeightMap.number`."""
    kind: Kind
    row: tuple[int, ...]
    """Of the table of segments, without what a patch brings."""
    num_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """Segments of one kind whose patches state positions alike."""

    kind: Kind
    position_width: int
    """See `Stated.position_width`."""
    segments: Sequence[Segment]
    """[num_segments]"""
    numbers: Array
    """int64 [num_segments], see `WeightMap.number`."""
    table: Array
    """int64 [num_segments, kind.num_columns], see `Column`."""
    jobs: Array
    """int32 [num_jobs, 2]: a segment, and which tile of its patch."""


class SegmentTable:
    """All segments of a rank, as rows of numbers: a change picks those of its tensors at once."""

    def __init__(self, segments: Mapping[str, Sequence[Segment]]) -> None:
        """Take over segments by name."""
        self._every = [each for its in segments.values() for each in its]
        ends = np.cumsum([len(its) for its in segments.values()], dtype=np.int64).tolist()
        self._ranges = {
            name: (end - len(its), len(its)) for (name, its), end in zip(segments.items(), ends, strict=True)
        }
        """By name its first segment, and how many it has."""
        # How regions begin matters only where they are read as a whole.
        numbers: dict[Kind, int] = {}
        self._kind = np.array(
            [numbers.setdefault(kind, len(numbers)) for kind in _unaligned(self._every)], dtype=np.int64
        )
        """int64 [num], of `kinds`."""
        self.kinds = list(numbers)
        """Kinds of segments, however regions begin."""
        self._numbers = np.array([each.number for each in self._every], dtype=np.int64)
        width = max((kind.num_columns for kind in self.kinds), default=int(Column.DIMS)) - Column.MEMORY
        self._rows = np.zeros((len(self._every), width), dtype=np.int64)
        """int64 [num, ..], the columns from MEMORY on, with zeros behind those that a kind has."""
        for kind in range(len(self.kinds)):
            mine = np.flatnonzero(self._kind == kind)
            rows = np.array([self._every[number].row for number in mine.tolist()], dtype=np.int64)
            self._rows[mine, : rows.shape[1]] = rows

    def pick(self, patches: Patches) -> list[Picked]:
        """Return the segments that patches of some names concern, by kind and width of positions."""
        ranges = np.array([self._ranges[name] for name in patches.names], dtype=np.int64).reshape(-1, 2)
        firsts, counts = ranges.T
        owners = np.repeat(np.arange(len(counts)), counts)
        every = np.arange(len(owners)) + np.repeat(firsts - (counts.cumsum() - counts), counts)
        tiles = num_tiles(patches.nums)
        brought = np.column_stack([patches.positions, patches.values, patches.nums, tiles.cumsum() - tiles])
        # Both in one number: a position has 8 bytes at most.
        alike = self._kind[every] * 16 + patches.position_widths[owners]
        found = []
        for number in np.unique(alike).tolist():
            mine = np.flatnonzero(alike == number)
            kind_number, width = divmod(number, 16)
            kind, picked = self.kinds[kind_number], every[mine]
            rows = self._rows[picked, : kind.num_columns - Column.MEMORY]
            table = np.concatenate([brought[owners[mine]], rows], axis=1)
            found.append(
                Picked(
                    kind=kind,
                    position_width=width,
                    segments=[self._every[each] for each in picked.tolist()],
                    numbers=self._numbers[picked],
                    table=table,
                    jobs=jobs_of(table[:, Column.NUM], TILE),
                )
            )
        return found


def _unaligned(segments: Iterable[Segment]) -> Iterable[Kind]:
    """Return the kinds of segments, as if no region said how it begins."""
    found: dict[Kind, Kind] = {}
    for each in segments:
        if each.kind not in found:
            found[each.kind] = replace(each.kind, is_aligned=False)
        yield found[each.kind]
