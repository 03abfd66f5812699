"""Encoding `context`: changes by the class of the old exponent, in tiles that can be read separately."""

from dataclasses import dataclass, field

from patchstore.codec.context.classes import is_coded
from patchstore.codec.context.coded import Coded
from patchstore.codec.context.decoder import decode_all
from patchstore.codec.context.encoder import encode_all
from patchstore.codec.context.rows import RowSets
from patchstore.codec.context.table import pack, packed, packed_table, pays, unpack
from patchstore.codec.context.tiles import Chosen, Cuts, Tiles, Tiling, tiling
from patchstore.codec.index import Gap

__all__ = [
    "Chosen",
    "Coded",
    "Context",
    "Cuts",
    "RowSets",
    "Tiles",
    "Tiling",
    "decode_all",
    "encode_all",
    "is_coded",
    "pack",
    "packed",
    "packed_table",
    "pays",
    "tiling",
    "unpack",
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
