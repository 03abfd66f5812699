"""Encoding `context`: changes by the class of the old exponent, in tiles that are read apart."""

from patchstore.encodings.context.classes import is_coded
from patchstore.encodings.context.entries import (
    Tiles,
    decode_patches,
    packed,
    packed_table,
    pays,
    unpacked,
)
from patchstore.encodings.context.stream import Coded, decode, decode_all, encode, encode_all
from patchstore.encodings.context.table import Table, pack, unpack
from patchstore.encodings.context.tiles import Tiling, tiling

__all__ = [
    "Coded",
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
    "unpack",
    "unpacked",
]
