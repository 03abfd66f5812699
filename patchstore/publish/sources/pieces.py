"""What a process has of each tensor: plain memory, whole or a box of the whole tensor.

Where a rank's elements belong follows from what its framework says alone: DTensors, ZeRO-3, vLLM's weight
sources. Nothing is sent or gathered.

vLLM's `WeightSource` (`vllm.distributed.weight_transfer.base`) is known by its methods, so that a trainer
needs no vLLM. Its releases describe shards in two ways:

- From 0.33 on, `metadata` names the ranks that own each tensor, their mesh and its placements. `iter_local`
  yields what this rank has, and `iter_full` whole tensors.
- Before, `metadata()` names shapes alone, and iterating yields whole tensors. A source for `nccl_m2n` has
  `mesh()`, names placements as numbers, and yields what this rank has.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from patchstore.errors import SchemaMismatch, UsageError
from patchstore.support.arguments import whole_number

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

DISTRIBUTED = (
    "on all ranks, gather whole tensors with torch.distributed.checkpoint.state_dict.get_model_state_dict("
    "model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)); publish them from rank 0, as "
    "a dict that is updated with them before each call"
)
DEQUANTIZED = (
    "publish what the model computes with: a model that was loaded without quantization, or a mapping or a "
    "stream of dequantized tensors by name"
)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types whose memory holds their elements."""


def plain(name: str, tensor: Any) -> torch.Tensor:
    """Return a tensor without its wrappers, which has its elements in its memory."""
    if type(tensor) in _PLAIN and _is_dense(tensor):
        return tensor  # type: ignore[no-any-return]
    whole = tensor
    while type(whole) not in _PLAIN:
        whole = _unwrapped(name, whole)
    if _is_dense(whole):
        return whole  # type: ignore[no-any-return]
    if whole.is_meta:
        raise SchemaMismatch(
            f"{name!r} is on the meta device, where tensors have no elements; load the weights first"
        )
    if whole.layout is not torch.strided or whole.is_quantized or whole.is_nested:
        kind = "quantized" if whole.is_quantized else "nested" if whole.is_nested else str(whole.layout)
        raise SchemaMismatch(
            f"{name!r} is a {kind} tensor, not a dense one; pass it converted, with "
            f"{'dequantize()' if whole.is_quantized else 'to_dense()'}, in a mapping by name"
        )
    # A view whose memory has the opposite signs.
    return whole.resolve_neg()  # type: ignore[no-any-return]


def _is_dense(tensor: torch.Tensor) -> bool:
    return not (
        tensor.is_meta
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_neg()
    )


def _unwrapped(name: str, tensor: Any) -> torch.Tensor:
    """Return the one tensor that a subclass's tensor is made of."""
    if not isinstance(tensor, torch.Tensor):
        if name.rpartition(".")[2] in {"_packed_params", "dtype"} and "_packed_params" in name:
            advice = "torch quantized this module; publish the weights from before that"
        elif isinstance(tensor, Mapping):
            advice = f"pass the tensors of one model by name, perhaps source[{name!r}]"
        else:
            advice = "pass tensors by name"
        raise SchemaMismatch(f"{name!r} is not a tensor but {class_of(tensor)}; {advice}")
    if hasattr(tensor, "full_tensor"):
        raise SchemaMismatch(
            f"{name!r} is a {class_of(tensor)}, of which each rank has a part that is not known here; "
            f"{DISTRIBUTED}"
        )
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        raise SchemaMismatch(f"{name!r} has no shape yet; run a batch through the model first")
    if hasattr(tensor, "trigger_wait"):
        # The result of a collective that may still be under way.
        return tensor.trigger_wait()  # type: ignore[no-any-return]
    kind = type(tensor)
    if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        # The subclass changes what Python sees, and its memory is its own.
        with torch._C.DisableTorchFunctionSubclass():
            inner = tensor.as_subclass(torch.Tensor)
        if holds_codes(inner) or getattr(tensor, "quant_state", None) is not None:
            raise SchemaMismatch(
                f"{name!r} is a {class_of(tensor)} of codes, {inner.dtype}, and its scales are elsewhere; "
                f"pass the module itself, which is published dequantized, or {DEQUANTIZED}"
            )
        return inner
    if hasattr(tensor, "__tensor_flatten__"):
        parts = [getattr(tensor, part) for part in tensor.__tensor_flatten__()[0]]
        if len(parts) == 1 and isinstance(parts[0], torch.Tensor) and _is_alike(parts[0], tensor):
            return parts[0]
    raise SchemaMismatch(
        f"{name!r} is a {class_of(tensor)}, whose elements are not in one tensor of its shape and dtype; "
        "pass the module itself, or plain tensors in a mapping by name, such as what its dequantize() returns"
    )


