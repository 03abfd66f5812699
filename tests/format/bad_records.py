"""JSON with a fault: manifests, the chain that they are, their digest sums, and store.json."""

from collections.abc import Callable
from typing import Any

from patchstore.bucket.digests import digest
from tests.format import surgery
from tests.format.bucket_edits import (
    CORRUPT,
    STATE,
    UNSUPPORTED,
    Bad,
    begin_at,
    both,
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
ZEROS = "blake3:" + "0" * 64
FIRST = "versions/00000000.json"


def manifest(name: str, edit: Callable[[Any], object], *kinds: str, version: int = 1, **where: Any) -> None:
    """Another manifest of the version that is read."""
    bad(name, in_manifest(version, edit), *kinds, version=version, **where)


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
    later = in_text("versions/00000001.json", lambda t, word=word: f'{{"later": [{word}],{t[1:]}'.encode())
    bad(f"manifest has {word}", later)
marked = in_file("delta", 1, lambda f, _: in_list(f, lambda text: text.encode("utf-8-sig")))
bad("delta's list has a byte order mark", marked)
half = '"later": "\ud800", "dtype"'
halved = in_file("delta", 1, lambda f, _: f.update(tensors=f["tensors"].replace('"dtype"', half)))
bad("delta's list has half of a pair", halved)

# Manifests.
for name, data in {
    "no JSON": b"{",
    "no UTF-8": b'{"\xff": 1}',
    "a list": b"[1]",
    "nested without end": b"[" * 100_000,
}.items():
    bad(f"manifest is {name}", lambda objects, data=data: surgery.put_manifest(objects, 1, data))
bad("manifest is of format version 2", in_manifest(1, put("format_version", 2)), UNSUPPORTED)
bad("anchor's manifest is of format version 2", in_manifest(0, put("format_version", 2)), UNSUPPORTED)
for name, edit in {
    "manifest is of format version true": put("format_version", True),
    "manifest is of no format version": drop("format_version"),
    "manifest is of another version": put("version", 2),
    "manifest is of another run": put("run_id", "another"),
    "manifest's parent comes later": put("parent", 2),
    "manifest is its own parent": put("parent", 1),
    "manifest has a wrong parent digest": put("parent_digest", ZEROS),
    "manifest has no parent digest": put("parent_digest", None),
    "manifest has neither delta nor anchor": put("delta", None),
    "manifest has no parent for its delta": put("parent", None),
    "kind is anchor where there is none": put("kind", "anchor"),
    "kind is another": put("kind", "rollup"),
    "encoding is another": put("delta.encoding", "raw"),
    "no object of sums is named": lambda record: record["state"].pop("sums"),
    "sums are in the manifest": put("state.sums", ["0" * 32] * 18),
}.items():
    manifest(name, edit)
EMPTY_DELTA = {"encoding": "gap", "num_changed": 0, "payloads": []}
for name, edit in {
    "first version has an empty delta": put("delta", EMPTY_DELTA),
    "first version has a parent digest": put("parent_digest", ZEROS),
    "kind is delta where there is an anchor": put("kind", "delta"),
    "a file is a payload too": lambda r: r["anchor"]["files"].append(r["anchor"]["payloads"][0]),
}.items():
    manifest(name, edit, version=0)
bad("first version has a delta", move_delta_to_first, version=0)
bad("parent has other bytes", lambda objects: objects.update({FIRST: objects[FIRST] + b" "}))
bad("parent is missing", lambda objects: objects.pop(FIRST), "version-not-found")
bad("manifest is missing", lambda objects: objects.pop("versions/00000001.json"), "version-not-found")
orphaned = in_manifest(2, lambda record: record.update(parent=None, parent_digest=None, delta=None))
bad("a later version has no parent", orphaned, bucket="v1-sharded", version=2)
bad("the run begins at version 5", lambda objects: begin_at(objects, 5), version=5)
FIELDS = ("version", "kind", "run_id", "step", "created_at", "writer", "state")
for field in (*FIELDS, "parent", "parent_digest", "delta", "anchor"):
    manifest(f"manifest has no field {field}", drop(field))
for field in (*FIELDS, "delta.payloads"):
    manifest(f"manifest's {field} is null", put(field, None))
for part, fields in {"writer": ("id", "write_id", "epoch"), "delta": (*EMPTY_DELTA,)}.items():
    for field in fields:
        manifest(f"{part} has no field {field}", lambda r, part=part, field=field: r[part].pop(field))
for field in ("payloads", "files"):
    manifest(f"anchor has no field {field}", lambda r, field=field: r["anchor"].pop(field), version=0)
for number in (-1, "3", 1.0, True, None, 2**53, -(2**53)):
    manifest(f"num_changed is {number!r}", put("delta.num_changed", number))
    manifest(f"epoch is {number!r}", put("writer.epoch", number))
for number in ("3", 1.0, True, 2**53, -(2**53)):
    manifest(f"step is {number!r}", put("step", number))
    manifest(f"version is {number!r}", put("version", number))
DAY, NOON = "2026-01-31", "2026-01-31T12:00:00"
for time in (
    *("", "yesterday", DAY, NOON, f"{NOON}.000", f"{NOON}+00:00", f"{NOON}.000+01:00", f"{DAY} 12:00:00Z"),
    *(f"{DAY}t12:00:00z", f"{DAY}T12:00Z", "20260131T120000Z", "2026-W05-6T12:00:00Z"),
    *("2026-02-30T12:00:00Z", f"{DAY}T24:00:00Z", f"{DAY}T12:00:60Z", "0000-01-31T12:00:00Z"),
    *(f"{NOON}.Z", f"{NOON}.0000000Z", f"{NOON}Z\n", "\u0662\u0660\u0662\u0666-01-31T12:00:00Z", 1769860800),
):
    manifest(f"created_at is {time!r}", put("created_at", time))
    bad(f"store.json was created at {time!r}", in_store_json(put("created_at", time)))
UNPRINTABLE = ("", "a\0", "a\tb", "a\x7f", "a\x85", "a\u200bb", "a\u2028", "a\u202eb", "\ufeffa", "a\ud800")
for text in UNPRINTABLE:
    manifest(f"the writer is {text!r}", put("writer.id", text))
    bad(f"the run is {text!r}", lambda o, text=text: rename_run(o, text))
    bad(f"a tensor is called {text!r}", in_store_json(put("tensors.0.name", text)))
    bad(f"a tensor is also called {text!r}", in_store_json(put("tied", {text: "scalar"})))
later = put("delta.encoding", "later")
bad("encoding is unknown", in_manifest(1, later), UNSUPPORTED)
bad("encoding of an empty delta is unknown", in_manifest(2, later), UNSUPPORTED, version=2)

# The chain above an anchor, which nothing but a verification needs.
for bucket, version in (("v1-sharded", 2), ("v1-recovered", 1)):
    ABOVE: dict[str, Any] = {"bucket": bucket, "version": version, "only_verified": True}
    for name, edited, edit in (
        ("has a wrong parent digest", version, put("parent_digest", ZEROS)),
        ("has a parent of a later epoch", version - 1, put("writer.epoch", 9)),
        ("has a parent of another run", version - 1, put("run_id", "another")),
    ):
        bad(f"an anchor of {bucket} {name}", in_manifest(edited, edit), **ABOVE)
    gone = lambda objects, version=version: objects.pop(f"versions/{version - 1:08d}.json")  # noqa: E731
    bad(f"an anchor of {bucket} has no parent in the store", gone, "version-not-found", **ABOVE)
bad("a parent is of a later epoch", in_manifest(0, put("writer.epoch", 9)))
for key in (
    *("../outside", "deltas/../outside", "deltas/../../outside", "/deltas/x/y", "deltas//x", "deltas/x"),
    *("deltas/x/y/z", "deltas/x/..", "deltas/./x", "deltas\\x\\y", "deltas/x/\0", "deltas/x/\u00e9"),
    *("anchors/x/y", "store.json", FIRST, "", 3, None, "deltas/x/y\n"),
):
    manifest(f"delta's key is {key!r}", put("delta.payloads.0.key", key))
for key in (
    *("anchors/x/..", "anchors/../config.json", "../config.json", "deltas/x/config.json"),
    "anchors/x/a/config.json",
):
    manifest(f"file's key is {key!r}", put("anchor.files.0.key", key), bucket="v1-sharded", version=2)
named_twice = in_manifest(
    1, lambda record: record["delta"]["payloads"].append(record["delta"]["payloads"][0])
)
bad("a payload is named twice", named_twice)
ELSEWHERE = "anchors/other/model.safetensors"
A_FILE = {"key": ELSEWHERE, "size": 0, "digest": digest(b"")}
also_elsewhere = both(
    lambda objects: objects.update({ELSEWHERE: b""}),
    in_manifest(0, lambda record: record["anchor"]["files"].append(A_FILE)),
)
bad("a file in another folder has a payload's name", also_elsewhere, version=0)
for size in (-1, 0, 1, 2**40, 2**53 - 1, 2**53, 2**62, 2**63, 10**30, "1", None, 1.0, True):
    manifest(f"delta's size is {size!r}", put("delta.payloads.0.size", size))
    bad(f"anchor's size is {size!r}", in_manifest(0, put("anchor.payloads.0.size", size)), version=0)
for stated in ("", "blake3:", "sha256:" + "0" * 64, ZEROS, "blake3:" + "G" * 64, None):
    manifest(f"delta's digest is {stated!r}", put("delta.payloads.0.digest", stated))
bad("a delta is left out", in_manifest(1, put("delta.payloads", [])), STATE)
bad("state's total is another", in_manifest(1, put("state.total", ZEROS)), STATE)
for key in (
    *("states/00000001-abc.json", "states/00000001.sums", "states/00000001-.sums", "states/1-abc.sums"),
    *("states/000000001-abc.sums", "states/00000001-a/b.sums", "states/00000001-a b.sums"),
    *("states/" + 8 * "\u0661" + "-abc.sums", "deltas/00000001-abc.sums", "../states/00000001-abc.sums"),
    *("store.json", "", 3),
):
    manifest(f"sums' key is {key!r}", put("state.sums.key", key))
for size in (-16, "288", None, 288.0, True):
    manifest(f"sums' size is {size!r}", put("state.sums.size", size))
for stated in ("", "sha256:" + "0" * 64, "blake3:" + "G" * 64, None):
    manifest(f"sums' digest is {stated!r}", put("state.sums.digest", stated))


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


def _adapter(*, base_may_change: Any = False, **changes: Any) -> dict[str, Any]:
    """Return what a header says of adapters, which is right but for changes of the base."""
    base = {"name": "base", "revision": None, "state": None}
    return {"base": base | changes, "base_may_change": base_may_change}


OF_HEADERS = ("run_id", "created_at", "tensors", "tied")
# For a follower the store may have become that of another run since it looked.
bad("store.json is of another run", in_store_json(put("run_id", "another")), CORRUPT, "store-replaced")
for name, edit in {
    "tensors do not ascend": lambda record: record["tensors"].reverse(),
    "a tensor is listed twice": lambda record: record["tensors"].insert(0, record["tensors"][0]),
    "a tensor has an unknown dtype": put("tensors.0.dtype", "F128"),
    # It has 2 x 3 elements.
    "a tensor has half a byte a row": put("tensors.0.dtype", "F4"),
    "a tensor has too many elements": put("tensors.0.shape", [2**30, 2**30]),
    "a tensor has a negative size": put("tensors.0.shape", [-1]),
    "a tensor has no name": put("tensors.0.name", ""),
    "a tensor is left out": lambda record: record["tensors"].pop(3),
    "a tensor has another shape": put("tensors.3.shape", [3, 2]),
    "tied to nothing": put("tied", {"a": "no such tensor"}),
    "tied to a list": put("tied", {"a": ["big"]}),
    "tied under a listed name": put("tied", {"scalar": "big"}),
    "tied under a name that is not printable": put("tied", {"a\nb": "big"}),
    "tied is a list": put("tied", []),
    **{
        f"the adapter {what}": put("adapter", value)
        for what, value in {
            "is null": None,
            "is a list": [],
            "has no base": {"base_may_change": True},
            "has a base that is a text": {"base": "b", "base_may_change": True},
            "has a base without a revision": {"base": {"name": "b", "state": None}, "base_may_change": True},
            "has a base with an empty name": _adapter(name=""),
            "has a base whose state is no digest": _adapter(state="blake3:1"),
            "may change by a number": _adapter(base_may_change=1),
        }.items()
    },
    "a size is true": put("tensors.3.shape", [True]),
    "a size is a fraction": put("tensors.3.shape", [2.0, 3]),
    "a tensor's name is reserved": put("tensors.0.name", "__metadata__"),
    **{f"store.json has no {field}": drop(field) for field in ("run_id", "created_at", "tensors", "tied")},
    **{
        f"store.json's {name} is null": put(name, None)
        for name in ("run_id", "created_at", "tensors", "tied")
    },
}.items():
    bad(name, in_store_json(edit))


def reshaped(name: str, shape: list[int]) -> Callable[[Objects], None]:
    """Another shape of a tensor, in the schema and in the anchor."""

    def in_schema(record: Any) -> None:
        next(each for each in record["tensors"] if each["name"] == name).update(shape=shape)

    in_anchor = in_header("anchor", 0, lambda header: header[name].update(shape=shape))
    return both(in_store_json(in_schema), in_anchor)


for name, shape in (("zero-size", [2**48, 2**48, 0]), ("scalar", [1] * 1000)):
    what = f"a tensor of {len(shape)} dimensions is listed and stored"
    bad(what, reshaped(name, shape), CORRUPT, UNSUPPORTED, STATE)
