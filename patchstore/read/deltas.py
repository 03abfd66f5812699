"""Open the deltas of a plan, verified, and turn them into patches.

Of a delta of encoding `context` only the ranges that some tiles need can be read. The digest of the whole
object cannot be checked then, so the caller must check the tensors' digest sums before it applies the result.
"""

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from itertools import pairwise
from math import prod
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from patchstore.bucket.digests import missing
from patchstore.bucket.records import REQUEST_BYTES, Box, Manifest, Payload, Schema, TensorSpec, view_of
from patchstore.bucket.state_sums import SumsArray
from patchstore.codec import IndexEncoding, delta_file, encoding, tensor_file
from patchstore.codec.context import Chosen, Coded, Context, Cuts, Tiles, Tiling, decode_all, unpack
from patchstore.codec.delta_file import Content
from patchstore.codec.index import Gap
from patchstore.codec.tensor_file import FileHeader
from patchstore.errors import CorruptObject, NotFound
from patchstore.read.download import OwnMemory, fill, in_memory, room_for
from patchstore.stores.base import Store
from patchstore.support import host
from patchstore.support.threads import Threads
from patchstore.tensors.bits import TOGETHER, TORCH_DTYPES, TensorPatch, unsigned
from patchstore.tensors.columns import Group, Located, in_order, last_of, patches, runs
from patchstore.tensors.state_digest import of_group

if TYPE_CHECKING:
    from patchstore.read.host_cache import HostCache

Array = npt.NDArray[Any]


def check_boxes(version: int, content: Content, schema: Schema) -> None:
    """Refuse coded parts of a tensor that have elements in common."""
    numbers = content.coded.numbers
    for number in np.unique(numbers[1:][numbers[1:] == numbers[:-1]]):
        parts = content.of(np.array([number])).coded
        spec = schema.tensors[number]
        pair = _overlapping([cut.box for cut in parts.cuts], view_of(spec.shape))
        if pair is not None:
            one, other = (parts.key(part) for part in pair)
            raise CorruptObject(
                f"{other}: it codes elements of {spec.name!r} that {one} codes too, in version {version}"
            )


def check_listed(version: int, content: Content, schema: Schema, index: IndexEncoding) -> None:
    """Refuse elements that two payloads list, or that one lists and any of them codes, also of gaps that are
    not decoded.
    """
    shared = content.shared
    if not len(shared):
        return
    some = content.of(shared)
    if not len(some.coded) and all(each.idx.dtype == torch.uint16 for each in some.listed):
        # Where gaps begin and end is known without listing positions.
        listed = [each.alone() for each in some.listed]
        begins = [each.firsts + unsigned(each.idx)[each.starts] for each in listed]
        sums = [np.add.reduceat(unsigned(each.idx), each.starts, dtype=np.int64) for each in listed]
        ends = [each.firsts + its + each.counts for each, its in zip(listed, sums, strict=True)]
        if _are_apart([each.numbers for each in listed], begins, [each - 1 for each in ends]):
            return
    for number in shared:
        its = content.of(np.array([number]))
        decoded = [(each.where, index.decode(each, schema)) for each in its.listed]
        check_groups(version, its.coded, schema, decoded)


def check_groups(version: int, coded: Coded, schema: Schema, listed: Sequence[tuple[str, Group]]) -> None:
    """Refuse elements of tensors that two payloads list, or that one lists and any of them codes.

    `listed` are payloads' keys, and what each lists of these tensors.
    """
    for number, cut in zip(coded.numbers.tolist(), coded.cuts, strict=True):
        its = np.array([number])
        for key, group in listed:
            line, col = np.divmod(group.of(its).positions.astype(np.int64), cut.cols)
            level, row = np.divmod(line, cut.rows)
            box = cut.box
            inside = (level >= box.level) & (level < box.level + box.levels)
            inside &= (row >= box.row) & (row < box.row + box.rows)
            inside &= (col >= box.col) & (col < box.col + box.cols)
            if inside.any():
                name = schema.tensors[number].name
                raise CorruptObject(
                    f"{key}: it lists an element of {name!r} that a payload of version {version} codes"
                )
    if len(listed) < 2:
        return
    groups = [group for _, group in listed]
    starts = [group.counts.cumsum() - group.counts for group in groups]
    begins = [group.positions[its] for group, its in zip(groups, starts, strict=True)]
    ends = [group.positions[its + group.counts - 1] for group, its in zip(groups, starts, strict=True)]
    if _are_apart([group.numbers for group in groups], begins, ends):
        return
    joined = in_order(groups)
    twice = (np.diff(joined.positions) == 0) & (np.diff(joined.owner) == 0)
    for at in np.flatnonzero(twice)[:1]:
        number = joined.numbers[joined.owner[at]]
        key = [key for key, group in listed if number in group.numbers][-1]
        raise CorruptObject(
            f"{key}: it states an element of {schema.tensors[number].name!r} that another payload of version "
            f"{version} states too"
        )


