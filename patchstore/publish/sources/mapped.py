"""Checkpoint names and layouts of trainers that name or fuse their tensors otherwise.

A rule says of each tensor of the trainer which checkpoint tensors it holds: other names, slices, transposes.
It says so with views of a tensor on the meta device, which has no elements, so it is called once for each
tensor. What a process has of the trainer's tensor, all of it or a shard, is then viewed in the same way.
Nothing is gathered and nothing is copied.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from patchstore.errors import SchemaMismatch, UsageError
from patchstore.publish.sources.pieces import LocalPart, Piece, piece, whole

Named = Mapping[str, "torch.Tensor | LocalPart"] | Iterable[tuple[str, "torch.Tensor | LocalPart"]]

Rule = Callable[[str, torch.Tensor], "str | Named | None"]
"""Given a name and a tensor of the whole shape without elements, returns what is published of it.

A name: all of it, under this name. Names with views of the tensor: slices, chunks, transposes. A `LocalPart`
of a view is a part of a checkpoint tensor that several of the trainer's make up. None: nothing is published.
"""


@dataclass(frozen=True, slots=True)
class Mapped:
    """A source with other names and layouts."""

    source: Any
    rule: Rule


def mapped(source: Any, rule: Rule | Mapping[str, str]) -> Mapped:
    """Return a source whose tensors are published under other names, or in other layouts.

    Args:
        source: whatever a `Publisher` takes.
        rule: checkpoint names by the trainer's names; tensors that are not in it keep theirs. Or a function
            of a name and a tensor on the meta device: it returns a name, names with views of that tensor, or
            None.

    Raises:
        UsageError: the rule is neither.

    Example: a fused tensor of experts, [experts, out, in], as one tensor each:

        mapped(model, lambda name, tensor: (
            {f"experts.{i}.weight": each for i, each in enumerate(tensor)} if name == "experts" else name
        ))
    """
    if isinstance(rule, Mapping):
        names = dict(rule)
        return Mapped(source, lambda name, _: names.get(name, name))
    if not callable(rule):
        raise UsageError(f"the rule must be a mapping of names or a function, not {rule!r}")
    return Mapped(source, rule)


class Target(NamedTuple):
    """A checkpoint tensor, or a part of one, as a view of a trainer's tensor."""

    name: str
    shape: tuple[int, ...]
    """Of the checkpoint tensor."""
    start: tuple[int, ...]
    """Where the view begins in it."""
    dims: tuple[int | None, ...]
    """Which dimension of the trainer's tensor each of the view is; None for one of size 1 that is new."""
    region: tuple[range, ...]
    """Which indices of each dimension of the trainer's tensor the view has."""

    def of(self, source: Piece) -> Piece | None:
        """Return what a piece of the trainer's tensor has of this view; None if that is nothing."""
        begin = source.start or (0,) * len(source.shape)
        local, first = source.local.detach(), []
        for dim, (side, at) in enumerate(zip(self.region, begin, strict=True)):
            low, high = max(side.start, at), min(side.stop, at + local.shape[dim])
            if low >= high and len(side):
                return None
            local = local.narrow(dim, low - at, max(high - low, 0))
            first.append(low - side.start)
        kept = [dim for dim in self.dims if dim is not None]
        local = local.permute([*kept, *(dim for dim in range(local.dim()) if dim not in kept)])
        for _ in range(local.dim() - len(kept)):
            local = local.squeeze(-1)
        for at, of in enumerate(self.dims):
            if of is None:
                local = local.unsqueeze(at)
        start = (
            base + (0 if dim is None else first[dim]) for base, dim in zip(self.start, self.dims, strict=True)
        )
        return piece(self.shape, tuple(start), local)


class Applied:
    """A rule, and what it said of each tensor."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._targets: dict[tuple[str, tuple[int, ...]], str | list[Target]] = {}

    def to(self, name: str, pieces: Sequence[Piece]) -> Iterable[tuple[str, list[Piece]]]:
        """Return what a process has of each checkpoint tensor, given its pieces of a trainer's tensor.

        Raises:
            SchemaMismatch: the rule returned what is no view of the tensor.
        """
        if not pieces:
            return
        shape = pieces[0].shape
        targets = self._targets.get((name, shape))
        if targets is None:
            targets = self._targets[name, shape] = self._ask(name, shape, pieces[0].local.dtype)
        if isinstance(targets, str):
            yield targets, list(pieces)
            return
        for target in targets:
            found = [some for each in pieces if (some := target.of(each)) is not None]
            if found:
                yield target.name, found

    def _ask(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> str | list[Target]:
        given = torch.empty(shape, dtype=dtype, device="meta")
        said = self._rule(name, given)
        if isinstance(said, str):
            return said
        if said is None:
            return []
        if isinstance(said, torch.Tensor):
            raise SchemaMismatch(f"the rule returned a tensor for {name!r}, and no name of it")
        found = []
        for new, value in said.items() if isinstance(said, Mapping) else said:
            view = value.tensor if isinstance(value, LocalPart) else value
            if not isinstance(new, str) or not isinstance(view, torch.Tensor):
                raise SchemaMismatch(
                    f"the rule must return names with views for {name!r}, but returned {new!r}: {value!r}"
                )
            place = whole(view)
            if isinstance(value, LocalPart):
                if value.start is None:
                    raise SchemaMismatch(f"the rule gives a part of {new!r} that needs start=")
                (place,) = value.pieces(new, view)
            dims, region = decode(f"what the rule returned as {new!r} of {name!r}", view, given)
            found.append(Target(new, place.shape, place.start or (0,) * view.dim(), dims, region))
        return found


def decode(
    what: str, view: torch.Tensor, given: torch.Tensor
) -> tuple[tuple[int | None, ...], tuple[range, ...]]:
    """Return which dimensions of a tensor a view has, and which indices of each.

    Raises:
        SchemaMismatch: it is a copy, or no box of the tensor.
    """
    if (
        view.device.type != "meta"
        or view.untyped_storage()._cdata != given.untyped_storage()._cdata
        or view.dtype != given.dtype
    ):
        raise SchemaMismatch(
            f"{what} is no view of the given tensor, but a copy or another tensor; use slices, chunk, split, "
            "transpose or permute"
        )
    strides, offset = given.stride(), int(view.storage_offset())
    of_stride = {stride: dim for dim, stride in enumerate(strides) if given.shape[dim] != 1}
    starts = [0] * given.dim()
    for dim, (size, stride) in enumerate(zip(given.shape, strides, strict=True)):
        if size > 1:
            starts[dim], offset = divmod(offset, stride)
    sizes, dims = [1] * given.dim(), list[int | None]()
    for size, stride in zip(view.shape, view.stride(), strict=True):
        found = of_stride.get(stride)
        if size == 1:
            dims.append(None)
            continue
        if found is None or found in dims or starts[found] + size > given.shape[found]:
            raise SchemaMismatch(
                f"{what} merges or splits dimensions, or takes steps: shape {tuple(view.shape)} of "
                f"{tuple(given.shape)}; give slices as parts, LocalPart(view, shape, start)"
            )
        dims.append(found)
        sizes[found] = size
    return tuple(dims), tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))
