"""Recorded optimiser steps: weights, and the bf16 elements that each step changed.

A trace is a folder with `base.safetensors` (the tensors before the first step, by name) and
`steps.safetensors` (for step `00`, `01`, ... and every tensor, `SS/NAME.idx` with int32 positions
and `SS/NAME.val` with the new values).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import load_file


@dataclass(slots=True)
class Trace:
    """A trace and the weights at the step reached so far."""

    weights: dict[str, torch.Tensor]
    _steps: dict[str, torch.Tensor]

    @classmethod
    def open(cls, folder: Path) -> Self:
        return cls(load_file(folder / "base.safetensors"), load_file(folder / "steps.safetensors"))

    @property
    def num_elements(self) -> int:
        return sum(tensor.numel() for tensor in self.weights.values())

    @property
    def num_steps(self) -> int:
        return len({key.split("/", 1)[0] for key in self._steps})

    def steps(self) -> Iterator[int]:
        """Bring the weights to each step in turn, and yield its number."""
        for step in sorted({key.split("/", 1)[0] for key in self._steps}):
            for name, weights in self.weights.items():
                if f"{step}/{name}.idx" in self._steps:
                    indices = self._steps[f"{step}/{name}.idx"]
                    weights.view(-1)[indices] = self._steps[f"{step}/{name}.val"]
            yield int(step)
