"""Models as bytes, which cross processes, and what a reader finds in a bucket."""

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from patchstore import Manifest, Replica
from patchstore.bucket import history
from patchstore.stores import opened
from patchstore.tensors.bits import bits

Bits = dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]
Versions = list[tuple[int, Bits]]
"""What a rank published: numbers, and the whole model at each."""


def bits_of(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = torch.bfloat16) -> Bits:
    """Return tensors as they are served in a dtype, the sharded ones whole; None for the dtypes they have."""
    found = {}
    for name, tensor in tensors.items():
        whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
        kept = whole.to(dtype) if dtype is not None and whole.is_floating_point() else whole
        found[name] = kept.dtype, tuple(kept.shape), bits(kept.contiguous()).numpy().tobytes()
    return found


def read(url: str, version: int | None = None) -> Bits:
    """Return a version as a reader that starts from nothing rebuilds it."""
    tensors: dict[str, torch.Tensor] = {}
    Replica(url, tensors).update(version)
    return bits_of(tensors, None)


def check(url: str, results: list[Versions]) -> list[Manifest]:
    """Fail unless all ranks published the same versions, and a reader finds the trainer's bits in each."""
    for other in results[1:]:
        assert [version for version, _ in other] == [version for version, _ in results[0]]
    with opened(url) as store:
        tied = history.run_header(store).schema.tied.keys()
        for version, expected in results[0]:
            found = read(url, version)
            assert expected.keys() == found.keys() | tied
            assert [name for name in found if found[name] != expected[name]] == [], version
        assert not [key for key in store.list() if key.startswith(("pieces/", "probes/"))]
        return [history.read_manifest(store, version) for version, _ in results[0]]
