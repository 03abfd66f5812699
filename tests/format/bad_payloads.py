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
for part, version in (("delta", 1), ("anchor", 0)):
    bad(f"{part} truncated", spoiled(part, version, lambda data: data[:-1]))
    bad(f"{part} cut in half", spoiled(part, version, lambda data: data[: len(data) // 2]))
    bad(f"{part} emptied", spoiled(part, version, lambda _: b""))
    bad(f"{part} goes on", spoiled(part, version, grown))
    bad(f"{part} has a flipped bit", spoiled(part, version, lambda data: data[:-1] + bytes([data[-1] ^ 4])))
    bad(f"{part} is missing", missing(part, version))
bad(
    "config has other bytes",
    lambda objects: objects.update({next(k for k in objects if "config" in k): b"{}"}),
    bucket="v1-sharded",
    beyond_followers=True,
)

# Safetensors files that break its rules, or this format's.
for part, version in (("delta", 1), ("anchor", 0)):
    bad(f"{part} is empty and vouched for", vouched(part, version, lambda _: b""))
    bad(f"{part} has 7 bytes", vouched(part, version, lambda data: data[:7]))
    bad(
        f"{part} claims a header of 2**63 bytes",
        vouched(part, version, lambda d: struct.pack("<Q", 2**63) + d[8:]),
    )
    bad(f"{part} claims a header of 2**64-1 bytes", vouched(part, version, lambda d: b"\xff" * 8 + d[8:]))
    bad(
        f"{part} has a header that is no JSON",
        vouched(part, version, lambda _: surgery.put_together(b"{]", b"")),
    )
    bad(f"{part} has a list for a header", vouched(part, version, lambda _: surgery.put_together(b"[]", b"")))
    bad(
        f"{part} has a header nested without end",
        vouched(part, version, lambda _: surgery.put_together(b'{"a":' * 100_000, b"")),
    )
    bad(f"{part} has tensors that overlap", in_header(part, version, move_first(-1)))
    bad(f"{part} has a hole", in_header(part, version, move_first(1)))
    bad(f"{part} has a name twice", vouched(part, version, repeated))
    bad(f"{part} has bytes behind its tensors", vouched(part, version, grown))
    bad(f"{part} has metadata that are no strings", in_file(part, version, metadata("step", 1)))
    bad(f"{part} has an unknown tensor", in_file(part, version, entry("unknown", "U8", [1], b"\0")))
    bad(
        f"{part} has a tensor of unknown dtype",
        in_file(part, version, entry("big.more", "C64", [1], bytes(8))),
    )
    bad(
        f"{part} has a tensor of 2**48 x 2**48 x 0",
        in_file(part, version, entry("x", "U8", [2**48, 2**48, 0], b"")),
    )
    bad(
        f"{part} has a tensor of 1,000 dimensions",
        in_file(part, version, entry("x", "U8", [1] * 1000, b"\0")),
    )
    bad(f"{part} has a negative size", in_file(part, version, entry("x", "U8", [-1, 0], b"")))
    bad(f"{part} has a fractional size", in_file(part, version, entry("x", "U8", [1.0], b"\0")))  # type: ignore[list-item]
    bad(f"{part} has a size of true", in_file(part, version, entry("x", "U8", [True], b"\0")))
    bad(f"{part} has a dtype that is a list", in_file(part, version, entry("x", ["U8"], [1], b"\0")))  # type: ignore[arg-type]
    for field in ("dtype", "shape", "data_offsets"):
        bad(f"{part} has a tensor without {field}", in_header(part, version, drop_in_first(field)))
    bad(f"{part} has a name with a newline", in_file(part, version, entry("a\nb", "U8", [1], b"\0")))
bad(
    "anchor has another shape",
    in_file("anchor", 0, lambda _, t: t.update(scalar=("BF16", [1], t["scalar"][2]))),
    version=0,
)
bad(
    "anchor has another dtype",
    in_file("anchor", 0, lambda _, t: t.update(scalar=("F16", [], t["scalar"][2]))),
    version=0,
)
bad("anchor lacks a tensor", in_file("anchor", 0, lambda _, tensors: tensors.pop("scalar")), version=0)
bad(
    "anchor lacks a tensor without elements",
    in_file("anchor", 0, lambda _, tensors: tensors.pop("zero-size")),
    version=0,
)
bad(
    "anchor is someone else's checkpoint",
    vouched("anchor", 0, lambda _: surgery.tensor_file({"format": "pt"}, {"w": ("F32", [1], bytes(4))})),
    version=0,
)
bad(
    "anchor holds a tensor in two files",
    lambda objects: surgery.edit_file(objects, 0, "anchor", entry("b", "BF16", [20], bytes(40)), 0),
    bucket="v1-sharded",
    version=0,
)

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
bad(
    "delta is someone else's checkpoint",
    vouched("delta", 1, lambda _: surgery.tensor_file(None, {"big": ("I8", [140_000], bytes(140_000))})),
)
bad(
    "delta is another version's",
    lambda objects: surgery.put_payload(objects, 1, "delta", surgery.payload(objects, 3, "delta")),
)
bad("delta lists nothing", in_file("delta", 1, metadata("tensors", "{}")))
bad("delta lists no JSON", in_file("delta", 1, metadata("tensors", "{")))
bad("delta lists a number", in_file("delta", 1, metadata("tensors", "3")))
bad(
    "delta lists a tensor twice",
    in_file("delta", 1, lambda f, _: f.update(tensors=f["tensors"][:-1] + "," + f["tensors"][1:])),
)
bad(
    "delta lists an unknown tensor",
    in_file(
        "delta",
        1,
        both(
            listed("new", "U8", [1]),
            entry("new.idx", "U16", [1], bytes(2)),
            entry("new.val", "U8", [1], b"\0"),
        ),
    ),
)
bad(
    "delta lists a tensor by its tied name",
    in_file(
        "delta",
        1,
        both(
            listed("tied-to-big", "I8", [140_000]),
            entry("tied-to-big.idx", "U16", [1], bytes(2)),
            entry("tied-to-big.val", "I8", [1], b"\0"),
        ),
    ),
)
bad("delta lists a shape of fractions", in_file("delta", 1, listed("big", "I8", [140_000.0])))  # type: ignore[list-item]
bad("delta lists a shape that is no list", in_file("delta", 1, listed("big", "I8", "140000")))  # type: ignore[arg-type]
bad(
    "delta lists no dtype", in_file("delta", 1, lambda f, _: f.update(tensors='{"big": {"shape": [140000]}}'))
)
bad("delta lists no shape", in_file("delta", 1, lambda f, _: f.update(tensors='{"big": {"dtype": "I8"}}')))
bad("delta lists nothing of a tensor", in_file("delta", 1, lambda f, _: f.update(tensors='{"big": null}')))
bad("delta lists another shape", in_file("delta", 1, listed("big", "I8", [70_000, 2])))
bad("delta lists another dtype", in_file("delta", 1, listed("big", "U8", [140_000])))
bad("delta lacks positions", in_file("delta", 1, lambda _, tensors: tensors.pop("big.idx")))
bad("delta lacks values", in_file("delta", 1, lambda _, tensors: tensors.pop("big.val")))

# Positions and values. `big` has 140,000 elements of I8, and 4 stated positions.
bad(
    "gaps reach the tensor's end",
    in_file("delta", 1, entry("big.idx", "U16", [4], uint16s(3, 65_535, 65_535, 8_926))),
)
bad("gaps reach far beyond", in_file("delta", 1, entry("big.idx", "U16", [4], b"\xff" * 8)))
bad(
    "a gap is other than it was",
    in_file("delta", 1, entry("big.idx", "U16", [4], uint16s(3, 65_535, 65_535, 1))),
    STATE,
)
bad("a value is other than it was", in_file("delta", 1, entry("big.val", "I8", [4], bytes(4))), STATE)
bad("gaps are int16", in_file("delta", 1, entry("big.idx", "I16", [4], uint16s(3, 65_535, 65_535, 8_925))))
bad("gaps are int32", in_file("delta", 1, entry("big.idx", "I32", [4], int32s(3, 65_535, 65_535, 8_925))))
bad(
    "nothing is stated of a tensor",
    in_file(
        "delta",
        1,
        both(
            listed("i8.weight", "I8", [2, 3]),
            entry("i8.weight.idx", "U16", [0], b""),
            entry("i8.weight.val", "I8", [0], b""),
        ),
    ),
)
bad("gaps have two dimensions", in_file("delta", 1, entry("big.idx", "U16", [2, 2], bytes(8))))
bad("gaps are a scalar", in_file("delta", 1, entry("big.idx", "U16", [], bytes(2))))
bad("there are more gaps than values", in_file("delta", 1, entry("big.idx", "U16", [5], bytes(10))))
bad("there are more values than gaps", in_file("delta", 1, entry("big.val", "I8", [5], bytes(5))))
bad("values are of another dtype", in_file("delta", 1, entry("big.val", "U8", [4], bytes(4))))
bad("values are of another shape", in_file("delta", 1, entry("big.val", "I8", [4, 1], bytes(4))))
RAW: dict[str, Any] = {"bucket": "v1-raw", "version": 1}
# `u8.weight` has 6 elements, the last two of which changed.
for name, data in {
    "descend": int32s(5, 4),
    "are equal": int32s(4, 4),
    "are negative": int32s(-1, 4),
    "reach the tensor's end": int32s(4, 6),
    "reach far beyond": int32s(4, 2**31 - 1),
}.items():
    bad(f"raw positions {name}", in_file("delta", 1, entry("u8.weight.idx", "I32", [2], data)), **RAW)
bad(
    "raw positions are int64",
    in_file("delta", 1, entry("u8.weight.idx", "I64", [2], struct.pack("<2q", 4, 5))),
    **RAW,
)
bad("raw positions are uint32", in_file("delta", 1, entry("u8.weight.idx", "U32", [2], int32s(4, 5))), **RAW)
bad(
    "raw positions are other than they were",
    in_file("delta", 1, entry("u8.weight.idx", "I32", [2], int32s(2, 3))),
    STATE,
    **RAW,
)

# Elements of BOOL, which are a byte each.
for bucket, idx in (("v1-gap", ("U16", [1], uint16s(5))), ("v1-raw", ("I32", [1], int32s(5)))):
    for byte in (2, 255):
        bad(
            f"an element of BOOL becomes {byte} in {bucket}",
            in_file("delta", 1, bool_of(idx, byte)),
            bucket=bucket,
        )
bad(
    "an element of BOOL is 2 in an anchor",
    in_file("anchor", 0, entry("bool.weight", "BOOL", [6], bytes([0, 1, 0, 1, 0, 2]))),
    version=0,
)
