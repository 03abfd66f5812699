"""Whatever a bucket holds, reading it ends in the right weights or in one of our errors, and in no trace.

Hypothesis finds the bytes. Digests and sizes are corrected around most changes, so that parsers are
reached; in CI (hypothesis' own `ci` profile) the examples are always the same.
"""

import json
import math
import struct
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from patchstore.apply.replica import Replica
from patchstore.bucket import digests, manifest_json
from patchstore.bucket.records import DTYPE_BYTES, Payload
from patchstore.codec import tensor_file
from patchstore.errors import CorruptObject, DataError, StoreError, StoreReplaced, UsageError, WrongParent
from patchstore.read import replay
from patchstore.tensors.bits import bits, raw_bytes
from tests.format import independent_reader, surgery
from tests.format.golden_buckets import GOLDEN, PatientStore
from tests.format.surgery import Objects
from tests.support.copies import put_back

TYPED = (DataError, StoreError, UsageError, WrongParent, StoreReplaced)
EXAMPLES = 50
fuzz = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])

BUCKETS = {name: surgery.load(GOLDEN / name) for name in ("v1-raw", "v1-resumed", "v1-sharded")}
TARGETS = {"v1-raw": 2, "v1-resumed": 4, "v1-sharded": 3}

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**48, 2**48 + 1, 2**63, 2**64, 10**30, -(2**63), 10**4000]),
    st.floats(allow_nan=True),
    st.text(max_size=5),
    st.sampled_from(
        ["..", "deltas/../x", "anchors/x/y", "\ud800", "\0", "gap", "raw", "BF16", "blake3:" + "0" * 64]
    ),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
edits = st.tuples(
    st.integers(0, 11) | st.integers(0, 10**6), st.sampled_from(["set", "drop", "again", "grow"]), values
)


def assert_reading_is_safe(bucket: str, objects: Objects) -> None:
    """Replay, follow from nothing, and from the version before: a typed error leaves no trace."""
    target = TARGETS[bucket]
    store = PatientStore(objects)
    with TemporaryDirectory() as folder:
        try:
            replay.replay(store, target, out=Path(folder) / "out")
        except TYPED:
            assert list(Path(folder).iterdir()) == []
        else:
            assert [path.name for path in Path(folder).iterdir()] == ["out"]
    fresh: dict[str, torch.Tensor] = {}
    try:
        Replica(store, fresh).update(target)
    except TYPED:
        assert fresh == {}
    put_back(store, BUCKETS[bucket])
    follower = Replica(store, {})
    follower.update(target - 1)
    before = {name: bits(tensor).clone() for name, tensor in follower.tensors.items()}
    places = {name: tensor.data_ptr() for name, tensor in follower.tensors.items()}
    put_back(store, objects)
    try:
        follower.update(target)
    except TYPED:
        assert follower.held == target - 1
        assert all(torch.equal(bits(follower.tensors[name]), old) for name, old in before.items())
    else:
        assert follower.held == target
    assert {name: tensor.data_ptr() for name, tensor in follower.tensors.items()} == places


def mutated(data: bytes, cuts: list[tuple[str, int, int]]) -> bytes:
    """Flip, set, insert, remove, repeat or cut at places that wrap around the data."""
    found = bytearray(data)
    for kind, place, value in cuts:
        at = place % (len(found) + 1)
        match kind:
            case "flip" if at < len(found):
                found[at] ^= 1 << value % 8
            case "set" if at < len(found):
                found[at] = value
            case "insert":
                found[at:at] = bytes([value])
            case "remove":
                del found[at : at + 1 + value % 8]
            case "repeat":
                found[at:at] = found[at : at + value]
            case "cut":
                del found[at:]
    return bytes(found)


byte_changes = st.lists(
    st.tuples(
        st.sampled_from(["flip", "set", "insert", "remove", "repeat", "cut"]),
        st.integers(0, 10**6) | st.integers(0, 40),
        st.integers(0, 255),
    ),
    min_size=1,
    max_size=4,
)


def places(record: Any) -> list[tuple[Any, Any]]:
    """Every field and item of nested JSON, outermost first: what it is in, and under which key."""
    found: list[tuple[Any, Any]] = []
    waiting = [record]
    for holder in waiting:
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        found += [(holder, key) for key in keys]
        waiting += [holder[key] for key in keys if isinstance(holder[key], (dict, list))]
    return found


def edit_json(record: Any, changes: list[tuple[int, str, Any]]) -> None:
    for number, kind, value in changes:
        found = places(record)
        if not found:
            return
        holder, key = found[number % len(found)]
        if kind == "drop":
            del holder[key]
        elif kind == "again" and isinstance(holder, list):
            holder.append(holder[key])
        elif kind == "grow" and isinstance(holder, dict):
            holder[str(value)] = holder[key]
        else:
            holder[key] = value


def assert_both_readers_agree(bucket: str, objects: Objects) -> None:
    """Either both verify the target, or both refuse it."""
    try:
        replay.verify(surgery.store_of(objects), TARGETS[bucket])
        refused = None
    except TYPED as exc:
        refused = exc
    with TemporaryDirectory() as folder:
        laid_out = surgery.lay_out(objects, Path(folder))
        if refused is None:
            independent_reader.verify(laid_out, TARGETS[bucket])
        else:
            note(f"refused: {refused}")
            with pytest.raises(independent_reader.Refused):
                independent_reader.verify(laid_out, TARGETS[bucket])


def edit_list(metadata: Any, changes: list[tuple[int, str, Any]]) -> None:
    record = json.loads(metadata["tensors"])
    edit_json(record, changes)
    metadata["tensors"] = json.dumps(record)


