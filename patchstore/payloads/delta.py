"""Encode changes on the CPU: from changes and the parent's tensors to the bytes of a delta."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from patchstore.encodings import Encoding, IndexEncoding
from patchstore.encodings.context import Coded, Context, encode_all, packed, pays
from patchstore.format.records import TensorSpec
from patchstore.payloads import delta_file, tensor_file
from patchstore.stores.base import Chunk
from patchstore.tensors import state_digest
from patchstore.tensors.bits import TensorPatch, bits, grouped, joined
from patchstore.tensors.changes import Changes
from patchstore.tensors.state_digest import Sums

Change = tuple[TensorSpec, TensorPatch, torch.Tensor]
"""A tensor, exactly what changed of it, and the tensor before; the patch is on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedDelta:
    """The bytes of a delta, and by how much it changes the digest sums."""

    encoding: str
    num_changed: int
    """Elements whose bits changed."""
    listed: Sequence[TensorSpec] = ()
    """The tensors that the file states by positions and values, ascending by name."""
    entries: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The file's tensors by name, in any order, in host memory."""
    sum_growth: Mapping[str, Sums] = field(default_factory=dict)
    """By how much the digest sums of each tensor with changes grow."""
    parent_sums: Mapping[str, Sums] = field(default_factory=dict)
    """The digest sums of those tensors before the change, if the encoding depends on them; otherwise
    empty."""

    def file(self, metadata: Mapping[str, str]) -> Callable[[], Iterator[Chunk]]:
        """Return a function that streams the delta file; it may be called again for a retry.

        Not for a delta without changes, which has no file.
        """
        specs, tensors = delta_file.in_order(self.entries)
        return lambda: tensor_file.write(specs, tensors, metadata)


NO_CHANGES = EncodedDelta(encoding="gap", num_changed=0)
"""The delta of a publication in which no bit changed. Every release reads `gap`."""


def encode(
    schema: Sequence[TensorSpec], changes: Changes, parent: Mapping[str, torch.Tensor], encoding: Encoding
) -> EncodedDelta:
    """Encode changes against the parent's tensors, which are on any device and stay as they are.

    Memory beside the result: one large tensor, or a few million elements of small ones.
    """
    encoder = DeltaEncoder(schema, encoding)
    encoder.add_all((spec, patch, parent[spec.name]) for spec, patch in changes.patches())
    return encoder.delta()


class DeltaEncoder:
    """Builds a delta: large tensors one at a time, small ones many at a time."""

    def __init__(self, schema: Sequence[TensorSpec], encoding: Encoding) -> None:
        self._places = {spec.name: place for place, spec in enumerate(schema)}
        self._encoding = encoding
        self._num_changed = 0
        self._coded: list[tuple[int, Coded]] = []
        self._listed: list[tuple[TensorSpec, TensorPatch]] = []
        self._growth: dict[str, Sums] = {}
        self._parents: dict[str, Sums] = {}

    def add_all(self, changes: Iterable[Change]) -> None:
        """Encode the changes of tensors.

        Args:
            changes: of each tensor that has any. Some of them are held meanwhile: `tensors.bits.TOGETHER`
                elements, or one large tensor of each dtype.
        """
        if not isinstance(self._encoding, Context):
            self._add_listed(changes)
            return
        for group in grouped(
            ((spec, patch, parent.cpu()) for spec, patch, parent in changes),
            lambda each: (each[0].dtype, pays(each[0], len(each[1].indices))),
            lambda each: each[0].num_elements,
        ):
            self._add_coded(group)

    def _add_listed(self, changes: Iterable[Change]) -> None:
        """State positions and values; of the parent only stated elements are read."""
        exact, before = [], []
        for spec, patch, parent in changes:
            stated, old = with_bridges(patch, parent, self._encoding.index)
            self._num_changed += len(patch.indices)
            self._listed.append((spec, stated))
            exact.append(patch)
            before.append(replace(patch, values=old))
        old_sums = state_digest.of_patches(before)
        for name, sums in state_digest.of_patches(exact).items():
            self._growth[name] = sums.minus(old_sums[name])

    def _add_coded(self, group: list[Change]) -> None:
        """Code the changes of tensors of one dtype; coding pays for all of them, or for none."""
        # Tensors of one shape beside each other are cut into tiles together.
        group.sort(key=lambda each: each[0].shape)
        specs = [spec for spec, _, _ in group]
        sizes = np.array([spec.num_elements for spec in specs])
        counts = np.array([len(patch.indices) for _, patch, _ in group])
        positions = torch.cat([patch.indices.to(torch.int64) for _, patch, _ in group]).numpy()
        old = joined([parent for _, _, parent in group])
        new = joined([patch.values for _, patch, _ in group])
        replaced = old[positions + np.repeat(sizes.cumsum() - sizes, counts)]
        before = state_digest.of_each(replaced, counts, positions)
        after = state_digest.of_each(new, counts, positions)
        parents = state_digest.of_each(old, sizes)
        for spec, its_before, its_after, its_parent in zip(specs, before, after, parents, strict=True):
            self._growth[spec.name] = its_after.minus(its_before)
            self._parents[spec.name] = its_parent
        self._num_changed += int(counts.sum())
        if pays(specs[0], int(counts[0])):
            coded = encode_all(specs, old, counts, positions, new)
            self._coded += zip((self._places[spec.name] for spec in specs), coded, strict=True)
        else:
            index = self._encoding.index
            self._listed += ((spec, with_bridges(patch, parent, index)[0]) for spec, patch, parent in group)

    def delta(self) -> EncodedDelta:
        """Return the delta of all that was added."""
        listed = sorted(self._listed, key=lambda each: each[0].name)
        coded = packed(sorted(self._coded, key=lambda each: each[0]))
        return EncodedDelta(
            encoding=self._encoding.name,
            num_changed=self._num_changed,
            listed=[spec for spec, _ in listed],
            entries={**coded, **delta_file.encoded(listed, self._encoding.index)},
            sum_growth=self._growth,
            parent_sums=self._parents,
        )


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
