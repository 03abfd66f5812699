"""Changes coded against the parent: found while a trainer waits, coded on a thread while it goes on."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from patchstore import digest, payload
from patchstore.digest import Sums
from patchstore.encodings import RELATIVE, named
from patchstore.encodings.context import Coded, encode_all, packed, pays
from patchstore.errors import PublishFailed
from patchstore.model import DTYPE_BYTES, TensorSpec
from patchstore.stores.base import Chunk
from patchstore.tensors import TensorPatch, bits, grouped, joined
from patchstore.worker import Task, Worker

_HEADER_BYTES = 160
"""Of a tensor in the header of a `gap` file, beside three times its name: two entries, and its shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a delta's file is made of, and what it does to the digests."""

    encoding: str
    listed: Sequence[TensorSpec]
    """Tensors that it has by name, ascending."""
    stored: Mapping[str, torch.Tensor]
    """The file's entries, in any order."""
    grown: Mapping[str, Sums]
    """By how much the digest sums of the tensors with changes grow."""
    parents: Mapping[str, Sums]
    """The digest sums of those tensors before."""

    @property
    def coded_bytes(self) -> int:
        return sum(tensor.nbytes for name, tensor in self.stored.items() if name in {"table", "tiles"})


class Relative:
    """A change that is being coded."""

    def __init__(self, step: int, num_changed: int, contents: Task[Contents]) -> None:
        self.step, self.num_changed = step, num_changed
        self._contents = contents

    def _done(self) -> Contents:
        """Wait until it has been coded.

        Raises:
            PublishFailed: that failed, for lack of memory, say.
        """
        try:
            return self._contents.result()
        except Exception as exc:
            raise PublishFailed(
                f"step {self.step} could not be coded, and the next publication will be an anchor: "
                f"{type(exc).__name__}: {exc}"
            ) from exc

    @property
    def encoding(self) -> str:
        return self._done().encoding

    def specs(self) -> list[TensorSpec]:
        return list(self._done().listed)

    def sums(self) -> Mapping[str, Sums]:
        return self._done().grown

    def parents(self) -> Mapping[str, Sums]:
        return self._done().parents

    def file(self, metadata: Mapping[str, str]) -> Callable[[], Iterator[Chunk]]:
        specs, tensors = payload.in_order(self._done().stored)
        return lambda: payload.write(specs, tensors, metadata)


