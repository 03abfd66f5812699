"""Delta files: for each tensor with changes its positions and values, or its coded tiles."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from patchstore.bucket.manifest_json import json_object
from patchstore.bucket.records import DTYPE_BYTES, FORMAT_VERSION, PACKED, Manifest, Schema
from patchstore.codec import encoding, tensor_file
from patchstore.codec.context import Coded, Context, unpack
from patchstore.codec.index import Listed
from patchstore.codec.listing import Listing
from patchstore.codec.tensor_file import (
    FileHeader,
    check_bools,
    check_metadata,
    listed_spec,
)
from patchstore.errors import CorruptObject
from patchstore.stores.base import Chunk
from patchstore.support import collector
from patchstore.tensors.bits import TORCH_DTYPES

Array = npt.NDArray[Any]


class Content:
    """What payloads of one version state."""

    def __init__(self, listed: Sequence[Listed], coded: Coded) -> None:
        self.listed = listed
        """By position. Several may list elements of one tensor, no two the same."""
        self.coded = coded.at(coded.numbers.argsort(kind="stable"))
        """By the parent's values; ascending by tensor."""

    @classmethod
    def joined(cls, contents: Sequence["Content"]) -> "Content":
        """Return what several payloads state."""
        if len(contents) == 1:
            return contents[0]
        return cls(
            [each for content in contents for each in content.listed],
            Coded.joined([content.coded for content in contents if len(content.coded)]),
        )

    @cached_property
    def numbers(self) -> tuple[Array, Array]:
        """int64 [T] each: the tensors that are stated, ascending; and how many state something of each."""
        every = np.concatenate([*(each.numbers for each in self.listed), self.coded.numbers])
        return np.unique(every.astype(np.int64), return_counts=True)

    @property
    def shared(self) -> Array:
        """int64, ascending: the tensors that one payload lists, and another states too."""
        numbers, counts = self.numbers
        listed = [numbers[:0], *(each.numbers for each in self.listed)]
        return np.intersect1d(numbers[counts > 1], np.concatenate(listed))

    def of(self, numbers: Array) -> "Content":
        """Return what is stated of some tensors, ascending."""
        listed = [some for each in self.listed if len((some := each.of(numbers)).numbers)]
        return Content(listed, self.coded.of(numbers))


def identity(version: int, parent: int | None, step: int, run_id: str, encoding: str) -> dict[str, str]:
    """The metadata that say which delta a file is of."""
    return {
        "format": "patchstore",
        "format_version": str(FORMAT_VERSION),
        "kind": "delta",
        "run_id": run_id,
        "version": str(version),
        "parent": str(parent),
        "step": str(step),
        "encoding": encoding,
    }


def write(
    schema: Schema, metadata: Mapping[str, str], listing: Listing, coded: Mapping[str, torch.Tensor]
) -> Callable[[], Iterator[Chunk]]:
    """Return a function that streams a delta file, with all that is needed to understand it on its own.

    `metadata` are its identity. The caller leaves the data as it is until the file is stored.
    """
    # By hand: a value for each of tens of thousands of tensors would take seconds.
    fields, at = [], 0

    def entry(name: str, dtype: str, num: int, num_bytes: int) -> None:
        nonlocal at
        fields.append(f'{name}":{{"dtype":"{dtype}","shape":[{num}],"data_offsets":[{at},{at + num_bytes}]}}')
        at += num_bytes

    names = schema.listed
    for column in listing.columns:
        width, codes = column.data.element_size(), PACKED.get(column.dtype, 1)
        for number, num in zip(column.numbers.tolist(), column.counts.tolist(), strict=True):
            entry(names[number][0] + column.suffix, column.dtype, num * codes, num * width)
    for name, data in coded.items():
        entry(f'"{name}', "U8", data.numel(), data.numel())
    listed = _list_of_tensors(schema, listing.numbers, listing.firsts)
    told = json.dumps({**metadata, "tensors": listed}, separators=(",", ":"), ensure_ascii=False)
    header = tensor_file.framed(",".join([f'{{"__metadata__":{told}', *fields]) + "}")
    for column in listing.columns:
        if column.dtype == "BOOL":
            _check_bools("this file cannot be written", column.numbers, column.counts, column.data, schema)
    tensors = [*(column.data for column in listing.columns), *coded.values()]
    return lambda: tensor_file.stream(header, tensors)


