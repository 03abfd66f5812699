"""A second reader of the format, written from docs/format.md alone: no torch, no patchstore.

What it rebuilds is what the format means; where it and the real reader differ, one of the two, or
the page, is wrong. It is slow, holds everything in memory, and prefers to be short.
"""

import json
import re
import struct
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from blake3 import blake3

from tests.format import independent_context

Tensor = tuple[str, tuple[int, ...], bytes]
"""dtype, shape, bytes."""

WIDTHS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
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


class Refused(Exception):
    """The bucket breaks a rule of the format."""


def rebuild(bucket: Path, version: int) -> dict[str, Tensor]:
    """Section 8: return every tensor of a version.

    Raises:
        Refused: a digest differs, or a rule is broken.
    """
    try:
        return _rebuild(bucket, version)
    except (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError, struct.error) as exc:
        raise Refused(f"malformed: {exc!r}") from exc


def _rebuild(bucket: Path, version: int) -> dict[str, Tensor]:
    header = _json((bucket / "store.json").read_bytes())
    schema = _schema(header)
    chain = [_manifest(bucket, version)]
    _need(chain[0]["run_id"] == header["run_id"], "the version is of another run")
    while chain[-1]["anchor"] is None:
        child, parent = chain[-1], _manifest(bucket, chain[-1]["parent"])
        stored = _version_path(bucket, child["parent"]).read_bytes()
        _need(_digest(stored) == child["parent_digest"], "the parent is another manifest")
        chain.append(parent)
    anchored = chain.pop()
    state: dict[str, tuple[str, tuple[int, ...], bytearray]] = {}
    for payload in anchored["anchor"]["payloads"]:
        _, tensors = parse_safetensors(_payload(bucket, payload))
        for name, (dtype, shape, data) in tensors.items():
            _need(name not in state and schema.get(name) == (dtype, shape), f"{name!r} does not belong here")
            state[name] = (dtype, shape, bytearray(data))
    for payload in anchored["anchor"]["files"]:
        _payload(bucket, payload)
    _need(state.keys() == schema.keys(), "the anchor lacks a tensor")
    for manifest in reversed(chain):
        parent = {name: bytes(data) for name, (_, _, data) in state.items()}
        seen: dict[str, bool] = {}
        for payload in manifest["delta"]["payloads"]:
            _apply(_payload(bucket, payload), manifest, schema, parent, state, seen)
    target = _manifest(bucket, version)
    found = [sums(bytes(state[name][2]), WIDTHS[dtype]) for name, (dtype, _) in schema.items()]
    lines = "".join(
        f"{name}\t{dtype}\t{','.join(map(str, shape))}\t{text}\n"
        for (name, (dtype, shape)), text in zip(schema.items(), found, strict=True)
    )
    _need(_digest(lines.encode()) == target["state"]["total"], "the state digest differs")
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


def positions(encoding: str, dtype: str, idx: bytes, num_elements: int) -> list[int]:
    """Section 6: the flat positions that a stored `idx` states."""
    if encoding == "gap":
        _need(dtype == "U16", "gaps must be uint16")
        gaps = struct.unpack(f"<{len(idx) // 2}H", idx)
        found = [total + i for i, total in enumerate(accumulate(gaps))]
    else:
        _need(encoding == "raw", f"unknown encoding {encoding!r}")
        _need(dtype == ("I64" if num_elements >= 2**31 else "I32"), "positions have the wrong width")
        found = list(struct.unpack(f"<{len(idx) // WIDTHS[dtype]}{'q' if dtype == 'I64' else 'i'}", idx))
    _need(all(a < b for a, b in pairwise(found)), "positions do not ascend")
    _need(not found or (found[0] >= 0 and found[-1] < num_elements), "a position beyond the tensor")
    return found


def parse_safetensors(data: bytes) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return a file's metadata and tensors."""
    (length,) = struct.unpack_from("<Q", data)
    _need(length <= min(100_000_000, len(data) - 8), "the header is too long")
    header = json.loads(data[8 : 8 + length], object_pairs_hook=_once)
    metadata = header.pop("__metadata__", {})
    _need(all(type(value) is str for value in metadata.values()), "metadata must be strings")
    tensors: dict[str, Tensor] = {}
    at = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = entry["data_offsets"]
        _need(
            start == at and end - start == _num_bytes(entry["dtype"], entry["shape"]), "overlap, hole or lie"
        )
        tensors[name] = (entry["dtype"], tuple(entry["shape"]), data[8 + length + start : 8 + length + end])
        at = end
    _need(8 + length + at == len(data), "the data do not end with the file")
    return metadata, tensors