def _are_apart(numbers: Sequence[Array], begins: Sequence[Array], ends: Sequence[Array]) -> bool:
    """Whether ranges of one tensor, of positions from the first to the last, never meet."""
    owners, first, last = (np.concatenate(each) for each in (numbers, begins, ends))
    order = np.lexsort((first, owners))
    owners, first, last = owners[order], first[order], last[order]
    return bool(((last[:-1] < first[1:]) | (owners[:-1] != owners[1:])).all())


def _overlapping(boxes: Sequence[Box], sides: tuple[int, int, int]) -> tuple[int, int] | None:
    """Return two boxes within a tensor of these sides that have elements in common, if any have."""
    starts = np.array([(box.level, box.row, box.col) for box in boxes])
    ends = starts + np.array([(box.levels, box.rows, box.cols) for box in boxes])
    # Most trainers cut one dimension: then neighbours along it tell.
    differ = [
        dim for dim in range(3) if len(np.unique(np.stack([starts[:, dim], ends[:, dim]], 1), axis=0)) > 1
    ]
    if len(differ) <= 1:
        dim = differ[0] if differ else 0
        order = np.argsort(starts[:, dim], kind="stable")
        near = np.flatnonzero(starts[order[1:], dim] < ends[order[:-1], dim])
        return (int(order[near[0]]), int(order[near[0] + 1])) if len(near) else None
    # A hostile payload may have a part for each element: each pair would be too many.
    taken = np.zeros(sides, dtype=np.bool_) if len(boxes) ** 2 > prod(sides) else None
    for number in range(len(boxes)):
        if taken is not None:
            its = taken[tuple(map(slice, starts[number], ends[number]))]
            if not its.any():
                its[...] = True
                continue
        common = (starts[:number] < ends[number]) & (starts[number] < ends[:number])
        found = np.flatnonzero(common.all(axis=1))
        if len(found):
            return int(found[0]), number
    return None


FIRST_BYTES = 1 << 16
"""Size of the first request: contains header and table of most payloads."""

Needs = Callable[[TensorSpec, Tiling], Tiles]
"""Which tiles of a part of a tensor are needed, ascending; None for all."""


def read_ranges(store: Store, wanted: Payload, manifest: Manifest, schema: Schema, needs: Needs) -> Content:
    """Read the parts of a delta of encoding `context` that some tiles need.

    Returns:
        As `delta_file.read_delta`; streams of other tiles are zeros. Memory: what was read.
    """
    try:
        view, done, header = _begun(store, wanted)
        entries = _entries(header)
        tiles, table = entries.get("tiles"), entries.get("table")
        end = wanted.size if tiles is None else tiles[0]
        _fill(store, wanted, view, done, end)
        if tiles is not None and table is not None:
            listed = np.frombuffer(view[slice(*table)], dtype=np.uint8)
            for first, last in _needed(wanted.key, listed, tiles[1] - end, schema, needs):
                _fill(store, wanted, view, max(end + first, done), end + last)
    except NotFound as exc:
        raise missing(store, wanted) from exc
    return delta_file.read_delta(wanted.key, view, manifest, schema)