def _list_of_tensors(schema: Schema, numbers: Array, firsts: Mapping[int, int]) -> str:
    """Return the list of the tensors that a file states by position, as this release writes it."""
    names, listed = schema.listed, []
    for number in numbers.tolist():
        name, what = names[number]
        listed.append(
            f'{name}":{{{what},"first":{firsts[number]}}}' if number in firsts else f'{name}":{{{what}}}'
        )
    return f"{{{','.join(listed)}}}"


@collector.paused()
def read_delta(where: str, buffer: bytearray | memoryview, manifest: Manifest, schema: Schema) -> Content:
    """Read a delta file, and check that it is the one its manifest means; the result shares the buffer."""
    view = memoryview(buffer).cast("B")
    header = tensor_file.read_header(where, len(view), lambda num_bytes: bytes(view[:num_bytes]))
    assert manifest.delta is not None
    expected = identity(
        manifest.version, manifest.parent, manifest.step, manifest.run_id, manifest.delta.encoding
    )
    check_metadata(where, header, expected)
    entries = dict(zip(header.names, range(len(header.names)), strict=True))
    coded = Coded.none()
    if isinstance(encoding(manifest.delta.encoding), Context):
        given = [entries.pop(name, None) for name in ("table", "tiles")]
        if given != [None, None]:
            table, tiles = (_bytes_of(where, view, header, place) for place in given)
            coded = unpack(where, table, tiles, schema)
    listed = _listed(where, view, header, entries, schema)
    if entries:
        raise CorruptObject(f"{where}: it holds {min(entries)!r:.100}, which belongs to no listed tensor")
    if not listed and not len(coded):
        raise CorruptObject(f"{where}: it changes no tensor; a delta without changes has no payloads")
    return Content(listed, coded)


def _bytes_of(where: str, view: memoryview, header: FileHeader, place: int | None) -> Array:
    """Return the entry `table` or `tiles`."""
    kind = ("", ()) if place is None else header.kinds[header.kind[place]]
    if place is None or kind[0] != "U8" or len(kind[1]) != 1:
        raise CorruptObject(f"{where}: its entries 'table' and 'tiles' are not two lists of bytes")
    start, end = (header.data_start + header.bounds[place : place + 2]).tolist()
    return np.frombuffer(view[start:end], dtype=np.uint8)


def _listed(
    where: str, view: memoryview, header: FileHeader, entries: dict[str, int], schema: Schema
) -> list[Listed]:
    """Take what is listed out of the places of a file's entries, by name."""
    firsts = _read_list(where, header, schema)
    numbers = sorted(firsts)
    if not numbers:
        return []
    names = [schema.tensors[number].name for number in numbers]
    idx_at = [entries.pop(f"{name}.idx", None) for name in names]
    val_at = [entries.pop(f"{name}.val", None) for name in names]
    for name, idx, val in zip(names, idx_at, val_at, strict=True) if None in idx_at + val_at else ():
        if idx is None or val is None:
            raise CorruptObject(f"{where}: {name!r} lacks its positions or values")
    each = _Stated(where, schema, header, np.array(numbers), np.array(idx_at), np.array(val_at))
    each.check([firsts[number] for number in numbers])
    begins = np.array([firsts[number] for number in numbers], dtype=np.int64)
    dtypes = [dtype for dtype, _ in header.kinds]
    of_place = np.unique(dtypes, return_inverse=True)[1][header.kind]
    kind = of_place[each.val] * len(dtypes) + of_place[each.idx]
    found: list[Listed] = []
    for mine in (np.flatnonzero(kind == one) for one in np.unique(kind)):
        its, counts, values = each.numbers[mine], each.counts[mine], _flat(view, header, each.val[mine])
        if values.dtype == torch.bool:
            _check_bools(where, its, counts, values, schema)
        gaps = _flat(view, header, each.idx[mine])
        found.append(Listed(where, its, counts, begins[mine], counts.cumsum() - counts, gaps, values))
    return found