def replace_entries(metadata: Any, tensors: surgery.Entries, replaced: dict[int, Any]) -> None:
    """Have positions and values of any dtype, shape and content, for tensors that the delta lists."""
    names = sorted(json.loads(metadata["tensors"]))
    for number, (idx, val) in replaced.items():
        name = names[number % len(names)]
        tensors |= {f"{name}.{part}": each for part, each in (("idx", idx), ("val", val)) if each is not None}


@st.composite
def stored_tensors(draw: st.DrawFn) -> tuple[str, list[int], bytes]:
    """A well-formed entry with any bytes, often small numbers so that it looks like positions."""
    dtype = draw(st.sampled_from([*DTYPE_BYTES, "I32", "I32", "U16", "U16"]))
    shape = draw(
        st.lists(st.integers(0, 3), max_size=3) | st.lists(st.integers(0, 8), min_size=1, max_size=1)
    )
    width = DTYPE_BYTES[dtype]
    numbers = st.integers(0, 7) | st.integers(0, 2 ** (8 * width) - 1)
    found = draw(st.lists(numbers, min_size=math.prod(shape), max_size=math.prod(shape)))
    return dtype, shape, b"".join((n % 2 ** (8 * width)).to_bytes(width, "little") for n in found)


json_changes = st.lists(edits, min_size=1, max_size=3)
pairs = st.tuples(st.none() | stored_tensors(), st.none() | stored_tensors())
CHANGES = {
    "an object's bytes": byte_changes,
    "a payload's bytes": byte_changes,
    "header": json_changes,
    "manifest": json_changes,
    "store.json": json_changes,
    "list": json_changes,
    "entries": st.dictionaries(st.integers(0, 100), pairs, min_size=1),
}


def changed(bucket: str, what: str, number: int, changes: Any) -> Objects:
    """Change one thing in a bucket; all but an object's bytes have a manifest that vouches for them."""
    objects, target = dict(BUCKETS[bucket]), TARGETS[bucket]
    version, part = (0, "anchor") if number % 2 else (target, "delta")
    match what:
        case "an object's bytes":
            key = sorted(objects)[number % len(objects)]
            objects[key] = mutated(objects[key], changes)
        case "a payload's bytes":
            data = mutated(surgery.payload(objects, version, part), changes)
            surgery.put_payload(objects, version, part, data)
        case "header":
            surgery.edit_header(objects, version, part, lambda header: edit_json(header, changes))
        case "manifest":
            version = max(0, target - number % 3)
            surgery.edit_manifest(objects, version, lambda record: edit_json(record, changes))
        case "store.json":
            surgery.edit_json(objects, what, lambda record: edit_json(record, changes))
        case "list":
            surgery.edit_file(objects, target, "delta", lambda metadata, _: edit_list(metadata, changes))
        case "entries":
            surgery.edit_file(objects, target, "delta", lambda *file: replace_entries(*file, changes))
    return objects


@pytest.mark.parametrize("what", CHANGES)
@fuzz
@given(bucket=st.sampled_from([*BUCKETS]), number=st.integers(0, 10**6), data=st.data())
def test_any_part_of_a_bucket_may_be_anything(
    what: str, bucket: str, number: int, data: st.DataObject
) -> None:
    assert_reading_is_safe(bucket, changed(bucket, what, number, data.draw(CHANGES[what])))


@fuzz
@given(
    st.sampled_from([*BUCKETS]),
    st.sampled_from(["manifest", "store.json", "header", "list"]),
    st.integers(0, 10),
    st.lists(edits, min_size=1, max_size=2),
)
def test_the_reader_that_was_written_from_the_page_refuses_the_same(
    bucket: str, what: str, number: int, changes: list[tuple[int, str, Any]]
) -> None:
    assert_both_readers_agree(bucket, changed(bucket, what, number, changes))


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=200) | st.builds(lambda v: json.dumps(v).encode(), values))
def test_manifests_and_hints_are_read_from_any_bytes(data: bytes) -> None:
    for read in (
        manifest_json.header_from_json,
        lambda data: manifest_json.from_json("versions/00000001.json", data),
    ):
        with pytest.raises(DataError):
            read(data)
    hint = manifest_json.hint_from_json(data)
    assert hint is None or hint >= 0


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64), st.integers(0, 2**64 - 1) | st.integers(0, 64))
def test_a_safetensors_header_is_read_from_any_bytes(rest: bytes, length: int) -> None:
    data = struct.pack("<Q", length) + rest
    with suppress(CorruptObject):
        tensor_file.open_buffer("here", bytearray(data))
    with suppress(CorruptObject):
        list(tensor_file.read_stream("here", len(data), iter([data[:5], b"", data[5:]])))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 200), st.lists(st.integers(0, 30), max_size=12), st.integers(-2, 2))
def test_a_stream_is_verified_however_it_is_cut(size: int, cuts: list[int], lie: int) -> None:
    data = bytes(number % 251 for number in range(size))
    pieces, at = [], 0
    for cut in cuts:
        pieces.append(data[at : at + cut])
        at += cut
    pieces.append(data[at:])
    claimed = Payload(key="deltas/x/y", size=max(0, size + lie), digest=digests.digest(data))
    if claimed.size == size:
        assert b"".join(digests.verified(pieces, claimed)) == data
    else:
        with pytest.raises(CorruptObject):
            list(digests.verified(pieces, claimed))


def test_what_a_reader_holds_shares_no_memory_with_what_it_fetched() -> None:
    follower = Replica(surgery.store_of(BUCKETS["v1-raw"]), {})
    follower.update(1)
    before = {name: bytes(raw_bytes(tensor)) for name, tensor in follower.tensors.items()}
    follower.apply(follower.stage(2)).rollback()
    assert {name: bytes(raw_bytes(tensor)) for name, tensor in follower.tensors.items()} == before
    assert follower.held == 1
