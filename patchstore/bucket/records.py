"""The records of the format as frozen values, without tensors.

Nothing here imports torch, so that commands that only read a bucket start at once.
"""

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Any

FORMAT_VERSION = 1

DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F4": 1,
    "F8_E4M3": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
"""Bytes per element of each dtype, by its safetensors name."""

PACKED: Mapping[str, int] = {"F4": 2}
"""Codes per element, of dtypes of which an element is several, as in torch. The last size of a shape that a
file states counts codes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of the checkpoint, without its values."""

    name: str
    dtype: str
    """A key of `DTYPE_BYTES`."""
    shape: tuple[int, ...]
    """As torch has it: it counts elements."""

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]

    @property
    def listed_shape(self) -> tuple[int, ...]:
        """The shape as files state it; see `PACKED`."""
        num = PACKED.get(self.dtype, 1)
        return self.shape if num == 1 else (*self.shape[:-1], num * self.shape[-1])

    @property
    def kind(self) -> str:
        """Dtype and shape, for people, such as `BF16 [256, 128]`."""
        return f"{self.dtype} {list(self.listed_shape)}"


@dataclass(frozen=True, slots=True)
class Box:
    """A range of levels, rows and columns of a tensor, seen as levels x rows x columns; see `view_of`."""

    level: int
    """The first one; so are `row` and `col`."""
    levels: int
    row: int
    rows: int
    col: int
    cols: int

    @property
    def num_elements(self) -> int:
        return self.levels * self.rows * self.cols

    def overlaps(self, other: "Box") -> bool:
        return (
            self.level < other.level + other.levels
            and other.level < self.level + self.levels
            and self.row < other.row + other.rows
            and other.row < self.row + self.rows
            and self.col < other.col + other.cols
            and other.col < self.col + self.cols
        )


