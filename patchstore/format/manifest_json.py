"""Manifests and the store header as JSON: the only module that knows how they are spelled.

Every field is checked before it becomes a value; see `json_fields`. A reader ignores fields that it does not
know, so that later releases may add some.
"""

import json
from collections.abc import Mapping
from typing import Any

from patchstore.errors import CorruptObject, UsageError
from patchstore.format import layout
from patchstore.format.json_fields import MAX_JSON_BYTES, Record, is_name, json_object, tensor_spec
from patchstore.format.records import (
    FORMAT_VERSION,
    Anchor,
    Delta,
    Manifest,
    Payload,
    Schema,
    StateDigest,
    StoreHeader,
    Writer,
)

MAX_HINT_BYTES = 1000
"""Of `head.json`."""


def header_to_json(header: StoreHeader) -> bytes:
    """Spell a store header; deterministic, so equal headers have equal bytes."""
    return dump(
        {
            "format_version": FORMAT_VERSION,
            "run_id": header.run_id,
            "created_at": header.created_at,
            "tensors": [
                {"name": t.name, "dtype": t.dtype, "shape": list(t.shape)} for t in header.schema.tensors
            ],
            "tied": dict(sorted(header.schema.tied.items())),
        }
    )


def header_from_json(data: bytes) -> StoreHeader:
    """Read `store.json`.

    Raises:
        CorruptObject: not a store header; the message names the field.
        UnsupportedFormat: written by a release with another format version.
    """
    record = Record.parse(layout.HEADER, data)
    specs = tuple(
        tensor_spec(layout.HEADER, item.text("name"), item.text("dtype"), item.value.get("shape"))
        for item in record.items("tensors")
    )
    names = {spec.name for spec in specs}
    if [spec.name for spec in specs] != sorted(names):
        raise record.corrupt("tensors", "must ascend by name and hold each name once")
    tied = record.item("tied")
    for alias in tied.value:
        if tied.text(alias) not in names or alias in names or not is_name(alias):
            raise record.corrupt("tied", f"{alias!r:.100} must be a further name of a tensor that is listed")
    return StoreHeader(
        run_id=record.text("run_id"),
        created_at=record.time("created_at"),
        schema=Schema(tensors=specs, tied=tied.value),
    )


def to_json(manifest: Manifest) -> bytes:
    """Spell a manifest; deterministic, because its digest is what the next version names."""
    return dump(
        {
            "format_version": FORMAT_VERSION,
            "version": manifest.version,
            "kind": manifest.kind,
            "parent": manifest.parent,
            "parent_digest": manifest.parent_digest,
            "run_id": manifest.run_id,
            "step": manifest.step,
            "created_at": manifest.created_at,
            "writer": {
                "id": manifest.writer.id,
                "epoch": manifest.writer.epoch,
                "write_id": manifest.writer.write_id,
            },
            "delta": delta_fields(manifest.delta),
            "anchor": anchor_fields(manifest.anchor),
            "state": {"total": manifest.state.total, "sums": _payload(manifest.state.sums)},
        }
    )


def from_json(key: str, data: bytes) -> Manifest:
    """Read a manifest.

    Args:
        key: where it was found; says which version it must be, and is named in errors.

    Raises:
        CorruptObject: not a manifest of that version; the message names the field.
        UnsupportedFormat: written by a release with another format version.
    """
    record = Record.parse(key, data)
    version = record.count("version")
    if layout.manifest_version(key) != version:
        raise record.corrupt("version", f"is {version}, which does not belong under this key")
    parent, parent_digest = _parent(record, version)
    writer, state = record.item("writer"), record.item("state")
    delta, anchor = delta_of(record), anchor_of(record)
    if anchor is None and delta is None:
        raise record.corrupt("anchor", "is null, and so is delta: one of them must hold the weights")
    if delta is not None and parent is None:
        raise record.corrupt("delta", "is there, but there is no parent to apply it to")
    manifest = Manifest(
        version=version,
        parent=parent,
        parent_digest=parent_digest,
        run_id=record.text("run_id"),
        step=record.integer("step"),
        created_at=record.time("created_at"),
        writer=Writer(id=writer.text("id"), epoch=writer.count("epoch"), write_id=writer.text("write_id")),
        state=StateDigest(total=state.digest("total"), sums=state.sums("sums")),
        delta=delta,
        anchor=anchor,
    )
    if (kind := record.text("kind")) != manifest.kind:
        raise record.corrupt("kind", f"is {kind!r:.80}, but this version is stored as {manifest.kind!r}")
    return manifest


