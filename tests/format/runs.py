"""Runs that the real publisher writes, with what the trainer had at each version."""

from collections.abc import Callable

import torch

from patchstore.bucket.records import PACKED
from patchstore.stores.base import Store
from patchstore.tensors.bits import TORCH_DTYPES, bits
from tests.support.weights import Run, State, random_bits, served

BIG = 132_000
"""Elements of the tensor whose gaps need bridges."""


def tensors_of_every_dtype() -> State:
    tensors = {}
    for seed, (name, dtype) in enumerate(TORCH_DTYPES.items()):
        tensors[f"{name}.matrix"] = random_bits(dtype, (5, 7), seed)
        if name not in PACKED:
            tensors[f"{name}.scalar"] = random_bits(dtype, (), 100 + seed)
        tensors[f"{name}.empty"] = random_bits(dtype, (0, 3), seed)
    tensors["big"] = random_bits(torch.int8, (2, BIG // 2), 200)
    tensors["head.weight"] = tensors["big"]
    tensors["naïve name, 重み"] = random_bits(torch.float32, (3,), 201)
    return tensors


def new_bits(seed: int) -> Callable[[State], None]:
    """A change of about a third of the elements of every small tensor."""

    def change(tensors: State) -> None:
        generator = torch.Generator().manual_seed(seed)
        for offset, (name, tensor) in enumerate(tensors.items()):
            if name not in {"big", "head.weight"}:
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


def publish(run: Run, *changes: Callable[[State], object] | None) -> None:
    """Change and publish, one version after the other."""
    for change in changes:
        if change is not None:
            change(run.model)
        run.publish(10 * len(run.history))


def eventful(store: Store, encoding: str, dtype: torch.dtype | None) -> Run:
    """A run with everything: anchors with and without deltas, empty deltas, a trainer that went back."""
    # Random bits of float64 are mostly numbers that no narrower dtype can hold, and these are refused.
    given = {n: each for n, each in tensors_of_every_dtype().items() if dtype is None or n[:4] != "F64."}
    run = Run(store, given, dtype)
    options = {"dtype": None if dtype is None else {"*": dtype}, "encoding": encoding}
    run.open(anchor_every=4, **options)
    publish(run, None, new_bits(1), None, far_apart, special_values, new_bits(2))
    run.close()
    run.go_back(3)
    run.open(resume=3, anchor_every=5, max_shard_bytes=120_000, **options)
    run.history[6] = served(run.model, dtype)
    publish(run, new_bits(3), lambda tensors: tensors["big"].zero_(), far_apart)
    run.close()
    new_bits(4)(run.model)
    run.open(resume="anchor", anchor_every=5, max_shard_bytes=120_000, **options)
    run.history[10] = run.history[9]
    publish(run, None, special_values)
    run.close()
    return run
