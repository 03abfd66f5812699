"""The digest sums of a version's tensors, and its state digest.

Each tensor has two. A manifest names the object that holds them beside their total, so it stays small for any
number of tensors.
"""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from patchstore.bucket.digests import digest, missing, verified
from patchstore.bucket.records import Manifest, Payload, Schema
from patchstore.errors import CorruptObject, NotFound
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


SumsArray: TypeAlias = npt.NDArray[np.uint64]
"""[T, 2], the digest sums of T tensors in the schema's order: a model of experts has tens of thousands."""

AllSums: TypeAlias = SumsArray | Mapping[str, Sums]
"""The digest sums of all tensors of a schema: in its order, or by name."""


def as_array(schema: Schema, sums: AllSums) -> SumsArray:
    """Return sums in the schema's order; an array as it is."""
    if isinstance(sums, np.ndarray):
        return sums
    return np.array([sums[spec.name] for spec in schema.tensors], dtype=np.uint64).reshape(-1, 2)


def by_name(schema: Schema, sums: SumsArray) -> dict[str, Sums]:
    names = (spec.name for spec in schema.tensors)
    return {name: Sums(*each) for name, each in zip(names, sums.tolist(), strict=True)}


def differing(schema: Schema, sums: Mapping[str, Sums], recorded: SumsArray) -> list[str]:
    """Return the names whose sums are not those recorded, in the schema's order."""
    places = schema.places
    wrong = [name for name, each in sums.items() if Sums(*recorded[places[name]].tolist()) != each]
    return sorted(wrong, key=places.__getitem__)


def state_total(schema: Schema, sums: AllSums) -> str:
    """Fold the sums of all tensors into the digest of a version.

    It is BLAKE3 over one line per tensor, ascending by name:
    `name TAB dtype TAB shape, joined by commas TAB 32 hex digits LF`.
    """
    digits, num = as_array(schema, sums).astype(">u8").tobytes().hex().encode(), 2 * SUMS_BYTES
    text = np.frombuffer(bytearray(schema.lines), dtype=np.uint8)
    # Of a name no byte ends a line. What begins at each byte is seen as one item, so no step takes a tensor.
    begins = np.flatnonzero(text == ord("\n")) - num
    items = np.ndarray((max(len(text) - num + 1, 0),), f"V{num}", text, strides=(1,))
    items[begins] = np.frombuffer(digits, dtype=items.dtype)
    return digest(text.data)


def pack_sums(schema: Schema, sums: AllSums) -> bytes:
    """Return the bytes of the stored object: 16 per tensor, in the schema's order."""
    return as_array(schema, sums).astype("<u8").tobytes()


def sums_object(schema: Schema, manifest: Manifest) -> Payload:
    """Return the object with the sums of a version; its size fits the run's tensors."""
    wanted, size = manifest.state.sums, SUMS_BYTES * len(schema.tensors)
    if wanted.size != size:
        raise CorruptObject(
            f"version {manifest.version}: its object of sums, {wanted.key}, must have {size:,} bytes for the "
            f"{len(schema.tensors)} tensors of the run, but the manifest says {wanted.size:,}"
        )
    return wanted


def unpack_sums(schema: Schema, manifest: Manifest, data: bytes) -> SumsArray:
    """Read the stored object. The caller has checked its size and digest."""
    sums = np.frombuffer(data, dtype="<u8").astype(np.uint64).reshape(-1, 2)
    if (found := state_total(schema, sums)) != manifest.state.total:
        raise CorruptObject(
            f"{manifest.state.sums.key}: its sums make the state digest {found}, but the manifest of version "
            f"{manifest.version} says {manifest.state.total}"
        )
    return sums


def read_sums(store: Store, schema: Schema, manifest: Manifest) -> SumsArray:
    """Fetch the digest sums of a version's tensors."""
    wanted = sums_object(schema, manifest)
    try:
        # One byte more than there should be, so that a longer object is noticed.
        data = b"".join(verified(store.read(wanted.key, end=wanted.size + 1), wanted))
    except NotFound as exc:
        raise missing(store, wanted) from exc
    return unpack_sums(schema, manifest, data)
