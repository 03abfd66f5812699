"""What the format leaves open: readers take it, though no golden bucket has it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from patchstore.apply.replica import Replica
from patchstore.bucket import manifest_json
from patchstore.read import replay
from patchstore.stores.folder import FolderStore
from tests.format import bucket_edits, independent_reader, surgery
from tests.format.bucket_edits import both, in_file, in_manifest, in_store_json, metadata, put
from tests.format.golden_buckets import GOLDEN, assert_both_verify, assert_expected

MOST = 2**53 - 1


def test_a_hint_that_lies_is_not_believed(tmp_path: Path) -> None:
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
        objects = surgery.load(GOLDEN / "v1-raw") | {"head.json": hint}
        assert replay.verify(surgery.store_of(objects)).version == 3
        # No file system can hold the key of the largest.
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


def in_first(number: int) -> Callable[[surgery.Objects], None]:
    """The step of version 0, in its manifest and its anchor."""
    return both(in_manifest(0, put("step", number)), in_file("anchor", 0, metadata("step", str(number))))


def made_at(time: str) -> Callable[[surgery.Objects], None]:
    return both(in_manifest(1, put("created_at", time)), in_store_json(put("created_at", time)))


CHANGES: dict[str, tuple[Callable[[surgery.Objects], object], int]] = {
    # Readers do not check that it is true.
    **{
        f"num_changed={number}": (in_manifest(1, put("delta.num_changed", number)), 3)
        for number in (0, 7, MOST)
    },
    **{
        f"empty, {name}": (in_manifest(2, put("delta.encoding", name)), 3)
        for name in ("raw", "gap", "context")
    },
    **{f"time{each}": (made_at(f"2024-02-29T23:59:59{each}Z"), 1) for each in ("", ".0", ".123", ".123456")},
    **{f"step={number}": (in_first(number), 0) for number in (MOST, -MOST)},
}


@pytest.mark.parametrize("name", CHANGES)
def test_both_readers_take_what_the_format_leaves_open(tmp_path: Path, name: str) -> None:
    objects, (change, version) = surgery.load(GOLDEN / "v1-gap"), CHANGES[name]
    change(objects)
    assert_both_verify(objects, version, tmp_path)


def test_both_readers_take_the_same_names() -> None:
    edges = {0, 0x20, 0x7E, 0x378, 0x3000, 0xE000, 0xFFFF, 0x1F600, 0xE0001, 0x10FFFF}
    for first, last in independent_reader.UNPRINTABLE:
        edges |= {max(0, first - 1), first, last, last + 1}
    for name in ["", "__metadata__", *(f"a{chr(point)}" for point in sorted(edges))]:
        try:
            independent_reader.checked_name(name)
        except independent_reader.Refused:
            assert not manifest_json.is_name(name), ascii(name)
        else:
            assert manifest_json.is_name(name), ascii(name)


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
    assert_expected(follower, "v1-gap", 1)


def test_payloads_that_no_manifest_names_do_not_exist() -> None:
    objects = surgery.load(GOLDEN / "v1-gap")
    objects["deltas/00000001-ffffffffffffffff/00001-of-00001.safetensors"] = b"left over"
    objects["anchors/00000009-ffffffffffffffff/model.safetensors"] = b"left over"
    objects["deltas/x"] = b"left over"
    assert replay.verify(surgery.store_of(objects)).version == 3
