"""Encode changes on the CPU: from changes and the parent's tensors to the bytes of a delta."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from patchstore.encodings import Encoding, IndexEncoding
from patchstore.encodings.context import (
    Coded,
    Context,
    RowSets,
    Tiling,
    encode_all,
    packed,
    pays,
    tiling_of_part,
)
from patchstore.format.records import DTYPE_BYTES, Part, TensorSpec
from patchstore.payloads import delta_file, tensor_file
from patchstore.stores.base import Chunk
from patchstore.tensors import parts, state_digest
from patchstore.tensors.bits import TensorPatch, bits, grouped, joined
from patchstore.tensors.changes import Changes
from patchstore.tensors.state_digest import Sums

Change = tuple[TensorSpec, TensorPatch, torch.Tensor]
"""A tensor, exactly what changed of it, and the tensor before; the patch is on the CPU."""
PartChange = tuple[Part, TensorPatch, torch.Tensor]
"""A part of a tensor, exactly what changed of it, by place in the flattened part, and the part before,
contiguous; the patch is on the CPU."""


Array = npt.NDArray[Any]


class _Change(NamedTuple):
    part: Part
    patch: TensorPatch
    """By place in the part."""
    parent: torch.Tensor
    """The part before."""
    cut: Tiling | None
    """How it is coded; None where that does not pay, or it cannot be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedDelta:
    """The bytes of a delta, and by how much it changes the digest sums."""

    encoding: str
    num_changed: int
    """Elements whose bits changed."""
    listed: Sequence[TensorSpec] = ()
    """The tensors that the file states by positions and values, ascending by name."""
    firsts: Mapping[str, int] = field(default_factory=dict)
    """From where the gaps of some of them count; see `EncodedTensor.first`."""
    entries: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The file's tensors by name, in any order, in host memory."""
    sum_growth: Mapping[str, Sums] = field(default_factory=dict)
    """By how much the digest sums of each part with changes grow, by key: the name of a whole tensor."""
    parent_sums: Mapping[str, Sums] = field(default_factory=dict)
    """The digest sums of those parts before the change, if the encoding depends on them; otherwise empty."""

    @property
    def num_bytes(self) -> int:
        """What the file's tensors take."""
        return sum(entry.nbytes for entry in self.entries.values())

    def file(self, metadata: Mapping[str, str]) -> Callable[[], Iterator[Chunk]]:
        """Return a function that streams the delta file; it may be called again for a retry.

        Not for a delta without changes, which has no file.
        """
        specs, tensors = delta_file.in_order(self.entries)
        return lambda: tensor_file.write(specs, tensors, metadata)


NO_CHANGES = EncodedDelta(encoding="gap", num_changed=0)
"""The delta of a publication in which no bit changed. Every release reads `gap`."""


def encode(
    schema: Sequence[TensorSpec],
    of: Mapping[str, Part],
    changes: Changes,
    parent: Mapping[str, torch.Tensor],
    encoding: Encoding,
) -> EncodedDelta:
    """Encode changes against the parent's tensors, which are on any device and stay as they are.

    Memory beside the result: one large tensor, or a few million elements of small ones.

    Args:
        schema: of the run: whole tensors.
        of: what each of the parent's tensors is a part of, by its name there.
    """
    encoder = DeltaEncoder(schema, encoding)
    encoder.add_parts((of[spec.name], patch, parent[spec.name]) for spec, patch in changes.patches())
    return encoder.delta()


