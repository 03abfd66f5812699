"""The records of the format as frozen values, without tensors.

Nothing here imports torch, so that commands that only read a bucket start at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from types import MappingProxyType

FORMAT_VERSION = 1

DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of the checkpoint, without its values."""

    name: str
    dtype: str
    """A key of `DTYPE_BYTES`."""
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]


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
    def num_elements(self) -> int:
        return sum(spec.num_elements for spec in self.tensors)

    @cached_property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHeader:
    """The content of `store.json`: written once, when a run is created."""

    run_id: str
    created_at: str
    """UTC, ISO 8601."""
    schema: Schema


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
    """The object that holds those sums; see `patchstore.format.state_sums`."""


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
    def num_bytes(self) -> int:
        """Bytes of all payloads."""
        return sum(part.num_bytes for part in (self.delta, self.anchor) if part is not None)


REQUEST_BYTES = 1 << 18
"""A request to a store takes about as long as so many bytes (33 ms at 8 MB/s), and counts as that many when
plans are compared: otherwise a thousand versions that change nothing would seem to cost nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a reader gets from the version that it has to a target; see `planning.plan`."""

    held: int | None
    target: Manifest
    anchor: Manifest | None
    """Load this version's anchor first; None when the deltas start at `held`."""
    deltas: tuple[Manifest, ...]
    """Then apply these versions' deltas, in this order."""

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
