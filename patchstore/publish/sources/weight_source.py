"""What trainers give to vLLM's weight transfer: `vllm.distributed.weight_transfer.base.WeightSource`.

Known by its methods, so that a trainer needs no vLLM. Releases of vLLM describe shards in two ways:

- From 0.33 on, `metadata` names the ranks that own each tensor, their mesh and its placements. `iter_local`
  yields what this rank has, and `iter_full` whole tensors.
- Before, `metadata()` names shapes alone, and iterating yields whole tensors. A source for `nccl_m2n` has
  `mesh()`, names placements as numbers, and yields what this rank has.
"""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from patchstore.errors import SchemaMismatch
from patchstore.publish.sources.pieces import LocalPart
from patchstore.publish.sources.plain import class_of

_PASSES = ("iter_local", "iter_full")
"""Methods that yield tensors; what each rank has comes first, because the other one may gather."""


def is_weight_source(source: Any) -> bool:
    """Whether this declares tensors (`metadata`) and yields them anew in each pass."""
    return (
        not isinstance(source, type)
        and hasattr(source, "metadata")
        and any(hasattr(source, each) for each in (*_PASSES, "__iter__"))
    )


def ranks_of_owners(source: Any) -> set[int]:
    """Return the global ranks that own tensors; none if the source names no other than one.

    Raises:
        SchemaMismatch: see `of_weight_source`.
    """
    found = {rank for each in _declared(source).values() if each.owners for rank in each.owners}
    return found if len(found) > 1 else set()


def owns_nothing(source: Any) -> bool:
    """Whether the source declares tensors, and other ranks own all of them."""
    declared = _declared(source)
    return bool(declared) and not _owned(source, declared)


def of_weight_source(source: Any) -> Iterator[tuple[str, torch.Tensor | LocalPart]]:
    """Yield names and tensors, or parts of tensors; a pass.

    Raises:
        SchemaMismatch: a tensor is not what the source declares; one is missing that this rank owns; or what
            is declared cannot be.
    """
    declared = _declared(source)
    missing = dict.fromkeys(_owned(source, declared))
    begin, is_local = _pass_of(source)
    for name, tensor in begin():
        if tensor is None and name in declared and name not in missing:
            # In releases before 0.33 a pass has all names on all ranks.
            continue
        if name not in missing:
            reason = "which this rank does not own" if name in declared else "which its metadata lack"
            raise SchemaMismatch(f"{class_of(source)} yields {name!r}, {reason}, or yields it twice")
        del missing[name]
        yield name, _part(source, name, tensor, declared[name], is_local)
    if missing:
        raise SchemaMismatch(
            f"{class_of(source)} declares {len(missing)} tensors that it does not yield on rank {_rank()}, "
            f"such as {next(iter(missing))!r}"
        )


class _Declared(NamedTuple):
    """What metadata say of a tensor."""

    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None
    """Global ranks, in the order of the mesh; None for all."""
    mesh: tuple[int, ...] = ()
    """Sides of the mesh of owners, row-major."""
    sharded: tuple[int | None, ...] = ()
    """The dimension that each axis of the mesh cuts; None where it replicates. Empty if nothing is cut."""


def _declared(source: Any) -> dict[str, _Declared]:
    metadata = source.metadata() if callable(source.metadata) else source.metadata
    mesh = source.mesh() if callable(getattr(source, "mesh", None)) else None
    found: dict[str, _Declared] = {}
    for each in metadata:
        name, shape = each.name, tuple(each.shape)
        if name in found:
            raise SchemaMismatch(f"{class_of(source)} declares {name!r} twice")
        owners, sides = getattr(each, "owners", None), getattr(each, "mesh_shape", None)
        if owners is None and mesh is not None:
            first, sides = mesh.start_rank, tuple(mesh.dims)
            owners = range(first, first + prod(sides))
        if owners is None:
            found[name] = _Declared(shape)
            continue
        sides = (len(owners),) if sides is None else tuple(sides)
        placements = getattr(each, "placements", None) or ()
        sharded = tuple(_cut(name, placement, len(shape)) for placement in placements)
        if prod(sides) != len(owners) or len(sharded) not in {0, len(sides)}:
            raise SchemaMismatch(
                f"{class_of(source)} declares {len(owners)} owners of {name!r} on a mesh of {sides}, with "
                f"the placements {tuple(placements)}; a mesh needs an owner at each place, and a placement "
                "for each side"
            )
        if not any(dim is not None for dim in sharded):
            sharded = ()
        found[name] = _Declared(shape, tuple(owners), sides, sharded)
    return found


