"""Golden buckets are read to the bytes they had, and vectors hold."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from patchstore.apply.replica import Replica
from patchstore.bucket import history
from patchstore.bucket.records import Adapter, Base, Schema, TensorSpec
from patchstore.codec import ENCODINGS, context
from patchstore.read import replay
from patchstore.stores.folder import FolderStore
from patchstore.tensors import state_digest
from patchstore.tensors.bits import TORCH_DTYPES, TensorPatch, raw_bytes, spec_of
from tests.format import independent_context, independent_reader
from tests.format.golden_buckets import EXPECTED, GOLDEN, assert_expected, sha256
from tests.format.table_edits import Head
from tests.support.coded import coded_of, decode, encode, parts_of
from tests.support.stated import decoded, encoded, listed, with_bridges

VECTORS: dict[str, Any] = json.loads((GOLDEN / "vectors.json").read_bytes())
VERSIONS = [(bucket, int(version)) for bucket, versions in EXPECTED.items() for version in versions]


def test_every_golden_bucket_has_expectations() -> None:
    assert {
        path.name for path in GOLDEN.iterdir() if path.is_dir() and path.name.startswith("v")
    } == EXPECTED.keys()
    assert sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file()) < 440_000


@pytest.mark.parametrize(("bucket", "version"), VERSIONS)
def test_a_golden_version_is_replayed_to_the_bytes_it_had(tmp_path: Path, bucket: str, version: int) -> None:
    expected = EXPECTED[bucket][str(version)]
    replay.verify(FolderStore(GOLDEN / bucket), version)
    replay.replay(FolderStore(GOLDEN / bucket), version, out=tmp_path / "out")
    tensors, files = {}, {}
    for path in (tmp_path / "out").iterdir():
        if path.suffix != ".safetensors":
            files[path.name] = sha256(path.read_bytes())
            continue
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                tensor = file.get_tensor(name)
                spec = spec_of(name, tensor)
                found = {"file": path.name, "dtype": spec.dtype, "shape": [*spec.listed_shape]}
                tensors[name] = {**found, "sha256": sha256(raw_bytes(tensor))}
    assert {"tensors": tensors, "files": files} == expected


@pytest.mark.parametrize("bucket", EXPECTED)
def test_a_follower_walks_a_golden_bucket(bucket: str) -> None:
    follower = Replica(FolderStore(GOLDEN / bucket), {})
    for version in map(int, EXPECTED[bucket]):
        follower.update(version)
        assert_expected(follower, bucket, version)


@pytest.mark.parametrize("bucket", EXPECTED)
def test_the_independent_reader_reads_a_golden_bucket(bucket: str) -> None:
    for version, expected in EXPECTED[bucket].items():
        tensors = independent_reader.rebuild(GOLDEN / bucket, int(version))
        independent_reader.verify(GOLDEN / bucket, int(version))
        found = {name: (dtype, [*shape], sha256(data)) for name, (dtype, shape, data) in tensors.items()}
        assert found == {n: (t["dtype"], t["shape"], t["sha256"]) for n, t in expected["tensors"].items()}


def test_a_golden_adapter_says_its_base() -> None:
    base = Base(
        name="golden/base",
        revision="main",
        state="blake3:e63e428e2493011fb8421d80962ed5c6704e19cd095b2aa1b31753748e7a038a",
    )
    header = history.run_header(FolderStore(GOLDEN / "v1-adapter"))
    assert header.adapter == Adapter(base=base, base_may_change=True)
    kinds = [history.read_manifest(FolderStore(GOLDEN / "v1-adapter"), version).kind for version in range(4)]
    assert kinds == ["anchor", "anchor", "delta", "delta"]


def test_a_golden_head_is_found(tmp_path: Path) -> None:
    for bucket, versions in EXPECTED.items():
        found = replay.replay(FolderStore(GOLDEN / bucket), out=tmp_path / bucket)
        assert found.version == max(map(int, versions))


@pytest.mark.parametrize("vector", VECTORS["digests"], ids=lambda v: f"{v['dtype']}-{v['bytes'][:8]}")
def test_digest_vectors_hold(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["bytes"])
    dtype = TORCH_DTYPES[vector["dtype"]]
    tensor = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)
        if data
        else torch.empty(0, dtype=dtype)
    )
    if "position" in vector:
        found = state_digest.of_elements(torch.tensor([vector["position"]]), tensor)
        first, second = independent_reader.added(vector["position"], int.from_bytes(data, "little"))
        assert vector["sums"] == f"{first:016x}{second:016x}"
    else:
        found = state_digest.of_tensor(tensor)
        assert vector["sums"] == independent_reader.sums(data, dtype.itemsize)
    assert found.hex() == vector["sums"]
    assert state_digest.Sums.from_hex(vector["sums"]) == found


@pytest.mark.parametrize("vector", VECTORS["encoded"], ids=lambda v: f"{v['encoding']}-{v['num_elements']}")
def test_encoding_vectors_hold(vector: dict[str, Any]) -> None:
    encoding, count = ENCODINGS[vector["encoding"]], vector["num_elements"]
    spec = TensorSpec(name="t", dtype="I8", shape=(count,))
    stated = with_bridges(encoding, torch.tensor(vector["changed"], dtype=torch.int64))
    assert stated.tolist() == vector["stated"]
    values = torch.zeros(len(stated), dtype=torch.int8)
    idx = encoded(encoding, TensorPatch(name="t", indices=stated, values=values), spec).idx
    assert idx.dtype == TORCH_DTYPES[vector["dtype"]]
    assert idx.tolist() == vector["idx"]
    stored = listed(torch.tensor(vector["idx"], dtype=idx.dtype), values)
    assert decoded(encoding, stored, spec).indices.tolist() == vector["stated"]
    data = bytes(raw_bytes(stored.idx))
    assert independent_reader.positions(vector["encoding"], vector["dtype"], data, count) == vector["stated"]


@pytest.mark.parametrize("vector", VECTORS["coded"], ids=lambda v: v["name"].replace(" ", "-"))
def test_vectors_of_encoding_context_hold(vector: dict[str, Any]) -> None:
    spec = TensorSpec(name="t", dtype=vector["dtype"], shape=tuple(vector["shape"]))
    as_bits = f"<u{TORCH_DTYPES[spec.dtype].itemsize}"
    old, new = (np.frombuffer(bytes.fromhex(vector[part]), dtype=as_bits) for part in ("old", "new"))
    coded = encode(spec, old, np.array(vector["positions"]), new)
    assert (coded.lo, coded.rows.tolist()) == (vector["lo"], vector["rows"])
    assert coded.lengths.tolist() == vector["lengths"]
    assert coded.data.tobytes().hex() == vector["data"]
    # Another zlib compresses to other bytes.
    head, stated = (Head(each) for each in (context.pack(coded_of([coded])), bytes.fromhex(vector["table"])))
    assert (head.data(), head.rest) == (stated.data(), stated.rest)
    table, data = bytes.fromhex(vector["table"]), bytes.fromhex(vector["data"])
    as_bytes = (np.frombuffer(each, dtype=np.uint8) for each in (table, data))
    (found,) = parts_of(context.unpack("here", *as_bytes, Schema(tensors=(spec,))))
    positions, values = decode(spec, found, old)
    assert positions.tolist() == vector["positions"]
    assert values.tobytes() == new.tobytes()
    schema, parent = {"t": (spec.dtype, spec.shape)}, {"t": old.tobytes()}
    changes = sorted(independent_context.changes(table, data, schema, parent))
    assert [position for _, position, _ in changes] == vector["positions"]
    assert b"".join(value for _, _, value in changes) == new.tobytes()


def test_vectors_of_encoding_context_have_rows_of_every_kind() -> None:
    rows = [row for vector in VECTORS["coded"] for row in vector["rows"]]
    assert {(min(first, 63), second > 0, third == 128) for first, second, third in rows if first > 62} == {
        (63, False, False),
        (63, False, True),
    }
    assert {second > 0 for first, second, _ in rows if first < 63} == {False, True}
    assert [127, 0, 0] in rows
    assert {vector["dtype"] for vector in VECTORS["coded"]} == {"BF16", "F16", "F8_E4M3", "F8_E5M2"}
