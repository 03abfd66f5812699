"""State digests: they identify the weights of a version, however these are stored or split.

Two 64-bit sums per tensor (see `elements.sum_of`). As sums they can be updated with the changed
elements alone, do not depend on order, and add up over parts. They protect against lost and mixed-up
data; the cryptographic digests of the payloads protect against forgery.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from patchstore.bucket.records import Manifest, Schema
from patchstore.bucket.state_sums import AllSums, Sums, SumsArray, as_array, read_sums, state_total
from patchstore.errors import SchemaMismatch, StateMismatch
from patchstore.stores.base import Store
from patchstore.tensors import elements
from patchstore.tensors.bits import TOGETHER, bits, spec_of, unsigned
from patchstore.tensors.columns import Group, flattened, runs

Array = npt.NDArray[Any]

_ALONE_FAR = 1 << 15
"""Elements of a tensor on a GPU that is digested there; smaller ones take less time together on the CPU."""

__all__ = ["Sums", "check_state", "of_elements", "of_run", "of_tensor", "of_tensors"]
"""`Sums` too, for callers of this module; it needs no torch."""


def of_tensor(tensor: torch.Tensor) -> Sums:
    """Sum over all elements; reads the tensor once."""
    return Sums(*elements.sum_of(bits(tensor)))


def of_run(first: int, values: torch.Tensor) -> Sums:
    """Sum over elements that follow each other from position `first` on."""
    return Sums(*elements.sum_of(bits(values), first))


def of_elements(indices: torch.Tensor, values: torch.Tensor) -> Sums:
    """Sum over the elements with these positions and values; both [num]."""
    return Sums(*elements.sum_of(bits(values), indices))


def of_named(tensors: Mapping[str, torch.Tensor]) -> dict[str, Sums]:
    """Sum over all elements of named tensors; see `of_each`."""
    return {
        name: Sums(*sums) for name, sums in zip(tensors, of_each([*tensors.values()]).tolist(), strict=True)
    }


def of_each(tensors: Sequence[torch.Tensor]) -> SumsArray:
    """Sum over all elements of each tensor; reads each once, small ones many at a time."""
    found = np.empty((len(tensors), 2), dtype=np.uint64)
    kinds = [(tensor.device, tensor.dtype) for tensor in tensors]
    for kind in dict.fromkeys(kinds):
        its = np.array([number for number, each in enumerate(kinds) if each == kind])
        counts = np.array([tensors[number].numel() for number in its.tolist()], dtype=np.int64)
        is_here = kind[0].type == "cpu"
        is_alone = (counts > _ALONE_FAR) & (not is_here)
        for number in its[is_alone].tolist():
            found[number] = of_tensor(tensors[number])
        its, counts = its[~is_alone], counts[~is_alone]
        for first, end in runs(counts, TOGETHER):
            some = [tensors[number] for number in its[first:end].tolist()]
            # Not every device joins elements of every dtype.
            flat = unsigned(flattened(some if is_here else [*map(bits, some)]).cpu())
            found[its[first:end]] = np.stack(elements.sum_each(flat, counts[first:end]), axis=1)
    return found


def of_group(group: Group) -> SumsArray:
    """Sum over the elements that a group states, of each of its tensors."""
    return np.stack(elements.sum_each(group.values, group.counts, group.positions), axis=1)


def of_tensors(schema: Schema, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Sums]:
    """Digest named tensors that follow a schema; each is read once, small ones many at a time."""
    specs, sums = schema.by_name(), dict[str, Sums]()
    batch, num = dict[str, torch.Tensor](), 0
    for name, tensor in tensors:
        if specs.get(name) != spec_of(name, tensor):
            raise SchemaMismatch(
                f"tensor {spec_of(name, tensor)} does not follow the schema: {specs.get(name)}"
            )
        batch[name] = tensor
        num += tensor.numel()
        if num >= TOGETHER // 4:
            sums |= of_named(batch)
            batch, num = {}, 0
    sums |= of_named(batch)
    if missing := specs.keys() - sums.keys():
        raise SchemaMismatch(f"{len(missing)} tensors are missing, such as {min(missing)!r}")
    return sums


def check_state(store: Store, schema: Schema, sums: AllSums, manifest: Manifest) -> None:
    """Check that weights with these sums are the manifest's version.

    If they are not, the version's own sums are read from the store, to name the tensors that differ.
    """
    found = state_total(schema, sums)
    if found == manifest.state.total:
        return
    try:
        recorded = read_sums(store, schema, manifest)
        differ = (as_array(schema, sums) != recorded).any(axis=1)
        wrong = [schema.tensors[place].name for place in np.flatnonzero(differ)]
        which = f"{len(wrong)} tensors differ: {', '.join(wrong[:3])}"
    except Exception as exc:  # noqa: BLE001 -- a failure here must not hide that tensors differ
        which = f"which tensors differ cannot be told: {exc}"
    raise StateMismatch(
        f"version {manifest.version} should have state digest {manifest.state.total} but these weights have "
        f"{found}; {which}"
    )