def _is_alike(inner: torch.Tensor, outer: torch.Tensor) -> bool:
    return (
        inner.shape == outer.shape
        and inner.dtype == outer.dtype
        and inner.device == outer.device
        and inner.stride() == outer.stride()
    )


def class_of(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


class Piece(NamedTuple):
    """A box of a tensor, with its elements."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: tuple[int, ...] | None
    """The first index of each dimension in the whole tensor; None for all of it."""
    local: torch.Tensor
    """The elements: a view of the source's memory, perhaps not contiguous."""

    @property
    def place(self) -> tuple[tuple[int, ...], tuple[int, ...] | None, tuple[int, ...]]:
        """What stays the same as long as the layout does."""
        return self.shape, self.start, tuple(self.local.shape)


def whole(tensor: torch.Tensor) -> Piece:
    return Piece(tuple(tensor.shape), None, tensor)


def piece(shape: Sequence[int], start: Sequence[int], local: torch.Tensor) -> Piece:
    """Return a piece, which is the whole tensor if it has its shape."""
    shape = tuple(shape)
    return Piece(shape, None if tuple(local.shape) == shape else tuple(start), local)


@dataclass(frozen=True, slots=True)
class LocalPart:
    """A part of a tensor that this process has: a value of a source, in place of a whole tensor.

    It has one of two kinds of place. A box: `start` says where it begins in each dimension. A flat range:
    `offset` says at which element of the flattened, row-major tensor it begins; its elements may have any
    shape.
    """

    tensor: torch.Tensor
    """The elements. They are read in each publication, and not copied before."""
    shape: Sequence[int]
    """Of the whole tensor."""
    start: Sequence[int] | None = None
    offset: int | None = None

    @classmethod
    def shard(cls, tensor: torch.Tensor, dim: int, *, rank: int, size: int) -> "LocalPart":
        """Return the part that one rank has of a tensor cut into equal shards, as over tensor parallel ranks.

        Args:
            tensor: the shard of this rank. It is not copied.
            dim: along which the shards follow each other; a negative one counts from the end.
            rank: of this process among those that have a shard.
            size: how many have one.

        Raises:
            UsageError: there is no such dimension or rank.
        """
        given: object = tensor
        if not isinstance(given, torch.Tensor) or not given.dim():
            raise UsageError(f"a shard must be a tensor with dimensions, not {tensor!r:.100}")
        dim = whole_number("dim", dim, least=-tensor.dim(), most=tensor.dim() - 1) % tensor.dim()
        size = whole_number("size", size, least=1)
        rank = whole_number("rank", rank, least=0, most=size - 1)
        shape, start = list(tensor.shape), [0] * tensor.dim()
        start[dim], shape[dim] = rank * shape[dim], size * shape[dim]
        return cls(tensor, tuple(shape), start=tuple(start))

    def pieces(self, name: str, local: torch.Tensor) -> list[Piece]:
        """Return the boxes that its elements are: one, or for a flat range at most 2 * dimensions - 1."""
        shape = tuple(self.shape)
        if any(size < 0 for size in shape):
            raise SchemaMismatch(f"the part of {name!r} is of a tensor of the impossible shape {shape}")
        if (self.start is None) == (self.offset is None):
            raise SchemaMismatch(
                f"the part of {name!r} needs either start=, the first index of each dimension, or offset=, "
                "its first element in the flattened tensor"
            )
        if self.start is not None:
            start, size = tuple(self.start), tuple(local.shape)
            if not len(start) == len(size) == len(shape):
                raise SchemaMismatch(
                    f"the part of {name!r} has the shape {size} and begins at {start}, which is no box of a "
                    f"tensor of shape {shape}: all three need as many dimensions"
                )
            for dim, (first, num, side) in enumerate(zip(start, size, shape, strict=True)):
                if first < 0 or first + num > side:
                    raise SchemaMismatch(
                        f"the part of {name!r} has the indices {first} to {first + num} of dimension {dim}, "
                        f"but the tensor of shape {shape} ends at {side}"
                    )
            return [piece(shape, start, local)]
        assert self.offset is not None
        num, total = local.numel(), prod(shape)
        if self.offset < 0 or self.offset + num > total:
            raise SchemaMismatch(
                f"the part of {name!r} has the elements {self.offset:,} to {self.offset + num:,}, but the "
                f"tensor of shape {shape} has {total:,}; cut off what pads the last part"
            )
        if not local.is_contiguous():
            raise SchemaMismatch(
                f"the part of {name!r} is a flat range, whose elements must follow each other in memory, but "
                f"its shape {tuple(local.shape)} has the strides {local.stride()}; pass boxes with start="
            )
        flat, taken, found = local.reshape(-1), 0, []
        for start, size in boxes(shape, self.offset, num):
            end = taken + prod(size)
            found.append(piece(shape, start, flat[taken:end].view(size)))
            taken = end
        return found


def boxes(shape: tuple[int, ...], offset: int, num: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a range of a flattened tensor into boxes, in the order of their elements.

    Returns:
        The first index and the shape of each. No element is one box without any, or no box of a scalar.

    Example: elements 4 to 9 of shape [3, 4] -> rows 1 to 2, then one element of row 2.
    """
    if num == prod(shape):
        yield (0,) * len(shape), shape
    elif num == 0:
        if shape:
            yield (0,) * len(shape), (0,) * len(shape)
    elif len(shape) == 1:
        yield (offset,), (num,)
    else:
        row = prod(shape[1:])
        first, within = divmod(offset, row)
        if within:
            head = min(num, row - within)
            yield from _of_row(shape, first, within, head)
            first, num = first + 1, num - head
        if rows := num // row:
            yield (first, *(0 for _ in shape[1:])), (rows, *shape[1:])
        if num % row:
            yield from _of_row(shape, first + rows, 0, num % row)


def _of_row(
    shape: tuple[int, ...], index: int, offset: int, num: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for start, size in boxes(shape[1:], offset, num):
        yield (index, *start), (1, *size)


_SCALE = re.compile(r"(\w+_)?scales?(_inv|_2)?")


def holds_codes(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a dtype in which quantized weights are stored, alone or several in one number."""
    return tensor.dtype == torch.int32 or (tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool)


def is_scale(name: str) -> bool:
    """Whether the last part of a name is one that libraries give to scales."""
    return _SCALE.fullmatch(name) is not None


class PieceOf(NamedTuple):
    """Of which tensor a piece is, and where it belongs there."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: tuple[int, ...]


class Given(NamedTuple):
    """What a source has in this process."""

    tensors: dict[str, torch.Tensor]
    """Plain, each once, by key. A tensor's key is its name. A piece's key has a number too, behind a tab:
    "w\\t0", "w\\t1". Those of a stream are on the meta device, without elements."""
    places: dict[str, PieceOf]
    """Where pieces belong, by the same keys."""
    tied: dict[str, str]
    """A further name of a tensor -> the one that it is under."""
    devices: dict[str, torch.device]
    """Where the elements of a stream are."""
    where: object = None
    """The same one at each call that finds names, layouts, dtypes, addresses and ties as they were."""

    def name(self, key: str) -> str:
        """Return the name of the tensor of which a key is all or a piece; it may be one that is refused."""
        place = self.places.get(key)
        return key if place is None else place.name

    def whole(self, key: str) -> tuple[str, tuple[int, ...]]:
        """Return the name and the shape of the whole tensor of which a key is all or a piece."""
        place = self.places.get(key)
        return (key, tuple(self.tensors[key].shape)) if place is None else (place.name, place.shape)

    def wholes(self) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
        return ((key, self.whole(key)) for key in self.tensors)

    def without_elements(self) -> dict[str, torch.Tensor]:
        """Return whole tensors under all their names, on the meta device."""
        found = {}
        for key, (name, shape) in self.wholes():
            found[name] = torch.empty(shape, dtype=self.tensors[key].dtype, device="meta")
        tied = {alias: torch.empty_like(found[name]) for alias, name in self.tied.items() if name in found}
        return found | tied


class Layout(NamedTuple):
    """How a tensor is sharded, and what this rank has of it."""

    key: tuple[Any, ...]
    """See `layout_key`."""
    boxes: Sequence[tuple[tuple[int, ...], tuple[range, ...]]]
    """Where each begins in the whole tensor, and what it is of each local dimension. One, if the elements are
    in one box; it may be empty."""

    @classmethod
    def of(cls, name: str, tensor: "DTensor", local_shape: Sequence[int]) -> "Layout":
        return cls(layout_key(tensor, local_shape), _boxes(name, tensor, tuple(local_shape)))

    def pieces(self, local: torch.Tensor) -> list[Piece]:
        """Return the pieces of what this rank has; they share memory."""
        shape = self.key[0]
        if len(self.boxes) == 1:
            return [piece(shape, self.boxes[0][0], local)]
        found = []
        for start, inside in self.boxes:
            some = local
            for dim, side in enumerate(inside):
                some = some.narrow(dim, side.start, len(side))
            found.append(piece(shape, start, some))
        return found


def layout_key(tensor: "DTensor", local_shape: Sequence[int]) -> tuple[Any, ...]:
    """Return what says how a tensor is sharded, and is the same as long as that is: shape, placements, mesh,
    and this rank's shape.
    """
    return tuple(tensor.shape), tuple(tensor.placements), tensor.device_mesh, tuple(local_shape)


def is_sharded(tensor: object) -> bool:
    """Whether this is a DTensor. Does not import what a process that has none never loads."""
    return hasattr(tensor, "full_tensor") and hasattr(tensor, "placements")


def ranks_of(tensor: Any) -> set[int]:
    """Return the global ranks among which a tensor is sharded; none if one rank has it alone."""
    found = set[int]()
    if is_partitioned(tensor):
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            found.update(range(distributed.get_world_size()))
    elif is_sharded(tensor):
        found.update(tensor.device_mesh.mesh.flatten().tolist())
    return found if len(found) > 1 else set()


def local_of(tensor: "DTensor") -> torch.Tensor:
    """Return the elements that this rank has, without a copy, and out of autograd's sight."""
    local = tensor._local_tensor
    if hasattr(local, "trigger_wait"):
        # The result of a collective that may still be under way.
        local = local.trigger_wait()
    return local.detach()


class _Sharded(NamedTuple):
    """What of a DTensor says where elements are."""

    shape: tuple[int, ...]
    device_mesh: Any
    placements: Sequence[Any]


def local_shape(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> tuple[int, ...]:
    """Return the shape of what this rank has of a tensor that is sharded in this way."""
    like: Any = _Sharded(tuple(shape), mesh, placements)
    return tuple(len(_indices(like, dim, size)) for dim, size in enumerate(shape))


def _boxes(
    name: str, tensor: "DTensor", local_shape: tuple[int, ...]
) -> list[tuple[tuple[int, ...], tuple[range, ...]]]:
    """Return where each box begins in the whole tensor, and which range of each local dimension it is.

    torch's own `compute_local_shape_and_global_offset` is not used: where strided shards are not contiguous
    it returns the first offset alone. So every dimension's indices are split as torch splits the tensor.
    """
    _check_placements(name, tensor)
    sides = [_indices(tensor, dim, size) for dim, size in enumerate(tensor.shape)]
    expected = tuple(len(side) for side in sides)
    if expected != local_shape:
        raise SchemaMismatch(
            f"{name!r} has the shape {local_shape} on this rank, but its placements {tensor.placements} say "
            f"{expected}; publish between steps, and not in the forward or backward pass"
        )
    runs = [_runs(side) for side in sides]
    return [(tuple(first for first, _ in box), tuple(inside for _, inside in box)) for box in product(*runs)]


def _check_placements(name: str, tensor: "DTensor") -> None:
    """Raises SchemaMismatch where placements name no owner of each element."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    for placement in tensor.placements:
        if isinstance(placement, Partial):
            raise SchemaMismatch(
                f"{name!r} has the placement {placement}: each rank has a summand of it, and none the "
                "weight; redistribute it to Shard or Replicate first"
            )
        if not isinstance(placement, Shard | _StridedShard | Replicate):
            raise SchemaMismatch(
                f"{name!r} has the placement {placement!r}, which is not known here; redistribute it to "
                "Shard or Replicate first"
            )


def _indices(tensor: "DTensor", dim: int, size: int) -> torch.Tensor:
    """Return which indices of a dimension this rank has, ascending in its memory."""
    from torch.distributed.tensor import Replicate

    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    found = torch.arange(size, device="cpu")
    if coordinate is None:
        return found[:0]
    placement: Any
    for mesh_dim, placement in enumerate(tensor.placements):
        if not isinstance(placement, Replicate) and placement.dim % len(tensor.shape) == dim:
            found = _split(placement, found, mesh.size(mesh_dim))[coordinate[mesh_dim]]
    return found


def _split(placement: Any, indices: torch.Tensor, num: int) -> list[torch.Tensor]:
    """Split the indices of a dimension into `num` shards, as a placement on any dimension splits it."""
    kind = type(placement)
    # The same kind of placement, but for the one dimension that a list of indices has.
    alike = kind(0, split_factor=placement.split_factor) if hasattr(placement, "split_factor") else kind(0)
    found: list[torch.Tensor]
    found, _ = alike._split_tensor(indices, num, with_padding=False, contiguous=False)
    return found


def _runs(indices: torch.Tensor) -> list[tuple[int, range]]:
    """Cut indices into runs that follow each other: the first index of each, and its places in the list.

    Example: [0, 2, 3] -> [(0, range(0, 1)), (2, range(1, 3))]. No index at all is one empty run.
    """
    if not len(indices):
        return [(0, range(0))]
    cuts = (indices[1:] - indices[:-1] != 1).nonzero()[:, 0] + 1
    ends = [0, *cuts.tolist(), len(indices)]
    return [(int(indices[start]), range(start, end)) for start, end in pairwise(ends)]


ZERO3_ADVICE = (
    "DeepSpeed ZeRO-3 keeps parameters apart: copy them inside deepspeed.zero.GatheredParameters("
    "model.parameters()), and publish the mapping of copies from rank 0"
)


def is_partitioned(value: Any) -> bool:
    """Whether this is a parameter whose partition is known."""
    return hasattr(value, "ds_tensor") and hasattr(value, "ds_shape") and hasattr(value, "ds_numel")


def is_placeholder(value: Any) -> bool:
    """Whether DeepSpeed keeps this tensor's elements elsewhere."""
    return hasattr(value, "ds_id") and not value.numel() and bool(getattr(value, "ds_numel", 1))


def partition_of(name: str, parameter: Any) -> LocalPart:
    """Return the partition of this rank, without what pads the last one.

    The partition is what the next forward pass gathers, also of parameters that are gathered now.
    """
    held = parameter.ds_tensor
    num_held = int(getattr(held, "ds_numel", held.numel()))
    if held.numel() != num_held:
        raise SchemaMismatch(
            f"the partition of {name!r} is not in memory, but offloaded to NVMe; {ZERO3_ADVICE}"
        )
    if held.dtype != parameter.dtype:
        raise SchemaMismatch(
            f"{name!r} is {parameter.dtype}, but DeepSpeed keeps it quantized as {held.dtype}; {ZERO3_ADVICE}"
        )
    total = int(parameter.ds_numel)
    offset = min(_rank_of_partition(parameter) * num_held, total)
    return LocalPart(held.detach()[: min(num_held, total - offset)], tuple(parameter.ds_shape), offset=offset)


def _rank_of_partition(parameter: Any) -> int:
    found = getattr(parameter, "ds_zero_partition_rank", None)
    if found is None:
        found = torch.distributed.get_rank(parameter.ds_process_group)
    return int(found)


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
    """Return the global ranks that own tensors; none if the source names no other than one."""
    found = {rank for each in _declared(source).values() if each.owners for rank in each.owners}
    return found if len(found) > 1 else set()


def owns_nothing(source: Any) -> bool:
    """Whether the source declares tensors, and other ranks own all of them."""
    declared = _declared(source)
    return bool(declared) and not _owned(source, declared)


def of_weight_source(source: Any) -> Iterator[tuple[str, torch.Tensor | LocalPart]]:
    """Yield names and tensors, or parts of tensors; a pass."""
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
    coordinates = np.unravel_index(place, declared.mesh)
    for dim, coordinate, num in zip(declared.sharded, coordinates, declared.mesh, strict=True):
        if dim is not None:
            chunk = -(-sizes[dim] // num)
            first = min(int(coordinate) * chunk, sizes[dim])
            starts[dim] += first
            sizes[dim] = min(chunk, sizes[dim] - first)
    return tuple(starts), tuple(sizes)


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