class Coder:
    """A thread to which a snapshot belongs until `wait` returns: nobody else may change it."""

    def __init__(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: the system starts no more threads.
        """
        self._worker = Worker("patchstore-coder")

    def start(self, step: int, num_changed: int, work: Callable[[], Contents]) -> Relative:
        """Have a change coded. What goes wrong is raised by the change."""
        self.wait()
        task = Task(work)
        self._worker.hand_over(task)
        return Relative(step, num_changed, task)

    def wait(self) -> None:
        """Wait until nothing is being coded; from any thread."""
        self._worker.wait_until_at_most(0)

    def close(self) -> None:
        """Wait, and end the thread."""
        self._worker.stop()


class Coding:
    """A delta in the making, on the CPU: of large tensors one at a time, of small ones many."""

    def __init__(self, schema: Sequence[TensorSpec]) -> None:
        self._places = {spec.name: place for place, spec in enumerate(schema)}
        self._coded: list[tuple[int, Coded]] = []
        self._listed: list[tuple[TensorSpec, TensorPatch]] = []
        self._grown: dict[str, Sums] = {}
        self._parents: dict[str, Sums] = {}

    def add_all(self, changes: Iterable[tuple[TensorSpec, TensorPatch, torch.Tensor]]) -> None:
        """Code the changes of tensors.

        Args:
            changes: of each tensor exactly what changed, and the tensor before; both on the CPU. Some of them
                are held meanwhile, `tensors.TOGETHER` elements or one large tensor for each dtype.
        """
        for group in grouped(
            changes,
            lambda each: (each[0].dtype, pays(each[0], len(each[1].indices))),
            lambda each: each[0].num_elements,
        ):
            self._add_group(group)

    def _add_group(self, group: list[tuple[TensorSpec, TensorPatch, torch.Tensor]]) -> None:
        """Code the changes of tensors of one dtype, for all of which that pays, or for none."""
        # Neighbours of one shape are cut into tiles together.
        group.sort(key=lambda each: each[0].shape)
        specs = [spec for spec, _, _ in group]
        sizes = np.array([spec.num_elements for spec in specs])
        counts = np.array([len(patch.indices) for _, patch, _ in group])
        positions = torch.cat([patch.indices.to(torch.int64) for _, patch, _ in group]).numpy()
        old = joined([parent for _, _, parent in group])
        new = joined([patch.values for _, patch, _ in group])
        replaced = old[positions + np.repeat(sizes.cumsum() - sizes, counts)]
        before = digest.of_each(replaced, counts, positions)
        after = digest.of_each(new, counts, positions)
        parents = digest.of_each(old, sizes)
        for spec, its_before, its_after, its_parent in zip(specs, before, after, parents, strict=True):
            self._grown[spec.name] = its_after.minus(its_before)
            self._parents[spec.name] = its_parent
        if pays(specs[0], int(counts[0])):
            coded = encode_all(specs, old, counts, positions, new)
            self._coded += zip((self._places[spec.name] for spec in specs), coded, strict=True)
        else:
            self._listed += ((spec, bridged(spec, patch, bits(parent))) for spec, patch, parent in group)

    def contents(self) -> Contents:
        return self._contents(RELATIVE, packed(sorted(self._coded, key=lambda each: each[0])), self._listed)

    def contents_as(self, encoding: str, patches: Iterable[tuple[TensorSpec, TensorPatch]]) -> Contents:
        """The same in an index encoding, of patches that state what that wants."""
        return self._contents(encoding, {}, patches)

    def _contents(
        self,
        encoding: str,
        coded: Mapping[str, torch.Tensor],
        patches: Iterable[tuple[TensorSpec, TensorPatch]],
    ) -> Contents:
        listed = sorted(patches, key=lambda each: each[0].name)
        return Contents(
            encoding=encoding,
            listed=[spec for spec, _ in listed],
            stored={**coded, **payload.encoded(listed, named(encoding))},
            grown=self._grown,
            parents=self._parents,
        )


def code(
    schema: Sequence[TensorSpec],
    patches: Sequence[tuple[TensorSpec, TensorPatch]],
    parents: Callable[[str], torch.Tensor],
    *,
    may_be_gap: bool,
) -> Contents:
    """Code changes on the CPU.

    Args:
        patches: exactly what changed, ascending by name, on the CPU.
        parents: makes a tensor of the parent by name, on the CPU.
        may_be_gap: whether encoding `gap` will do where it is smaller.
    """
    coding = Coding(schema)
    coding.add_all((spec, patch, parents(spec.name)) for spec, patch in patches)
    found = coding.contents()
    nums = [(spec, len(patch.indices)) for spec, patch in patches if pays(spec, len(patch.indices))]
    if may_be_gap and found.coded_bytes >= gap_bytes(nums):
        listed = [(spec, bridged(spec, patch, bits(parents(spec.name)))) for spec, patch in patches]
        return coding.contents_as("gap", listed)
    return found


def gap_bytes(nums: Iterable[tuple[TensorSpec, int]]) -> int:
    """How many bytes `gap` takes at least for so many changes of each tensor, headers included."""
    return sum(
        num * (2 + DTYPE_BYTES[spec.dtype]) + _HEADER_BYTES + 3 * len(spec.name) for spec, num in nums if num
    )


def bridged(spec: TensorSpec, patch: TensorPatch, old: torch.Tensor) -> TensorPatch:
    """State a change as `gap` wants it; `old` has the parent's bits, flat, on any device."""
    stated = named("gap").stated(patch.indices)
    if stated is patch.indices:
        return patch
    values = old[stated.to(old.device)].cpu()
    values[torch.searchsorted(stated, patch.indices)] = bits(patch.values)
    return TensorPatch(name=spec.name, indices=stated, values=values.view(patch.values.dtype))
