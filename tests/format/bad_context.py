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
    its: Entries = {"big.idx": ("U16", [len(gaps)], uint16s(*gaps)), "big.val": ("I8", [len(gaps)], values)}
    bad(f"{name} is stated in two payloads", second_payload(its, LIST_OF_BIG))
bad("a second payload changes no tensor", second_payload({}, {}))


def coded(name: str, edit: Callable[[Any, Entries], object], *kinds: str, version: int = 1) -> None:
    """Another delta of `v1-context`."""
    bad(name, in_file("delta", version, edit), *kinds, bucket="v1-context", version=version)


def as_still(head: Head) -> None:
    """The part of `bf16.dense` is one of `bf16.still`, of 20 elements and not 30."""
    head.columns["place"][DENSE] = 2
    head.columns["place"][LEVELS] = 1


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
    "has a row set less": edited(lambda head: setattr(head, "num_sets", head.num_sets - 1)),
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
    coded(f"table {name}", in_entry("table", edit))
coded("table has the place of a smaller tensor", in_entry("table", edited(as_still)), CORRUPT, STATE)
# Two lengths of three bits, of `f8_e4m3.ragged`.
padded = in_entry("table", edited(lambda head: pad(head, 16 * 3 // 8 + 48 * 3 // 8)))
coded("table has lengths padded with a one", padded, version=4)
for row in (
    *((63, 0, 0), (126, 0, 0), (129, 0, 0), (255, 255, 255), (0, 0, 1), (0, 1, 16), (0, 64, 0)),
    *((127, 1, 0), (127, 0, 1), (128, 1, 0), (128, 0, 16), (128, 0, 127), (128, 0, 129)),
):
    coded(f"table has the row {row}", in_entry("table", edited(lambda head, row=row: set_row(head, row))))
coded("tiles are a byte shorter", in_entry("tiles", lambda data: data[:-1]))
coded("tiles are a byte longer", in_entry("tiles", grown))
coded("a stream lacks its last byte", dense_stream(lambda stream: stream[:-1]), STATE)
coded("a stream is empty", dense_stream(lambda _: b""), STATE)
coded("a stream has a byte too many", dense_stream(grown))
coded("a stream has 100 bytes too many", dense_stream(lambda stream: stream + bytes(100)))
coded("a stream has 255 bytes of ones", dense_stream(lambda _: b"\xff" * 255))
for at in (0, 30, 31, 51, 52, 100, 200, -1):
    flipped = in_entry("tiles", lambda data, at=at: flip(8 * (at % len(data)))(data))
    coded(f"tiles have a bit flipped in byte {at}", flipped, CORRUPT, STATE)
for by, its in {
    # 16 << 4 steps are none in eight bits.
    "0": coding(6, (128, 0, 4), [4] + [0] * 15, b"\xff\xff\0\0"),
    # Of eight bits again, sparse: a change of 2 + v, and v = 254 in Rice code with k = 4.
    "a magnitude of 256": coding(6, (0, 1, 4), [3] + [0] * 15, SPARSE_256),
}.items():
    coded(f"a stream changes an element by {by}", lambda _, tensors, its=its: tensors.update(its))


def as_dtype(name: str, dtype: str, shape: list[int]) -> Callable[[Any, Entries], None]:
    """The same bytes with another dtype and shape; -1 stands for their number."""

    def change(_: Any, tensors: Entries) -> None:
        data = tensors[name][2]
        tensors[name] = (dtype, [len(data) if size < 0 else size for size in shape], data)

    return change


for name in ("table", "tiles"):
    coded(f"{name} is missing", lambda _, tensors, name=name: tensors.pop(name))
    for dtype, shape in (("I8", [-1]), ("U8", [-1, 1]), ("U8", [1, -1]), ("BOOL", [-1])):
        what = f"{dtype} in {len(shape)} dimensions, the first of {shape[0]}"
        coded(f"{name} is {what}", as_dtype(name, dtype, shape))
coded("tiles are a scalar", entry("tiles", "U8", [], b"\0"))
coded("tiles are without a table where nothing is coded", entry("tiles", "U8", [0], b""), version=5)
EMPTY = coding(1, (0, 0, 0), [0], b"")
only_a_table = both(lambda _, t: t.clear(), lambda _, t: t.update(EMPTY), metadata("tensors", "{}"))
coded("table has a part and the streams no byte", only_a_table)
also_as_gaps = both(listed("bf16.dense", "BF16", [30]), lambda _, tensors: tensors.update(GAP_OF_DENSE))
coded("a coded tensor is stored as gaps too", also_as_gaps)
ONE = coding(1, (0, 0, 0), [1], b"\xfc")
A_PART = coding(1, (0, 0, 0), [1], b"\xfc", (0, 0, 0, 0, 7, 1))
for name, its, its_list in (
    ("has a coded tensor as gaps", GAP_OF_DENSE, LIST_OF_DENSE),
    ("codes a tensor again", ONE, {}),
    ("codes a part of what the first codes", A_PART, {}),
):
    bad(f"a second payload {name}", second_payload(its, its_list), **CONTEXT)


def also_listed(_: Any, tensors: Entries) -> None:
    """An element of `bf16.matrix` that the first payload codes, in one that codes other rows."""
    tensors |= {"bf16.matrix.idx": ("U16", [1], uint16s(5)), "bf16.matrix.val": ("BF16", [1], bytes(2))}


# Version 1 of `v1-parts` has three payloads, each with some rows of every tensor.
for number in range(3):
    more = in_file("delta", 1, both(listed("bf16.matrix", "BF16", [48, 64]), also_listed), number)
    bad(f"payload {number} lists an element that the first codes", more, bucket="v1-parts", version=1)
as_gap = both(in_file("delta", 1, metadata("encoding", "gap")), in_manifest(1, put("delta.encoding", "gap")))
bad("a coded delta is labelled gap", as_gap, **CONTEXT)
zeros = in_file("anchor", 0, lambda _, tensors: tensors.update({"bf16.dense": ("BF16", [30], bytes(60))}))
bad("the anchor below a coded delta has other weights", zeros, CORRUPT, STATE, **CONTEXT)
