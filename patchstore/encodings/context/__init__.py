"""Encoding `context`: changes by the class of the old exponent, in tiles that can be read separately."""

from dataclasses import dataclass, field

from patchstore.encodings.context.classes import is_coded
from patchstore.encodings.context.decoder import decode, decode_all
from patchstore.encodings.context.encoder import encode, encode_all
from patchstore.encodings.context.entries import (
    Chosen,
    Tiles,
    decode_patches,
    packed,
    packed_table,
    pays,
    unpacked,
)
from patchstore.encodings.context.row_sets import RowSets
from patchstore.encodings.context.stream import Coded
from patchstore.encodings.context.table import Table, pack, unpack
from patchstore.encodings.context.tiles import Tiling, tiling, tiling_of_part
from patchstore.encodings.gap import Gap

__all__ = [
    "Chosen",
    "Coded",
    "Context",
    "RowSets",
    "Table",
    "Tiles",
    "Tiling",
    "decode",
    "decode_all",
    "decode_patches",
    "encode",
    "encode_all",
    "is_coded",
    "pack",
    "packed",
    "packed_table",
    "pays",
    "tiling",
    "tiling_of_part",
    "unpack",
    "unpacked",
]


@dataclass(frozen=True, slots=True)
class Context:
    """Positions and magnitudes of changes, coded by the parent's exponents: about 0.9 bytes per change in
    bf16.

    Tensors for which that does not pay (`pays`) are stored in an index encoding.
    """

    name: str = "context"
    index: Gap = field(default_factory=Gap)
    only_dense: bool = False
    """Code nothing but parts of which so much has changed that `gap` would take more than a quarter of their
    bytes. A delta without such parts is one in `gap`."""
