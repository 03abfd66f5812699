"""Write a version's delta in another encoding."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from patchstore.encodings import ENCODINGS
from patchstore.errors import UsageError
from patchstore.format import kept
from patchstore.format.records import Manifest, StoreHeader, TensorSpec
from patchstore.format.state_sums import read_sums
from patchstore.payloads import delta_file
from patchstore.payloads.delta import DeltaEncoder
from patchstore.read.deltas import Wanted, open_deltas
from patchstore.read.replay import route_to, tensors_of
from patchstore.read.unfinished import unfinished, write_file
from patchstore.stores.base import Store
from patchstore.support.arguments import local_path, version_number
from patchstore.tensors import state_digest
from patchstore.tensors.bits import TensorPatch, bits


def transcode(
    store: Store, version: int, *, encoding: str, out: str | os.PathLike[str]
) -> tuple[Manifest, int]:
    """Write a version's delta in another encoding: a file as a publisher with that encoding stores it.

    The parent is rebuilt, large tensors one at a time and small ones together, and the state digest verifies
    the result. Memory: the changes, and one tensor or a few million elements of small ones.

    Args:
        encoding: "raw", "gap" or "context".
        out: a file that does not exist yet.

    Returns:
        The version's manifest, and the bytes of the file.

    Raises:
        UsageError: no such encoding, the version has no delta, `out` exists, or it cannot be created.
        VersionNotFound: no such version.
        VersionRetired: it, or the version that it builds on, is retired, and payloads are deleted.
        WrongParent: its parent cannot be reached.
        CorruptObject, StateMismatch: the bucket's bytes are wrong. Nothing exists under `out`.
    """
    target = local_path("out", out)
    version = version_number(version)
    if encoding not in ENCODINGS:
        raise UsageError(f"encoding must be one of {', '.join(ENCODINGS)}, not {encoding!r}")
    if os.path.lexists(target):
        raise UsageError(f"{target} exists; name a file that does not")
    header, route = route_to(store, version)
    wanted = route.target
    if wanted.delta is None or wanted.parent is None:
        raise UsageError(f"version {version} has no delta: it can only be reached through its anchor")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise UsageError(f"{target} cannot be made: {exc}; name another place") from exc
    with kept.explained(store, wanted.parent), kept.explained(store, version):
        size = _written(store, header, wanted, wanted.parent, encoding, target)
    return wanted, size


def _written(
    store: Store, header: StoreHeader, wanted: Manifest, parent: int, encoding: str, target: Path
) -> int:
    """Write the file, and return its bytes."""
    _, before = route_to(store, parent)
    schema = header.schema.by_name()
    encoder = DeltaEncoder(header.schema.tensors, ENCODINGS[encoding])
    with open_deltas(store, (wanted,), schema, None) as deltas:

        def changes() -> Iterator[tuple[TensorSpec, TensorPatch, torch.Tensor]]:
            stated = (pair for pair in tensors_of(store, header, before) if pair[0].name in deltas.names)
            for (spec, old, _), patch in deltas.merged_each(Wanted(*pair) for pair in stated):
                assert old is not None
                exact = _exact(patch, old)
                if len(exact.indices):
                    yield spec, exact, old

        encoder.add_all(changes())
    found = encoder.delta()
    sums = read_sums(store, header.schema, before.target)
    sums |= {name: sums[name].plus(growth) for name, growth in found.sum_growth.items()}
    state_digest.check_state(store, header.schema, sums, wanted)
    metadata = delta_file.delta_metadata(
        *(wanted.version, parent, wanted.step, wanted.run_id, encoding),
        *(found.listed, found.firsts),
    )
    with unfinished(target, is_folder=False) as partial:
        write_file(partial, found.file(metadata)())
    return target.stat().st_size


def _exact(patch: TensorPatch, parent: torch.Tensor) -> TensorPatch:
    """Return a patch without elements that it does not change; a copy, as it may be in a mapped file."""
    indices, values = patch.indices, patch.values
    differ = bits(parent)[indices] != bits(values)
    return TensorPatch(name=patch.name, indices=indices[differ], values=values[differ])
