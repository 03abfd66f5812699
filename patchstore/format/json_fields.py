"""Untrusted JSON: parse it, and read its fields one at a time, each checked before it becomes a value.

The bytes come from a bucket that others can write to.
"""

import json
import re
from datetime import datetime
from math import prod
from typing import Any, NoReturn, TypeVar

from patchstore.errors import CorruptObject, UnsupportedFormat, UsageError
from patchstore.format import layout
from patchstore.format.records import DTYPE_BYTES, FORMAT_VERSION, Payload, TensorSpec

MAX_JSON_BYTES = 100_000_000
"""Of a manifest or `store.json`, several times what 100,000 tensors need. Readers ask for no more."""
MAX_INTEGER = 2**53 - 1
"""The largest integer of the format, and the largest that every JSON library reads exactly."""
MAX_ELEMENTS = 2**48
"""Elements of one tensor; keeps every byte count of a hostile shape inside 64 bits."""

_HEX = frozenset("0123456789abcdef")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z", re.ASCII)
# Fixed ranges, and not `str.isprintable`, which changes with the Unicode version of each Python.
_UNPRINTABLE = re.compile(
    "[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]"
)
_Scalar = TypeVar("_Scalar", str, int)


def json_object(what: str, text: str | bytes | bytearray) -> dict[str, Any]:
    """Parse untrusted JSON.

    Args:
        what: the subject of the error's sentence.

    Raises:
        CorruptObject: not JSON in UTF-8, a name that occurs twice, or not an object.
    """
    try:
        # Given bytes, `json` would also guess UTF-16 and UTF-32; given text, it may be what UTF-8 cannot say.
        data = text.encode() if isinstance(text, str) else text
        value = json.loads(data.decode(), object_pairs_hook=_without_repeats, parse_constant=_no_number)
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


def is_printable(text: str) -> bool:
    """Whether a text is not empty, and has no control character, invisible character or surrogate."""
    return bool(text) and _UNPRINTABLE.search(text) is None


def is_name(name: str) -> bool:
    """Whether a tensor may be called so: printable, and not what safetensors keeps for itself."""
    return is_printable(name) and name != "__metadata__"


def tensor_spec(where: str, name: str, dtype: str, shape: object) -> TensorSpec:
    """Build a spec from untrusted parts.

    Raises:
        CorruptObject: a name that is not printable, an unknown dtype, or a bad shape.
    """
    if not is_name(name):
        raise CorruptObject(f"{where}: {name!r:.100} cannot name a tensor")
    if dtype not in DTYPE_BYTES:
        raise CorruptObject(f"{where}: tensor {name!r} has unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n <= MAX_ELEMENTS for n in shape):
        raise CorruptObject(f"{where}: tensor {name!r} has shape {shape!r:.100}, not a list of sizes")
    # Without its zeros: strides are computed from all sizes, also where there is nothing to stride over.
    if prod(n for n in shape if n) > MAX_ELEMENTS:
        raise CorruptObject(f"{where}: tensor {name!r} of shape {shape!r:.100} has too many elements")
    return TensorSpec(name=name, dtype=dtype, shape=tuple(shape))


def time_of(text: str) -> datetime:
    """Read a time as the format spells it: `2026-01-31T12:00:00.000Z`, with a fraction or without.

    Raises:
        ValueError: spelled otherwise, or no such time.
    """
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
