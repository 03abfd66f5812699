"""A run whose history is remembered: what the trainer had at every version, to compare with."""

from dataclasses import replace
from typing import Any

import torch

from patchstore import Manifest, Publisher, Replica
from patchstore.format import hashing, history, layout
from patchstore.format.manifest_json import to_json
from patchstore.format.records import StateDigest
from patchstore.format.state_sums import Sums, pack_sums, read_sums, state_total
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


def served(model: State, dtype: torch.dtype = torch.bfloat16) -> State:
    """Copies of what the model's tensors are as served, each tied one once."""
    return {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).clone()
        for name, tensor in model.items()
        if name != "head.weight"
    }


def assert_same_bits(found: State, expected: State) -> None:
    """Fail unless both hold the same names, shapes, dtypes and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype), name
        assert torch.equal(bits(found[name]), bits(tensor)), name


def newest(store: Store) -> State:
    """What a follower that starts from nothing ends up with."""
    tensors: State = {}
    Replica(store, tensors).update()
    return tensors


def lie(store: Store, version: int, name: str) -> None:
    """Replace a version's manifest, and its digest sums, by ones that promise other weights of a tensor."""
    header, found = history.read_header(store), history.read_manifest(store, version)
    assert header is not None
    sums = read_sums(store, header.schema, found) | {name: Sums(1, 2)}
    data = pack_sums(header.schema, sums)
    stored = replace(found.state.sums, key=layout.sums_key(version, "lie"), digest=hashing.digest(data))
    store.put(stored.key, data)
    state = StateDigest(total=state_total(header.schema, sums), sums=stored)
    store.put(layout.manifest_key(version), to_json(replace(found, state=state)))


class Run:
    """A publisher, its model, and the served weights at each committed version."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.model = small_model()
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
        self.history[manifest.version] = served(self.model)
        return manifest

    def publish_versions(self, count: int) -> list[Manifest]:
        """Publish and train, so many times."""
        published = []
        for step in range(count):
            published.append(self.publish(step))
            self.train()
        return published

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
