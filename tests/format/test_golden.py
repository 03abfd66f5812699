"""Golden buckets are read to the bytes they had; bad ones are refused, and leave nothing."""

import hashlib
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from patchstore.apply.replica import Replica
from patchstore.encodings import ENCODINGS, EncodedTensor, context
from patchstore.errors import CorruptObject, PatchstoreError, UsageError
from patchstore.format import history, json_fields, layout, manifest_json
from patchstore.format.records import Schema, StoreHeader, TensorSpec
from patchstore.publish.publisher import Publisher
from patchstore.read import replay
from patchstore.read.anchors import open_anchor
from patchstore.read.host_cache import HostCache
from patchstore.stores.folder import FolderStore
from patchstore.stores.memory import MemoryStore
from patchstore.tensors import state_digest
from patchstore.tensors.bits import TORCH_DTYPES, TensorPatch, bits, raw_bytes, spec_of
from tests.format import bad_buckets, independent_context, independent_reader, surgery
from tests.format.test_context_page import packed, table_of

GOLDEN = Path(__file__).parents[1] / "golden"
EXPECTED: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_bytes())
VECTORS: dict[str, Any] = json.loads((GOLDEN / "vectors.json").read_bytes())
VERSIONS = [(bucket, int(version)) for bucket, versions in EXPECTED.items() for version in versions]


class PatientStore(MemoryStore):
    """Refuses to be asked for ever."""

    def __init__(self, objects: surgery.Objects) -> None:
        super().__init__()
        for key, data in objects.items():
            self.put(key, data)
        self.patience = 200

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.patience -= 1
        assert self.patience > 0, "a bucket of some ten objects was asked for 200 pieces"
        return super().get(key, start, end)


