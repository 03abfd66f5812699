"""The digest sums of a version's tensors, and the stored object that holds them.

A manifest names that object beside the total, so it stays small whatever the number of tensors. Only readers
that verify single tensors need it: the total alone shows whether weights are a version's.
"""

import struct
from collections.abc import Mapping
from typing import NamedTuple

from patchstore.errors import CorruptObject, NotFound
from patchstore.format import hashing
from patchstore.format.missing import missing
from patchstore.format.records import Manifest, Payload, Schema
from patchstore.stores.base import Store

SUMS_BYTES = 16
"""Of one tensor: two 64-bit integers, little-endian."""

_MODULUS = 1 << 64


class Sums(NamedTuple):
    """The two digest sums of a tensor, or of some of its elements; integers modulo 2**64."""

    first: int = 0
    second: int = 0

    def plus(self, other: "Sums") -> "Sums":
        return Sums((self.first + other.first) % _MODULUS, (self.second + other.second) % _MODULUS)

    def minus(self, other: "Sums") -> "Sums":
        return Sums((self.first - other.first) % _MODULUS, (self.second - other.second) % _MODULUS)

    def hex(self) -> str:
        """32 hex digits, the first sum before the second."""
        return f"{self.first:016x}{self.second:016x}"

    @classmethod
    def from_hex(cls, text: str) -> "Sums":
        return cls(int(text[:16], 16), int(text[16:], 16))


def state_total(schema: Schema, sums: Mapping[str, Sums]) -> str:
    """Fold the sums of all tensors into the digest of a version.

    It is BLAKE3 over one line per tensor, ascending by name:
    `name TAB dtype TAB shape, joined by commas TAB 32 hex digits LF`.
    """
    lines = []
    for spec in schema.tensors:
        shape = ",".join(map(str, spec.shape))
        lines.append(f"{spec.name}\t{spec.dtype}\t{shape}\t{sums[spec.name].hex()}\n")
    return hashing.digest("".join(lines).encode())


def pack_sums(schema: Schema, sums: Mapping[str, Sums]) -> bytes:
    """Return the bytes of the stored object: 16 per tensor, in the schema's order."""
    return b"".join(struct.pack("<2Q", *sums[spec.name]) for spec in schema.tensors)


def sums_object(schema: Schema, manifest: Manifest) -> Payload:
    """Return the object with the sums of a version; its size fits the run's tensors.

    Raises:
        CorruptObject: the manifest names one of another size.
    """
    wanted, size = manifest.state.sums, SUMS_BYTES * len(schema.tensors)
    if wanted.size != size:
        raise CorruptObject(
            f"version {manifest.version}: its object of sums, {wanted.key}, must have {size:,} bytes for the "
            f"{len(schema.tensors)} tensors of the run, but the manifest says {wanted.size:,}"
        )
    return wanted


def unpack_sums(schema: Schema, manifest: Manifest, data: bytes) -> dict[str, Sums]:
    """Read the stored object. The caller has checked its size and digest.

    Raises:
        CorruptObject: the sums are not those of the manifest's total.
    """
    each = struct.iter_unpack("<2Q", data)
    sums = {spec.name: Sums(*pair) for spec, pair in zip(schema.tensors, each, strict=True)}
    if (found := state_total(schema, sums)) != manifest.state.total:
        raise CorruptObject(
            f"{manifest.state.sums.key}: its sums make the state digest {found}, but the manifest of version "
            f"{manifest.version} says {manifest.state.total}"
        )
    return sums


def read_sums(store: Store, schema: Schema, manifest: Manifest) -> dict[str, Sums]:
    """Fetch the digest sums of a version's tensors.

    Raises:
        CorruptObject: the object is missing, or is not what the manifest says.
    """
    wanted = sums_object(schema, manifest)
    try:
        # One byte more than there should be, so that a longer object is noticed.
        data = b"".join(hashing.verified(store.read(wanted.key, end=wanted.size + 1), wanted))
    except NotFound as exc:
        raise missing(store, wanted) from exc
    return unpack_sums(schema, manifest, data)
