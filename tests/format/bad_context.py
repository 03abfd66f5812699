"""Deltas in encoding `context` with a fault, and deltas whose payloads do not fit together."""

import struct
from collections.abc import Callable
from typing import Any

from tests.format.bucket_edits import (
    CORRUPT,
    STATE,
    Bad,
    both,
    entry,
    grown,
    in_file,
    in_manifest,
    into,
    listed,
    metadata,
    put,
    second_payload,
    uint16s,
)
from tests.format.surgery import Entries

CASES: list[Bad] = []
bad = into(CASES)

# Encoding `context`. Version 1 codes tensors 0, 1, 3, 5 and 6 of the schema: `bf16.classes` with 6 classes;
# `bf16.dense` (30 elements, one tile), `f16.levels`, `f8_e4m3.ragged` and `f8_e5m2.swapped` with one each.
CONTEXT: dict[str, Any] = {"bucket": "v1-context", "version": 1}
RECORDS, ROWS = 4, 4 + 5 * 12
"""Where they begin in the table."""
DENSE, LEVELS, RAGGED, SWAPPED = (RECORDS + 12 * number for number in range(1, 5))
"""Where the records of these tensors do."""
DENSE_ROW, DENSE_BYTES = ROWS + 6 * 3, slice(31, 52)
"""The class of `bf16.dense` in the table, and its stream in the tiles."""


def in_entry(name: str, edit: Callable[[bytes], bytes]) -> Callable[[Any, Entries], None]:
    """Other bytes in an entry of bytes."""

    def change(_: Any, tensors: Entries) -> None:
        data = edit(tensors[name][2])
        tensors[name] = ("U8", [len(data)], data)

    return change


