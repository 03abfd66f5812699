"""Runs that the real publisher writes, with what the trainer had at each version."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from patchstore.publish.publisher import Publisher
from patchstore.stores.base import Store
from patchstore.tensors.bits import TORCH_DTYPES, bits

BIG = 132_000
"""Elements of the tensor whose gaps need bridges."""

State = dict[str, torch.Tensor]


@dataclass
class Run:
    """A trainer's tensors, and a copy of them for each version that was published."""

    tensors: State
    dtype: torch.dtype | None
    states: list[State] = field(default_factory=list)

    def publish(self, publisher: Publisher, change: Callable[[State], object] | None = None) -> None:
        if change is not None:
            change(self.tensors)
        publisher.publish_patch(step=10 * len(self.states)).result()
        self.record()

    def record(self) -> None:
        """Note that the newest version has the weights of now."""
        self.states.append(
            {name: self.served(t).clone() for name, t in self.tensors.items() if name != "big again"}
        )

    def served(self, tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.is_floating_point() and tensor.element_size() > 1
        return tensor.to(self.dtype) if self.dtype is not None and wide else tensor

    def go_back(self, version: int) -> None:
        for name, tensor in self.states[version].items():
            self.tensors[name].copy_(tensor)


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bit pattern, so among floats there are NaNs of all kinds; 0 and 1 for bool."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    data = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return data.view(dtype).reshape(shape)


def tensors_of_every_dtype() -> State:
    tensors = {}
    for seed, (name, dtype) in enumerate(TORCH_DTYPES.items()):
        tensors[f"{name}.matrix"] = random_bits(dtype, (5, 7), seed)
        tensors[f"{name}.scalar"] = random_bits(dtype, (), 100 + seed)
        tensors[f"{name}.empty"] = random_bits(dtype, (0, 3), seed)
    tensors["big"] = random_bits(torch.int8, (2, BIG // 2), 200)
    tensors["big again"] = tensors["big"]
    tensors["naïve name, 重み"] = random_bits(torch.float32, (3,), 201)
    return tensors


def new_bits(seed: int) -> Callable[[State], None]:
    """A change of about a third of the elements of every small tensor."""

    def change(tensors: State) -> None:
        generator = torch.Generator().manual_seed(seed)
        for offset, (name, tensor) in enumerate(tensors.items()):
            if name not in {"big", "big again"}:
                chosen = torch.rand(tensor.shape, generator=generator) < 0.35
                fresh = random_bits(tensor.dtype, tuple(tensor.shape), seed + offset)
                bits(tensor)[chosen.flatten()] = bits(fresh)[chosen.flatten()]

    return change


def far_apart(tensors: State) -> None:
    """Gaps of 65,535 (no bridge), 65,536 (one) and more."""
    flat = bits(tensors["big"])
    flat[torch.tensor([3, 65_539, 131_076, 131_999])] += 1


def special_values(tensors: State) -> None:
    """-0.0, infinities and NaNs whose payloads and signs differ."""
    for name, patterns in {
        "BF16.matrix": [-0x8000, 0x7F80, -0x80, 0x7FC1, 0x7F81, -0x3F, 0],
        "F16.matrix": [-0x8000, 0x7C00, -0x400, 0x7E01, 0x7C01, -0x1FF, 0],
        "F32.matrix": [-0x80000000, 0x7F800000, -0x800000, 0x7FC00001, 0x7F800001, -0x3FFFFF, 0],
        "F64.matrix": [-(1 << 63), 0x7FF << 52, -(1 << 52), (0x7FF << 52) + 1, 0, 1, -1],
    }.items():
        if name not in tensors:
            continue
        flat = bits(tensors[name])
        flat[:7] = torch.tensor(patterns, dtype=flat.dtype)
    tensors["F32.scalar"].copy_(torch.tensor(-0.0))
    tensors["F8_E4M3.scalar"].view(torch.uint8).fill_(0x80)


def eventful(store: Store, encoding: str, dtype: torch.dtype | None) -> Run:
    """A run with everything: anchors with and without deltas, empty deltas, a trainer that went back."""
    # Random bits of float64 are mostly numbers that no narrower dtype can hold, and these are refused.
    given = {n: each for n, each in tensors_of_every_dtype().items() if dtype is None or n[:4] != "F64."}
    run = Run(given, dtype)
    asked = None if dtype is None else {"*": dtype}
    with Publisher(store, run.tensors, dtype=asked, encoding=encoding, anchor_every=4) as publisher:
        run.publish(publisher)
        run.publish(publisher, new_bits(1))
        run.publish(publisher)
        run.publish(publisher, far_apart)
        run.publish(publisher, special_values)
        run.publish(publisher, new_bits(2))
    run.go_back(3)
    options: dict[str, Any] = {
        "dtype": asked,
        "encoding": encoding,
        "anchor_every": 5,
        "max_shard_bytes": 120_000,
    }
    with Publisher(store, run.tensors, resume=3, **options) as publisher:
        run.record()
        run.publish(publisher, new_bits(3))
        run.publish(publisher, lambda tensors: tensors["big"].zero_())
        run.publish(publisher, far_apart)
    new_bits(4)(run.tensors)
    with Publisher(store, run.tensors, resume="anchor", **options) as publisher:
        run.states.append(run.states[-1])
        run.publish(publisher)
        run.publish(publisher, special_values)
    return run