class DeltaEncoder:
    """Builds a delta: large tensors one at a time, small ones many at a time."""

    def __init__(self, schema: Sequence[TensorSpec], encoding: Encoding) -> None:
        self._places = {spec.name: place for place, spec in enumerate(schema)}
        self._encoding = encoding
        self._only_dense = isinstance(encoding, Context) and encoding.only_dense
        self._num_changed = 0
        self._row_sets = RowSets()
        self._coded: list[tuple[int, Coded]] = []
        self._listed: list[tuple[Part, TensorPatch]] = []
        """Positions in the whole tensors; bridged where a part is whole."""
        self._growth: dict[str, Sums] = {}
        self._parents: dict[str, Sums] = {}

    def add_all(self, changes: Iterable[Change]) -> None:
        """Encode the changes of tensors.

        Args:
            changes: of each tensor that has any. Some of them are held meanwhile: `tensors.bits.TOGETHER`
                elements, or one large tensor of each dtype.
        """
        self.add_parts((Part.whole(spec), patch, parent) for spec, patch, parent in changes)

    def add_parts(self, changes: Iterable[PartChange]) -> None:
        """Encode the changes of parts of tensors; a tensor may have several, without elements in common.

        Args:
            changes: as of `add_all`.
        """
        if not isinstance(self._encoding, Context):
            self._add_listed(changes)
            return
        listed: list[PartChange] = []
        for group in grouped(
            self._cut(changes, listed),
            lambda each: (each.part.spec.dtype, each.cut is not None),
            lambda each: each.part.num_elements,
        ):
            self._add_group(group)
        self._add_listed(listed)

    def _cut(self, changes: Iterable[PartChange], listed: list[PartChange]) -> Iterator[_Change]:
        """Yield what is encoded beside the whole parent; what needs its changes alone goes to `listed`."""
        for change in changes:
            part, patch, parent = change
            num = len(patch.indices)
            cut = part_tiling(part, num) if not self._only_dense or _is_dense(part, num) else None
            if cut is None and self._only_dense:
                listed.append(change)
            else:
                yield _Change(part, patch, parent.cpu(), cut)

    def _add_listed(self, changes: Iterable[PartChange]) -> None:
        """State positions and values; of the parent only stated elements are read."""
        exact, before = [], []
        for part, patch, parent in changes:
            stated, old = self._stated(part, patch, parent)
            self._num_changed += len(patch.indices)
            self._listed.append((part, stated))
            at = parts.positions(part, patch.indices)
            exact.append(replace(patch, name=part.key, indices=at))
            before.append(replace(exact[-1], values=old))
        old_sums, new_sums = state_digest.of_patches(before), state_digest.of_patches(exact)
        self._growth |= {key: new_sums[key].minus(old_sums[key]) for key in new_sums}

    def _stated(
        self, part: Part, patch: TensorPatch, parent: torch.Tensor
    ) -> tuple[TensorPatch, torch.Tensor]:
        """Return what a file states of a part, by position in the tensor, and the old values of changes."""
        index = self._encoding.index
        if part.is_whole:
            return with_bridges(patch, parent, index)
        # A publisher of a part does not know what lies between its elements.
        old = bits(parent)[patch.indices.to(parent.device)].cpu().view(patch.values.dtype)
        at = parts.positions(part, patch.indices)
        return replace(patch, name=part.spec.name, indices=at), old

    def _add_group(self, group: list[_Change]) -> None:
        """Encode the changes of parts of tensors of one dtype; coding pays for all of them, or for none."""
        # Parts that are cut alike, beside each other, are cut into tiles together.
        group.sort(key=lambda each: part_order(each.part))
        sizes = np.array([each.part.num_elements for each in group])
        counts = np.array([len(each.patch.indices) for each in group])
        places = [each.patch.indices.to(torch.int64) for each in group]
        positions = torch.cat(places).numpy()
        old = joined([each.parent for each in group])
        new = joined([each.patch.values for each in group])
        replaced = old[positions + np.repeat(sizes.cumsum() - sizes, counts)]
        stated = positions
        if not all(each.part.is_whole for each in group):
            stated = np.concatenate(
                [each.part.positions(local.numpy()) for each, local in zip(group, places, strict=True)]
            )
        before = state_digest.of_each(replaced, counts, stated)
        after = state_digest.of_each(new, counts, stated)
        parents = self._parent_sums(group, old, sizes)
        for each, its_before, its_after, its_parent in zip(group, before, after, parents, strict=True):
            self._growth[each.part.key] = its_after.minus(its_before)
            self._parents[each.part.key] = its_parent
        self._num_changed += int(counts.sum())
        cuts = [each.cut for each in group if each.cut is not None]
        if cuts:
            dtype = group[0].part.spec.dtype
            coded = encode_all(dtype, cuts, old, counts, positions, new, self._row_sets)
            self._coded += zip((self._places[each.part.spec.name] for each in group), coded, strict=True)
            return
        for each in group:
            patch, _ = self._stated(each.part, each.patch, each.parent)
            self._listed.append((each.part, patch))

    def _parent_sums(self, group: Sequence[_Change], old: Array, sizes: Array) -> list[Sums]:
        """Digest parts before the change, at their positions in the whole tensors."""
        if all(each.part.is_whole for each in group):
            return state_digest.of_each(old, sizes)
        return [parts.digest(each.part, each.parent) for each in group]

    def delta(self) -> EncodedDelta:
        """Return the delta of all that was added."""
        index = self._encoding.index
        listed = listed_parts(self._listed)
        entries, firsts = delta_file.encoded(listed, index)
        is_listed = self._only_dense and not self._coded
        return EncodedDelta(
            encoding=index.name if is_listed else self._encoding.name,
            num_changed=self._num_changed,
            listed=[part.spec for part, _ in listed],
            firsts=firsts,
            entries={**packed(self._coded), **entries},
            sum_growth=self._growth,
            parent_sums=self._parents,
        )


