"""A run whose history is remembered: what the trainer had at every version, to compare with."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from patchstore import Manifest, Publisher, Replica
from patchstore.bucket import digests, history
from patchstore.bucket.manifest_json import to_json
from patchstore.bucket.records import StateDigest
from patchstore.bucket.state_sums import Sums, by_name, pack_sums, read_sums, state_total
from patchstore.stores import layout
from patchstore.stores.base import Store
from patchstore.tensors.bits import bits

State = dict[str, torch.Tensor]


def small_model() -> State:
    """fp32 masters of several shapes, an integer buffer, a scalar, a tensor without elements, and a tie."""
    embedding = torch.randn(97, 33)
    return {
        "embed.weight": embedding,
        "layers.0.proj.weight": torch.randn(64, 129),
        "layers.0.norm.weight": torch.ones(33),
        "position_ids": torch.arange(40),
        "scale": torch.tensor(0.5),
        "unused": torch.empty(0, 4),
        "head.weight": embedding,
    }


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any bit pattern, so among floats there are NaNs of all kinds; 0 and 1 for bool."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    data = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return data.view(dtype).reshape(shape)


def served(model: State, dtype: torch.dtype | None = torch.bfloat16) -> State:
    """Copies of what the model's tensors are as served, each tied one once; None keeps all dtypes."""

    def is_converted(tensor: torch.Tensor) -> bool:
        return dtype is not None and tensor.is_floating_point() and tensor.itemsize > 1

    return {
        name: (tensor.to(dtype) if is_converted(tensor) else tensor).clone()
        for name, tensor in model.items()
        if name != "head.weight"
    }


def assert_same_bits(found: State, expected: State) -> None:
    """Fail unless both hold the same names, shapes, dtypes and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype), name
        assert torch.equal(bits(found[name]), bits(tensor)), name


def loaded(folder: Path) -> State:
    """All tensors of a checkpoint folder, as the safetensors library reads them."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def rebuilt(store: Store, version: int | None = None) -> State:
    """What a follower that starts from nothing ends up with; None for the newest version."""
    tensors: State = {}
    Replica(store, tensors).update(version)
    return tensors


def newest(store: Store) -> State:
    return rebuilt(store)


def head(store: Store) -> Manifest:
    """The newest version of a store that has one."""
    found = history.head(store)
    assert found is not None
    return found


def lie(store: Store, version: int, name: str) -> None:
    """Replace a version's manifest, and its digest sums, by ones that promise other weights of a tensor."""
    header, found = history.read_header(store), history.read_manifest(store, version)
    assert header is not None
    sums = by_name(header.schema, read_sums(store, header.schema, found)) | {name: Sums(1, 2)}
    data = pack_sums(header.schema, sums)
    stored = replace(found.state.sums, key=layout.sums_key(version, "lie"), digest=digests.digest(data))
    store.put(stored.key, data)
    state = StateDigest(total=state_total(header.schema, sums), sums=stored)
    store.put(layout.manifest_key(version), to_json(replace(found, state=state)))


class Run:
    """A publisher, its model, and the served weights at each committed version."""

    def __init__(
        self, store: Store, model: State | None = None, dtype: torch.dtype | None = torch.bfloat16
    ) -> None:
        self.store, self.dtype = store, dtype
        self.model = small_model() if model is None else model
        self.history: dict[int, State] = {}
        self._publisher: Publisher | None = None

    def open(self, **options: Any) -> Publisher:
        """Open a publisher on the model; the claim of a resumed run has the weights of its parent."""
        self._publisher = Publisher(self.store, self.model, **{"anchor_every": 4, **options})
        return self._publisher

    @property
    def publisher(self) -> Publisher:
        return self._publisher or self.open()

    def train(self, num_changes: int = 50) -> None:
        """Move some weights a little, the way an optimiser step does."""
        for tensor in self.model.values():
            if tensor.is_floating_point() and tensor.numel() > 1:
                at = torch.randint(tensor.numel(), (num_changes,))
                tensor.view(-1)[at] *= 1 + 0.02 * torch.randn(num_changes)

    def publish(self, step: int = 0) -> Manifest:
        """Publish, wait, and remember what the model was."""
        manifest = self.publisher.publish_patch(step).result()
        self.history[manifest.version] = served(self.model, self.dtype)
        return manifest

    def publish_versions(self, count: int) -> list[Manifest]:
        """Publish and train, so many times."""
        published = []
        for step in range(count):
            published.append(self.publish(step))
            self.train()
        return published

    def train_versions(self, count: int) -> None:
        """Train and publish, so many times; the model is then that of the newest version."""
        for step in range(count):
            self.train()
            self.publish(step)

    def assert_reached(self, version: int, held: int | None = None, store: Store | None = None) -> None:
        """Fail unless a reader that has a version, or nothing, comes to another one and its bits.

        Args:
            store: a copy of the run's.
        """
        tensors = {} if held is None else {name: each.clone() for name, each in self.history[held].items()}
        Replica(store or self.store, tensors, held=held).update(version)
        assert_same_bits(tensors, self.history[version])

    def publish_and_close(self, count: int, **options: Any) -> list[Manifest]:
        """Publish and train, so many times, with a publisher that has these options, and close it."""
        if options:
            self.open(**options)
        published = self.publish_versions(count)
        self.close()
        return published

    def go_back(self, version: int) -> None:
        """Have the weights of an older version again."""
        for name, tensor in self.history[version].items():
            self.model[name].copy_(tensor)

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
