"""A trainer without a model to train: named tensors that change a little at each step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from patchstore import Publisher
from patchstore.bucket.records import Manifest
from patchstore.read.replay import replay
from patchstore.stores import Store, open_store


class Trainer:
    """Publishes to a store of its own, and remembers the weights of each version."""

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, torch.Tensor],
        *,
        anchor_every: int = 100,
        dtype: torch.dtype | None = torch.bfloat16,
        encoding: str = "auto",
        **options: Any,
    ) -> None:
        self.url = str(folder)
        self.store = open_store(self.url)
        # One clone for all names of a tensor, so that tied ones stay tied.
        clones = {id(tensor): tensor.clone() for tensor in tensors.values()}
        self.tensors = {name: clones[id(tensor)] for name, tensor in tensors.items()}
        self._publisher = Publisher(
            self.store, self.tensors, dtype=dtype, encoding=encoding, anchor_every=anchor_every, **options
        )
        self._random = torch.Generator().manual_seed(11)
        self.history: list[dict[str, torch.Tensor]] = []

    def publish(self) -> Manifest:
        """Publish the tensors as they are now."""
        self.history.append({name: tensor.clone() for name, tensor in self.tensors.items()})
        return self._publisher.publish_patch(len(self.history)).result(timeout_s=60)

    def step(self, density: float = 0.02) -> Manifest:
        """Change some elements of every tensor, and publish."""
        for tensor in self.tensors.values():
            chosen = torch.rand(tensor.shape, generator=self._random) < density
            noise = torch.randn(tensor.shape, generator=self._random)
            tensor[chosen] = (tensor[chosen].float() + noise[chosen]).to(tensor.dtype)
        return self.publish()

    def close(self) -> None:
        self._publisher.close()
        self.store.close()


def replayed(store: Store, version: int, out: Path, base: Path) -> Path:
    """Write a version, with what the first checkpoint has beside weights, to a folder that vLLM serves."""
    replay(store, version, out=out)
    for path in base.iterdir():
        if not (out / path.name).exists() and path.suffix != ".safetensors":
            (out / path.name).write_bytes(path.read_bytes())
    return out
