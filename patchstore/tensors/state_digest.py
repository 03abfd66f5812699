"""State digests: they identify the weights of a version, however these are stored or split.

Two 64-bit sums per tensor (see `elements.sum_of`). As sums they can be updated with the changed
elements alone, do not depend on order, and add up over parts. They protect against lost and mixed-up
data; the cryptographic digests of the payloads protect against forgery.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from patchstore.bucket.records import Manifest, Schema
from patchstore.bucket.state_sums import AllSums, Sums, SumsArray, as_array, read_sums, state_total
from patchstore.errors import SchemaMismatch, StateMismatch
from patchstore.stores.base import Store
from patchstore.tensors import elements
from patchstore.tensors.bits import TOGETHER, bits, grouped, joined, spec_of
from patchstore.tensors.columns import Group

Array = npt.NDArray[Any]

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
        each = elements.sum_each(joined([tensors[name] for name in group]), counts)
        found |= zip(group, map(Sums, *(sums.tolist() for sums in each)), strict=True)
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