def _apply(
    data: bytes,
    manifest: dict[str, Any],
    schema: dict[str, Any],
    parent: dict[str, bytes],
    state: dict[str, Any],
    seen: dict[str, bool],
) -> None:
    """Apply a payload; `seen` tells of the tensors of the version's earlier ones whether they are coded."""
    metadata, tensors = parse_safetensors(data)
    encoding = manifest["delta"]["encoding"]
    expected = {"format": "patchstore", "kind": "delta", "encoding": encoding}
    for field in ("format_version", "run_id", "version", "parent", "step"):
        expected[field] = str(manifest[field])
    _need({field: metadata.get(field) for field in expected} == expected, "the metadata differ")
    listed = json.loads(metadata["tensors"], object_pairs_hook=_once)
    if encoding == "context":
        _need(not any(seen.get(name) for name in listed), "a coded tensor is in two payloads")
        streams = [tensors.pop(entry) for entry in ("table", "tiles") if entry in tensors]
        _need(all(dtype == "U8" and len(shape) == 1 for dtype, shape, _ in streams), "streams must be bytes")
        _need(len(streams) != 1, "a table without tiles, or tiles without a table")
        if streams:
            table, tiles = (stream for _, _, stream in streams)
            coded = {name for name, *_ in independent_context.parse_table(table, len(tiles), schema)}
            _need(coded.isdisjoint(seen), "a coded tensor is in two payloads")
            seen |= dict.fromkeys(coded, True)
            for name, position, new in independent_context.changes(table, tiles, schema, parent):
                _need(name not in listed, "a tensor is coded and stored otherwise too")
                state[name][2][position * len(new) : (position + 1) * len(new)] = new
        encoding = "gap"
    seen |= {name: seen.get(name, False) for name in listed}
    _need(
        {f"{name}.{part}" for name in listed for part in ("idx", "val")} == tensors.keys(), "entries differ"
    )
    for name, spec in listed.items():
        dtype, shape = schema[name]
        _need(spec == {"dtype": dtype, "shape": list(shape)}, f"{name!r} is another tensor in this run")
        width, target = WIDTHS[dtype], state[name][2]
        idx_dtype, idx_shape, idx = tensors[f"{name}.idx"]
        val_dtype, val_shape, val = tensors[f"{name}.val"]
        _need(val_dtype == dtype and idx_shape == val_shape and len(idx_shape) == 1, "idx and val do not fit")
        where = positions(encoding, idx_dtype, idx, len(target) // width)
        for number, position in enumerate(where):
            target[position * width : (position + 1) * width] = val[number * width : (number + 1) * width]


def _schema(header: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    names = [entry["name"] for entry in header["tensors"]]
    _need(names == sorted(set(names)), "names must ascend")
    further = header["tied"].items()
    _need(all(n and n.isprintable() for n in [*names, *header["tied"]]), "a name is not printable")
    _need(all(new not in names and old in names for new, old in further), "tied to nothing")
    for entry in header["tensors"]:
        _num_bytes(entry["dtype"], entry["shape"])
    return {entry["name"]: (entry["dtype"], tuple(entry["shape"])) for entry in header["tensors"]}


def _num_bytes(dtype: str, shape: list[int]) -> int:
    count = 1
    for size in shape:
        _need(type(size) is int and size >= 0, "a size must be a number")
        count *= size
    _need(count <= 2**48, "too many elements")
    return count * WIDTHS[dtype]


def _manifest(bucket: Path, version: int) -> dict[str, Any]:
    found = _json(_version_path(bucket, version).read_bytes())
    _need(found["version"] == version, "the manifest is of another version")
    _need(found["parent"] is None or found["parent"] < version, "the parent comes later")
    _need(found["anchor"] is not None or None not in (found["delta"], found["parent"]), "no content")
    for part, folder in (("delta", "deltas"), ("anchor", "anchors")):
        keys = [item["key"] for field in ("payloads", "files") for item in (found[part] or {}).get(field, [])]
        _need(len(set(keys)) == len(keys), "a key occurs twice")
        for key in keys:
            parts = key.split("/")
            _need(parts[0] == folder and len(parts) == 3, f"{key!r} lies elsewhere")
            _need(all(PART.fullmatch(p) and p not in {".", ".."} for p in parts), f"{key!r} is no key")
        _need(len({key.split("/")[1] for key in keys}) <= 1, "payloads must lie in one folder")
    sums = found["state"]["sums"]
    key = SUMS.fullmatch(sums["key"])
    _need(key is not None and f"{int(key[1]):08d}" == key[1], "the sums have a wrong key")
    _need(type(sums["size"]) is int and sums["size"] >= 0, "the sums have no size")
    _need(DIGEST.fullmatch(sums["digest"]) is not None, "the sums have no digest")
    return found


def _version_path(bucket: Path, version: int) -> Path:
    return bucket / "versions" / f"{version:08d}.json"


def _payload(bucket: Path, payload: dict[str, Any]) -> bytes:
    data: bytes = (bucket / payload["key"]).read_bytes()
    _need(
        len(data) == payload["size"] and _digest(data) == payload["digest"],
        f"{payload['key']} has other bytes",
    )
    return data


def _json(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(data)
    _need(type(found["format_version"]) is int and found["format_version"] == 1, "another format version")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _need(len(dict(pairs)) == len(pairs), "a name occurs twice")
    return dict(pairs)


def _digest(data: bytes) -> str:
    return f"blake3:{blake3(data).hexdigest()}"


def _need(holds: bool, why: str) -> None:
    if not holds:
        raise Refused(why)
