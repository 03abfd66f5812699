"""The streams of parts of tensors: which elements of each tile changed, and by how many steps.

A stream says nothing about elements that are likely to stay, class by class, so most of its bits are
ones; beyond its end a reader finds ones. An unchanged tile has no bytes. `encoder` writes streams, `decoder`
reads them, and this module has what both need.

Many small parts are coded together, tile after tile, as one large part is: numpy's calls then cost
nothing beside the elements. What differs from part to part (classes, rows) is an array then, and of
one part an array of one value, with which numpy is as fast as with a number.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from patchstore.encodings.context.bits import bounds_of
from patchstore.encodings.context.tiles import Layout, Tiling

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coded:
    """A change of one part of a tensor."""

    tiling: Tiling
    lo: int
    """Exponents up to this one are in the first class."""
    rows: npt.NDArray[np.uint8]
    """[K, 3], the code of each class."""
    lengths: npt.NDArray[np.int64]
    """[num_tiles], bytes of each tile's stream."""
    data: npt.NDArray[np.uint8]
    """All streams, one after the other."""


@dataclass(frozen=True, slots=True)
class TileSet:
    """Some tiles of parts of one dtype, their elements numbered tile after tile."""

    owner: npt.NDArray[np.int64]
    """[tiles], the part of each."""
    sizes: npt.NDArray[np.int64]
    """[tiles]"""

    @property
    def ends(self) -> npt.NDArray[np.int64]:
        """[tiles + 1], where each begins, and the end."""
        return bounds_of(self.sizes)

    def of_elements(self, values: Array) -> Array:
        """Return for each element the value (uint8) of its part; [1] where there is one part."""
        return values if len(values) == 1 else np.repeat(values[self.owner], self.sizes)


def split(layout: Layout, tiles: Array, num_elements: int) -> Iterator[Array]:
    """Cut ascending tiles into groups of about so many elements."""
    if len(layout.runs) > 1:
        ends = layout.sizes()[tiles].cumsum()
        yield from np.split(tiles, np.flatnonzero(np.diff(ends // num_elements)) + 1) if len(tiles) else ()
        return
    cut = layout.runs[0]
    # Whole bands are gathered fastest.
    num = max(1, num_elements // (cut.largest * cut.col_tiles)) * cut.col_tiles
    for start in range(0, len(tiles), num):
        yield tiles[start : start + num]
