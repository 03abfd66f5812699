"""What can be wrong with a bucket, and the kind of error that each must give.

Each case is a small change to a golden bucket. Unless the case is about digests, sizes and digests
are mended around the change, so that the check behind them is reached.
"""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.format import surgery
from tests.format.surgery import Entries, Objects

CORRUPT, UNSUPPORTED, STATE = "corrupt-object", "unsupported-format", "state-mismatch"


@dataclass(frozen=True, kw_only=True)
class Bad:
    name: str
    kinds: tuple[str, ...]
    """The error's kind; several where the format leaves open which check comes first."""
    change: Callable[[Objects], object]
    bucket: str = "v1-gap"
    version: int = 1
    """The version that must not be readable any more."""
    beyond_followers: bool = False
    """Whether it is about files that only a replay reads."""
    only_verified: bool = False
    """Whether it is about what only a verification reads."""


CASES: list[Bad] = []


def bad(name: str, change: Callable[[Objects], object], *kinds: str, **where: Any) -> None:
    CASES.append(Bad(name=name, kinds=kinds or (CORRUPT,), change=change, **where))


def key_of(objects: Objects, version: int, part: str) -> str:
    return surgery.manifest(objects, version)[part]["payloads"][0]["key"]  # type: ignore[no-any-return]


def spoiled(part: str, version: int, spoil: Callable[[bytes], bytes]) -> Callable[[Objects], None]:
    """Other bytes under a payload's key, and nothing mended."""

    def change(objects: Objects) -> None:
        key = key_of(objects, version, part)
        objects[key] = spoil(objects[key])

    return change


def missing(part: str, version: int) -> Callable[[Objects], object]:
    return lambda objects: objects.pop(key_of(objects, version, part))


def vouched(part: str, version: int, edit: Callable[[bytes], bytes]) -> Callable[[Objects], None]:
    """Other bytes of a payload, and a manifest that vouches for them."""
    return lambda objects: surgery.put_payload(
        objects, version, part, edit(surgery.payload(objects, version, part))
    )


def in_manifest(version: int, edit: Callable[[Any], object]) -> Callable[[Objects], None]:
    return lambda objects: surgery.edit_manifest(objects, version, edit)


def in_file(part: str, version: int, edit: Callable[[Any, Entries], object]) -> Callable[[Objects], None]:
    return lambda objects: surgery.edit_file(objects, version, part, edit)


def in_header(part: str, version: int, edit: Callable[[Any], object]) -> Callable[[Objects], None]:
    return lambda objects: surgery.edit_header(objects, version, part, edit)


def in_text(key: str, edit: Callable[[str], bytes]) -> Callable[[Objects], None]:
    """Other bytes for the text of a JSON object, which its children vouch for."""

    def change(objects: Objects) -> None:
        data = edit(objects[key].decode())
        objects[key] = data
        if key.startswith("versions/"):
            surgery.put_manifest(objects, int(key[9:17]), data)

    return change


def in_header_text(part: str, version: int, edit: Callable[[str], bytes]) -> Callable[[Objects], None]:
    """Other bytes for the text of a payload's header."""

    def change(objects: Objects) -> None:
        header, rest = surgery.take_apart(surgery.payload(objects, version, part))
        data = surgery.put_together(edit(json.dumps(header)), rest)
        surgery.put_payload(objects, version, part, data)

    return change


def in_list(metadata: Any, edit: Callable[[str], bytes]) -> None:
    """Another text of a delta's list of tensors."""
    metadata["tensors"] = edit(metadata["tensors"]).decode()


def in_store_json(edit: Callable[[Any], object]) -> Callable[[Objects], None]:
    return lambda objects: surgery.edit_json(objects, "store.json", edit)


def put(path: str, value: object) -> Callable[[Any], None]:
    """Set a field of nested objects: `put("writer.epoch", 3)`."""
    *folders, last = [int(part) if part.isdigit() else part for part in path.split(".")]

    def edit(record: Any) -> None:
        for folder in folders:
            record = record[folder]
        record[last] = value

    return edit


def drop(field: str) -> Callable[[Any], object]:
    return lambda record: record.pop(field)


def metadata(field: str, value: object) -> Callable[[Any, Entries], None]:
    return lambda found, _: found.__setitem__(field, value)