def _read_list(where: str, header: FileHeader, schema: Schema) -> dict[int, Any]:
    """Read which tensors a file states by position; returns from where the gaps of each count, unchecked."""
    text = header.metadata.get("tensors", "")
    values = [name.removesuffix(".val") for name in header.names if name.endswith(".val")]
    numbers = sorted(schema.places[name] for name in values if name in schema.places)
    # Comparing takes a tenth of the time of parsing.
    if text == _list_of_tensors(schema, np.array(numbers, dtype=np.int64), {}):
        return dict.fromkeys(numbers, 0)
    firsts: dict[int, Any] = {}
    for name, value in json_object(f"{where}: its list of tensors", text).items():
        number = schema.places.get(name)
        if number is None:
            raise CorruptObject(f"{where}: it changes tensor {name!r:.100}, which this run does not have")
        spec = schema.tensors[number]
        if listed_spec(where, name, value) != spec:
            raise CorruptObject(f"{where}: it takes {name!r} for {value!r:.100}, but the run has {spec}")
        firsts[number] = value.get("first", 0)
    return firsts


class _Stated:
    """What a file says of the tensors that it lists; `numbers` ascend."""

    def __init__(
        self, where: str, schema: Schema, header: FileHeader, numbers: Array, idx: Array, val: Array
    ) -> None:
        self.numbers, self.idx, self.val = numbers, idx, val
        """int64 [T] each, the tensors, and the places of their entries."""
        widths = np.array([DTYPE_BYTES[dtype] for dtype, _ in header.kinds])[header.kind]
        self._nums = np.diff(header.bounds) // widths
        self.counts = self._nums[self.val]
        """int64 [T], elements that are listed of each."""
        self._where, self._schema, self._header = where, schema, header

    def check(self, firsts: Sequence[Any]) -> None:
        """Refuse what no index encoding stores of a tensor."""
        schema, kind_of_tensor = self._schema, np.array(self._schema.kinds[1])[self.numbers]
        kinds, idx_kind, val_kind = (
            self._header.kinds,
            self._header.kind[self.idx],
            self._header.kind[self.val],
        )
        sizes = np.array(schema.sizes)[self.numbers]
        dims = np.array([len(shape) for _, shape in kinds])
        is_flat = (dims[idx_kind] == 1) & (dims[val_kind] == 1) & (self._nums[self.idx] == self.counts)
        # A file and a run have few dtypes and shapes.
        alike = [[dtype == other for other, _ in kinds] for dtype, _ in schema.kinds[0]]
        is_typed = np.array(alike)[kind_of_tensor, val_kind]
        begins = [
            type(first) is int and 0 <= first < size
            for first, size in zip(firsts, sizes.tolist(), strict=True)
        ]
        is_right = is_flat & is_typed & np.array(begins) & (self.counts > 0) & (self.counts <= sizes)
        for at in np.flatnonzero(~is_right)[:1].tolist():
            spec = schema.tensors[self.numbers[at]]
            (_, idx_shape), (dtype, val_shape) = kinds[idx_kind[at]], kinds[val_kind[at]]
            what = (
                f"it has values of {spec.name!r} in {dtype}, expected {spec.dtype}"
                if not is_typed[at]
                else f"{spec.name!r} has positions of shape {idx_shape} and values of shape "
                f"{val_shape}, expected one dimension of the same length"
                if not is_flat[at]
                else f"it lists {spec.name!r}, and states no element of it"
                if not self.counts[at]
                else f"it states {self.counts[at]} elements of {spec.name!r}, which has {spec.num_elements}"
                if self.counts[at] > sizes[at]
                else f"positions of {spec.name!r} count from {firsts[at]!r:.100}, which is none of its "
                f"{spec.num_elements} elements"
            )
            raise CorruptObject(f"{self._where}: {what}")


def _flat(view: memoryview, header: FileHeader, places: Array) -> torch.Tensor:
    """Return the data of entries of one dtype, one after the other; neighbours without a copy."""
    cuts = np.flatnonzero(np.diff(places) != 1) + 1
    begins, ends = (
        header.bounds[some].tolist()
        for some in (places[np.r_[0, cuts]], places[np.r_[cuts - 1, len(places) - 1]] + 1)
    )
    dtype = TORCH_DTYPES[header.kinds[header.kind[places[0]]][0]]
    found = [
        torch.frombuffer(
            view, dtype=dtype, count=(end - begin) // dtype.itemsize, offset=header.data_start + begin
        )
        for begin, end in zip(begins, ends, strict=True)
    ]
    return found[0] if len(found) == 1 else torch.cat(found)


def _check_bools(where: str, numbers: Array, counts: Array, data: torch.Tensor, schema: Schema) -> None:
    """`tensor_file.check_bools` for tensors whose data lie one after the other."""
    for number, its in zip(numbers.tolist(), torch.split(data, counts.tolist()), strict=True):
        check_bools(where, schema.tensors[number].name, "BOOL", its)