def view_of(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the levels, rows and columns of a shape: sizes of 1 are left out, and leading ones multiplied.

    Example: [3, 1, 64, 40] -> (3, 64, 40), [7] -> (1, 1, 7), [] -> (1, 1, 1).
    """
    *others, rows, cols = (1, 1, *(size for size in shape if size != 1))
    return prod(others), rows, cols


# Without slots, so that what is asked of it in each version is worked out once.
@dataclass(frozen=True)
class Part:
    """A part of a tensor that one process of a trainer has: a range of each dimension."""

    spec: TensorSpec
    """The whole tensor."""
    start: tuple[int, ...]
    """The first index of each dimension."""
    size: tuple[int, ...]
    """How many there are of each dimension: the shape of the part."""

    def __post_init__(self) -> None:
        ranges = zip(self.start, self.size, self.spec.shape, strict=True)
        if any(start < 0 or size < 0 or start + size > side for start, size, side in ranges):
            raise ValueError(f"{self.size} from {self.start} on is no part of {self.spec}")

    @classmethod
    def whole(cls, spec: TensorSpec) -> "Part":
        return cls(spec, (0,) * len(spec.shape), spec.shape)

    @property
    def is_whole(self) -> bool:
        return self.size == self.spec.shape

    @property
    def num_elements(self) -> int:
        return prod(self.size)

    @property
    def key(self) -> str:
        """A text for this part alone: the tensor's name where it is whole.

        Names of tensors have no tabs.
        """
        if self.is_whole:
            return self.spec.name
        ranges = (f"{start}+{size}" for start, size in zip(self.start, self.size, strict=True))
        return f"{self.spec.name}\t{','.join(ranges)}"

    @cached_property
    def box(self) -> Box | None:
        """Return what of the tensor's levels, rows and columns it is.

        None where it is no such range (a range of two leading dimensions at once), or has no elements.
        """
        if not self.num_elements:
            return None
        sides = [each for each in zip(self.start, self.size, self.spec.shape, strict=True) if each[2] != 1]
        *leading, row, col = [(0, 1, 1), (0, 1, 1), *sides]
        level, levels = 0, 1
        for start, size, side in leading:
            # Levels follow each other if all of this dimension is there, or one index of all before it.
            if levels > 1 and size < side:
                return None
            level, levels = level * side + start, levels * size
        return Box(level, levels, row[0], row[1], col[0], col[1])

    @property
    def box_start(self) -> tuple[int, int, int]:
        """Return the first level, row and column of a part that is a box."""
        box = self.box
        assert box is not None
        return box.level, box.row, box.col

    @cached_property
    def run(self) -> int | None:
        """Return where the part begins in the flattened tensor if its elements follow each other there."""
        first, is_cut = 0, False
        for start, size, side in zip(self.start, self.size, self.spec.shape, strict=True):
            if is_cut and size < side:
                return None
            first = first * side + start
            is_cut = is_cut or size > 1
        return first

    @cached_property
    def lines(self) -> tuple[int, int, int] | None:
        """Return where the part's elements stand, if its lines are all of one length and distance.

        Element i stands at `first + i // length * distance + i % length` of the flattened tensor.

        Returns:
            `first`, `length`, `distance`; None where that takes more than one distance.
        """
        first, sides, strides = self._joined_sides
        if len(sides) > 2:
            return None
        if len(sides) < 2:
            return first, max(self.num_elements, 1), 0
        return first, max(sides[1][1], 1), strides[0]

    def positions(self, local: Any) -> Any:
        """Return where elements of the part stand in the flattened tensor.

        Args:
            local: integers of NumPy or torch, wide enough for the result: places in the flattened part.
        """
        first, sides, strides = self._joined_sides
        if len(sides) <= 1:
            return local + first if first else local
        found, rest = first, local
        for (_, size, _), stride in zip(reversed(sides[1:]), reversed(strides[1:]), strict=True):
            line = rest // size
            found = found + (rest - line * size) * stride
            rest = line
        return found + rest * strides[0]

    @cached_property
    def _joined_sides(self) -> tuple[int, list[tuple[int, int, int]], list[int]]:
        """Return the position of the first element, and start, size, side and stride of dimensions.

        A dimension of which there is all is one with the dimension before it.
        """
        sides: list[tuple[int, int, int]] = []
        for start, size, side in zip(self.start, self.size, self.spec.shape, strict=True):
            if sides and size == side:
                before = sides[-1]
                sides[-1] = (before[0] * side, before[1] * size, before[2] * side)
            else:
                sides.append((start, size, side))
        strides = [prod(side for _, _, side in sides[place + 1 :]) for place in range(len(sides))]
        return (
            sum(start * stride for (start, _, _), stride in zip(sides, strides, strict=True)),
            sides,
            strides,
        )


def _sides(spec: TensorSpec) -> str:
    return f"[{','.join(map(str, spec.listed_shape))}]"


# Without slots, so that what is asked once for each tensor or version is worked out once.
@dataclass(frozen=True, kw_only=True)
class Schema:
    """The tensors of a run, fixed when the run is created."""

    tensors: tuple[TensorSpec, ...]
    """Ascending by name; each stored tensor once."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """A further name of a tensor -> the name it is stored under."""

    def by_name(self) -> Mapping[str, TensorSpec]:
        return self._by_name

    @cached_property
    def _by_name(self) -> Mapping[str, TensorSpec]:
        return MappingProxyType({spec.name: spec for spec in self.tensors})

    @cached_property
    def places(self) -> Mapping[str, int]:
        """Where in `tensors` each is, by name."""
        return {spec.name: place for place, spec in enumerate(self.tensors)}

    @cached_property
    def sizes(self) -> Sequence[int]:
        """Elements of each tensor."""
        return [spec.num_elements for spec in self.tensors]

    @cached_property
    def kinds(self) -> tuple[Sequence[tuple[str, tuple[int, ...]]], Sequence[int]]:
        """Each pair of a dtype and a shape once, and which of them each tensor has."""
        known: dict[tuple[str, tuple[int, ...]], int] = {}
        of = [known.setdefault((spec.dtype, spec.shape), len(known)) for spec in self.tensors]
        return [*known], of

    @cached_property
    def num_elements(self) -> int:
        return sum(self.sizes)

    @cached_property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.tensors)

    @cached_property
    def lines(self) -> bytes:
        """Each tensor's line in the state digest, with zeros for digits; see `state_sums.state_total`."""
        zeros = "0" * 32
        lines = [f"{each.name}\t{each.dtype}\t{_sides(each)[1:-1]}\t{zeros}\n" for each in self.tensors]
        return "".join(lines).encode()

    @cached_property
    def listed(self) -> Sequence[tuple[str, str]]:
        """Of each tensor, the beginning of a JSON string with its name, and its dtype and shape in JSON."""
        return [
            (json.dumps(each.name, ensure_ascii=False)[:-1], f'"dtype":"{each.dtype}","shape":{_sides(each)}')
            for each in self.tensors
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The model that an adapter was trained on, as far as it is known."""

    name: str | None
    """On the Hub, or the path of a folder."""
    revision: str | None
    state: str | None
    """State digest of its weights, if they are a version of a run."""

    def __str__(self) -> str:
        known = [("revision", self.revision), ("with state", self.state)]
        return " ".join([self.name or "without a name", *(f"{what} {each}" for what, each in known if each)])

    def differs(self, other: "Base") -> bool:
        """Whether something that is known of both differs.

        A model may be at a path here and on the Hub there, so of names the last parts are compared.
        """
        ours, theirs = ((_last(each.name), each.revision, each.state) for each in (self, other))
        return any(a is not None and b is not None and a != b for a, b in zip(ours, theirs, strict=True))


def _last(name: str | None) -> str | None:
    return None if name is None else name.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """What a run of adapters says of them."""

    base: Base
    base_may_change: bool = False
    """Whether servers may update the base while they serve a version of the adapter."""

    def __str__(self) -> str:
        return f"adapters of the base {self.base}, which may{'' if self.base_may_change else ' not'} change"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHeader:
    """The content of `store.json`: written once, when a run is created."""

    run_id: str
    created_at: str
    """UTC, ISO 8601."""
    schema: Schema
    adapter: Adapter | None = None
    """None in a run of whole weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """One stored object, with the size and digest that the manifest records."""

    key: str
    size: int
    """Bytes."""
    digest: str
    """`blake3:` and 64 hex digits, over all bytes of the object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The changed elements of a version against its parent."""

    encoding: str
    num_changed: int
    """Elements whose bits differ from the parent's."""
    payloads: tuple[Payload, ...]
    """Safetensors objects; none when nothing changed."""

    @property
    def num_bytes(self) -> int:
        return sum(payload.size for payload in self.payloads)

    def share_changed(self, schema: Schema) -> float:
        """Return the changed elements by all of the run's, from 0 to 1."""
        return self.num_changed / max(1, schema.num_elements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """All tensors of a version in full: an ordinary Hugging Face checkpoint folder."""

    payloads: tuple[Payload, ...]
    """Safetensors objects that together hold every tensor of the schema once."""
    files: tuple[Payload, ...]
    """The other files of the folder: index, config, tokenizer."""

    @property
    def num_bytes(self) -> int:
        return sum(payload.size for payload in (*self.payloads, *self.files))


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Who committed a version."""

    id: str
    """Names the publisher: host, process id and a random part."""
    epoch: int
    """Grows by one with each publisher that claims the run; a publisher with a lower one is fenced."""
    write_id: str
    """Unique to the commit attempt; distinguishes a publisher's own manifest from another's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDigest:
    """A digest of a version's weights, independent of how they are stored."""

    total: str
    """`blake3:` and 64 hex digits, over names, dtypes, shapes and the digest sums of all tensors."""
    sums: Payload
    """The object that holds those sums; see `patchstore.bucket.digests`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The record whose creation makes a version exist."""

    version: int
    parent: int | None
    """The version that `delta` builds on; None for a run's first version."""
    parent_digest: str | None
    """`blake3:` digest of the parent's manifest, byte for byte."""
    run_id: str
    step: int
    """The trainer's count at this version."""
    created_at: str
    """UTC, ISO 8601."""
    writer: Writer
    state: StateDigest
    delta: Delta | None
    """None where the version can only be reached through its anchor."""
    anchor: Anchor | None

    @property
    def kind(self) -> str:
        return "delta" if self.anchor is None else "anchor"

    @property
    def objects(self) -> list[Payload]:
        """Return all objects that the version names, each once: payloads, files and digest sums."""
        found = [self.state.sums]
        if self.delta is not None:
            found += self.delta.payloads
        if self.anchor is not None:
            found += [*self.anchor.payloads, *self.anchor.files]
        return list(dict.fromkeys(found))

    @property
    def num_bytes(self) -> int:
        """Bytes of all payloads."""
        return sum(part.num_bytes for part in (self.delta, self.anchor) if part is not None)


REQUEST_BYTES = 1 << 18
"""A request to a store takes about as long as this many bytes (33 ms at 8 MB/s), and counts as that many when
plans are compared: otherwise a thousand versions that change nothing would seem to cost nothing."""


@dataclass(frozen=True, slots=True, order=True)
class Ends:
    """What a shortcut's key says of it."""

    version: int
    parent: int | None
    """The older version that its delta builds on; None for an anchor."""

    def leads_over(self, versions: Sequence[int]) -> bool:
        """Whether a rollup begins or ends at one of some versions, or replaces its delta.

        Args:
            versions: ascending.
        """
        if self.parent is None:
            return False
        at = bisect_left(versions, self.parent)
        return at < len(versions) and versions[at] <= self.version


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a reader gets from the version that it has to a target; see `bucket.lineage.plan`."""

    held: int | None
    target: Manifest
    anchor: Manifest | None
    """Load this version's anchor first; None when the deltas start at `held`."""
    deltas: tuple[Manifest, ...]
    """Then apply these versions' deltas, in this order."""
    over: frozenset[Ends] = frozenset()
    """Which of these are shortcuts."""

    @property
    def num_bytes(self) -> int:
        """Bytes to fetch."""
        start = self.anchor.anchor.num_bytes if self.anchor and self.anchor.anchor else 0
        return start + sum(m.delta.num_bytes for m in self.deltas if m.delta)

    @property
    def num_requests(self) -> int:
        """Objects to read: the manifests from the target back to where the plan starts, and the payloads.

        Without the anchor's other files, which only a replay reads. The parts of a large object are read at
        the same time, so only their bytes count.
        """
        start = len(self.anchor.anchor.payloads) if self.anchor and self.anchor.anchor else 0
        return 1 + start + sum(1 + len(m.delta.payloads) for m in self.deltas if m.delta)

    @property
    def cost(self) -> int:
        """How long it takes, as a number of bytes."""
        return self.num_bytes + self.num_requests * REQUEST_BYTES

    def __str__(self) -> str:
        if self.anchor is None and not self.deltas:
            return f"version {self.target.version} is held already"
        start = f"anchor {self.anchor.version}" if self.anchor else f"held {self.held}"
        steps = "".join(f" -> {m.version}" for m in self.deltas)
        return f"{start}{steps} ({self.num_bytes:,} bytes, {self.num_requests:,} requests)"
