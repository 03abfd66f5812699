"""Manifests and the store header as JSON: the only module that knows how they are spelled.

The bytes come from a bucket that others can write to. So every field is checked before it becomes a value. A
reader ignores fields that it does not know, so that later releases may add some.
"""

import json
import re
from collections.abc import Mapping
from datetime import datetime
from math import prod
from typing import Any, NoReturn, TypeVar

from patchstore.bucket.records import (
    DTYPE_BYTES,
    FORMAT_VERSION,
    PACKED,
    Adapter,
    Anchor,
    Base,
    Delta,
    Manifest,
    Payload,
    Schema,
    StateDigest,
    StoreHeader,
    TensorSpec,
    Writer,
)
from patchstore.errors import CorruptObject, UnsupportedFormat, UsageError
from patchstore.stores import layout
from patchstore.support import collector
from patchstore.support.printable import UNPRINTABLE

MAX_JSON_BYTES = 100_000_000
"""Of a manifest or `store.json`, several times what 100,000 tensors need. Readers ask for no more."""
MAX_INTEGER = 2**53 - 1
"""The largest integer of the format, and the largest that every JSON library reads exactly."""
MAX_ELEMENTS = 2**48
"""Elements of one tensor; keeps every byte count of a hostile shape inside 64 bits."""

_HEX = frozenset("0123456789abcdef")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z", re.ASCII)
_Scalar = TypeVar("_Scalar", str, int, bool)


