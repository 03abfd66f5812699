"""What differs between two versions, tensor by tensor."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from patchstore.bucket.records import Manifest, Plan, TensorSpec
from patchstore.read.rebuild import File, Progress, rebuild
from patchstore.read.run import Run
from patchstore.support import host
from patchstore.tensors.bits import bits


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDiff:
    """A tensor of which some elements differ."""

    name: str
    num_changed: int
    """Elements whose bits differ."""
    num_elements: int
    largest_change: float
    """The largest difference of two numbers; infinite if a number is or was infinite or NaN."""

    @property
    def share_changed(self) -> float:
        """From 0 to 1."""
        return self.num_changed / self.num_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """What differs between two versions."""

    before: Manifest
    after: Manifest
    tensors: tuple[TensorDiff, ...]
    """Those that differ, by name."""
    num_tensors: int
    """Of the run."""
    num_elements: int

    @property
    def num_changed(self) -> int:
        """Elements whose bits differ."""
        return sum(each.num_changed for each in self.tensors)

    @property
    def share_changed(self) -> float:
        """Of all elements, from 0 to 1."""
        return self.num_changed / max(1, self.num_elements)


@host.asked("rebuilding two versions", kinds=host.SHORT_OF_MEMORY)
def diff(run: Run, before: int | str, after: int | str, progress: Progress | None) -> Diff:
    """As `Run.diff`."""
    first, second = run.named(before), run.named(after)
    return run.reach(first, lambda old: run.reach(second, lambda new: _compared(run, old, new, progress)))


def _compared(run: Run, old: Plan, new: Plan, progress: Progress | None) -> Diff:
    schema, found = run.schema, list[TensorDiff]()
    waiting: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
    done = 0
    # Both iterators are taken to their ends, where they verify what they yielded.
    for pair in zip(_tensors(rebuild(run, old)), _tensors(rebuild(run, new)), strict=True):
        for (spec, tensor), its in zip(pair, waiting, strict=True):
            its[spec.name] = tensor
        for spec in dict.fromkeys(spec for spec, _ in pair):
            if all(spec.name in its for its in waiting):
                each = _of_tensor(spec, *(its.pop(spec.name) for its in waiting))
                found += [] if each is None else [each]
                done += spec.num_bytes
        if progress is not None:
            progress(done, schema.num_bytes)
    return Diff(
        before=old.target,
        after=new.target,
        tensors=tuple(sorted(found, key=lambda each: each.name)),
        num_tensors=len(schema.tensors),
        num_elements=schema.num_elements,
    )


def _tensors(files: Iterable[File]) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    for _, specs, tensors in files:
        yield from zip(specs, tensors, strict=True)


def _of_tensor(spec: TensorSpec, before: torch.Tensor, after: torch.Tensor) -> TensorDiff | None:
    old, new = bits(before), bits(after)
    changed = old != new
    num_changed = int(changed.sum())
    if not num_changed:
        return None
    # Chosen as integers: not every dtype can be indexed.
    old, new = (each[changed].view(before.dtype).to(torch.float64) for each in (old, new))
    change = (new - old).abs()
    return TensorDiff(
        name=spec.name,
        num_changed=num_changed,
        num_elements=spec.num_elements,
        largest_change=float(change.max()) if bool(change.isfinite().all()) else float("inf"),
    )
