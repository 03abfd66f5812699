"""What differs between two versions, tensor by tensor."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from patchstore.bucket.records import Manifest, Plan, TensorSpec
from patchstore.errors import DataError
from patchstore.read.rebuild import Progress, rebuild
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

    def __repr__(self) -> str:
        versions = f"{self.before.version} and {self.after.version}"
        return (
            f"<Diff of versions {versions}: {self.num_changed:,} elements ({100 * self.share_changed:.3g} %) "
            f"in {len(self.tensors):,} of {self.num_tensors:,} tensors>"
        )

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

    def compared(old: Plan) -> Diff:
        try:
            return run.reach(second, lambda new: _compared(run, old, new, progress))
        except _OfOther as exc:
            raise exc.error from exc.error.__cause__
        except DataError as exc:
            raise _OfOther(exc) from exc

    try:
        return run.reach(first, compared)
    except _OfOther as exc:
        raise exc.error from exc.error.__cause__


class _OfOther(Exception):
    """What is wrong with one of the two versions, on its way past `Run.reach` of the other one."""

    def __init__(self, error: DataError) -> None:
        super().__init__(error)
        self.error = error


def _compared(run: Run, old: Plan, new: Plan, progress: Progress | None) -> Diff:
    schema, found = run.schema, list[TensorDiff]()
    waiting: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
    done = 0
    # Both iterators are taken to their ends, where they verify what they yielded.
    for pair in zip(_of_old(run, old), _tensors(run, new), strict=True):
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


def _tensors(run: Run, route: Plan) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    for _, specs, tensors in rebuild(run, route):
        yield from zip(specs, tensors, strict=True)


def _of_old(run: Run, route: Plan) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    try:
        yield from _tensors(run, route)
    except DataError as exc:
        raise _OfOther(exc) from exc


def _of_tensor(spec: TensorSpec, before: torch.Tensor, after: torch.Tensor) -> TensorDiff | None:
    old, new = bits(before), bits(after)
    changed = old != new
    num_changed = int(changed.sum())
    if not num_changed:
        return None
    # Chosen as integers: not every dtype can be indexed.
    change = (_numbers(new[changed], after.dtype) - _numbers(old[changed], before.dtype)).abs()
    return TensorDiff(
        name=spec.name,
        num_changed=num_changed,
        num_elements=spec.num_elements,
        largest_change=float(change.max()) if bool(change.isfinite().all()) else float("inf"),
    )


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device="cpu")
"""The numbers that the codes of F4 stand for, without the sign."""


def _numbers(found: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what bit patterns stand for, in float64; of F4 two numbers for each element."""
    if dtype != torch.float4_e2m1fn_x2:
        return found.view(dtype).to(torch.float64)
    # Torch itself does not convert these.
    codes = torch.cat([found, found >> 4]).to(torch.int64) & 15
    return _E2M1[codes & 7] * (1 - (codes >> 3) * 2)