def sha256(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


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
    assert context.pack([(0, coded)])[0].hex() == vector["table"]
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


def spoiled(case: bad_buckets.Bad) -> surgery.Objects:
    objects = surgery.load(GOLDEN / case.bucket)
    case.change(objects)
    return objects


@pytest.fixture(params=bad_buckets.CASES, ids=lambda case: case.name.encode("unicode_escape").decode())
def case(request: pytest.FixtureRequest) -> bad_buckets.Bad:
    return request.param  # type: ignore[no-any-return]


def test_a_bad_bucket_is_refused_by_replay_and_leaves_no_file(tmp_path: Path, case: bad_buckets.Bad) -> None:
    if case.only_verified:
        pytest.skip("a replay needs nothing above its anchor")
    store = PatientStore(spoiled(case))
    with pytest.raises(PatchstoreError) as caught:
        replay.replay(store, case.version, out=tmp_path / "out")
    assert caught.value.kind in case.kinds
    assert list(tmp_path.iterdir()) == []


def test_a_bad_bucket_is_refused_by_verify(case: bad_buckets.Bad) -> None:
    with pytest.raises(PatchstoreError) as caught:
        replay.verify(PatientStore(spoiled(case)), case.version)
    assert caught.value.kind in case.kinds


def test_a_bad_bucket_is_refused_by_a_follower_that_holds_nothing(case: bad_buckets.Bad) -> None:
    if case.beyond_followers or case.only_verified:
        pytest.skip("a follower reads no config, and nothing above an anchor")
    tensors: dict[str, torch.Tensor] = {}
    with pytest.raises(PatchstoreError) as caught:
        Replica(PatientStore(spoiled(case)), tensors).update(case.version)
    assert caught.value.kind in case.kinds
    assert tensors == {}


def test_a_bad_bucket_does_not_move_a_follower_that_holds_the_version_before(case: bad_buckets.Bad) -> None:
    good = surgery.load(GOLDEN / case.bucket)
    store = PatientStore(good)
    follower = Replica(store, {})
    if layout.manifest_key(case.version - 1) in good:
        follower.update(case.version - 1)
    before = {name: bits(tensor).clone() for name, tensor in follower.tensors.items()}
    held = follower.held
    for key in good:
        store.delete(key)
    for key, data in spoiled(case).items():
        store.put(key, data)
    try:
        follower.update(case.version)
    except PatchstoreError:
        assert follower.held == held
        assert follower.tensors.keys() == before.keys()
        assert all(torch.equal(bits(follower.tensors[name]), old) for name, old in before.items())
    else:
        # It needed nothing of what is wrong, so it must have the right weights.
        expected = EXPECTED[case.bucket][str(case.version)]["tensors"]
        assert {n: sha256(raw_bytes(t)) for n, t in follower.tensors.items()} == {
            name: tensor["sha256"] for name, tensor in expected.items()
        }


def test_a_bad_bucket_is_refused_by_the_independent_reader(tmp_path: Path, case: bad_buckets.Bad) -> None:
    bucket = surgery.lay_out(spoiled(case), tmp_path)
    with pytest.raises(independent_reader.Refused):
        independent_reader.verify(bucket, case.version)
    if not case.only_verified:
        with pytest.raises(independent_reader.Refused):
            independent_reader.rebuild(bucket, case.version)


@pytest.mark.parametrize("change", [pytest.param(change, id=name) for name, change in bad_buckets.BAD_SUMS])
def test_bad_digest_sums_are_refused_where_they_are_read(tmp_path: Path, change: Any) -> None:
    objects = surgery.load(GOLDEN / "v1-gap")
    change(objects)
    with pytest.raises(CorruptObject):
        replay.verify(PatientStore(objects), 1)
    with pytest.raises(independent_reader.Refused):
        independent_reader.rebuild(surgery.lay_out(objects, tmp_path), 1)
    # The total proves the weights without them.
    follower = Replica(PatientStore(objects), {})
    follower.update(1)
    expected = EXPECTED["v1-gap"]["1"]["tensors"]
    assert {n: sha256(raw_bytes(t)) for n, t in follower.tensors.items()} == {
        name: tensor["sha256"] for name, tensor in expected.items()
    }


def test_a_tensor_coded_in_two_payloads_is_refused_though_they_agree() -> None:
    objects = surgery.load(GOLDEN / "v1-context")
    _, tensors = surgery.entries(surgery.payload(objects, 1, "delta"))
    coded = {name: tensors[name] for name in ("table", "tiles")}
    bad_buckets.second_payload(coded, {})(objects)
    with pytest.raises(CorruptObject):
        replay.verify(surgery.store_of(objects), 1)
    with pytest.raises(CorruptObject):
        Replica(surgery.store_of(objects), {}).update(1)


def test_a_hint_that_lies_is_not_believed() -> None:
    for hint in (
        b"",
        b"{",
        b"[]",
        b'"version"',
        b'{"version": -1}',
        b'{"version": true}',
        b'{"version": 99}',
        b'{"version": 1}',
        b'{"version": %d}' % 10**300,
        b'{"version": 1e9}',
        b"[" * 100_000,
    ):
        store = surgery.store_of({**surgery.load(GOLDEN / "v1-raw"), "head.json": hint})
        assert replay.verify(store).version == 3


def test_a_hint_that_no_file_system_can_hold_is_not_believed(tmp_path: Path) -> None:
    objects = surgery.load(GOLDEN / "v1-raw") | {"head.json": b'{"version": %d}' % 10**300}
    assert replay.verify(FolderStore(surgery.lay_out(objects, tmp_path))).version == 3


def test_fields_of_later_releases_are_ignored(tmp_path: Path) -> None:
    objects = surgery.load(GOLDEN / "v1-gap")
    for version in range(4):
        surgery.edit_manifest(objects, version, lambda record: record.update(later={"a": [1]}))
        surgery.edit_manifest(objects, version, lambda record: record["writer"].update(later=None))
    surgery.edit_json(objects, "store.json", lambda record: record.update(later=3))
    surgery.edit_file(objects, 1, "delta", lambda metadata, _: metadata.update(later="3"))
    for version, part in ((0, "anchor"), (1, "delta")):
        surgery.edit_header(objects, version, part, add_fields)
    surgery.edit_file(objects, 1, "delta", lambda metadata, _: add_fields_to_list(metadata))
    assert replay.verify(surgery.store_of(objects), 3).version == 3
    independent_reader.verify(surgery.lay_out(objects, tmp_path), 3)


def add_fields(header: Any) -> None:
    for name, entry in header.items():
        if name != "__metadata__":
            entry["later"] = {"a": None}


def add_fields_to_list(metadata: Any) -> None:
    listed = json.loads(metadata["tensors"])
    for entry in listed.values():
        entry["later"] = [1]
    metadata["tensors"] = json.dumps(listed)


def assert_both_verify(objects: surgery.Objects, version: int, folder: Path) -> None:
    assert replay.verify(surgery.store_of(objects), version).version == version
    independent_reader.verify(surgery.lay_out(objects, folder), version)


@pytest.mark.parametrize("number", [0, 7, 2**53 - 1])
def test_readers_do_not_check_that_the_number_of_changes_is_true(tmp_path: Path, number: int) -> None:
    objects = surgery.load(GOLDEN / "v1-gap")
    bad_buckets.in_manifest(1, bad_buckets.put("delta.num_changed", number))(objects)
    assert_both_verify(objects, 3, tmp_path)


@pytest.mark.parametrize("encoding", ["raw", "gap", "context"])
def test_an_empty_delta_may_be_of_any_encoding(tmp_path: Path, encoding: str) -> None:
    objects = surgery.load(GOLDEN / "v1-gap")
    bad_buckets.in_manifest(2, bad_buckets.put("delta.encoding", encoding))(objects)
    assert_both_verify(objects, 3, tmp_path)


@pytest.mark.parametrize("fraction", ["", ".0", ".123", ".123456"])
def test_a_time_has_a_fraction_or_none(tmp_path: Path, fraction: str) -> None:
    objects = surgery.load(GOLDEN / "v1-gap")
    time = bad_buckets.put("created_at", f"2024-02-29T23:59:59{fraction}Z")
    bad_buckets.in_manifest(1, time)(objects)
    bad_buckets.in_store_json(time)(objects)
    assert_both_verify(objects, 1, tmp_path)


@pytest.mark.parametrize("number", [2**53 - 1, -(2**53 - 1)])
def test_the_largest_integers_are_read(tmp_path: Path, number: int) -> None:
    objects = surgery.load(GOLDEN / "v1-gap")
    step = bad_buckets.put("step", number)
    bad_buckets.in_manifest(0, step)(objects)
    surgery.edit_file(objects, 0, "anchor", lambda metadata, _: metadata.update(step=str(number)))
    assert_both_verify(objects, 0, tmp_path)


def test_both_readers_take_the_same_names() -> None:
    edges = {0, 0x20, 0x7E, 0x378, 0x3000, 0xE000, 0xFFFF, 0x1F600, 0xE0001, 0x10FFFF}
    for first, last in independent_reader.UNPRINTABLE:
        edges |= {max(0, first - 1), first, last, last + 1}
    for name in ["", "__metadata__", *(f"a{chr(point)}" for point in sorted(edges))]:
        try:
            independent_reader._name(name)
        except independent_reader.Refused:
            assert not json_fields.is_name(name), ascii(name)
        else:
            assert json_fields.is_name(name), ascii(name)


def split_in_two(objects: surgery.Objects) -> None:
    """Put the two last positions of `big` in version 1 into a second payload."""
    _, tensors = surgery.entries(surgery.payload(objects, 1, "delta"))
    *_, values = tensors["big.val"]
    # They are 3, 65,539, 131,075 (a bridge) and 139,999; the second payload needs a bridge of its own.
    first = {
        "big.idx": ("U16", [2], bad_buckets.uint16s(3, 65_535)),
        "big.val": ("I8", [2], values[:2]),
    }
    second = {
        "big.idx": ("U16", [3], bad_buckets.uint16s(65_535, 65_535, 8_927)),
        "big.val": ("I8", [3], bytes(2) + values[3:]),
    }
    listed = {"big": {"dtype": "I8", "shape": [140_000]}}
    bad_buckets.second_payload(second, listed)(objects)
    surgery.edit_file(objects, 1, "delta", lambda _, found: (found.clear(), found.update(first)))


def test_payloads_of_one_delta_may_hold_parts_of_one_tensor(tmp_path: Path) -> None:
    objects = surgery.load(GOLDEN / "v1-gap")
    split_in_two(objects)
    assert_both_verify(objects, 3, tmp_path)
    follower = Replica(surgery.store_of(objects), {})
    follower.update(0)
    follower.update(1)
    expected = EXPECTED["v1-gap"]["1"]["tensors"]
    assert {n: sha256(raw_bytes(t)) for n, t in follower.tensors.items()} == {
        name: tensor["sha256"] for name, tensor in expected.items()
    }


@pytest.mark.parametrize(
    "name", ["a change is stated in two payloads", "an element of BOOL becomes 2 in v1-gap"]
)
def test_a_follower_on_its_way_from_the_version_before_refuses_what_others_refuse(name: str) -> None:
    """Not as a wrong state, which would send it back to an anchor."""
    case = next(case for case in bad_buckets.CASES if case.name == name)
    store = surgery.store_of(surgery.load(GOLDEN / case.bucket))
    follower = Replica(store, {})
    follower.update(0)
    for key, data in spoiled(case).items():
        store.put(key, data)
    with pytest.raises(CorruptObject):
        follower.stage(1)
    with pytest.raises(CorruptObject):
        follower.update(1)


def test_an_element_of_bool_is_checked_in_an_anchor_that_is_mapped(tmp_path: Path) -> None:
    case = next(case for case in bad_buckets.CASES if case.name == "an element of BOOL is 2 in an anchor")
    store = surgery.store_of(spoiled(case))
    header, found = history.read_header(store), history.read_manifest(store, 0)
    assert header is not None
    cache = HostCache(tmp_path / "cache")
    with pytest.raises(CorruptObject), open_anchor(store, found, header.schema.by_name(), cache):
        pass


SIX_GIB = 6 << 30


@pytest.mark.parametrize("key", ["store.json", "versions/00000001.json"])
def test_an_object_that_is_larger_than_any_of_its_kind_is_refused_before_it_is_read(
    tmp_path: Path, key: str
) -> None:
    bucket = surgery.lay_out(surgery.load(GOLDEN / "v1-gap"), tmp_path)
    os.truncate(bucket / key, SIX_GIB)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptObject, match="100,000,000"):
            replay.verify(FolderStore(bucket), 1)
        assert tracemalloc.get_traced_memory()[1] < json_fields.MAX_JSON_BYTES + (16 << 20)
    finally:
        tracemalloc.stop()
    with pytest.raises(independent_reader.Refused):
        independent_reader.rebuild(bucket, 1)


