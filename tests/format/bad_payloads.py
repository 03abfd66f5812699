"""Payloads with a fault: their bytes, their safetensors headers, and what deltas state."""

import struct
from typing import Any

from tests.format import surgery
from tests.format.bucket_edits import (
    STATE,
    Bad,
    bool_of,
    both,
    drop_in_first,
    entry,
    grown,
    in_file,
    in_header,
    int32s,
    into,
    listed,
    metadata,
    missing,
    move_first,
    repeated,
    spoiled,
    uint16s,
    vouched,
)

CASES: list[Bad] = []
bad = into(CASES)

# Bytes that no digest vouches for.
SPOILED = {
    "truncated": lambda data: data[:-1],
    "cut in half": lambda data: data[: len(data) // 2],
    "emptied": lambda _: b"",
    "goes on": grown,
    "has a flipped bit": lambda data: data[:-1] + bytes([data[-1] ^ 4]),
}
# Safetensors files that break its rules, or this format's.
VOUCHED = {
    "is empty and vouched for": lambda _: b"",
    "has 7 bytes": lambda data: data[:7],
    "claims a header of 2**63 bytes": lambda data: struct.pack("<Q", 2**63) + data[8:],
    "claims a header of 2**64-1 bytes": lambda data: b"\xff" * 8 + data[8:],
    "has a header that is no JSON": lambda _: surgery.put_together(b"{]", b""),
    "has a list for a header": lambda _: surgery.put_together(b"[]", b""),
    "has a header nested without end": lambda _: surgery.put_together(b'{"a":' * 100_000, b""),
    "has a name twice": repeated,
    "has bytes behind its tensors": grown,
}
HEADERS = {
    "has tensors that overlap": move_first(-1),
    "has a hole": move_first(1),
    **{f"has a tensor without {field}": drop_in_first(field) for field in ("dtype", "shape", "data_offsets")},
}
ENTRIES: dict[str, tuple[Any, Any, Any, bytes]] = {
    "has an unknown tensor": ("unknown", "U8", [1], b"\0"),
    "has a tensor of unknown dtype": ("big.more", "C64", [1], bytes(8)),
    "has a tensor of 2**48 x 2**48 x 0": ("x", "U8", [2**48, 2**48, 0], b""),
    "has a tensor of 1,000 dimensions": ("x", "U8", [1] * 1000, b"\0"),
    "has a negative size": ("x", "U8", [-1, 0], b""),
    "has a fractional size": ("x", "U8", [1.0], b"\0"),
    "has a size of true": ("x", "U8", [True], b"\0"),
    "has a dtype that is a list": ("x", ["U8"], [1], b"\0"),
    "has a name with a newline": ("a\nb", "U8", [1], b"\0"),
}
for part, version in (("delta", 1), ("anchor", 0)):
    for name, edit in SPOILED.items():
        bad(f"{part} {name}", spoiled(part, version, edit))
    bad(f"{part} is missing", missing(part, version))
    for name, edit in VOUCHED.items():
        bad(f"{part} {name}", vouched(part, version, edit))
    for name, in_its_header in HEADERS.items():
        bad(f"{part} {name}", in_header(part, version, in_its_header))
    for name, its in ENTRIES.items():
        bad(f"{part} {name}", in_file(part, version, entry(*its)))
    bad(f"{part} has metadata that are no strings", in_file(part, version, metadata("step", 1)))
bad(
    "config has other bytes",
    lambda objects: objects.update({next(k for k in objects if "config" in k): b"{}"}),
    bucket="v1-sharded",
    beyond_followers=True,
)
ANCHOR_EDITS = {
    "has another shape": lambda _, t: t.update(scalar=("BF16", [1], t["scalar"][2])),
    "has another dtype": lambda _, t: t.update(scalar=("F16", [], t["scalar"][2])),
    "lacks a tensor": lambda _, t: t.pop("scalar"),
    "lacks a tensor without elements": lambda _, t: t.pop("zero-size"),
    "has an element of BOOL that is 2": entry("bool.weight", "BOOL", [6], bytes([0, 1, 0, 1, 0, 2])),
}
for name, edit in ANCHOR_EDITS.items():
    bad(f"anchor {name}", in_file("anchor", 0, edit), version=0)
OTHERS = surgery.tensor_file({"format": "pt"}, {"w": ("F32", [1], bytes(4))})
bad("anchor is someone else's checkpoint", vouched("anchor", 0, lambda _: OTHERS), version=0)
twice = in_file("anchor", 0, entry("b", "BF16", [20], bytes(40)), 0)
bad("anchor holds a tensor in two files", twice, bucket="v1-sharded", version=0)

# Deltas that are not their manifest's.
for field, value in {
    "format": "pt",
    "format_version": "2",
    "kind": "anchor",
    "run_id": "another",
    "version": "2",
    "parent": "7",
    "step": "101",
    "encoding": "raw",
}.items():
    bad(f"delta is labelled {field} {value}", in_file("delta", 1, metadata(field, value)))
    bad(f"delta has no {field}", in_file("delta", 1, lambda found, _, field=field: found.pop(field)))
OTHER = surgery.tensor_file(None, {"big": ("I8", [140_000], bytes(140_000))})
bad("delta is someone else's checkpoint", vouched("delta", 1, lambda _: OTHER))
bad(
    "delta is another version's",
    lambda objects: surgery.put_payload(objects, 1, "delta", surgery.payload(objects, 3, "delta")),
)
for name, edit in {
    "lists nothing": metadata("tensors", "{}"),
    "lists no JSON": metadata("tensors", "{"),
    "lists a number": metadata("tensors", "3"),
    "lists a tensor twice": lambda f, _: f.update(tensors=f["tensors"][:-1] + "," + f["tensors"][1:]),
    "lists an unknown tensor": both(
        listed("new", "U8", [1]), entry("new.idx", "U16", [1], bytes(2)), entry("new.val", "U8", [1], b"\0")
    ),
    "lists a tensor by its tied name": both(
        listed("tied-to-big", "I8", [140_000]),
        entry("tied-to-big.idx", "U16", [1], bytes(2)),
        entry("tied-to-big.val", "I8", [1], b"\0"),
    ),
    "lists a shape of fractions": listed("big", "I8", [140_000.0]),  # type: ignore[list-item]
    "lists a shape that is no list": listed("big", "I8", "140000"),  # type: ignore[arg-type]
    "lists no dtype": metadata("tensors", '{"big": {"shape": [140000]}}'),
    "lists no shape": metadata("tensors", '{"big": {"dtype": "I8"}}'),
    "lists nothing of a tensor": metadata("tensors", '{"big": null}'),
    "lists another shape": listed("big", "I8", [70_000, 2]),
    "lists another dtype": listed("big", "U8", [140_000]),
    "lacks positions": lambda _, tensors: tensors.pop("big.idx"),
    "lacks values": lambda _, tensors: tensors.pop("big.val"),
    # `big` has 140,000 elements of I8, and 4 stated positions.
    "has gaps to the tensor's end": entry("big.idx", "U16", [4], uint16s(3, 65_535, 65_535, 8_926)),
    "has gaps far beyond the end": entry("big.idx", "U16", [4], b"\xff" * 8),
    "has gaps in int16": entry("big.idx", "I16", [4], uint16s(3, 65_535, 65_535, 8_925)),
    "has gaps in int32": entry("big.idx", "I32", [4], int32s(3, 65_535, 65_535, 8_925)),
    "states nothing of a tensor": both(
        listed("i8.weight", "I8", [2, 3]),
        entry("i8.weight.idx", "U16", [0], b""),
        entry("i8.weight.val", "I8", [0], b""),
    ),
    "has gaps of two dimensions": entry("big.idx", "U16", [2, 2], bytes(8)),
    "has gaps that are a scalar": entry("big.idx", "U16", [], bytes(2)),
    "has more gaps than values": entry("big.idx", "U16", [5], bytes(10)),
    "has more values than gaps": entry("big.val", "I8", [5], bytes(5)),
    "has values of another dtype": entry("big.val", "U8", [4], bytes(4)),
    "has values of another shape": entry("big.val", "I8", [4, 1], bytes(4)),
}.items():
    bad(f"delta {name}", in_file("delta", 1, edit))
for name, edit in {
    "gap": entry("big.idx", "U16", [4], uint16s(3, 65_535, 65_535, 1)),
    "value": entry("big.val", "I8", [4], bytes(4)),
}.items():
    bad(f"a {name} is other than it was", in_file("delta", 1, edit), STATE)

# `f4.weight` has 256 elements of two codes, of which 7 changed.
CODES: dict[str, Any] = {"bucket": "v1-codes", "version": 1}
for name, val in (
    ("a value for each code", ("F4", [7], bytes(7))),
    ("an odd number of codes", ("F4", [13], bytes(7))),
    ("values of two dimensions", ("F4", [7, 2], bytes(7))),
    ("bytes as values", ("U8", [7], bytes(7))),
):
    bad(f"F4 has {name}", in_file("delta", 1, entry("f4.weight.val", *val)), **CODES)

# `u8.weight` has 6 elements, the last two of which changed.
RAW: dict[str, Any] = {"bucket": "v1-raw", "version": 1}
for name, dtype, data in (
    ("descend", "I32", int32s(5, 4)),
    ("are equal", "I32", int32s(4, 4)),
    ("are negative", "I32", int32s(-1, 4)),
    ("reach the tensor's end", "I32", int32s(4, 6)),
    ("reach far beyond", "I32", int32s(4, 2**31 - 1)),
    ("are int64", "I64", struct.pack("<2q", 4, 5)),
    ("are uint32", "U32", int32s(4, 5)),
):
    bad(f"raw positions {name}", in_file("delta", 1, entry("u8.weight.idx", dtype, [2], data)), **RAW)
others = in_file("delta", 1, entry("u8.weight.idx", "I32", [2], int32s(2, 3)))
bad("raw positions are other than they were", others, STATE, **RAW)

# Elements of BOOL, which are a byte each.
for bucket, idx in (("v1-gap", ("U16", [1], uint16s(5))), ("v1-raw", ("I32", [1], int32s(5)))):
    for byte in (2, 255):
        edit = in_file("delta", 1, bool_of(idx, byte))
        bad(f"an element of BOOL becomes {byte} in {bucket}", edit, bucket=bucket)
