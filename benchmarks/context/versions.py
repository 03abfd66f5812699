"""Random weights, and versions of them such as AdamW makes in bfloat16.

Small weights change rather than large ones, mostly by one unit in the last place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.support.kernel_bench import Bench

STEP_ELEMENTS = 1 << 26
"""Elements changed at a time."""
PROBE_ELEMENTS = 1 << 20
"""Elements of the sample from which the odds of a change are fitted to a density."""


class Weights:
    """Random weights, the parents of every version."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.random = torch.Generator(bench.device).manual_seed(0)
        self.tensors = [self._normal(spec.shape) for spec in bench.specs]
        self.addresses = np.array([each.data_ptr() for each in self.tensors], dtype=np.int64)

    def _normal(self, shape: Sequence[int]) -> torch.Tensor:
        found = torch.empty(tuple(shape), dtype=torch.bfloat16, device=self.bench.device)
        return found.normal_(0, 0.02, generator=self.random)

    def scale(self, density: float) -> float:
        """Return the scale of `_odds` that gives this share of changes."""
        exponents = _exponents(self._normal([PROBE_ELEMENTS]))
        low, high = 1e-8, 1e4
        for _ in range(40):
            middle = (low * high) ** 0.5
            if float(_odds(exponents, middle).mean()) > density:
                high = middle
            else:
                low = middle
        return low

    def change(self, density: float) -> "Version":
        """Draw a version with at least one change in every tensor."""
        scale = self.scale(density)
        drawn = [self._change(each.view(-1), scale) for each in self.tensors]
        return Version(
            positions=torch.cat([at for at, _ in drawn]),
            values=torch.cat([new for _, new in drawn]),
            bounds=np.array([0, *accumulate(len(at) for at, _ in drawn)], dtype=np.int64),
        )

    def _change(self, flat: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the positions (int32) and new bits (int16) of some elements."""
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        for start in range(0, len(flat), STEP_ELEMENTS):
            part = flat[start : start + STEP_ELEMENTS]
            picked = (self._rand(len(part)) < _odds(_exponents(part), scale)).nonzero()[:, 0]
            if not len(picked) and not found:
                picked = torch.zeros(1, dtype=torch.int64, device=flat.device)
            found.append(((picked + start).int(), self._moved(part[picked])))
        return torch.cat([at for at, _ in found]), torch.cat([new for _, new in found])

    def _moved(self, old: torch.Tensor) -> torch.Tensor:
        """Return new bits of elements: mostly a neighbour, for tiny elements a value further away."""
        bits, exponents = _bits(old), _exponents(old)
        odds = torch.where(exponents < 113, 0.5, torch.where(exponents == 113, 0.1, 0.0))
        is_far = self._rand(len(old)) < odds
        far = torch.empty(len(old), device=old.device).exponential_(0.3, generator=self.random)
        distance = 1 + is_far * (1 + far.int())
        # Bit patterns to numbers in numerical order, and back.
        number = torch.where(bits >= 0x8000, bits ^ 0xFFFF, bits | 0x8000)
        number = (number + torch.where(self._rand(len(old)) < 0.5, distance, -distance)) & 0xFFFF
        return torch.where(number >= 0x8000, number ^ 0x8000, number ^ 0xFFFF).to(torch.int16)

    def _rand(self, num: int) -> torch.Tensor:
        return torch.rand(num, device=self.bench.device, generator=self.random)


def _bits(elements: torch.Tensor) -> torch.Tensor:
    return elements.view(torch.int16).int() & 0xFFFF


def _exponents(elements: torch.Tensor) -> torch.Tensor:
    return (_bits(elements) >> 7) & 0xFF


def _odds(exponents: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the odds of a change: a step changes half as many elements if they are twice as large."""
    return (scale * torch.exp2((120 - exponents).float())).clamp_(max=0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """The changes of all tensors, tensor by tensor, with ascending positions in each."""

    positions: torch.Tensor
    values: torch.Tensor
    bounds: npt.NDArray[np.int64]

    def of(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin, end = self.bounds[index : index + 2].tolist()
        return self.positions[begin:end], self.values[begin:end]
