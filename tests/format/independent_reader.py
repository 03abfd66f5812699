"""A second reader of the format, written from docs/format.md alone: no torch, no patchstore.

What it rebuilds is what the format means; where it and the real reader differ, one of the two, or
the page, is wrong. It is slow, holds everything in memory, and prefers to be short.
"""

import json
import re
import struct
from datetime import datetime
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from blake3 import blake3

from tests.format import independent_context

Tensor = tuple[str, tuple[int, ...], bytes]
"""dtype, shape, bytes."""

WIDTHS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F4", "F8_E8M0"), 1),
    **dict.fromkeys(("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}
LETTERS = {1: "B", 2: "H", 4: "I", 8: "Q"}
A, B, M = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0xFF51AFD7ED558CCD
MASK, LOW = 2**64 - 1, 2**32 - 1
PART = re.compile(r"[A-Za-z0-9._+=@-]+")
SUMS = re.compile(r"states/([0-9]{8,})-[A-Za-z0-9._+=@-]+\.sums")
DIGEST = re.compile("blake3:[0-9a-f]{64}")
TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?Z")
UNPRINTABLE = [
    *((0, 0x1F), (0x7F, 0x9F), (0x200B, 0x200F), (0x2028, 0x202E), (0x2060, 0x206F)),
    *((0xD800, 0xDFFF), (0xFEFF, 0xFEFF)),
]
MAX_JSON_BYTES = MAX_HEADER_BYTES = 100_000_000


class Refused(Exception):
    """The bucket breaks a rule of the format."""


def rebuild(bucket: Path, version: int) -> dict[str, Tensor]:
    """Section 8: return every tensor of a version.

    Raises:
        Refused: a digest differs, or a rule is broken.
    """
    try:
        return _rebuild(bucket, version, by_delta=False)
    except (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError, struct.error) as exc:
        raise Refused(f"malformed: {exc!r}") from exc


def verify(bucket: Path, version: int) -> None:
    """Section 8: rebuild a version, and check what that does not need.

    Raises:
        Refused: as `rebuild`.
    """
    rebuild(bucket, version)
    try:
        target = anchored = read_manifest(bucket, version)
        while anchored["anchor"] is None:
            anchored = _parent(bucket, anchored)
        if anchored["parent"] is not None:
            _parent(bucket, anchored)
        if target["anchor"] is not None and target["delta"] is not None:
            _rebuild(bucket, version, by_delta=True)
    except (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError, struct.error) as exc:
        raise Refused(f"malformed: {exc!r}") from exc


def _rebuild(bucket: Path, version: int, *, by_delta: bool) -> dict[str, Tensor]:
    header = _json(_read(bucket / "store.json", MAX_JSON_BYTES))
    _need(type(header["format_version"]) is int and header["format_version"] == 1, "another format version")
    schema = _schema(header)
    chain = [read_manifest(bucket, version)]
    _need(chain[0]["run_id"] == header["run_id"], "the version is of another run")
    while chain[-1]["anchor"] is None or (by_delta and len(chain) == 1):
        chain.append(_parent(bucket, chain[-1]))
    anchored = chain.pop()
    labels = {"format": "pt", "kind": "anchor"}
    labels |= {field: str(anchored[field]) for field in ("format_version", "run_id", "version", "step")}
    state: dict[str, tuple[str, tuple[int, ...], bytearray]] = {}
    for payload in anchored["anchor"]["payloads"]:
        metadata, tensors = parse_safetensors(_payload(bucket, payload))
        _need(metadata.items() >= labels.items(), "the anchor's metadata differ")
        for name, (dtype, shape, data) in tensors.items():
            _need(name not in state and schema.get(name) == (dtype, shape), f"{name!r} does not belong here")
            state[name] = (dtype, shape, bytearray(data))
    for payload in anchored["anchor"]["files"]:
        _payload(bucket, payload)
    _need(state.keys() == schema.keys(), "the anchor lacks a tensor")
    for manifest in reversed(chain):
        _need(manifest["delta"]["encoding"] in {"raw", "gap", "context"}, "unknown encoding")
        parent = {name: bytes(data) for name, (_, _, data) in state.items()}
        stated: dict[str, set[int]] = {}
        for payload in manifest["delta"]["payloads"]:
            _apply(_payload(bucket, payload), manifest, schema, parent, state, stated)
    target = read_manifest(bucket, version)
    found = [sums(bytes(state[name][2]), WIDTHS[dtype]) for name, (dtype, _) in schema.items()]
    lines = "".join(
        f"{name}\t{dtype}\t{','.join(map(str, shape))}\t{text}\n"
        for (name, (dtype, shape)), text in zip(schema.items(), found, strict=True)
    )
    _need(digest_of(lines.encode()) == target["state"]["total"], "the state digest differs")
    stored = struct.unpack(f"<{2 * len(schema)}Q", _payload(bucket, target["state"]["sums"]))
    pairs = zip(stored[::2], stored[1::2], strict=True)
    _need(found == [f"{one:016x}{two:016x}" for one, two in pairs], "a tensor's sums differ")
    return {name: (dtype, shape, bytes(data)) for name, (dtype, shape, data) in state.items()}


@lru_cache(256)
def sums(data: bytes, width: int) -> str:
    """Section 7: the 32 hex digits of a tensor."""
    first = second = 0
    for i, x in enumerate(struct.unpack(f"<{len(data) // width}{LETTERS[width]}", data)):
        one, two = added(i, x)
        first, second = first + one, second + two
    return f"{first & MASK:016x}{second & MASK:016x}"


def added(i: int, x: int) -> tuple[int, int]:
    """What the element at position i with bits x adds to the two sums."""
    u = (A * (i + 1) + B * x) & MASK
    z = M * (u ^ (u >> 32)) & MASK
    y = z ^ (z >> 32)
    return y, (y >> 32) * (y & LOW)


def positions(encoding: str, dtype: str, idx: bytes, num_elements: int, first: int = 0) -> list[int]:
    """Section 6: the flat positions that a stored `idx` states."""
    _need(type(first) is int and 0 <= first < max(num_elements, 1), "gaps count from no position")
    if encoding == "gap" and dtype == "U16":
        gaps = struct.unpack(f"<{len(idx) // 2}H", idx)
        found = [first + total + i for i, total in enumerate(accumulate(gaps))]
    else:
        _need(dtype == ("I64" if num_elements >= 2**31 else "I32"), "positions have the wrong width")
        _need(first == 0, "positions count from 0")
        found = list(struct.unpack(f"<{len(idx) // WIDTHS[dtype]}{'q' if dtype == 'I64' else 'i'}", idx))
    _need(all(a < b for a, b in pairwise(found)), "positions do not ascend")
    _need(not found or (found[0] >= 0 and found[-1] < num_elements), "a position beyond the tensor")
    return found


def parse_safetensors(data: bytes) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return a file's metadata and tensors."""
    (length,) = struct.unpack_from("<Q", data)
    _need(length <= min(MAX_HEADER_BYTES, len(data) - 8), "the header is too long")
    header = _json(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    _need(all(type(value) is str for value in metadata.values()), "metadata must be strings")
    tensors: dict[str, Tensor] = {}
    at = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = map(_count, entry["data_offsets"])
        _need(
            start == at and end - start == _num_bytes(entry["dtype"], entry["shape"]), "overlap, hole or lie"
        )
        found = data[8 + length + start : 8 + length + end]
        _need(entry["dtype"] != "BOOL" or not found.strip(b"\0\1"), "a BOOL byte is neither 0 nor 1")
        tensors[checked_name(name)] = (entry["dtype"], tuple(entry["shape"]), found)
        at = end
    _need(8 + length + at == len(data), "the data do not end with the file")
    return metadata, tensors


def _apply(
    data: bytes,
    manifest: dict[str, Any],
    schema: dict[str, Any],
    parent: dict[str, bytes],
    state: dict[str, Any],
    stated: dict[str, set[int]],
) -> None:
    """Apply a payload; `stated` has each tensor's positions that the version's payloads stated before."""
    metadata, tensors = parse_safetensors(data)
    encoding = manifest["delta"]["encoding"]
    expected = {"format": "patchstore", "kind": "delta", "encoding": encoding}
    for field in ("format_version", "run_id", "version", "parent", "step"):
        expected[field] = str(manifest[field])
    _need({field: metadata.get(field) for field in expected} == expected, "the metadata differ")
    listed = _json(metadata["tensors"].encode())
    _need(bool(tensors), "the payload changes no tensor")
    if encoding == "context":
        streams = [tensors.pop(entry) for entry in ("table", "tiles") if entry in tensors]
        _need(all(dtype == "U8" and len(shape) == 1 for dtype, shape, _ in streams), "streams must be bytes")
        _need(len(streams) != 1, "a table without tiles, or tiles without a table")
        if streams:
            table, tiles = (stream for _, _, stream in streams)
            for part in independent_context.parse_table(table, len(tiles), schema):
                # A coded part leaves no element of it to another payload.
                where = independent_context.positions_of(part, schema)
                _need(stated.setdefault(part.name, set()).isdisjoint(where), "an element is stated twice")
                stated[part.name].update(where)
            for name, position, new in independent_context.changes(table, tiles, schema, parent):
                state[name][2][position * len(new) : (position + 1) * len(new)] = new
        encoding = "gap"
    _need(
        {f"{name}.{part}" for name in listed for part in ("idx", "val")} == tensors.keys(), "entries differ"
    )
    for name, spec in listed.items():
        dtype, shape = schema[name]
        _num_bytes(spec["dtype"], spec["shape"])
        _need((spec["dtype"], tuple(spec["shape"])) == (dtype, shape), f"{name!r} is another tensor here")
        width, target = WIDTHS[dtype], state[name][2]
        idx_dtype, idx_shape, idx = tensors[f"{name}.idx"]
        val_dtype, val_shape, val = tensors[f"{name}.val"]
        codes = tuple(num * (2 if dtype == "F4" else 1) for num in idx_shape)
        _need(val_dtype == dtype and val_shape == codes and len(idx_shape) == 1, "idx and val do not fit")
        where = positions(encoding, idx_dtype, idx, len(target) // width, spec.get("first", 0))
        _need(len(where) > 0, f"nothing of {name!r} is stated")
        _need(stated.setdefault(name, set()).isdisjoint(where), "an element is stated in two payloads")
        stated[name].update(where)
        for number, position in enumerate(where):
            target[position * width : (position + 1) * width] = val[number * width : (number + 1) * width]


def _schema(header: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    _string(header["run_id"])
    _time(header["created_at"])
    names = [checked_name(entry["name"]) for entry in header["tensors"]]
    _need(names == sorted(set(names)), "names must ascend")
    for new, old in header["tied"].items():
        _need(checked_name(new) not in names and old in names, "tied to nothing")
    for entry in header["tensors"]:
        _num_bytes(entry["dtype"], entry["shape"])
    if "adapter" in header:
        base = header["adapter"]["base"]
        for field in (base["name"], base["revision"]):
            _need(field is None or _string(field) == field, "a base must be a string or null")
        state = base["state"]
        _need(state is None or re.fullmatch("blake3:[0-9a-f]{64}", state) is not None, "no digest")
        _need(type(header["adapter"]["base_may_change"]) is bool, "no boolean")
    return {entry["name"]: (entry["dtype"], tuple(entry["shape"])) for entry in header["tensors"]}


def _num_bytes(dtype: str, shape: Any) -> int:
    """The bytes of a tensor of this dtype and shape; of any, also of one that is refused."""
    _need(type(shape) is list, "a shape must be a list")
    count = non_zero = 1
    for size in map(_count, shape):
        count, non_zero = count * size, non_zero * (size or 1)
    _need(non_zero <= 2**48, "too many elements")
    if dtype == "F4":
        _need(bool(shape) and shape[-1] % 2 == 0, "half a byte")
        return count // 2
    return count * WIDTHS[dtype]


def read_manifest(bucket: Path, version: int) -> dict[str, Any]:
    found = _json(_read(_version_path(bucket, version), MAX_JSON_BYTES))
    _need(type(found["format_version"]) is int and found["format_version"] == 1, "another format version")
    _need(_count(found["version"]) == version, "the manifest is of another version")
    delta, anchor, parent = found["delta"], found["anchor"], found["parent"]
    _need((parent is None) == (version == 0), "version 0, and no other, has no parent")
    if parent is None:
        _need(found["parent_digest"] is None and delta is None, "a first version has nothing to build on")
    else:
        _need(_count(parent) < version, "the parent comes later")
        _need(DIGEST.fullmatch(found["parent_digest"]) is not None, "the parent's digest is none")
    _need(anchor is not None or delta is not None, "no content")
    _need(_string(found["kind"]) == ("delta" if anchor is None else "anchor"), "the kind is another")
    _string(found["run_id"])
    _integer(found["step"])
    _time(found["created_at"])
    writer = found["writer"]
    _need(_string(writer["id"]) and _string(writer["write_id"]) and _count(writer["epoch"]) >= 0, "no writer")
    _need(DIGEST.fullmatch(found["state"]["total"]) is not None, "the state digest is none")
    sums = found["state"]["sums"]
    key = SUMS.fullmatch(_string(sums["key"]))
    _need(key is not None and f"{int(key[1]):08d}" == key[1], "the sums have a wrong key")
    _count(sums["size"])
    _need(DIGEST.fullmatch(sums["digest"]) is not None, "the sums have no digest")
    if delta is not None:
        _string(delta["encoding"])
        _count(delta["num_changed"])
        _check_payloads(delta["payloads"], "deltas")
    if anchor is not None:
        _check_payloads([*_list(anchor["payloads"]), *_list(anchor["files"])], "anchors")
    return found


def _check_payloads(payloads: Any, folder: str) -> None:
    keys = [_string(payload["key"]) for payload in _list(payloads)]
    for key in keys:
        parts = key.split("/")
        _need(parts[0] == folder and len(parts) == 3, f"{key!r} lies elsewhere")
        _need(all(PART.fullmatch(p) and p not in {".", ".."} for p in parts), f"{key!r} is no key")
    _need(len(set(keys)) == len(keys), "a key occurs twice")
    _need(len({key.split("/")[1] for key in keys}) <= 1, "payloads must lie in one folder")
    for payload in payloads:
        _count(payload["size"])
        _need(DIGEST.fullmatch(payload["digest"]) is not None, "a payload's digest is none")


def _parent(bucket: Path, child: dict[str, Any]) -> dict[str, Any]:
    """The parent's manifest, which must be the one that the child names."""
    found = read_manifest(bucket, child["parent"])
    stored = _read(_version_path(bucket, child["parent"]), MAX_JSON_BYTES)
    _need(digest_of(stored) == child["parent_digest"], "the parent is another manifest")
    _need(found["run_id"] == child["run_id"], "the parent is of another run")
    _need(found["writer"]["epoch"] <= child["writer"]["epoch"], "the parent is of a later epoch")
    return found


def _version_path(bucket: Path, version: int) -> Path:
    return bucket / "versions" / f"{version:08d}.json"


def _payload(bucket: Path, payload: dict[str, Any]) -> bytes:
    data = _read(bucket / payload["key"], payload["size"])
    _need(
        len(data) == payload["size"] and digest_of(data) == payload["digest"],
        f"{payload['key']} has other bytes",
    )
    return data


def _read(path: Path, most: int) -> bytes:
    _need(path.is_file() and not path.is_symlink(), f"{path} is no regular file")
    _need(path.stat().st_size <= most, f"{path} has more than {most} bytes")
    return path.read_bytes()


def _json(data: bytes) -> dict[str, Any]:
    found = json.loads(data.decode("utf-8"), object_pairs_hook=_once, parse_constant=_constant)
    _need(type(found) is dict, "not a JSON object")
    return found  # type: ignore[no-any-return]


def _constant(word: str) -> None:
    raise Refused(f"{word} is no JSON")


def _integer(value: Any) -> int:
    _need(type(value) is int and abs(value) < 2**53, f"{value!r:.80} is no integer")
    return value  # type: ignore[no-any-return]


def _count(value: Any) -> int:
    _need(_integer(value) >= 0, f"{value} is negative")
    return value  # type: ignore[no-any-return]


def _string(value: Any) -> str:
    _need(type(value) is str and value != "", f"{value!r:.80} is no string, or empty")
    _need(not any(a <= ord(c) <= b for c in value for a, b in UNPRINTABLE), f"{value!r:.80} is not printable")
    return value  # type: ignore[no-any-return]


def checked_name(value: Any) -> str:
    _need(value != "__metadata__", "no tensor has this name")
    return _string(value)


def _time(value: Any) -> None:
    _need(TIME.fullmatch(value) is not None, f"{value!r:.80} is no time in UTC")
    datetime.fromisoformat(value)


def _list(value: Any) -> list[Any]:
    _need(type(value) is list, f"{value!r:.80} is no list")
    return value  # type: ignore[no-any-return]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _need(len(dict(pairs)) == len(pairs), "a name occurs twice")
    return dict(pairs)


def digest_of(data: bytes) -> str:
    return f"blake3:{blake3(data).hexdigest()}"


def _need(holds: bool, why: str) -> None:
    if not holds:
        raise Refused(why)