def bytes_at(at: int, *values: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes(values) + data[at + len(values) :]


def flip(bit: int) -> Callable[[bytes], bytes]:
    return lambda data: bytes_at(bit >> 3, data[bit >> 3] ^ 1 << (bit & 7))(data)


def dense_stream(edit: Callable[[bytes], bytes]) -> Callable[[Any, Entries], None]:
    """Another stream of `bf16.dense`, and a table that says how long it is."""

    def change(metadata: Any, tensors: Entries) -> None:
        data = tensors["tiles"][2]
        stream = edit(data[DENSE_BYTES])
        data = data[: DENSE_BYTES.start] + stream + data[DENSE_BYTES.stop :]
        tensors["tiles"] = ("U8", [len(data)], data)
        in_entry("table", bytes_at(DENSE + 8, len(stream)))(metadata, tensors)

    return change


def coding(place: int, row: tuple[int, int, int], lengths: list[int], streams: bytes) -> Entries:
    """A change of one tensor with one class."""
    table = struct.pack("<IIBBBBI", 1, place, 0, 1, 8, 0, 0) + bytes(row) + bytes(lengths)
    return {"table": ("U8", [len(table)], table), "tiles": ("U8", [len(streams)], streams)}


# Bits, the first in front: a change, its sign, a run of no ones, 15 ones and a zero, and 14 in four bits.
SPARSE_256 = int("".join(reversed("0" + "0" + "0" + "1" * 15 + "0" + "0111" + "1")), 2).to_bytes(3, "little")


GAP_OF_DENSE: Entries = {
    "bf16.dense.idx": ("U16", [1], uint16s(0)),
    "bf16.dense.val": ("BF16", [1], bytes(2)),
}
LIST_OF_DENSE = {"bf16.dense": {"dtype": "BF16", "shape": [30]}}

LIST_OF_BIG = {"big": {"dtype": "I8", "shape": [140_000]}}
for name, gaps, values in (("a change", [3], b"\1"), ("a bridge", [65_535, 65_535, 3], bytes(3))):
    # At 3, and at 131,075, where version 1 has a change and a bridge; with the values that they have there.
    bad(
        f"{name} is stated in two payloads",
        second_payload(
            {"big.idx": ("U16", [len(gaps)], uint16s(*gaps)), "big.val": ("I8", [len(gaps)], values)},
            LIST_OF_BIG,
        ),
    )
bad("a second payload changes no tensor", second_payload({}, {}))
for name, edit in {
    "is a byte shorter": lambda data: data[:-1],
    "is a byte longer": lambda data: data + b"\0",
    "is empty": lambda _: b"",
    "has 3 bytes": lambda data: data[:3],
    "ends behind its records": lambda data: data[:ROWS],
    "has a tensor less": bytes_at(0, 4),
    "has a tensor more": bytes_at(0, 6),
    "claims 2**32-1 tensors": bytes_at(0, 255, 255, 255, 255),
    "has K = 0": bytes_at(RECORDS + 5, 0),
    "has K = 17": bytes_at(RECORDS + 5, 17),
    "has w = 33": bytes_at(RECORDS + 6, 33),
    "has w = 255": bytes_at(RECORDS + 6, 255),
    "has another byte than zero": bytes_at(RECORDS + 7, 1),
    "has a place beyond the schema": bytes_at(SWAPPED, 10),
    "has a place far beyond the schema": bytes_at(SWAPPED + 3, 255),
    "has a place twice": bytes_at(DENSE, 0),
    "has places that descend": bytes_at(RECORDS, 2),
    "has the place of an F32 tensor": bytes_at(RAGGED, 4),
    "has the place of an I8 tensor": bytes_at(SWAPPED, 7),
    "has the place of a tensor without elements": bytes_at(SWAPPED, 9),
    "has the place of a tensor of fewer tiles": bytes_at(SWAPPED, 8),
    "says less than there is": bytes_at(DENSE + 8, 20),
    "says more than there is": bytes_at(DENSE + 8, 22),
    "says 2**32-1": bytes_at(DENSE + 8, 255, 255, 255, 255),
}.items():
    bad(f"table {name}", in_file("delta", 1, in_entry("table", edit)), **CONTEXT)
bad(
    "table has the place of a smaller tensor",
    in_file("delta", 1, in_entry("table", bytes_at(DENSE, 2))),
    CORRUPT,
    STATE,
    **CONTEXT,
)
bad(
    "table has lengths padded with a one",
    # Two lengths of three bits, of `f8_e4m3.ragged`.
    in_file("delta", 4, in_entry("table", flip(8 * (4 + 4 * 15 + 16 * 3 // 8 + 48 * 3 // 8) + 7))),
    bucket="v1-context",
    version=4,
)
for row in (
    (63, 0, 0),
    (126, 0, 0),
    (129, 0, 0),
    (255, 255, 255),
    (0, 0, 1),
    (0, 1, 16),
    (0, 64, 0),
    (127, 1, 0),
    (127, 0, 1),
    (128, 1, 0),
    (128, 0, 16),
    (128, 0, 127),
    (128, 0, 129),
):
    bad(
        f"table has the row {row}",
        in_file("delta", 1, in_entry("table", bytes_at(DENSE_ROW, *row))),
        **CONTEXT,
    )
bad("tiles are a byte shorter", in_file("delta", 1, in_entry("tiles", lambda data: data[:-1])), **CONTEXT)
bad("tiles are a byte longer", in_file("delta", 1, in_entry("tiles", grown)), **CONTEXT)
bad("a stream lacks its last byte", in_file("delta", 1, dense_stream(lambda s: s[:-1])), STATE, **CONTEXT)
bad("a stream is empty", in_file("delta", 1, dense_stream(lambda _: b"")), STATE, **CONTEXT)
bad("a stream has a byte too many", in_file("delta", 1, dense_stream(grown)), **CONTEXT)
bad("a stream has 100 bytes too many", in_file("delta", 1, dense_stream(lambda s: s + bytes(100))), **CONTEXT)
bad("a stream has 255 bytes of ones", in_file("delta", 1, dense_stream(lambda _: b"\xff" * 255)), **CONTEXT)
for at in (0, 30, 31, 51, 52, 100, 200, -1):
    bad(
        f"tiles have a bit flipped in byte {at}",
        in_file("delta", 1, in_entry("tiles", lambda data, at=at: flip(8 * (at % len(data)))(data))),
        CORRUPT,
        STATE,
        **CONTEXT,
    )
bad(
    "a stream changes an element by 0",
    # 16 << 4 steps are none in eight bits.
    in_file("delta", 1, lambda _, t: t.update(coding(6, (128, 0, 4), [4] + [0] * 15, b"\xff\xff\0\0"))),
    **CONTEXT,
)
bad(
    "a stream changes an element by a magnitude of 256",
    # Of eight bits again, sparse: a change of 2 + v, and v = 254 in Rice code with k = 4.
    in_file("delta", 1, lambda _, t: t.update(coding(6, (0, 1, 4), [3] + [0] * 15, SPARSE_256))),
    **CONTEXT,
)
for name in ("table", "tiles"):
    bad(f"{name} is missing", in_file("delta", 1, lambda _, t, name=name: t.pop(name)), **CONTEXT)
    for dtype, shape in (("I8", [-1]), ("U8", [-1, 1]), ("U8", [1, -1]), ("BOOL", [-1])):
        bad(
            f"{name} is {dtype} in {len(shape)} dimensions, the first of {shape[0]}",
            in_file(
                "delta",
                1,
                lambda _, t, name=name, dtype=dtype, shape=shape: t.update(
                    {name: (dtype, [len(t[name][2]) if s < 0 else s for s in shape], t[name][2])}
                ),
            ),
            **CONTEXT,
        )
bad("tiles are a scalar", in_file("delta", 1, entry("tiles", "U8", [], b"\0")), **CONTEXT)
bad(
    "tiles are without a table where nothing is coded",
    in_file("delta", 5, entry("tiles", "U8", [0], b"")),
    bucket="v1-context",
    version=5,
)
bad(
    "a coded tensor is stored as gaps too",
    in_file("delta", 1, both(listed("bf16.dense", "BF16", [30]), lambda _, t: t.update(GAP_OF_DENSE))),
    **CONTEXT,
)
bad("a second payload has a coded tensor as gaps", second_payload(GAP_OF_DENSE, LIST_OF_DENSE), **CONTEXT)
bad(
    "a second payload codes a tensor again",
    second_payload(coding(1, (0, 0, 0), [1], b"\xfc"), {}),
    **CONTEXT,
)
bad(
    "a coded delta is labelled gap",
    lambda objects: (
        in_file("delta", 1, metadata("encoding", "gap"))(objects),
        in_manifest(1, put("delta.encoding", "gap"))(objects),
    ),
    **CONTEXT,
)
bad(
    "the anchor below a coded delta has other weights",
    in_file("anchor", 0, lambda _, t: t.update({"bf16.dense": ("BF16", [30], bytes(60))})),
    CORRUPT,
    STATE,
    **CONTEXT,
)
