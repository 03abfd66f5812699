"""JSON with a fault: manifests, the chain that they are, their digest sums, and store.json."""

from collections.abc import Callable
from typing import Any

from tests.format import surgery
from tests.format.bucket_edits import (
    CORRUPT,
    STATE,
    UNSUPPORTED,
    Bad,
    begin_at,
    drop,
    in_file,
    in_header,
    in_header_text,
    in_list,
    in_manifest,
    in_store_json,
    in_text,
    into,
    move_delta_to_first,
    put,
    rename_run,
)
from tests.format.surgery import Objects

CASES: list[Bad] = []
bad = into(CASES)

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
