"""Golden buckets are read to the bytes they had, and vectors hold."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from patchstore.apply.replica import Replica
from patchstore.encodings import ENCODINGS, EncodedTensor, context
from patchstore.errors import CorruptObject
from patchstore.format.records import TensorSpec
from patchstore.read import replay
from patchstore.stores.folder import FolderStore
from patchstore.tensors import state_digest
from patchstore.tensors.bits import TORCH_DTYPES, TensorPatch, raw_bytes, spec_of
from tests.format import independent_context, independent_reader
from tests.format.golden_buckets import EXPECTED, GOLDEN, sha256
from tests.format.table_edits import Head, table_of
from tests.format.test_context_page import packed

VECTORS: dict[str, Any] = json.loads((GOLDEN / "vectors.json").read_bytes())
VERSIONS = [(bucket, int(version)) for bucket, versions in EXPECTED.items() for version in versions]


def test_every_golden_bucket_has_expectations() -> None:
    assert {
        path.name for path in GOLDEN.iterdir() if path.is_dir() and path.name.startswith("v")
    } == EXPECTED.keys()
    assert sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file()) < 400_000


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
                found = {"file": path.name, "dtype": spec_of(name, tensor).dtype, "shape": [*tensor.shape]}
                tensors[name] = {**found, "sha256": sha256(raw_bytes(tensor))}
    assert {"tensors": tensors, "files": files} == expected


@pytest.mark.parametrize("bucket", EXPECTED)
def test_a_follower_walks_a_golden_bucket(bucket: str) -> None:
    follower = Replica(FolderStore(GOLDEN / bucket), {})
    for version, expected in EXPECTED[bucket].items():
        follower.update(int(version))
        found = {name: sha256(raw_bytes(tensor)) for name, tensor in follower.tensors.items()}
        assert found == {name: tensor["sha256"] for name, tensor in expected["tensors"].items()}


@pytest.mark.parametrize("bucket", EXPECTED)
def test_the_independent_reader_reads_a_golden_bucket(bucket: str) -> None:
    for version, expected in EXPECTED[bucket].items():
        tensors = independent_reader.rebuild(GOLDEN / bucket, int(version))
        independent_reader.verify(GOLDEN / bucket, int(version))
        found = {name: (dtype, [*shape], sha256(data)) for name, (dtype, shape, data) in tensors.items()}
        assert found == {n: (t["dtype"], t["shape"], t["sha256"]) for n, t in expected["tensors"].items()}


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
    stated = encoding.with_bridges(torch.tensor(vector["changed"], dtype=torch.int64))
    assert stated.tolist() == vector["stated"]
    values = torch.zeros(len(stated), dtype=torch.int8)
    idx = encoding.encode(TensorPatch(name="t", indices=stated, values=values), spec).idx
    assert idx.dtype == TORCH_DTYPES[vector["dtype"]]
    assert idx.tolist() == vector["idx"]
    stored = EncodedTensor(idx=torch.tensor(vector["idx"], dtype=idx.dtype), val=values)
    assert encoding.decode(stored, spec, "here").indices.tolist() == vector["stated"]
    data = bytes(raw_bytes(stored.idx))
    assert independent_reader.positions(vector["encoding"], vector["dtype"], data, count) == vector["stated"]


@pytest.mark.parametrize("vector", VECTORS["coded"], ids=lambda v: v["name"].replace(" ", "-"))
def test_vectors_of_encoding_context_hold(vector: dict[str, Any]) -> None:
    spec = TensorSpec(name="t", dtype=vector["dtype"], shape=tuple(vector["shape"]))
    as_bits = f"<u{TORCH_DTYPES[spec.dtype].itemsize}"
    old, new = (np.frombuffer(bytes.fromhex(vector[part]), dtype=as_bits) for part in ("old", "new"))
    coded = context.encode(spec, old, np.array(vector["positions"]), new)
    assert (coded.lo, coded.rows.tolist()) == (vector["lo"], vector["rows"])
    assert coded.lengths.tolist() == vector["lengths"]
    assert coded.data.tobytes().hex() == vector["data"]
    # Another zlib compresses to other bytes.
    head, stated = (Head(each) for each in (context.pack([(0, coded)])[0], bytes.fromhex(vector["table"])))
    assert (head.data(), head.rest) == (stated.data(), stated.rest)
    table, data = bytes.fromhex(vector["table"]), bytes.fromhex(vector["data"])
    stored = context.unpack("here", np.frombuffer(table, dtype=np.uint8), len(data), [spec])
    found = stored.coded(0, np.frombuffer(data, dtype=np.uint8))
    positions, values = context.decode(spec, found, old, "here")
    assert positions.tolist() == vector["positions"]
    assert values.tobytes() == new.tobytes()
    schema, parent = {"t": (spec.dtype, spec.shape)}, {"t": old.tobytes()}
    changes = sorted(independent_context.changes(table, data, schema, parent))
    assert [position for _, position, _ in changes] == vector["positions"]
    assert b"".join(value for _, _, value in changes) == new.tobytes()


@pytest.mark.parametrize(
    ("row", "stream", "steps"),
    [
        ((128, 0, 4), packed("1" * 16, "0 1000 0"), 1),  # 257 steps up
        ((128, 0, 4), packed("1" * 16, "0 1000 1"), -1),
        ((128, 0, 4), packed("1" * 16, "0 0000 0"), 0),  # 256, which is not 0, so a sign follows
        ((0, 1, 0), packed("0 0 0", "1" * 24, "11111111"), 1),  # 2 + 255
        ((0, 1, 0), packed("0 0 0", "1" * 24, "01111111"), 0),  # 2 + 254
    ],
)
def test_both_readers_take_magnitudes_modulo_the_width_after_they_read_them(
    row: tuple[int, int, int], stream: bytes, steps: int
) -> None:
    spec, old = TensorSpec(name="t", dtype="F8_E4M3", shape=(7,)), np.full(7, 0x38, dtype=np.uint8)
    table = table_of(0, [row], [len(stream)])
    streams = np.frombuffer(stream, dtype=np.uint8)
    stored = context.unpack("here", np.frombuffer(table, dtype=np.uint8), len(stream), [spec])
    schema, parent = {"t": (spec.dtype, spec.shape)}, {"t": old.tobytes()}
    if steps:
        positions, values = context.decode(spec, stored.coded(0, streams), old, "here")
        found = dict(zip(positions.tolist(), values.tolist(), strict=True))
        # In a dense class the other elements change too, by what the ones beyond the stream say.
        assert found[0] == 0x38 + steps
        changes = independent_context.changes(table, stream, schema, parent)
        assert {position: new[0] for _, position, new in changes} == found
    else:
        with pytest.raises(CorruptObject):
            context.decode(spec, stored.coded(0, streams), old, "here")
        with pytest.raises(ValueError, match="change by 0"):
            list(independent_context.changes(table, stream, schema, parent))


def test_vectors_of_encoding_context_have_rows_of_every_kind() -> None:
    rows = [row for vector in VECTORS["coded"] for row in vector["rows"]]
    assert {(min(first, 63), second > 0, third == 128) for first, second, third in rows if first > 62} == {
        (63, False, False),
        (63, False, True),
    }
    assert {second > 0 for first, second, _ in rows if first < 63} == {False, True}
    assert [127, 0, 0] in rows
    assert {vector["dtype"] for vector in VECTORS["coded"]} == {"BF16", "F16", "F8_E4M3", "F8_E5M2"}