def _cut(name: str, placement: Any, num_dims: int) -> int | None:
    """Return the dimension that a placement cuts, None if it cuts none."""
    if isinstance(placement, int):
        dim = None if placement == -1 else placement
    elif type(placement).__name__ in {"Shard", "Replicate"}:
        dim = None if type(placement).__name__ == "Replicate" else int(placement.dim)
    else:
        raise SchemaMismatch(f"{name!r} is declared with the placement {placement!r}, which is unknown")
    if dim is not None and not 0 <= dim < num_dims:
        raise SchemaMismatch(f"{name!r} is declared as cut in dimension {dim}, but it has {num_dims}")
    return dim


def _owned(source: Any, declared: dict[str, _Declared]) -> list[str]:
    """Return the names that this rank has something of, perhaps no element."""
    held = source.held_names() if callable(getattr(source, "held_names", None)) else None
    rank = _rank()
    return [
        name
        for name, each in declared.items()
        if (each.owners is None or rank in each.owners) and (held is None or name in held)
    ]


def _pass_of(source: Any) -> tuple[Callable[[], Iterator[tuple[str, Any]]], bool]:
    """Return what begins a pass, and whether it yields what this rank has."""
    for name in _PASSES:
        method, implements = (getattr(source, each, None) for each in (name, f"implements_{name}"))
        if callable(method) and (implements is None or implements()):
            return method, name == "iter_local"
    if not hasattr(source, "__iter__"):
        raise SchemaMismatch(f"{class_of(source)} implements neither iter_local nor iter_full")
    return source.__iter__, callable(getattr(source, "mesh", None))


def _part(source: Any, name: str, tensor: Any, declared: _Declared, is_local: bool) -> Any:
    """Return what a pass yields under a name, with the place where it belongs."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    start, size = (0,) * len(declared.shape), declared.shape
    if is_local and declared.owners is not None and declared.sharded:
        start, size = _box(declared)
    if tuple(tensor.shape) != size:
        if size != declared.shape:
            expected = f"so that rank {_rank()} has {size} of it from {start} on"
        else:
            expected = "and no placements that cut it"
        raise SchemaMismatch(
            f"{class_of(source)} declares {name!r} with the shape {declared.shape}, {expected}, but yields "
            f"{tuple(tensor.shape)}; for a shard, metadata must say which; or pass the module itself, or "
            "LocalParts"
        )
    return tensor if size == declared.shape else LocalPart(tensor.detach(), declared.shape, start=start)


def _box(declared: _Declared) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where this rank's box begins, and its shape: cut as torch.chunk cuts, by outer axes first."""
    assert declared.owners is not None
    place = declared.owners.index(_rank())
    starts, sizes = [0] * len(declared.shape), list(declared.shape)
    for dim, coordinate, num in zip(
        declared.sharded, _coordinates(place, declared.mesh), declared.mesh, strict=True
    ):
        if dim is not None:
            chunk = -(-sizes[dim] // num)
            first = min(coordinate * chunk, sizes[dim])
            starts[dim] += first
            sizes[dim] = min(chunk, sizes[dim] - first)
    return tuple(starts), tuple(sizes)


def _coordinates(place: int, mesh: Sequence[int]) -> list[int]:
    """Return where the owner at a place of a row-major mesh is. Example: 5 in (2, 3) -> [1, 2]."""
    found = []
    for side in reversed(mesh):
        place, coordinate = divmod(place, side)
        found.append(coordinate)
    return found[::-1]


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
