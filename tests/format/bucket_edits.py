"""Edits of golden buckets, from which cases of bad buckets are made.

Unless a case is about digests, sizes and digests are recomputed around the edit, so that the check behind
them is reached.
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
    """A change to a golden bucket, and the kind of error that it must give."""

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


def into(cases: list[Bad]) -> Callable[..., None]:
    """A function that adds a case to a list."""

    def bad(name: str, change: Callable[[Objects], object], *kinds: str, **where: Any) -> None:
        cases.append(Bad(name=name, kinds=kinds or (CORRUPT,), change=change, **where))

    return bad


def key_of(objects: Objects, version: int, part: str) -> str:
    return surgery.manifest(objects, version)[part]["payloads"][0]["key"]  # type: ignore[no-any-return]


def spoiled(part: str, version: int, spoil: Callable[[bytes], bytes]) -> Callable[[Objects], None]:
    """Other bytes under a payload's key, and no digest recomputed."""

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


def in_file(
    part: str, version: int, edit: Callable[[Any, Entries], object], number: int = 0
) -> Callable[[Objects], None]:
    return lambda objects: surgery.edit_file(objects, version, part, edit, number)


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


def second_payload(tensors: Entries, listed: dict[str, Any]) -> Callable[[Objects], None]:
    """One more payload of version 1."""

    def change(objects: Objects) -> None:
        found, _ = surgery.entries(surgery.payload(objects, 1, "delta"))
        key = key_of(objects, 1, "delta").replace("00001-of-00001", "00002-of-00002")
        surgery.edit_manifest(objects, 1, lambda r: r["delta"]["payloads"].append({"key": key}))
        data = surgery.tensor_file({**found, "tensors": json.dumps(listed)}, tensors)
        surgery.put_payload(objects, 1, "delta", data, 1)

    return change
