"""Checkpoint names and layouts of trainers that name or fuse their tensors otherwise.

A rule says of each tensor of the trainer which checkpoint tensors it holds: other names, slices, transposes.
It says so with views of a tensor on the meta device, which has no elements, so it is called once for each
tensor. What a process has of the trainer's tensor, all of it or a shard, is then viewed in the same way.
Nothing is gathered and nothing is copied.

Ready rules are those of Megatron's fused tensors, and what transformers does when it saves a model: from
version 5 on it fuses tensors when it loads, such as all experts of a layer into one, and takes them apart
again. That is found by letting it convert tensors without elements.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from patchstore.errors import SchemaMismatch, UsageError
from patchstore.publish.sources.names import models_of_transformers, without_engine
from patchstore.publish.sources.pieces import LocalPart, Piece, class_of, piece, whole
from patchstore.support.arguments import whole_number

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
        """Return what a process has of each checkpoint tensor, given its pieces of a trainer's tensor."""
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
    """Return which dimensions of a tensor a view has, and which indices of each."""
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


Parts = list[tuple[str, LocalPart]]


def interleaved_qkv(
    tensor: torch.Tensor, names: Sequence[str], *, num_heads: int, num_query_groups: int
) -> Parts:
    """Return query, key and value of a tensor whose rows are ordered by query group.

    Megatron's `linear_qkv` has for each group the rows of its query heads, then of its key head, then of its
    value head. Checkpoints have all query heads in one tensor, all key heads and all value heads in others.

    Args:
        tensor: the whole weight, [(num_heads + 2 * num_query_groups) * head_dim, hidden], or the bias, [the
            same rows].
        names: of the query, key and value tensors in the checkpoint.
        num_heads: query heads of a layer, on all ranks together.
        num_query_groups: key heads of a layer, on all ranks together; num_heads without grouped queries.

    Raises:
        UsageError: these numbers of heads do not fit each other or the tensor.
    """
    what = "interleaved_qkv"
    _check(what, tensor, names, 3)
    num_heads = whole_number("num_heads", num_heads, least=1)
    num_query_groups = whole_number("num_query_groups", num_query_groups, least=1)
    rows = tensor.shape[0]
    num_slices = num_heads + 2 * num_query_groups
    if num_heads % num_query_groups or rows % num_slices:
        raise UsageError(
            f"{what}: {rows} rows are not those of {num_heads} query heads in {num_query_groups} groups, "
            f"which are {num_slices} heads with key and value; pass the tensor and the numbers of the whole "
            "layer, not those of one rank"
        )
    head = rows // num_slices
    sizes = num_heads // num_query_groups * head, head, head
    return _dealt(tensor, names, sizes, num_query_groups)


def joined_gate_up(tensor: torch.Tensor, names: Sequence[str], *, num_shards: int) -> Parts:
    """Return gate and up projection of a tensor of which each tensor parallel rank has its gate, then its up.

    Megatron's `linear_fc1` with a gated activation is cut so. Without tensor parallelism, num_shards is 1.

    Args:
        tensor: the whole weight, [2 * intermediate, hidden], or the bias, [2 * intermediate].
        names: of the gate and up tensors in the checkpoint.
        num_shards: ranks over which the layer is sharded: tensor parallel ranks, of experts those of expert
            tensor parallelism.

    Raises:
        UsageError: the rows cannot be divided so.
    """
    what = "joined_gate_up"
    _check(what, tensor, names, 2)
    num_shards = whole_number("num_shards", num_shards, least=1)
    rows = tensor.shape[0]
    if rows % (2 * num_shards):
        raise UsageError(
            f"{what}: {rows} rows are not {num_shards} shards with as many gate as up rows; pass the whole "
            "tensor, not that of one rank"
        )
    half = rows // (2 * num_shards)
    return _dealt(tensor, names, (half, half), num_shards)


def without_padding(tensor: torch.Tensor, name: str, *, num_rows: int) -> Parts:
    """Return the first rows of a tensor: of an embedding or head those of the real vocabulary.

    Megatron pads the vocabulary so that each rank has as many rows. Checkpoints have no such rows.

    Args:
        tensor: [padded rows, ...].
        name: in the checkpoint.
        num_rows: of the checkpoint's tensor: `vocab_size` in its config.

    Raises:
        UsageError: the tensor has fewer rows.
    """
    what = "without_padding"
    _check(what, tensor, [name], 1)
    num_rows = whole_number("num_rows", num_rows, least=0)
    if num_rows > tensor.shape[0]:
        raise UsageError(
            f"{what}: {name!r} has {tensor.shape[0]} rows, which is less than num_rows={num_rows}; pass the "
            "whole tensor, not that of one rank"
        )
    kept = tensor[:num_rows]
    return [(name, LocalPart(kept, tuple(kept.shape), start=(0,) * kept.dim()))]


