"""Objects that are too large, or say that they are, cost a reader nothing."""

import os
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from patchstore.bucket import history, manifest_json
from patchstore.bucket.records import Schema, StoreHeader, TensorSpec
from patchstore.errors import CorruptObject, PatchstoreError, UsageError
from patchstore.publish.publisher import Publisher
from patchstore.read import replay
from patchstore.stores.folder import FolderStore
from patchstore.stores.memory import MemoryStore
from tests.format import bucket_edits, independent_reader, surgery
from tests.format.golden_buckets import GOLDEN, PatientStore

SIX_GIB = 6 << 30


@contextmanager
def taking_at_most(num_bytes: int) -> Iterator[None]:
    """Fail if what happens takes more memory."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < num_bytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("key", ["store.json", "versions/00000001.json"])
def test_an_object_that_is_larger_than_any_of_its_kind_is_refused_before_it_is_read(
    tmp_path: Path, key: str
) -> None:
    bucket = surgery.lay_out(surgery.load(GOLDEN / "v1-gap"), tmp_path)
    os.truncate(bucket / key, SIX_GIB)
    most = manifest_json.MAX_JSON_BYTES + (16 << 20)
    with taking_at_most(most), pytest.raises(CorruptObject, match="100,000,000"):
        replay.verify(FolderStore(bucket), 1)
    with pytest.raises(independent_reader.Refused):
        independent_reader.rebuild(bucket, 1)


def test_a_hint_that_is_larger_than_any_is_not_read(tmp_path: Path) -> None:
    bucket = surgery.lay_out(surgery.load(GOLDEN / "v1-gap"), tmp_path)
    hint = bucket / "head.json"
    hint.write_bytes(b'{"version": 1}' + b" " * manifest_json.MAX_HINT_BYTES)
    os.truncate(hint, SIX_GIB)
    with taking_at_most(16 << 20):
        assert history.head(FolderStore(bucket)) == history.read_manifest(FolderStore(bucket), 3)


def test_what_no_reader_would_take_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_json, "MAX_JSON_BYTES", 1000)
    store = MemoryStore()
    with pytest.raises(UsageError, match="1,000"):
        Publisher(store, {f"w{i}": torch.zeros(3) for i in range(30)}).close()
    assert list(store.list("store.json")) == []


def test_a_schema_of_100_000_tensors_is_far_below_the_limit() -> None:
    names = [
        f"model.language_model.layers.{i // 1000:03d}.mlp.experts.{i:06d}.down_proj.weight"
        for i in range(100_000)
    ]
    specs = tuple(TensorSpec(name=name, dtype="BF16", shape=(2048, 768)) for name in names)
    header = StoreHeader(run_id="run", created_at="2026-01-31T12:00:00Z", schema=Schema(tensors=specs))
    data = manifest_json.header_to_json(header)
    assert len(data) * 4 < manifest_json.MAX_JSON_BYTES
    assert manifest_json.header_from_json(data) == header


@pytest.mark.parametrize(("part", "version"), [("delta", 1), ("anchor", 0)])
@pytest.mark.parametrize("size", [2**33, 2**50])
def test_a_lying_size_costs_neither_memory_nor_disk_nor_requests(
    monkeypatch: pytest.MonkeyPatch, part: str, version: int, size: int
) -> None:
    reserve, taken = os.posix_fallocate, [0]

    def reserved(handle: int, offset: int, length: int) -> None:
        taken.append(length)
        reserve(handle, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", reserved)
    objects = surgery.load(GOLDEN / "v1-gap")
    bucket_edits.in_manifest(version, bucket_edits.put(f"{part}.payloads.0.size", size))(objects)
    store = PatientStore(objects)
    with taking_at_most(32 << 20), pytest.raises(PatchstoreError) as caught:
        replay.verify(store, 1)
    assert caught.value.kind == "corrupt-object"
    assert max(taken) < 32 << 20
    assert store.patience > 150