def entry(name: str, dtype: str, shape: list[int], data: bytes) -> Callable[[Any, Entries], None]:
    return lambda _, tensors: tensors.__setitem__(name, (dtype, shape, data))


def listed(name: str, dtype: str, shape: list[int]) -> Callable[[Any, Entries], None]:
    """Add a tensor to a delta's own list."""

    def edit(found: Any, _: Entries) -> None:
        found["tensors"] = json.dumps(
            {**json.loads(found["tensors"]), name: {"dtype": dtype, "shape": shape}}
        )

    return edit


def bool_of(idx: tuple[str, list[int], bytes], byte: int) -> Callable[[Any, Entries], None]:
    """State one element of `bool.weight`."""
    return both(
        listed("bool.weight", "BOOL", [6]),
        lambda _, tensors: tensors.update({"bool.weight.idx": idx}),
        entry("bool.weight.val", "BOOL", [1], bytes([byte])),
    )


def both(*edits: Callable[..., object]) -> Callable[..., None]:
    def edit(*arguments: Any) -> None:
        for each in edits:
            each(*arguments)

    return edit


def repeated(data: bytes) -> bytes:
    """The header's first tensor, twice under one name."""
    header, rest = surgery.take_apart(data)
    name = next(name for name in header if name != "__metadata__")
    text = json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"
    return surgery.put_together(text.encode(), rest)


def grown(data: bytes) -> bytes:
    """One more byte of data than the header accounts for."""
    return data + b"\0"


def move_first(by: int) -> Callable[[Any], None]:
    """Move the bytes that the header's first tensor claims."""

    def edit(header: Any) -> None:
        name = next(name for name in header if name != "__metadata__")
        header[name]["data_offsets"] = [offset + by for offset in header[name]["data_offsets"]]

    return edit


def drop_in_first(field: str) -> Callable[[Any], None]:
    """Leave a field out of the header's first tensor."""
    return lambda header: next(entry for name, entry in header.items() if name != "__metadata__").pop(field)


def move_delta_to_first(objects: Objects) -> None:
    """Give version 0, which has an anchor, the delta of version 1."""
    delta = surgery.manifest(objects, 1)["delta"]
    surgery.edit_manifest(objects, 0, put("delta", delta))


def begin_at(objects: Objects, version: int) -> None:
    """Leave nothing but version 0, under another number, which all of it agrees on."""
    surgery.edit_file(objects, 0, "anchor", metadata("version", str(version)))
    surgery.edit_manifest(objects, 0, put("version", version))
    first = objects["versions/00000000.json"]
    for key in [key for key in objects if key.startswith("versions/")]:
        del objects[key]
    objects[f"versions/{version:08d}.json"] = first


def rename_run(objects: Objects, run_id: str) -> None:
    """Call the run otherwise, wherever it is named on the way to version 1."""
    surgery.edit_json(objects, "store.json", put("run_id", run_id))
    surgery.edit_file(objects, 0, "anchor", metadata("run_id", run_id))
    surgery.edit_manifest(objects, 0, put("run_id", run_id))
    surgery.edit_file(objects, 1, "delta", metadata("run_id", run_id))
    surgery.edit_manifest(objects, 1, put("run_id", run_id))


def int32s(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}i", *numbers)


def uint16s(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}H", *numbers)


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

# Text that some JSON libraries take, and the format does not.
NOT_UTF8: dict[str, Callable[[str], bytes]] = {
    "is UTF-16": lambda text: text.encode("utf-16"),
    "is UTF-16 without a byte order mark": lambda text: text.encode("utf-16-le"),
    "is UTF-32": lambda text: text.encode("utf-32-be"),
    "has a byte order mark": lambda text: text.encode("utf-8-sig"),
    "is Latin-1": lambda text: ('{"later": "\u00e9",' + text[1:]).encode("latin-1"),
}
NO_NUMBERS: dict[str, Callable[[str], bytes]] = {
    # In a field that no reader knows.
    f"has {word}": lambda text, word=word: text.replace('"shape"', f'"later": {word}, "shape"', 1).encode()  # type: ignore[misc]
    for word in ("NaN", "Infinity", "-Infinity")
}
for name, edit in (NOT_UTF8 | NO_NUMBERS).items():
    if name in NOT_UTF8:
        bad(f"manifest {name}", in_text("versions/00000001.json", edit))
        bad(f"anchor's manifest {name}", in_text("versions/00000000.json", edit), version=0)
    else:
        bad(f"delta's list {name}", in_file("delta", 1, lambda f, _, edit=edit: in_list(f, edit)))
    bad(f"store.json {name}", in_text("store.json", edit))
    bad(f"delta's header {name}", in_header_text("delta", 1, edit))
    bad(f"anchor's header {name}", in_header_text("anchor", 0, edit), version=0)
