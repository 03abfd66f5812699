"""Parts of coded payloads: no more than what is needed is read, and what is read is what the whole has."""

from functools import partial

import numpy as np
import pytest
import torch

from patchstore import Publisher
from patchstore.bucket import history
from patchstore.bucket.records import TensorSpec
from patchstore.codec.context import Tiles, Tiling
from patchstore.errors import CorruptObject
from patchstore.read import deltas
from patchstore.read.deltas import open_deltas
from patchstore.stores.memory import MemoryStore
from patchstore.tensors.bits import bits
from tests.support.weights import rebuilt


class Counting(MemoryStore):
    """Counts the bytes that are read of deltas."""

    num_bytes = 0

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        data = super().get(key, start, end)
        self.num_bytes += len(data) if key.startswith("deltas/") else 0
        return data


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Counting:
    """Two large tensors and a small one that is not coded; version 1 changes some of each."""
    monkeypatch.setattr(deltas, "FIRST_BYTES", 64)
    monkeypatch.setattr(deltas, "REQUEST_BYTES", 16)
    store = Counting()
    model = {"a": 0.02 * torch.randn(256, 256), "b": 0.02 * torch.randn(128, 512), "n": torch.arange(100)}
    with Publisher(store, model, encoding="context") as publisher:
        publisher.publish_patch(0).result()
        for name in "ab":
            model[name][:, ::7] *= 1.02
        model["n"][50] += 1
        publisher.publish_patch(1).result()
    store.num_bytes = 0
    return store


def some(spec: TensorSpec, tiles: Tiling) -> Tiles:
    """A quarter of the rows of `a`, every second column of `b`, and nothing else."""
    if spec.name == "a":
        return np.arange(tiles.num_tiles // 4)
    return np.arange(1, tiles.num_tiles, 2)


def decoded(store: Counting, needs: deltas.Needs | None) -> dict[str, torch.Tensor]:
    header, manifest = history.run_header(store), history.read_manifest(store, 1)
    specs = header.schema.by_name()
    before = rebuilt(store, 0)
    with open_deltas(store, (manifest,), header.schema, None, None, needs) as deltas:
        for name in deltas.names:
            tiles = None if needs is None or name == "n" else partial(needs, specs[name])
            patch = deltas.merged(specs[name], before[name], tiles)
            bits(before[name])[patch.indices] = bits(patch.values)
    return before


def test_only_what_is_needed_is_read(store: Counting) -> None:
    whole = decoded(store, None)
    size = store.num_bytes
    store.num_bytes = 0
    found = decoded(store, some)
    assert 0.2 * size < store.num_bytes < 0.6 * size
    assert torch.equal(found["n"], whole["n"])
    assert torch.equal(bits(found["a"][:64]), bits(whole["a"][:64]))
    columns = torch.arange(512) // 32 % 2 == 1
    assert torch.equal(bits(found["b"][:, columns]), bits(whole["b"][:, columns]))


def test_a_payload_that_ends_early_or_is_gone_is_corrupt(store: Counting) -> None:
    delta = history.read_manifest(store, 1).delta
    assert delta is not None
    (wanted,) = delta.payloads
    data = store.get(wanted.key)
    for kept in (0, 30, 200, len(data) // 2):
        store.put(wanted.key, data[:kept])
        with pytest.raises(CorruptObject):
            decoded(store, some)
    store.delete(wanted.key)
    with pytest.raises(CorruptObject, match="missing"):
        decoded(store, some)


def test_ranges_that_are_near_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "REQUEST_BYTES", 10)
    wanted = [(3, 5), (5, 9), (19, 20), (31, 32), (100, 101)]
    assert list(deltas.joined(wanted)) == [(3, 20), (31, 32), (100, 101)]
    assert list(deltas.joined([(50, 60)])) == [(50, 60)]
    assert list(deltas.joined([])) == []