def test_a_hint_that_is_larger_than_any_is_not_read(tmp_path: Path) -> None:
    bucket = surgery.lay_out(surgery.load(GOLDEN / "v1-gap"), tmp_path)
    hint = bucket / "head.json"
    hint.write_bytes(b'{"version": 1}' + b" " * manifest_json.MAX_HINT_BYTES)
    assert history._stored_hint(FolderStore(bucket)) is None
    os.truncate(hint, SIX_GIB)
    tracemalloc.start()
    try:
        assert history.head(FolderStore(bucket)) == history.read_manifest(FolderStore(bucket), 3)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


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
    assert len(data) * 4 < json_fields.MAX_JSON_BYTES
    assert manifest_json.header_from_json(data) == header


def test_payloads_that_no_manifest_names_do_not_exist() -> None:
    objects = surgery.load(GOLDEN / "v1-gap")
    objects["deltas/00000001-ffffffffffffffff/00001-of-00001.safetensors"] = b"left over"
    objects["anchors/00000009-ffffffffffffffff/model.safetensors"] = b"left over"
    objects["deltas/x"] = b"left over"
    assert replay.verify(surgery.store_of(objects)).version == 3


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
    bad_buckets.in_manifest(version, bad_buckets.put(f"{part}.payloads.0.size", size))(objects)
    store = PatientStore(objects)
    tracemalloc.start()
    try:
        with pytest.raises(PatchstoreError) as caught:
            replay.verify(store, 1)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert caught.value.kind == "corrupt-object"
    assert max(taken) < 32 << 20
    assert store.patience > 150