for word in ("NaN", "Infinity", "-Infinity"):
    bad(
        f"manifest has {word}",
        in_text("versions/00000001.json", lambda text, word=word: f'{{"later": [{word}],{text[1:]}'.encode()),
    )
bad(
    "delta's list has a byte order mark",
    in_file("delta", 1, lambda f, _: in_list(f, lambda text: text.encode("utf-8-sig"))),
)
bad(
    "delta's list has half of a pair",
    in_file(
        "delta",
        1,
        lambda f, _: f.update(tensors=f["tensors"].replace('"dtype"', '"later": "\ud800", "dtype"')),
    ),
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

# Manifests.
bad("manifest is no JSON", lambda o: surgery.put_manifest(o, 1, b"{"))
bad("manifest is no UTF-8", lambda o: surgery.put_manifest(o, 1, b'{"\xff": 1}'))
bad("manifest is a list", lambda o: surgery.put_manifest(o, 1, b"[1]"))
bad("manifest is nested without end", lambda o: surgery.put_manifest(o, 1, b"[" * 100_000))
bad("manifest is of format version 2", in_manifest(1, put("format_version", 2)), UNSUPPORTED)
bad("manifest is of format version true", in_manifest(1, put("format_version", True)))
bad("anchor's manifest is of format version 2", in_manifest(0, put("format_version", 2)), UNSUPPORTED)
bad("manifest is of no format version", in_manifest(1, drop("format_version")))
bad("manifest is of another version", in_manifest(1, put("version", 2)))
bad("manifest is of another run", in_manifest(1, put("run_id", "another")))
bad("manifest's parent comes later", in_manifest(1, put("parent", 2)))
bad("manifest is its own parent", in_manifest(1, put("parent", 1)))
bad("manifest has a wrong parent digest", in_manifest(1, put("parent_digest", "blake3:" + "0" * 64)))
bad("manifest has no parent digest", in_manifest(1, put("parent_digest", None)))
bad(
    "parent has other bytes",
    lambda o: o.update({"versions/00000000.json": o["versions/00000000.json"] + b" "}),
)
bad("parent is missing", lambda o: o.pop("versions/00000000.json"), "version-not-found")
bad("manifest is missing", lambda o: o.pop("versions/00000001.json"), "version-not-found")
bad("manifest has neither delta nor anchor", in_manifest(1, put("delta", None)))
bad("manifest has no parent for its delta", in_manifest(1, put("parent", None)))
EMPTY_DELTA = {"encoding": "gap", "num_changed": 0, "payloads": []}
bad("first version has an empty delta", in_manifest(0, put("delta", EMPTY_DELTA)), version=0)
bad("first version has a delta", move_delta_to_first, version=0)
bad(
    "first version has a parent digest", in_manifest(0, put("parent_digest", "blake3:" + "0" * 64)), version=0
)
bad(
    "a later version has no parent",
    in_manifest(2, lambda r: r.update(parent=None, parent_digest=None, delta=None)),
    bucket="v1-sharded",
    version=2,
)
bad("the run begins at version 5", lambda o: begin_at(o, 5), version=5)
bad("kind is anchor where there is none", in_manifest(1, put("kind", "anchor")))
bad("kind is delta where there is an anchor", in_manifest(0, put("kind", "delta")), version=0)
bad("kind is another", in_manifest(1, put("kind", "rollup")))
for field in (
    *("version", "kind", "parent", "parent_digest", "run_id", "step", "created_at", "writer"),
    *("delta", "anchor", "state"),
):
    bad(f"manifest has no field {field}", in_manifest(1, drop(field)))
for field in ("version", "kind", "run_id", "step", "created_at", "writer", "state", "delta.payloads"):
    bad(f"manifest's {field} is null", in_manifest(1, put(field, None)))
for field in ("id", "write_id", "epoch"):
    bad(f"writer has no {field}", in_manifest(1, lambda r, field=field: r["writer"].pop(field)))
for field in ("encoding", "num_changed", "payloads"):
    bad(f"delta has no field {field}", in_manifest(1, lambda r, field=field: r["delta"].pop(field)))
for field in ("payloads", "files"):
    bad(
        f"anchor has no field {field}",
        in_manifest(0, lambda r, field=field: r["anchor"].pop(field)),
        version=0,
    )
for number in (-1, "3", 1.0, True, None, 2**53, -(2**53)):
    bad(f"num_changed is {number!r}", in_manifest(1, put("delta.num_changed", number)))
    bad(f"epoch is {number!r}", in_manifest(1, put("writer.epoch", number)))
for number in ("3", 1.0, True, 2**53, -(2**53)):
    bad(f"step is {number!r}", in_manifest(1, put("step", number)))
    bad(f"version is {number!r}", in_manifest(1, put("version", number)))
for time in (
    "",
    "yesterday",
    "2026-01-31",
    "2026-01-31T12:00:00",
    "2026-01-31T12:00:00.000",
    "2026-01-31T12:00:00+00:00",
    "2026-01-31T12:00:00.000+01:00",
    "2026-01-31 12:00:00Z",
    "2026-01-31t12:00:00z",
    "2026-01-31T12:00Z",
    "20260131T120000Z",
    "2026-W05-6T12:00:00Z",
    "2026-02-30T12:00:00Z",
    "2026-01-31T24:00:00Z",
    "2026-01-31T12:00:60Z",
    "0000-01-31T12:00:00Z",
    "2026-01-31T12:00:00.Z",
    "2026-01-31T12:00:00.0000000Z",
    "2026-01-31T12:00:00Z\n",
    "\u0662\u0660\u0662\u0666-01-31T12:00:00Z",
    1769860800,
):
    bad(f"created_at is {time!r}", in_manifest(1, put("created_at", time)))
    bad(f"store.json was created at {time!r}", in_store_json(put("created_at", time)))
UNPRINTABLE = ("", "a\0", "a\tb", "a\x7f", "a\x85", "a\u200bb", "a\u2028", "a\u202eb", "\ufeffa", "a\ud800")
for text in UNPRINTABLE:
    bad(f"the writer is {text!r}", in_manifest(1, put("writer.id", text)))
    bad(f"the run is {text!r}", lambda o, text=text: rename_run(o, text))
    bad(f"a tensor is called {text!r}", in_store_json(put("tensors.0.name", text)))
    bad(f"a tensor is also called {text!r}", in_store_json(put("tied", {text: "scalar"})))
bad("encoding is unknown", in_manifest(1, put("delta.encoding", "later")), UNSUPPORTED)
bad(
    "encoding of an empty delta is unknown",
    in_manifest(2, put("delta.encoding", "later")),
    UNSUPPORTED,
    version=2,
)

# The chain above an anchor, which nothing but a verification needs.
for bucket, version in (("v1-sharded", 2), ("v1-recovered", 1)):
    ABOVE: dict[str, Any] = {"bucket": bucket, "version": version, "only_verified": True}
    bad(
        f"an anchor of {bucket} has a wrong parent digest",
        in_manifest(version, put("parent_digest", "blake3:" + "0" * 64)),
        **ABOVE,
    )
    bad(
        f"an anchor of {bucket} has a parent of a later epoch",
        in_manifest(version - 1, put("writer.epoch", 9)),
        **ABOVE,
    )
    bad(
        f"an anchor of {bucket} has a parent of another run",
        in_manifest(version - 1, put("run_id", "another")),
        **ABOVE,
    )
    bad(
        f"an anchor of {bucket} has no parent in the store",
        lambda o, version=version: o.pop(f"versions/{version - 1:08d}.json"),
        "version-not-found",
        **ABOVE,
    )
bad("a parent is of a later epoch", in_manifest(0, put("writer.epoch", 9)))
bad("encoding is another", in_manifest(1, put("delta.encoding", "raw")))
for key in (
    "../outside",
    "deltas/../outside",
    "deltas/../../outside",
    "/deltas/x/y",
    "deltas//x",
    "deltas/x",
    "deltas/x/y/z",
    "deltas/x/..",
    "deltas/./x",
    "deltas\\x\\y",
    "deltas/x/\0",
    "deltas/x/\u00e9",
    "anchors/x/y",
    "store.json",
    "versions/00000000.json",
    "",
    3,
    None,
    "deltas/x/y\n",
):
    bad(f"delta's key is {key!r}", in_manifest(1, put("delta.payloads.0.key", key)))
for key in (
    "anchors/x/..",
    "anchors/../config.json",
    "../config.json",
    "deltas/x/config.json",
    "anchors/x/a/config.json",
):
    bad(
        f"file's key is {key!r}",
        in_manifest(2, put("anchor.files.0.key", key)),
        bucket="v1-sharded",
        version=2,
    )
bad(
    "a payload is named twice",
    in_manifest(1, lambda r: r["delta"]["payloads"].append(r["delta"]["payloads"][0])),
)
bad(
    "a file is a payload too",
    in_manifest(0, lambda r: r["anchor"]["files"].append(r["anchor"]["payloads"][0])),
    version=0,
)
bad(
    "a file in another folder has a payload's name",
    lambda o: (
        o.update({"anchors/other/model.safetensors": b""}),
        surgery.edit_manifest(
            o,
            0,
            lambda r: r["anchor"]["files"].append(
                {
                    "key": "anchors/other/model.safetensors",
                    "size": 0,
                    "digest": "blake3:af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
                }
            ),
        ),
    ),
    version=0,
)
for size in (-1, 0, 1, 2**40, 2**53 - 1, 2**53, 2**62, 2**63, 10**30, "1", None, 1.0, True):
    bad(f"delta's size is {size!r}", in_manifest(1, put("delta.payloads.0.size", size)))
    bad(f"anchor's size is {size!r}", in_manifest(0, put("anchor.payloads.0.size", size)), version=0)
for digest in ("", "blake3:", "sha256:" + "0" * 64, "blake3:" + "0" * 64, "blake3:" + "G" * 64, None):
    bad(f"delta's digest is {digest!r}", in_manifest(1, put("delta.payloads.0.digest", digest)))
bad("a delta is left out", in_manifest(1, put("delta.payloads", [])), STATE)
bad("state's total is another", in_manifest(1, put("state.total", "blake3:" + "0" * 64)), STATE)
bad("no object of sums is named", in_manifest(1, lambda record: record["state"].pop("sums")))
bad("sums are in the manifest", in_manifest(1, put("state.sums", ["0" * 32] * 18)))
for key in (
    "states/00000001-abc.json",
    "states/00000001.sums",
    "states/00000001-.sums",
    "states/1-abc.sums",
    "states/000000001-abc.sums",
    "states/00000001-a/b.sums",
    "states/00000001-a b.sums",
    "states/\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661-abc.sums",
    "deltas/00000001-abc.sums",
    "../states/00000001-abc.sums",
    "store.json",
    "",
    3,
):
    bad(f"sums' key is {key!r}", in_manifest(1, put("state.sums.key", key)))
for size in (-16, "288", None, 288.0, True):
    bad(f"sums' size is {size!r}", in_manifest(1, put("state.sums.size", size)))
for digest in ("", "sha256:" + "0" * 64, "blake3:" + "G" * 64, None):
    bad(f"sums' digest is {digest!r}", in_manifest(1, put("state.sums.digest", digest)))


def sums(version: int, edit: Callable[[bytes], bytes], *, vouched: bool) -> Callable[[Objects], None]:
    """Another object of sums, with a manifest that vouches for it or not."""

    def change(objects: Objects) -> None:
        key = surgery.manifest(objects, version)["state"]["sums"]["key"]
        if vouched:
            surgery.put_sums(objects, version, edit(objects[key]))
        else:
            objects[key] = edit(objects[key])

    return change


def without_sums(objects: Objects) -> None:
    del objects[surgery.manifest(objects, 1)["state"]["sums"]["key"]]


BAD_SUMS: list[tuple[str, Callable[[Objects], None]]] = [
    ("missing", without_sums),
    ("truncated", sums(1, lambda data: data[:-1], vouched=False)),
    ("longer", sums(1, lambda data: data + bytes(16), vouched=False)),
    ("one flipped bit", sums(1, lambda data: bytes([data[0] ^ 1]) + data[1:], vouched=False)),
    ("empty and vouched for", sums(1, lambda _: b"", vouched=True)),
    ("a tensor too few, and vouched for", sums(1, lambda data: data[16:], vouched=True)),
    ("a tensor too many, and vouched for", sums(1, lambda data: data + bytes(16), vouched=True)),
    ("8 bytes too many, and vouched for", sums(1, lambda data: data + bytes(8), vouched=True)),
    ("another tensor's, and vouched for", sums(1, lambda data: data[16:] + data[:16], vouched=True)),
    ("big-endian, and vouched for", sums(1, lambda data: data[::-1], vouched=True)),
    ("the parent's, and vouched for", lambda objects: surgery.put_sums(objects, 1, parent_sums(objects))),
]
"""What can be wrong with the digest sums of version 1 of `v1-gap`. The total alone does not show it."""


def parent_sums(objects: Objects) -> bytes:
    return objects[surgery.manifest(objects, 0)["state"]["sums"]["key"]]


# store.json.
bad("store.json is no JSON", lambda objects: objects.update({"store.json": b""}))
bad("store.json is missing", lambda objects: objects.pop("store.json"))
bad("store.json is of format version 2", in_store_json(put("format_version", 2)), UNSUPPORTED)
bad(
    "store.json is of another run",
    in_store_json(put("run_id", "another")),
    CORRUPT,
    # A follower, for which the store may have become that of another run since it looked.
    "store-replaced",
)
bad("tensors do not ascend", in_store_json(lambda record: record["tensors"].reverse()))
bad(
    "a tensor is listed twice",
    in_store_json(lambda record: record["tensors"].insert(0, record["tensors"][0])),
)
bad("a tensor has an unknown dtype", in_store_json(put("tensors.0.dtype", "F128")))
bad("a tensor has too many elements", in_store_json(put("tensors.0.shape", [2**30, 2**30])))
bad("a tensor has a negative size", in_store_json(put("tensors.0.shape", [-1])))
bad("a tensor has no name", in_store_json(put("tensors.0.name", "")))
bad("a tensor is left out", in_store_json(lambda record: record["tensors"].pop(3)))
bad("a tensor has another shape", in_store_json(put("tensors.3.shape", [3, 2])))
for name, shape in (("zero-size", [2**48, 2**48, 0]), ("scalar", [1] * 1000)):
    bad(
        f"a tensor of {len(shape)} dimensions is listed and stored",
        lambda objects, name=name, shape=shape: (
            in_store_json(lambda r: next(t for t in r["tensors"] if t["name"] == name).update(shape=shape))(
                objects
            ),
            in_header("anchor", 0, lambda header: header[name].update(shape=shape))(objects),
        ),
        CORRUPT,
        UNSUPPORTED,
        STATE,
    )
bad("tied to nothing", in_store_json(put("tied", {"a": "no such tensor"})))
bad("tied to a list", in_store_json(put("tied", {"a": ["big"]})))
bad("tied under a listed name", in_store_json(put("tied", {"scalar": "big"})))
bad("tied under a name that is not printable", in_store_json(put("tied", {"a\nb": "big"})))
bad("tied is a list", in_store_json(put("tied", [])))
for field in ("run_id", "created_at", "tensors", "tied"):
    bad(f"store.json has no {field}", in_store_json(drop(field)))
    bad(f"store.json's {field} is null", in_store_json(put(field, None)))
bad("a size is true", in_store_json(put("tensors.3.shape", [True])))
bad("a size is a fraction", in_store_json(put("tensors.3.shape", [2.0, 3])))
bad("a tensor's name is reserved", in_store_json(put("tensors.0.name", "__metadata__")))

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


def second_payload(tensors: Entries, listed: dict[str, Any]) -> Callable[[Objects], None]:
    """One more payload of version 1."""

    def change(objects: Objects) -> None:
        found, _ = surgery.entries(surgery.payload(objects, 1, "delta"))
        key = key_of(objects, 1, "delta").replace("00001-of-00001", "00002-of-00002")
        surgery.edit_manifest(objects, 1, lambda r: r["delta"]["payloads"].append({"key": key}))
        data = surgery.tensor_file({**found, "tensors": json.dumps(listed)}, tensors)
        surgery.put_payload(objects, 1, "delta", data, 1)

    return change


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