def json_object(what: str, text: str | bytes | bytearray) -> dict[str, Any]:
    """Parse untrusted JSON."""
    try:
        # Given bytes, `json` would also guess UTF-16 and UTF-32; given text, it may be what UTF-8 cannot say.
        data = text.encode() if isinstance(text, str) else text
        with collector.paused():
            value = DECODER.decode(data.decode())
    except (ValueError, RecursionError) as exc:
        raise CorruptObject(f"{what} is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise CorruptObject(f"{what} must be a JSON object, not {type(value).__name__}")
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return record


def _no_number(word: str) -> NoReturn:
    """Refuse `NaN` and `Infinity`, which Python reads and JSON does not have."""
    raise ValueError(f"{word} is no JSON")


DECODER = json.JSONDecoder(object_pairs_hook=_without_repeats, parse_constant=_no_number)
"""Parses untrusted JSON; raises ValueError or RecursionError where it is none."""


def is_printable(text: str) -> bool:
    """Whether a text is not empty, and has no control character, invisible character or surrogate."""
    return bool(text) and UNPRINTABLE.search(text) is None


def is_name(name: str) -> bool:
    """Whether a tensor may be called so: printable, and not what safetensors keeps for itself."""
    return is_printable(name) and name != "__metadata__"


def tensor_spec(where: str, name: str, dtype: str, shape: object) -> TensorSpec:
    """Build a spec from untrusted parts, with a shape as files state it."""
    if not is_name(name):
        raise CorruptObject(f"{where}: {name!r:.100} cannot name a tensor")
    if dtype not in DTYPE_BYTES:
        raise CorruptObject(f"{where}: tensor {name!r} has unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n <= MAX_ELEMENTS for n in shape):
        raise CorruptObject(f"{where}: tensor {name!r} has shape {shape!r:.100}, not a list of sizes")
    # Without its zeros: strides are computed from all sizes, also where there is nothing to stride over.
    if prod(n for n in shape if n) > MAX_ELEMENTS:
        raise CorruptObject(f"{where}: tensor {name!r} of shape {shape!r:.100} has too many elements")
    if num := PACKED.get(dtype):
        if not shape or shape[-1] % num:
            raise CorruptObject(
                f"{where}: tensor {name!r} of dtype {dtype} has shape {shape!r:.100}, and its last size must "
                f"be a multiple of {num}: that many codes are one byte"
            )
        shape = [*shape[:-1], shape[-1] // num]
    return TensorSpec(name=name, dtype=dtype, shape=tuple(shape))


def time_of(text: str) -> datetime:
    """Read a time as the format spells it: `2026-01-31T12:00:00.000Z`, with a fraction or without."""
    if not _TIME.fullmatch(text):
        raise ValueError(f"{text!r:.80} is not spelled as 2026-01-31T12:00:00.000Z")
    return datetime.fromisoformat(text)


class Record:
    """An untrusted JSON object that is asked for one typed field at a time."""

    def __init__(self, where: str, path: str, value: dict[str, Any]) -> None:
        self.where, self.path, self.value = where, path, value

    @classmethod
    def parse(cls, where: str, data: bytes) -> "Record":
        if len(data) > MAX_JSON_BYTES:
            raise CorruptObject(f"{where} has more than {MAX_JSON_BYTES:,} bytes, which no reader takes")
        record = cls(where, "", json_object(where, data))
        found = record.integer("format_version")
        if found != FORMAT_VERSION:
            raise UnsupportedFormat(
                f"{where} has format version {found}; this release reads {FORMAT_VERSION}: "
                "use the release that wrote it, or a later one"
            )
        return record

    def corrupt(self, field: str, reason: str) -> CorruptObject:
        return CorruptObject(f"{self.where}: {self.path}{field} {reason}")

    def _scalar(self, field: str, kind: type[_Scalar]) -> _Scalar:
        value = self.value.get(field)
        if type(value) is not kind:  # bool is an int to isinstance
            raise self.corrupt(field, f"must be of type {kind.__name__}, not {value!r:.80}")
        return value

    def text(self, field: str) -> str:
        value = self._scalar(field, str)
        if not is_printable(value):
            raise self.corrupt(field, "must be printable and not empty")
        return value

    def time(self, field: str) -> str:
        value = self.text(field)
        try:
            time_of(value)
        except ValueError as exc:
            raise self.corrupt(field, f"must be a time in UTC: {exc}") from exc
        return value

    def integer(self, field: str) -> int:
        value = self._scalar(field, int)
        if abs(value) > MAX_INTEGER:
            raise self.corrupt(field, "must be between -(2**53 - 1) and 2**53 - 1")
        return value

    def flag(self, field: str) -> bool:
        return self._scalar(field, bool)

    def count(self, field: str) -> int:
        value = self.integer(field)
        if value < 0:
            raise self.corrupt(field, f"must not be negative, but is {value}")
        return value

    def digest(self, field: str) -> str:
        value = self.text(field)
        if not (value.startswith("blake3:") and len(value) == 71 and _HEX.issuperset(value[7:])):
            raise self.corrupt(field, f"must be 'blake3:' and 64 hex digits, not {value!r:.80}")
        return value

    def sums(self, field: str) -> Payload:
        item = self.item(field)
        key = item.text("key")
        if not layout.is_sums_key(key):
            raise item.corrupt("key", f"must be states/<version>-<write_id>.sums, not {key!r:.100}")
        return Payload(key=key, size=item.count("size"), digest=item.digest("digest"))

    def item(self, field: str) -> "Record":
        value = self.value.get(field)
        if not isinstance(value, dict):
            raise self.corrupt(field, "must be an object")
        return Record(self.where, f"{self.path}{field}.", value)

    def is_null(self, field: str) -> bool:
        """Whether a field that may be null is null; it must be there either way."""
        if field not in self.value:
            raise self.corrupt(field, "is missing")
        return self.value[field] is None

    def optional(self, field: str) -> "Record | None":
        return None if self.is_null(field) else self.item(field)

    def items(self, field: str) -> "list[Record]":
        values = self.value.get(field)
        if not isinstance(values, list) or not all(isinstance(v, dict) for v in values):
            raise self.corrupt(field, "must be a list of objects")
        return [Record(self.where, f"{self.path}{field}[{i}].", v) for i, v in enumerate(values)]

    def texts(self, field: str) -> tuple[str, ...]:
        values = self.value.get(field)
        if not isinstance(values, list) or not all(isinstance(v, str) and is_printable(v) for v in values):
            raise self.corrupt(field, "must be a list of printable strings")
        return tuple(values)

    def payloads(self, field: str, prefix: str) -> tuple[Payload, ...]:
        found = []
        for item in self.items(field):
            key = item.text("key")
            try:
                layout.check_key(key)
            except UsageError as exc:
                raise item.corrupt("key", str(exc)) from exc
            # A manifest must not be able to make a reader fetch or overwrite anything else.
            if not key.startswith(prefix) or key.count("/") != 2:
                raise item.corrupt("key", f"must be a file in a folder of {prefix}, not {key!r}")
            found.append(Payload(key=key, size=item.count("size"), digest=item.digest("digest")))
        return tuple(found)


MAX_HINT_BYTES = 1000
"""Of `head.json`."""


def header_to_json(header: StoreHeader) -> bytes:
    """Spell a store header; deterministic, so equal headers have equal bytes."""
    fields = {
        "format_version": FORMAT_VERSION,
        "run_id": header.run_id,
        "created_at": header.created_at,
        "tensors": [
            {"name": t.name, "dtype": t.dtype, "shape": list(t.listed_shape)} for t in header.schema.tensors
        ],
        "tied": dict(sorted(header.schema.tied.items())),
    }
    if header.adapter is not None:
        base = header.adapter.base
        fields["adapter"] = {
            "base": {"name": base.name, "revision": base.revision, "state": base.state},
            "base_may_change": header.adapter.base_may_change,
        }
    return dump(fields)


@collector.paused()
def header_from_json(data: bytes) -> StoreHeader:
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
        adapter=_adapter(record),
    )


def _adapter(record: Record) -> Adapter | None:
    """Read the field `adapter`, which a run of whole weights does not have."""
    if "adapter" not in record.value:
        return None
    fields = record.item("adapter")
    base = fields.item("base")
    return Adapter(
        base=Base(
            name=None if base.is_null("name") else base.text("name"),
            revision=None if base.is_null("revision") else base.text("revision"),
            state=None if base.is_null("state") else base.digest("state"),
        ),
        base_may_change=fields.flag("base_may_change"),
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
    """Read a manifest."""
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
    """Read which version is the parent, and the digest of its manifest; version 0 alone has neither."""
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
    if delta is None:
        return None
    return {
        "encoding": delta.encoding,
        "num_changed": delta.num_changed,
        "payloads": _payloads(delta.payloads),
    }


def anchor_fields(anchor: Anchor | None) -> dict[str, Any] | None:
    if anchor is None:
        return None
    return {"payloads": _payloads(anchor.payloads), "files": _payloads(anchor.files)}


def _payloads(payloads: tuple[Payload, ...]) -> list[dict[str, Any]]:
    return [_payload(payload) for payload in payloads]


def _payload(payload: Payload) -> dict[str, Any]:
    return {"key": payload.key, "size": payload.size, "digest": payload.digest}


def dump(value: Mapping[str, Any]) -> bytes:
    """Spell an object: one line a field, which people can read, and no spaces in what programs read."""
    spell = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    lines = (f"{spell(field)}: {spell(found)}" for field, found in value.items())
    data = ("{\n" + ",\n".join(lines) + "\n}\n").encode()
    if len(data) > MAX_JSON_BYTES:
        raise UsageError(
            f"so many tensors need an object of {len(data):,} bytes, but readers take at most "
            f"{MAX_JSON_BYTES:,}: publish them as several runs"
        )
    return data
