"""What the format leaves open: readers take it, though no golden bucket has it."""

import json
from pathlib import Path
from typing import Any

import pytest

from patchstore.apply.replica import Replica
from patchstore.format import json_fields
from patchstore.read import replay
from patchstore.stores.folder import FolderStore
from patchstore.tensors.bits import raw_bytes
from tests.format import bucket_edits, independent_reader, surgery
from tests.format.golden_buckets import EXPECTED, GOLDEN, assert_both_verify, sha256


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


@pytest.mark.parametrize("number", [0, 7, 2**53 - 1])
def test_readers_do_not_check_that_the_number_of_changes_is_true(tmp_path: Path, number: int) -> None:
    objects = surgery.load(GOLDEN / "v1-gap")
    bucket_edits.in_manifest(1, bucket_edits.put("delta.num_changed", number))(objects)
    assert_both_verify(objects, 3, tmp_path)


@pytest.mark.parametrize("encoding", ["raw", "gap", "context"])
def test_an_empty_delta_may_be_of_any_encoding(tmp_path: Path, encoding: str) -> None:
    objects = surgery.load(GOLDEN / "v1-gap")
    bucket_edits.in_manifest(2, bucket_edits.put("delta.encoding", encoding))(objects)
    assert_both_verify(objects, 3, tmp_path)


@pytest.mark.parametrize("fraction", ["", ".0", ".123", ".123456"])
def test_a_time_has_a_fraction_or_none(tmp_path: Path, fraction: str) -> None:
    objects = surgery.load(GOLDEN / "v1-gap")
    time = bucket_edits.put("created_at", f"2024-02-29T23:59:59{fraction}Z")
    bucket_edits.in_manifest(1, time)(objects)
    bucket_edits.in_store_json(time)(objects)
    assert_both_verify(objects, 1, tmp_path)


@pytest.mark.parametrize("number", [2**53 - 1, -(2**53 - 1)])
def test_the_largest_integers_are_read(tmp_path: Path, number: int) -> None:
    objects = surgery.load(GOLDEN / "v1-gap")
    step = bucket_edits.put("step", number)
    bucket_edits.in_manifest(0, step)(objects)
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
        "big.idx": ("U16", [2], bucket_edits.uint16s(3, 65_535)),
        "big.val": ("I8", [2], values[:2]),
    }
    second = {
        "big.idx": ("U16", [3], bucket_edits.uint16s(65_535, 65_535, 8_927)),
        "big.val": ("I8", [3], bytes(2) + values[3:]),
    }
    listed = {"big": {"dtype": "I8", "shape": [140_000]}}
    bucket_edits.second_payload(second, listed)(objects)
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


def test_payloads_that_no_manifest_names_do_not_exist() -> None:
    objects = surgery.load(GOLDEN / "v1-gap")
    objects["deltas/00000001-ffffffffffffffff/00001-of-00001.safetensors"] = b"left over"
    objects["anchors/00000009-ffffffffffffffff/model.safetensors"] = b"left over"
    objects["deltas/x"] = b"left over"
    assert replay.verify(surgery.store_of(objects)).version == 3
