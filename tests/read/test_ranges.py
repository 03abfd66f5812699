"""Parts of coded payloads: no more than what is needed is read, and what is read is what the whole has."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from patchstore import Publisher
from patchstore.encodings.context import Tiles, Tiling
from patchstore.errors import CorruptObject
from patchstore.format import history
from patchstore.format.json_fields import MAX_INTEGER
from patchstore.format.records import Manifest, TensorSpec
from patchstore.read import ranges
from patchstore.read.anchors import stream_anchor
from patchstore.read.deltas import open_deltas
from patchstore.stores.memory import MemoryStore
from patchstore.tensors.bits import bits


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
    monkeypatch.setattr(ranges, "FIRST_BYTES", 64)
    monkeypatch.setattr(ranges, "REQUEST_BYTES", 16)
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


def decoded(store: Counting, needs: ranges.Needs | None) -> dict[str, torch.Tensor]:
    header, manifest = history.read_header(store), history.read_manifest(store, 1)
    assert header is not None
    specs = header.schema.by_name()
    before: dict[str, torch.Tensor] = {}
    base = history.read_manifest(store, 0)
    for _, _, tensors in stream_anchor(store, base, specs):
        before |= dict(zip(_names(store, base), tensors, strict=True))
    with open_deltas(store, (manifest,), specs, None, None, needs) as deltas:
        for name in deltas.names:
            tiles = None if needs is None or name == "n" else partial(needs, specs[name])
            patch = deltas.merged(specs[name], before[name], tiles)
            bits(before[name])[patch.indices] = bits(patch.values)
    return before


def _names(store: Counting, manifest: Manifest) -> list[str]:
    return ["n", "a", "b"]


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


def test_a_size_that_no_host_has_is_a_lie_and_no_error_of_the_system(store: Counting) -> None:
    found = history.read_manifest(store, 1)
    assert found.delta is not None
    (wanted,) = found.delta.payloads
    for size in (2**40, 2**50, MAX_INTEGER):
        lie = replace(found, delta=replace(found.delta, payloads=(replace(wanted, size=size),)))
        header = history.read_header(store)
        assert header is not None
        with (
            pytest.raises(CorruptObject),
            open_deltas(store, (lie,), header.schema.by_name(), None, None, some),
        ):
            pass
    store.delete(wanted.key)
    with (
        pytest.raises(CorruptObject, match="missing"),
        open_deltas(store, (lie,), header.schema.by_name(), None, None, some),
    ):
        pass


def test_ranges_that_are_near_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "REQUEST_BYTES", 10)
    wanted = [(3, 5), (5, 9), (19, 20), (31, 32), (100, 101)]
    assert list(ranges._joined(wanted)) == [(3, 20), (31, 32), (100, 101)]
    assert list(ranges._joined([(50, 60)])) == [(50, 60)]
    assert list(ranges._joined([])) == []
