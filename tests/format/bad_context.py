"""Deltas in encoding `context` with a fault, and deltas whose payloads do not fit together."""

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
from tests.format.table_edits import Head, edited, setting, table_of

Sides = tuple[int, int, int, int, int, int]

CASES: list[Bad] = []
bad = into(CASES)

# Encoding `context`. Version 1 codes tensors 0, 1, 3, 5 and 6 of the schema: `bf16.classes` with 6 classes;
# `bf16.dense` (30 elements, one tile), `f16.levels`, `f8_e4m3.ragged` and `f8_e5m2.swapped` with one each.
CONTEXT: dict[str, Any] = {"bucket": "v1-context", "version": 1}
CLASSES, DENSE, LEVELS, RAGGED, SWAPPED = range(5)
"""Their numbers in the table."""
DENSE_ROW, DENSE_BYTES = 6, slice(31, 52)
"""The class of `bf16.dense` among the rows of the table, and its stream in the tiles."""


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
        in_entry("table", setting("least", DENSE, len(stream)))(metadata, tensors)

    return change


def coding(
    place: int, row: tuple[int, int, int], lengths: list[int], streams: bytes, box: Sides = (0,) * 6
) -> Entries:
    """A change of a part of one tensor, with one class; rows in 16 slices where there are 16 lengths."""
    slices = 4 if len(lengths) == 16 else 0
    table = table_of(0, [row], [*lengths[:-1], lengths[-1]], place, box=box, slices=slices)
    return {"table": ("U8", [len(table)], table), "tiles": ("U8", [len(streams)], streams)}


def pad(head: Head, at: int) -> None:
    head.rest = head.rest[:at] + bytes([head.rest[at] | 128]) + head.rest[at + 1 :]


def set_row(head: Head, row: tuple[int, int, int]) -> None:
    head.rows[DENSE_ROW] = list(row)


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
    "has 11 bytes": lambda data: data[:11],
    "ends behind its front": lambda data: data[:12],
    "ends behind its head": lambda data: data[: len(data) - len(Head(data).rest)],
    "has a part less": edited(lambda head: setattr(head, "num_parts", 4)),
    "has a part more": edited(lambda head: setattr(head, "num_parts", 6)),
    "has no parts": edited(lambda head: setattr(head, "num_parts", 0)),
    "claims 2**32-1 parts": edited(lambda head: setattr(head, "num_parts", 2**32 - 1)),
    "has no row sets": edited(lambda head: setattr(head, "num_sets", 0)),
    "has more row sets than parts": edited(lambda head: setattr(head, "num_sets", 6)),
    "has a head that is not compressed": lambda data: data[:12] + Head(data).data() + Head(data).rest,
    "has a damaged head": lambda data: bytes_at(20, data[20] ^ 255)(data),
    "has a head of a byte more": edited(lambda head: setattr(head, "more", b"\0")),
    "has a head of a million bytes more": edited(lambda head: setattr(head, "more", bytes(10**6))),
    "has a head of a row less": edited(lambda head: head.rows.pop()),
    "has a byte behind the compressed head": edited(lambda head: setattr(head, "trailing", b"\0")),
    "has K = 0": edited(lambda head: head.num_classes.__setitem__(0, 0)),
    "has K = 17": edited(lambda head: head.num_classes.__setitem__(0, 17)),
    "has a row set that there is not": setting("set", DENSE, 5),
    "has w = 33": setting("w", CLASSES, 33),
    "has w = 255": setting("w", CLASSES, 255),
    "has a place beyond the schema": setting("place", SWAPPED, 5),
    "has a place far beyond the schema": setting("place", SWAPPED, 2**32 - 1),
    "has a part twice": setting("place", DENSE, 0),
    "has the place of an F32 tensor": setting("place", RAGGED, 1),
    "has the place of an I8 tensor": setting("place", SWAPPED, 2),
    "has the place of a tensor without elements": setting("place", SWAPPED, 4),
    "has the place of a tensor of fewer tiles": setting("place", SWAPPED, 3),
    "has more levels than there are": setting("levels", LEVELS, 4),
    "has no levels": setting("first", LEVELS, 1),
    "has more rows than there are": setting("rows", CLASSES, 17),
    "has a row beyond all": setting("row", CLASSES, 2**63),
    "has more columns than there are": setting("columns", DENSE, 31),
    "has 32 slices": setting("slices", CLASSES, 5),
    "has slices that do not divide": setting("slices", DENSE, 0x20),
    "has another number of slices": setting("slices", CLASSES, 3),
    "says less than there is": setting("least", DENSE, 20),
    "says more than there is": setting("least", DENSE, 22),
    "says 2**32-1": setting("least", DENSE, 2**32 - 1),
}.items():
    bad(f"table {name}", in_file("delta", 1, in_entry("table", edit)), **CONTEXT)


def as_still(head: Head) -> None:
    """The part of `bf16.dense` is one of `bf16.still`, of 20 elements and not 30."""
    head.columns["place"][DENSE] = 2
    head.columns["place"][LEVELS] = 1


bad(
    "table has the place of a smaller tensor",
    in_file("delta", 1, in_entry("table", edited(as_still))),
    CORRUPT,
    STATE,
    **CONTEXT,
)
bad(
    "table has lengths padded with a one",
    # Two lengths of three bits, of `f8_e4m3.ragged`.
    in_file("delta", 4, in_entry("table", edited(lambda head: pad(head, 16 * 3 // 8 + 48 * 3 // 8)))),
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
        in_file("delta", 1, in_entry("table", edited(lambda head, row=row: set_row(head, row)))),
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
    "a second payload codes a part of what the first codes",
    second_payload(coding(1, (0, 0, 0), [1], b"\xfc", (0, 0, 0, 0, 7, 1)), {}),
    **CONTEXT,
)
# Version 1 of `v1-parts` has three payloads, each with some rows of every tensor.
PARTS: dict[str, Any] = {"bucket": "v1-parts", "version": 1}


def also_listed(_: Any, tensors: Entries) -> None:
    """An element of `bf16.matrix` that the first payload codes, in one that codes other rows."""
    tensors |= {"bf16.matrix.idx": ("U16", [1], uint16s(5)), "bf16.matrix.val": ("BF16", [1], bytes(2))}


for number in range(3):
    bad(
        f"payload {number} lists an element that the first codes",
        in_file("delta", 1, both(listed("bf16.matrix", "BF16", [48, 64]), also_listed), number),
        **PARTS,
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