def delta_of(record: Record) -> Delta | None:
    """Read the field `delta`; None where it is null. Raises CorruptObject."""
    fields = record.optional("delta")
    if fields is None:
        return None
    payloads = fields.payloads("payloads", "deltas/")
    _check_folder(record, payloads)
    return Delta(encoding=fields.text("encoding"), num_changed=fields.count("num_changed"), payloads=payloads)


def anchor_of(record: Record) -> Anchor | None:
    """Read the field `anchor`; None where it is null. Raises CorruptObject."""
    fields = record.optional("anchor")
    if fields is None:
        return None
    payloads, files = fields.payloads("payloads", "anchors/"), fields.payloads("files", "anchors/")
    _check_folder(record, (*payloads, *files))
    return Anchor(payloads=payloads, files=files)


def _check_folder(record: Record, payloads: tuple[Payload, ...]) -> None:
    if len({payload.key for payload in payloads}) != len(payloads):
        raise record.corrupt("payloads", "must hold each key once")
    if len({payload.key.rpartition("/")[0] for payload in payloads}) > 1:
        raise record.corrupt("payloads", "must lie in one folder")


def _parent(record: "Record", version: int) -> tuple[int | None, str | None]:
    """Read which version is the parent, and the digest of its manifest; version 0 alone has neither.

    Raises:
        CorruptObject
    """
    if record.is_null("parent"):
        if version != 0:
            raise record.corrupt("parent", f"is null, but version {version} is not the first, which is 0")
        if not record.is_null("parent_digest"):
            raise record.corrupt("parent_digest", "is there, but there is no parent")
        return None, None
    parent = record.count("parent")
    if parent >= version:
        raise record.corrupt("parent", f"is {parent}, which is not before version {version}")
    return parent, record.digest("parent_digest")


def hint_to_json(version: int) -> bytes:
    """Spell `head.json`."""
    return dump({"version": version})


def hint_from_json(data: bytes) -> int | None:
    """Read `head.json`; a hint that makes no sense is none, and one that is too long is not parsed."""
    if len(data) > MAX_HINT_BYTES:
        return None
    try:
        return Record(layout.HEAD, "", json_object(layout.HEAD, data)).count("version")
    except CorruptObject:
        return None


def delta_fields(delta: Delta | None) -> dict[str, Any] | None:
    """Spell the field `delta`."""
    if delta is None:
        return None
    return {
        "encoding": delta.encoding,
        "num_changed": delta.num_changed,
        "payloads": _payloads(delta.payloads),
    }


def anchor_fields(anchor: Anchor | None) -> dict[str, Any] | None:
    """Spell the field `anchor`."""
    if anchor is None:
        return None
    return {"payloads": _payloads(anchor.payloads), "files": _payloads(anchor.files)}


def _payloads(payloads: tuple[Payload, ...]) -> list[dict[str, Any]]:
    return [_payload(payload) for payload in payloads]


def _payload(payload: Payload) -> dict[str, Any]:
    return {"key": payload.key, "size": payload.size, "digest": payload.digest}


def dump(value: Mapping[str, Any]) -> bytes:
    """Spell an object: one line a field, which people can read, and no spaces in what programs read.

    Raises:
        UsageError: it would be larger than readers take.
    """
    spell = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    lines = (f"{spell(field)}: {spell(found)}" for field, found in value.items())
    data = ("{\n" + ",\n".join(lines) + "\n}\n").encode()
    if len(data) > MAX_JSON_BYTES:
        raise UsageError(
            f"so many tensors need an object of {len(data):,} bytes, but readers take at most "
            f"{MAX_JSON_BYTES:,}: publish them as several runs"
        )
    return data