def stated_sizes(store: Store, manifest: Manifest, schema: Schema) -> tuple[Array, Array, int]:
    """Read from the headers of a delta how much it states of each tensor; no digest is checked.

    Returns:
        Elements that are listed, with bridges of `gap`, and bytes of coded tiles, int64 [T] by place in the
        schema; and how many bytes were read.
    """
    listed, coded = np.zeros((2, len(schema.tensors)), dtype=np.int64)
    num_read = 0
    for wanted in () if manifest.delta is None else manifest.delta.payloads:
        try:
            view, done, header = _begun(store, wanted)
            num_read += done
            for name, kind in zip(header.names, header.kind.tolist(), strict=True):
                if name.endswith(".val") and (place := schema.places.get(name[:-4])) is not None:
                    listed[place] += prod(header.kinds[kind][1])
            entries = _entries(header)
            if (table := entries.get("table")) is not None and (tiles := entries.get("tiles")) is not None:
                num_read += _fill(store, wanted, view, max(table[0], done), table[1]) - max(table[0], done)
                data = np.frombuffer(view[slice(*table)], dtype=np.uint8)
                found = unpack(wanted.key, data, _no_bytes(tiles[1] - tiles[0]), schema)
                np.add.at(coded, found.numbers, np.diff(found.bytes_at))
        except NotFound as exc:
            raise missing(store, wanted) from exc
    return listed, coded, num_read


def _begun(store: Store, wanted: Payload) -> tuple[memoryview, int, FileHeader]:
    """Read the beginning of a payload.

    Returns:
        Memory for all of the payload, how many bytes of it were read, and its header.
    """
    view = memoryview(_room(store, wanted))[: wanted.size]
    done = 0

    def beginning(num_bytes: int) -> bytes:
        nonlocal done
        done = _fill(store, wanted, view, done, max(num_bytes, FIRST_BYTES))
        return bytes(view[:done])

    header = tensor_file.read_header(wanted.key, wanted.size, beginning)
    return view, done, header


def _entries(header: FileHeader) -> dict[str, tuple[int, int]]:
    """Return where in its file each entry begins and ends."""
    bounds = (header.data_start + header.bounds).tolist()
    return dict(zip(header.names, pairwise(bounds), strict=True))


def _no_bytes(num: int) -> npt.NDArray[np.uint8]:
    """Return so many zeros, in the memory of one."""
    return np.broadcast_to(np.zeros(1, dtype=np.uint8), num)


def _room(store: Store, wanted: Payload) -> mmap.mmap:
    """Reserve address space for a payload; only pages that are written take memory."""
    try:
        return mmap.mmap(-1, max(wanted.size, 1))
    except OSError as exc:
        if (size := store.size(wanted.key)) != wanted.size:
            raise CorruptObject(f"{wanted.key} should have {wanted.size:,} bytes but has {size:,}") from exc
        raise


def _fill(store: Store, wanted: Payload, view: memoryview, start: int, end: int) -> int:
    """Read bytes from `start` to `end` to their place in the buffer; return the end of the last range."""
    at, end = start, min(end, wanted.size)
    if at < end:
        with host.reading(wanted.key):
            for chunk in store.read(wanted.key, start=at, end=end):
                view[at : at + len(chunk)] = chunk
                at += len(chunk)
        if at < end:
            raise CorruptObject(f"{wanted.key} ends {end - at:,} bytes early")
    return max(start, end)


def _needed(
    where: str, table: np.ndarray, num_bytes: int, schema: Schema, needs: Needs
) -> Iterator[tuple[int, int]]:
    """Yield ranges of the entry `tiles` with all streams that are needed, ascending and apart."""
    specs = schema.tensors
    found = unpack(where, table, _no_bytes(num_bytes), schema)
    lengths, bounds = found.lengths, found.tiles_at.tolist()
    ends = np.cumsum(lengths)
    chosen = np.zeros(len(ends), dtype=np.bool_)
    for number, cut, (first, end) in zip(found.numbers.tolist(), found.cuts, pairwise(bounds), strict=True):
        tiles = needs(specs[number], cut)
        chosen[first:end][slice(None) if tiles is None else tiles] = True
    chosen &= lengths > 0
    yield from joined(zip((ends - lengths)[chosen].tolist(), ends[chosen].tolist(), strict=True))