def _is_dense(part: Part, num_changed: int) -> bool:
    """Whether positions and values of so many changes take more than a quarter of the part's own bytes."""
    width = DTYPE_BYTES[part.spec.dtype]
    return 4 * num_changed * (2 + width) > part.num_elements * width


def part_tiling(part: Part, num_changed: int) -> Tiling | None:
    """Return how a part with so many changes is coded; None where that does not pay, or it cannot be."""
    box = part.box
    if box is None:
        return None
    cut = tiling_of_part(part.spec.shape, None if part.is_whole else box, num_changed)
    return cut if pays(part.spec, num_changed, cut) else None


def part_order(part: Part) -> tuple[tuple[int, ...], ...]:
    """Return what parts that are coded together are sorted by: those that are cut alike are neighbours."""
    return part.spec.shape, part.start, part.size


def listed_parts(stated: Iterable[tuple[Part, TensorPatch]]) -> list[tuple[Part, TensorPatch]]:
    """Join what a file states of parts of one tensor; the result ascends by name.

    Args:
        stated: by position in the tensor.
    """
    by_name: dict[str, list[tuple[Part, TensorPatch]]] = {}
    for part, patch in stated:
        by_name.setdefault(part.spec.name, []).append((part, patch))
    return [_joined(by_name[name]) for name in sorted(by_name)]


def _joined(stated: Sequence[tuple[Part, TensorPatch]]) -> tuple[Part, TensorPatch]:
    if len(stated) == 1:
        return stated[0]
    indices, order = torch.cat([patch.indices.to(torch.int64) for _, patch in stated]).sort()
    values = torch.cat([patch.values for _, patch in stated])[order]
    return stated[0][0], TensorPatch(name=stated[0][1].name, indices=indices, values=values)


def with_bridges(
    patch: TensorPatch, parent: torch.Tensor, encoding: IndexEncoding
) -> tuple[TensorPatch, torch.Tensor]:
    """Add to a patch the unchanged elements that an encoding must state.

    Args:
        patch: exactly what changed, on the CPU.
        parent: the tensor before, contiguous, on any device.

    Returns:
        The patch to encode, and the parent's values where the bits changed.
    """
    stated = encoding.with_bridges(patch.indices)
    held = bits(parent)[stated.to(parent.device)].cpu()
    if stated is patch.indices:
        return patch, held.view(patch.values.dtype)
    changed = torch.searchsorted(stated, patch.indices)
    old = held[changed]
    held[changed] = bits(patch.values)
    return replace(patch, indices=stated, values=held.view(patch.values.dtype)), old.view(patch.values.dtype)