def _dealt(tensor: torch.Tensor, names: Sequence[str], sizes: Sequence[int], times: int) -> Parts:
    """Cut rows into runs of these sizes, again and again, and append each to the tensor of its name."""
    rest = tuple(tensor.shape[1:])
    found, first = [], 0
    for turn in range(times):
        for name, size in zip(names, sizes, strict=True):
            start = (turn * size, *(0 for _ in rest))
            found.append((name, LocalPart(tensor[first : first + size], (times * size, *rest), start=start)))
            first += size
    return found


def _check(what: str, tensor: object, names: Sequence[str], num: int) -> None:
    if not isinstance(tensor, torch.Tensor) or not tensor.dim():
        raise UsageError(f"{what} takes a tensor with rows, not {tensor!r}")
    if isinstance(names, str) or len(names) != num or not all(isinstance(name, str) for name in names):
        raise UsageError(f"{what} takes {num} names, not {names!r}")


_COPIES: frozenset[Callable[..., Any]] = frozenset({torch.Tensor.contiguous, torch.Tensor.clone})


class _Said(NamedTuple):
    """A checkpoint tensor that has something of a model's tensor."""

    name: str
    view: torch.Tensor
    """Of the model's tensor."""
    shape: tuple[int, ...]
    """Of the checkpoint tensor."""
    start: tuple[int, ...]
    """Where the view begins there."""


def rule_as_saved(model: torch.nn.Module, given: Mapping[str, torch.Tensor]) -> Rule | None:
    """Return what becomes of a model's tensors when transformers saves it; None if they keep their names."""
    found: dict[str, list[_Said]] = {}
    outer: list[str] = []
    for path, start, inner in models_of_transformers(without_engine(model)):
        if not path.startswith(tuple(outer)):
            outer.append(f"{path}." if path else "")
            own = {n.removeprefix(start): each for n, each in given.items() if n.startswith(start)}
            for name, said in _converted(inner, own).items():
                found[start + name] = [each._replace(name=start + each.name) for each in said]
    if not found:
        return None

    def rule(name: str, whole: torch.Tensor) -> Any:
        if name not in found:
            return name
        return [
            (new, LocalPart(whole.as_strided(view.shape, view.stride(), view.storage_offset()), shape, start))
            for new, view, shape, start in found[name]
        ]

    return rule


def of_transformers(model: torch.nn.Module) -> Any:
    return next((each.model for each in models_of_transformers(without_engine(model))), None)


class _Views(TorchFunctionMode):
    """Copies are views here, and what tensors are joined to is written down."""

    def __init__(self) -> None:
        super().__init__()
        self.joined: dict[int, tuple[torch.Tensor, list[tuple[torch.Tensor, tuple[int, ...]]]]] = {}
        """By storage, the joined tensor, and what it was joined of with the first index of each dimension."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _COPIES:
            return args[0]
        found = func(*args, **kwargs)
        if func in {torch.cat, torch.concat, torch.stack}:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % found.dim()
            parts, first = [], 0
            for each in args[0] if args else kwargs["tensors"]:
                part = each.unsqueeze(dim) if func is torch.stack else each
                start = tuple(first if at == dim else 0 for at in range(found.dim()))
                parts.append((part, start))
                first += part.shape[dim]
            self.joined[_storage(found)] = found, parts
        return found


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _converted(model: Any, given: Mapping[str, torch.Tensor]) -> dict[str, list[_Said]]:
    """Have transformers convert tensors without elements.

    Returns by the name of a given tensor the checkpoint tensors that have something of it. A tensor that
    keeps its name and shape is left out.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        # Versions before 5 keep the names of checkpoints.
        return {}
    with _Views() as seen:
        converted = revert_weight_conversion(model, dict(given))
    names = {_storage(tensor): name for name, tensor in given.items()}
    found: dict[str, list[_Said]] = {}

    def add(new: str, view: torch.Tensor, shape: tuple[int, ...], start: tuple[int, ...]) -> None:
        storage = _storage(view)
        if storage in names:
            found.setdefault(names[storage], []).append(_Said(new, view, shape, start))
            return
        whole, parts = seen.joined.get(storage, (None, []))
        if whole is None or (whole.shape, whole.stride()) != (view.shape, view.stride()):
            raise SchemaMismatch(
                f"transformers computes {new!r} when it saves {class_of(model)}, so a part of it cannot be "
                "published as it is; publish model.save_pretrained's tensors, as a mapping by name"
            )
        for part, at in parts:
            add(new, part, shape, tuple(a + b for a, b in zip(start, at, strict=True)))

    for new, tensor in converted.items():
        add(new, tensor, tuple(tensor.shape), (0,) * tensor.dim())
    return {
        name: said
        for name, said in found.items()
        if [(each.name, each.shape) for each in said] != [(name, tuple(given[name].shape))]
    }