def joined(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Join ascending ranges that are near each other."""
    start, end = 0, 0
    for first, last in ranges:
        # Reading what lies between takes no longer than one more request.
        if first - end > REQUEST_BYTES:
            if end > start:
                yield start, end
            start = first
        elif end == start:
            start = first
        end = last
    if end > start:
        yield start, end


_AT_A_TIME = 8
"""Payloads of which ranges are read at the same time."""
OWN_BYTES = 1 << 30
"""The most that is read into a process's own memory, of all deltas of a plan."""


Held = Callable[[Array], Located]
"""Returns the parent's tensors by their places in the schema, in that order; some may be there twice."""
CutOf = Callable[[int], Chosen | None]
"""Returns which tiles of the parts of a tensor are wanted; None for all. What is held need be right there
alone."""


class Deltas:
    """The deltas of a plan on local disk, mapped into memory.

    What they state is decoded many tensors at a time: those of one dtype, of about `TOGETHER` elements.
    """

    def __init__(self, versions: Sequence[tuple[Manifest, Content]], schema: Schema) -> None:
        self._versions = versions
        self._schema = schema
        every = [content.numbers[0] for _, content in versions]
        self.numbers: Array = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *every]))
        """int64 [T], places in the schema of tensors that any of the deltas states; ascending."""
        coded = [content.coded.numbers for _, content in versions]
        self.relative: Array = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *coded]))
        """Those of which any of them is relative: to decode it takes the tensor that it changes."""

    @cached_property
    def names(self) -> set[str]:
        """Of `numbers`."""
        return {self._schema.tensors[number].name for number in self.numbers.tolist()}

    def apply(self, tensors: Iterable[tuple[TensorSpec, torch.Tensor]]) -> None:
        """Write the changes of all deltas into tensors that have the version before the first delta."""
        for _ in self._written(self._by_number(tensors)):
            pass

    def counted(
        self, tensors: Iterable[tuple[TensorSpec, torch.Tensor]], growth: SumsArray, *, is_written: bool
    ) -> None:
        """Add to `growth`, of all tensors, by how much the digest sums of these grow.

        Args:
            is_written: `apply` too. Otherwise the tensors stay as they are, and there must be one delta.
        """
        assert is_written or len(self._versions) == 1
        held = self._by_number(tensors)
        for group in self._written(held, is_written=is_written):
            growth[group.numbers] += of_group(group) - of_group(group._replace(values=held.at(group)))

    def _by_number(self, tensors: Iterable[tuple[TensorSpec, torch.Tensor]]) -> Located:
        """Return those of these tensors that any delta states, by their places."""
        its = {self._schema.places[spec.name]: tensor for spec, tensor in tensors if spec.name in self.names}
        return Located(np.array(sorted(its), dtype=np.int64), [its[number] for number in sorted(its)])

    def _written(self, held: Located, *, is_written: bool = True) -> Iterator[Group]:
        """Yield all that the deltas state of tensors, delta by delta; each is written when the next is
        taken.
        """
        for some in self._runs(held.numbers):
            for number in range(len(self._versions)):
                group = self._stated(number, some, held.of)
                if group is not None:
                    yield group
                    if is_written:
                        held.write(group)

    def after(self, spec: TensorSpec, before: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor with all deltas applied."""
        tensor = before.clone()
        self.apply([(spec, tensor)])
        return tensor

    def _runs(self, numbers: Array) -> Iterator[Array]:
        """Cut tensors, ascending, into runs that are decoded together."""
        kinds, of = self._schema.kinds
        dtypes = [dtype for dtype, _ in kinds]
        dtype = np.array([dtypes.index(each) for each in dtypes], dtype=np.int64)[np.array(of)[numbers]]
        sizes = self._sizes[np.searchsorted(self.numbers, numbers)]
        for each in dict.fromkeys(dtype.tolist()):
            its = np.flatnonzero(dtype == each)
            for first, end in runs(sizes[its], TOGETHER):
                yield numbers[its[first:end]]

    @cached_property
    def _sizes(self) -> Array:
        """int64 [T], of `numbers`: elements that are listed of each, or all where any delta is relative."""
        found = np.zeros(len(self.numbers), dtype=np.int64)
        whole = np.array(self._schema.sizes, dtype=np.int64)[self.numbers]
        for _, content in self._versions:
            for each in content.listed:
                found[np.searchsorted(self.numbers, each.numbers)] += each.counts
            at = np.searchsorted(self.numbers, np.unique(content.coded.numbers))
            found[at] += whole[at]
        return found

    def _stated(self, version: int, numbers: Array, held: Held, cut: CutOf | None = None) -> Group | None:
        """Return what one version states of tensors of one dtype; None for nothing."""
        manifest, content = self._versions[version]
        assert manifest.delta is not None
        index, some = encoding(manifest.delta.encoding).index, content.of(numbers)
        listed = [(each.where, index.decode(each, self._schema)) for each in some.listed]
        if len(shared := some.shared):
            its = some.of(shared)
            check_groups(
                manifest.version, its.coded, self._schema, [(key, group.of(shared)) for key, group in listed]
            )
        groups = [group for _, group in listed]
        if len(some.coded):
            groups += _decoded(some.coded, self._schema, held, cut)
        groups = [group for group in groups if len(group.positions)]
        return in_order(groups) if groups else None

    def cuts(self) -> list[tuple[Array, Cuts]]:
        """Return of each version's coded parts the place of the tensor in the schema, and how it is cut."""
        return [(content.coded.numbers, content.coded.cuts) for _, content in self._versions]

    def contents(self) -> list[Content] | None:
        """Return what each version states, oldest first; None where any has positions that are not gaps."""
        for manifest, content in self._versions:
            assert manifest.delta is not None
            index = encoding(manifest.delta.encoding).index
            if not isinstance(index, Gap):
                return None
            check_listed(manifest.version, content, self._schema, index)
        return [content for _, content in self._versions]

    def merged(self, spec: TensorSpec, held: torch.Tensor | None, tiles: Chosen | None = None) -> TensorPatch:
        """Return one patch of a tensor with the effect of all.

        Args:
            held: the parent's tensor; None if no stored change of it is relative to the parent.
            tiles: which tiles of a part are wanted; None for all.
        """

        def given(places: Array) -> Located:
            assert held is not None or not len(places)
            return Located(places, [] if held is None else [held] * len(places))

        numbers = [self._schema.places[spec.name]] if spec.name in self.names else []
        for group in self.merged_groups(np.array(numbers, dtype=np.int64), given, lambda _: tiles):
            return next(patches(group, self._schema))
        nothing = torch.empty(0, dtype=torch.int32, device="cpu")
        return TensorPatch(name=spec.name, indices=nothing, values=nothing.to(TORCH_DTYPES[spec.dtype]))

    def merged_groups(self, numbers: Array, held: Held, cut: CutOf | None = None) -> Iterator[Group]:
        """Yield what all deltas together state of tensors, ascending: the last value of every position wins.

        A tensor is in one group, and groups share no memory that is written to.
        """
        for some in self._runs(numbers):
            if len(self._versions) == 1:
                if (group := self._stated(0, some, held, cut)) is not None:
                    yield group
                continue
            relative = some[np.isin(some, self.relative)]
            before = held(relative).copied()
            found = []
            for version in range(len(self._versions)):
                if (group := self._stated(version, some, before.of, cut)) is not None:
                    before.write(group.of(relative))
                    found.append(group)
            if found:
                yield last_of(found)


def _decoded(coded: Coded, schema: Schema, held: Held, cut: CutOf | None) -> Iterator[Group]:
    """Yield the changes of coded parts of tensors of one dtype; a tensor is there once for each part."""
    # Neighbours that are cut alike are cut into tiles together.
    order = coded.cuts.kind.argsort(kind="stable")
    tiles: list[Tiles] | None = None
    if cut is not None:
        chosen = {number: cut(number) for number in np.unique(coded.numbers).tolist()}
        each = [(chosen[int(coded.numbers[part])], coded.cuts[part]) for part in order.tolist()]
        tiles = [None if choose is None else choose(tiling) for choose, tiling in each]
        wanted = np.array([some is None or len(some) > 0 for some in tiles], dtype=np.bool_)
        order, tiles = order[wanted], [tiles[at] for at in np.flatnonzero(wanted).tolist()]
    if not len(order):
        return
    parts = coded.at(order)
    olds = held(parts.numbers).whole()
    if not parts.cuts.each(
        lambda kind: kind.num_elements == prod((kind.whole_levels, kind.rows, kind.cols))
    ).all():
        olds = [cut.of_whole(each) for cut, each in zip(parts.cuts, olds, strict=True)]
    old = olds[0] if len(olds) == 1 else np.concatenate(olds)
    counts, positions, new = decode_all(schema.tensors, parts, old, tiles)
    some_change = counts > 0
    if len(positions) and positions.max() < 2**31:
        positions = positions.astype(np.int32)
    yield Group(parts.numbers[some_change], counts[some_change], positions, new)


@contextmanager
def open_deltas(
    store: Store,
    manifests: tuple[Manifest, ...],
    schema: Schema,
    scratch: Path | None,
    cache: "HostCache | None" = None,
    needs: Needs | None = None,
    allocate: Callable[[int], torch.Tensor] | None = None,
) -> Iterator[Deltas]:
    """Download and open the deltas of these versions; their files are gone when the block ends.

    Args:
        scratch: folder for temporary files of the deltas' size; None for the system's.
        needs: which tiles of coded tensors to read, if not all; their digests are not checked then.
        allocate: returns host memory, into which deltas of at most `OWN_BYTES` are read if the store is on
            this host: a second file of the same bytes would gain nothing, and takes long to write.
    """
    payloads = [payload for each in manifests if each.delta is not None for payload in each.delta.payloads]

    def local(wanted: Payload) -> memoryview:
        # The file is closed at once: of a chain of any length, one is open at a time.
        if lend is not None:
            with lend(store, wanted) as file:
                return in_memory(file)
        with (
            room_for(store, wanted, scratch or gettempdir()),
            TemporaryFile(prefix="patchstore-", dir=scratch) as file,
        ):
            fill(file, store, wanted)
            file.flush()
            return in_memory(file)

    with ExitStack() as files:
        if allocate is not None and needs is None and _are_near(store, payloads):
            # Nothing here refers to that memory: it is free when the caller needs it no more.
            yield _opened(store, manifests, schema, None, partial(OwnMemory(payloads, allocate).read, store))
            return
        lend = None if cache is None else files.enter_context(cache.lease())
        yield _opened(store, manifests, schema, needs, local)


def _are_near(store: Store, payloads: Sequence[Payload]) -> bool:
    """Whether payloads are files of this host, and few bytes."""
    if not payloads or OwnMemory.size_of(payloads) > OWN_BYTES:
        return False
    # The first one tells: where others are elsewhere they are read just as well, and only slower.
    key = payloads[0].key
    with host.reading(key):
        return store.is_on_this_host(key)


def _opened(
    store: Store,
    manifests: Sequence[Manifest],
    schema: Schema,
    needs: Needs | None,
    local: Callable[[Payload], memoryview],
) -> Deltas:
    """Read deltas."""
    versions: list[tuple[Manifest, Content]] = []
    for manifest in manifests:
        assert manifest.delta is not None
        # Before anything is fetched, so that a newer release's bucket fails at once.
        is_coded = isinstance(encoding(manifest.delta.encoding), Context)
        if needs is not None and is_coded:
            found = list(_ranges(store, manifest, schema, needs))
        else:
            found = [
                delta_file.read_delta(wanted.key, local(wanted), manifest, schema)
                for wanted in manifest.delta.payloads
            ]
        content = Content.joined(found)
        check_boxes(manifest.version, content, schema)
        versions.append((manifest, content))
    return Deltas(versions, schema)


def _ranges(store: Store, manifest: Manifest, schema: Schema, needs: Needs) -> Iterator[Content]:
    """Read what is needed of the payloads of a version, some of them at a time."""
    assert manifest.delta is not None

    def read(wanted: Payload) -> Content:
        with room_for(store, wanted, "memory"):
            return read_ranges(store, wanted, manifest, schema, needs)

    payloads = manifest.delta.payloads
    if len(payloads) < 2:
        yield from map(read, payloads)
        return
    with Threads(min(_AT_A_TIME, len(payloads)), "patchstore-ranges") as pool:
        yield from pool.map(read, payloads)
