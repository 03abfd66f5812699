"""What this rank has of sharded tensors, as boxes in the coordinates of the whole tensor.

Nothing is sent: where a rank's elements belong follows from the mesh and the placements alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from patchstore.errors import SchemaMismatch
from patchstore.publish.sources.pieces import Piece, piece

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor is sharded, and what this rank has of it."""

    shape: tuple[int, ...]
    placements: tuple[Any, ...]
    mesh: Any
    local_shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], tuple[range, ...]], ...]
    """Where each begins in the whole tensor, and what it is of each local dimension. One, if the elements are
    in one box; it may be empty."""

    @classmethod
    def of(cls, name: str, tensor: "DTensor", local_shape: Sequence[int]) -> "Layout":
        """Find out what this rank has of a DTensor.

        Args:
            local_shape: of its elements on this rank.

        Raises:
            SchemaMismatch: placements that name no owner of each element, or that contradict the memory.
        """
        boxes = _boxes(name, tensor, tuple(local_shape))
        return cls(
            tuple(tensor.shape),
            tuple(tensor.placements),
            tensor.device_mesh,
            tuple(local_shape),
            tuple(boxes),
        )

    def pieces(self, local: torch.Tensor) -> list[Piece]:
        """Return the pieces of what this rank has; they share memory."""
        if len(self.boxes) == 1:
            return [piece(self.shape, self.boxes[0][0], local)]
        found = []
        for start, inside in self.boxes:
            some = local
            for dim, side in enumerate(inside):
                some = some.narrow(dim, side.start, len(side))
            found.append(piece(self.shape, start, some))
        return found

    def fits(self, tensor: "DTensor", local_shape: Sequence[int]) -> bool:
        """Whether a tensor is sharded in this way."""
        return (
            (tensor.device_mesh is self.mesh or tensor.device_mesh == self.mesh)
            and tensor.placements == self.placements
            and tuple(local_shape) == self.local_shape
            and tuple(tensor.shape) == self.shape
        )

    def __str__(self) -> str:
        return f"{self.shape} as {self.placements} over {self.mesh}, {self.local_shape} here"

    @staticmethod
    def described(tensor: "DTensor", local_shape: Sequence[int]) -> str:
        """What `str` says of a layout."""
        placed = f"{tensor.placements} over {tensor.device_mesh}"
        return f"{tuple(tensor.shape)} as {placed}, {tuple(local_shape)} here"


def is_sharded(tensor: object) -> bool:
    """Whether this is a DTensor. Does not import what a process that has none never loads."""
    return hasattr(tensor, "full_tensor") and hasattr(tensor, "placements")


def ranks_of(tensor: Any) -> set[int]:
    """Return the global ranks of a DTensor's mesh; none if it has one rank alone."""
    found = set(tensor.device_mesh.mesh.flatten().tolist())
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
