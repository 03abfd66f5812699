"""State digests: what the weights of a version are, however they are stored or split.

Two 64-bit sums a tensor (see `kernels.reference.sum_all`). Being sums they can be updated with the
changed elements alone, do not depend on order, and add up over parts. They guard against loss and
mix-ups; against forgery stand the cryptographic digests of the payloads.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from patchstore import checksum
from patchstore.errors import SchemaMismatch, StateMismatch
from patchstore.kernels import reference
from patchstore.model import Manifest, Schema, StateDigest
from patchstore.tensors import TensorPatch, bits, grouped, joined, spec_of

Array = npt.NDArray[Any]

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


def of_tensor(tensor: torch.Tensor) -> Sums:
    """Sum over all elements; reads the tensor once."""
    return Sums(*reference.sum_all(bits(tensor)))


def of_run(first: int, values: torch.Tensor) -> Sums:
    """Sum over elements that follow each other from position `first` on."""
    return Sums(*reference.sum_all(bits(values), first))


def of_elements(indices: torch.Tensor, values: torch.Tensor) -> Sums:
    """Sum over the elements with these positions and values; both [num]."""
    return Sums(*reference.sum_at(indices, bits(values)))


def of_each(bits: Array, counts: Array, indices: Array | None = None) -> list[Sums]:
    """Sum over elements of each of some tensors; see `kernels.reference.sum_each`."""
    first, second = reference.sum_each(bits, counts, indices)
    return [Sums(*each) for each in zip(first.tolist(), second.tolist(), strict=True)]


def of_named(tensors: Mapping[str, torch.Tensor]) -> dict[str, Sums]:
    """Sum over all elements of named tensors; reads each once, small ones many at a time."""
    found: dict[str, Sums] = {}
    here: list[str] = []
    for name, tensor in tensors.items():
        if tensor.device.type == "cpu":
            here.append(name)
        else:
            found[name] = of_tensor(tensor)
    for group in grouped(here, lambda name: tensors[name].element_size(), lambda name: tensors[name].numel()):
        counts = np.array([tensors[name].numel() for name in group])
        found |= zip(group, of_each(joined([tensors[name] for name in group]), counts), strict=True)
    return found


def of_patches(patches: Iterable[TensorPatch]) -> dict[str, Sums]:
    """Sum over the elements that patches of different tensors state, by name; they are on the CPU."""
    found: dict[str, Sums] = {}
    for group in grouped(patches, lambda each: each.values.element_size(), lambda each: len(each.indices)):
        indices = torch.cat([each.indices.to(torch.int64) for each in group])
        counts = np.array([len(each.indices) for each in group])
        sums = of_each(joined([each.values for each in group]), counts, indices.numpy())
        found |= zip((each.name for each in group), sums, strict=True)
    return found


def of_state(schema: Schema, sums: Mapping[str, Sums]) -> StateDigest:
    """Fold the sums of all tensors into the digest of a version.

    The total is BLAKE3 over one line a tensor, ascending by name:
    `name TAB dtype TAB shape, joined by commas TAB 32 hex digits LF`.
    """
    lines = []
    for spec in schema.tensors:
        shape = ",".join(map(str, spec.shape))
        lines.append(f"{spec.name}\t{spec.dtype}\t{shape}\t{sums[spec.name].hex()}\n")
    return StateDigest(
        total=checksum.digest("".join(lines).encode()),
        tensors=tuple(sums[spec.name].hex() for spec in schema.tensors),
    )


def of_tensors(schema: Schema, tensors: Iterable[tuple[str, torch.Tensor]]) -> StateDigest:
    """Digest named tensors that follow a schema; each is read once, in the order given.

    Raises:
        SchemaMismatch: a tensor is unknown, missing, or of another shape or dtype.
    """
    specs, sums = schema.by_name(), dict[str, Sums]()
    for name, tensor in tensors:
        if specs.get(name) != spec_of(name, tensor):
            raise SchemaMismatch(
                f"tensor {spec_of(name, tensor)} does not follow the schema: {specs.get(name)}"
            )
        sums[name] = of_tensor(tensor)
    if missing := specs.keys() - sums.keys():
        raise SchemaMismatch(f"{len(missing)} tensors are missing, such as {min(missing)!r}")
    return of_state(schema, sums)


def sums_of(schema: Schema, state: StateDigest) -> dict[str, Sums]:
    """Return each tensor's sums from a manifest's state digest.

    Raises:
        StateMismatch: the digest is not one of this schema.
    """
    if len(state.tensors) != len(schema.tensors):
        raise StateMismatch(
            f"the state digest covers {len(state.tensors)} tensors, but the schema has {len(schema.tensors)}"
        )
    return {spec.name: Sums.from_hex(text) for spec, text in zip(schema.tensors, state.tensors, strict=True)}


def check_state(schema: Schema, sums: Mapping[str, Sums], manifest: Manifest) -> None:
    """Check that weights with these sums are the manifest's version.

    Raises:
        StateMismatch: they are not; the message names some of the tensors that differ.
    """
    found = of_state(schema, sums)
    if found == manifest.state:
        return
    expected = sums_of(schema, manifest.state)
    wrong = [spec.name for spec in schema.tensors if sums[spec.name] != expected[spec.name]]
    raise StateMismatch(
        f"version {manifest.version} should have state digest {manifest.state.total} but these weights have "
        f"{found.total}; {len(wrong)} tensors differ: {', '.join(wrong[:3])}"
    )
