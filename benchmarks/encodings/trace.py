"""Recorded or imitated optimiser steps: weights, and the bf16 elements that each step changed.

A trace is a folder with `base.safetensors` (the tensors before the first step, by name) and
`steps.safetensors` (for step `00`, `01`, ... and every tensor, `SS/NAME.idx` with int32 positions
and `SS/NAME.val` with the new values).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from safetensors.torch import load_file

from patchstore.tensors.bits import bits


@dataclass(slots=True)
class Trace:
    """A trace and the weights at the step reached so far."""

    weights: dict[str, torch.Tensor]
    _steps: dict[str, torch.Tensor]

    @classmethod
    def open(cls, folder: Path) -> Self:
        return cls(load_file(folder / "base.safetensors"), load_file(folder / "steps.safetensors"))

    @classmethod
    def imitate(cls, weights: dict[str, torch.Tensor], density: float, seed: int = 0) -> Self:
        """Imitate one step that changes this share of finite bf16 weights, as AdamW does.

        Every weight has a master weight at a random place in the interval that rounds to it. All updates
        come from one normal distribution, so a small weight, whose interval is narrow, is likelier to change.
        The scale of the updates is a quantile of the scales at which each weight just leaves its interval.
        """
        random = np.random.default_rng(seed)
        masters, updates, reaches = {}, {}, []
        for name, tensor in weights.items():
            flat = tensor.flatten().double().numpy()
            # 2**-7 of the power of two below; frexp's exponent is one above that one's, and 0 for zero.
            exponents = np.where(flat == 0, -125, np.frexp(flat)[1])
            ulp = np.ldexp(1.0, np.maximum(exponents, -125) - 8)
            # The interval of a power of two is half as wide on the side of 0.
            power = (bits(tensor).numpy() & 0x7F == 0) & (np.abs(flat) > 2.0**-126)
            toward_zero, away = np.where(power, ulp / 4, ulp / 2), ulp / 2
            # The ends are left out: ties there round to the neighbour.
            offset = -toward_zero + (toward_zero + away) * random.uniform(1e-4, 1 - 1e-4, flat.size)
            update = random.standard_normal(flat.size)
            reaches.append(np.where(update > 0, away - offset, toward_zero + offset) / np.abs(update))
            signs = np.copysign(1.0, flat)
            masters[name], updates[name] = flat + signs * offset, signs * update
        scale = np.quantile(np.concatenate(reaches), density)
        steps: dict[str, torch.Tensor] = {}
        for name, tensor in weights.items():
            new = torch.from_numpy(masters[name] + scale * updates[name]).to(torch.bfloat16)
            indices = (bits(new) != bits(tensor)).nonzero().flatten()
            steps |= {f"00/{name}.idx": indices, f"00/{name}.val": new[indices]}
        return cls(weights, steps)

    def copy(self) -> Self:
        """Return a trace at the same step, with weights of its own."""
        return type(self)({name: tensor.clone() for name, tensor in self.weights.items()}, self._steps)

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
