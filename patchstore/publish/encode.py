"""Choose how a delta is encoded, and where: the only place that decides either."""

from collections.abc import Mapping, Sequence

from patchstore.encodings import ENCODINGS, Encoding
from patchstore.encodings.context import Context
from patchstore.format.records import Part, Schema, TensorSpec
from patchstore.payloads import delta
from patchstore.payloads.delta import NO_CHANGES, EncodedDelta
from patchstore.publish.snapshot import Snapshot
from patchstore.publish.snapshot.device import DeviceChanges, DeviceSnapshot
from patchstore.tensors.changes import Changes

_TOO_FEW_BYTES = 1 << 15
"""To save so many is not worth an anchor, for whose upload the second call after it waits."""


def choose(name: str, snapshot: Snapshot) -> Encoding:
    """Return the encoding of a publisher's choice.

    `auto` is `context` where kernels encode it. On the CPU `context` takes a second for 70 million elements,
    however few of them have changed, so it is for tensors of which much has: see `Context.only_dense`.
    """
    if name != "auto":
        return ENCODINGS[name]
    return Context(only_dense=not _has_kernels(snapshot))


def of_rollups(encoding: Encoding) -> str:
    """Return the name of the encoding of rollups, which a process on the CPU makes of many deltas."""
    return encoding.index.name if isinstance(encoding, Context) and encoding.only_dense else encoding.name


def is_limited(name: str) -> bool:
    """Whether an anchor takes the place of a delta that is too large; not where the user has chosen how."""
    return name == "auto"


def largest_delta(name: str, schema: Schema, files: Mapping[str, bytes]) -> int | None:
    """Return how large a delta may be: an anchor takes the place of a larger one.

    That is the size of an anchor, and a little more. None where the user has chosen the encoding.

    Args:
        files: that go into anchors.
    """
    if not is_limited(name):
        return None
    return schema.num_bytes + sum(map(len, files.values())) + _TOO_FEW_BYTES


def encode(
    schema: Sequence[TensorSpec],
    parts: Mapping[str, Part],
    changes: Changes,
    parent: Snapshot,
    encoding: Encoding,
) -> EncodedDelta:
    """Encode changes against the snapshot that they were found with; the snapshot stays as it is.

    Args:
        schema: of the run.
        parts: by the keys of the snapshot, what its tensors are.
    """
    if changes.num_changed == 0:
        return NO_CHANGES
    if isinstance(changes, DeviceChanges) and _has_kernels(parent):
        from patchstore.publish import encode_gpu

        return encode_gpu.encode(schema, parts, changes, encoding)
    return delta.encode(schema, parts, changes, parent.tensors, encoding)


def _has_kernels(snapshot: Snapshot) -> bool:
    """Whether kernels encode changes of this snapshot: a device cannot address a mapped file."""
    return isinstance(snapshot, DeviceSnapshot) and not snapshot.is_file
