"""Find out which version of a run some weights are: by their bits, since names and times prove nothing."""

import mmap
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from patchstore.bucket import history, kept, lineage
from patchstore.bucket.digests import PayloadMissing, missing
from patchstore.bucket.records import REQUEST_BYTES, Manifest, Payload, Plan, Schema, TensorSpec
from patchstore.bucket.state_sums import SumsArray, differing, state_total
from patchstore.codec import tensor_file
from patchstore.codec.checkpoint import weight_files
from patchstore.errors import CorruptObject, NotFound, StateMismatch, VersionNotFound
from patchstore.read import host_cache
from patchstore.read.anchors import open_anchor
from patchstore.read.deltas import open_deltas
from patchstore.read.host_cache import HostCache
from patchstore.read.run import Run
from patchstore.stores.base import Store
from patchstore.support import host
from patchstore.tensors.bits import spec_of
from patchstore.tensors.state_digest import Sums, of_tensor

_MANIFESTS_AT_LEAST = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What the store says of a version that seems to be served already."""

    manifest: Manifest
    recorded: SumsArray
    """Its digest sums."""
    tensors: Mapping[str, torch.Tensor]
    """Some of its tensors, in full."""


def find_version(
    run: Run, sums: Mapping[str, Sums], cache: HostCache, likely: int | None = None
) -> int | None:
    """Return the version whose tensors have these digest sums, or None. Without any sums nothing is found.

    Looks at the `likely` version, then from the head back for as long as the deltas from there cost no more
    than the nearest anchor, as `lineage.plan` counts: knowing an older version would not make the next update
    cheaper.
    """
    if not sums:
        return None
    is_all = len(sums) == len(run.schema.tensors)
    total = state_total(run.schema, sums) if is_all else None
    with closing(_worth_knowing(run.store, run.schema.num_bytes, likely)) as versions:
        for manifest in versions:
            if is_all:
                found = manifest.state.total == total
            else:
                try:
                    recorded = host_cache.cached_sums(run.store, run.schema, manifest, cache)
                except PayloadMissing as exc:
                    if not kept.is_of_retired(run.store, exc):
                        raise
                    # Its sums were deleted. A server of its weights starts from an anchor next.
                    continue
                found = not differing(run.schema, sums, recorded)
            if found:
                return manifest.version
    return None


def nearly_the_head(run: Run, sums: Mapping[str, Sums], cache: HostCache) -> str | None:
    """Say how weights differ from the newest version; None if they do in most tensors."""
    head = history.head(run.store)
    if head is None:
        return None
    try:
        recorded = host_cache.cached_sums(run.store, run.schema, head, cache)
    except PayloadMissing:
        return None
    wrong = differing(run.schema, sums, recorded)
    if not wrong or 2 * len(wrong) > len(sums):
        return None
    return (
        f"these weights are no version of the run: {len(wrong)} of {len(sums)} tensors differ from those of "
        f"the newest one, version {head.version}, such as {wrong[0]!r}; the next update starts from an anchor"
    )


def _worth_knowing(store: Store, anchor_bytes: int, likely: int | None) -> Generator[Manifest, None, None]:
    """Yield the likely version, and then versions from the head back. There may be an anchor near the head,
    among the shortcuts.
    """
    if likely is not None:
        with suppress(VersionNotFound):
            yield history.read_manifest(store, likely)
    head = history.head(store)
    if head is None:
        return
    # Small models: a few more manifests cost less than any anchor with the requests around it.
    spent, anchor, limit = 0, None, anchor_bytes + _MANIFESTS_AT_LEAST * 2 * REQUEST_BYTES
    with closing(history.ancestry(store, head.version)) as versions, suppress(VersionNotFound):
        for manifest in versions:
            yield manifest
            if anchor is None and manifest.anchor is not None:
                anchor = spent + lineage.anchor_cost(manifest)
            if manifest.delta is None:
                return
            spent += lineage.delta_cost(manifest)
            if spent > (limit if anchor is None else anchor):
                return


def read_contents(run: Run, version: int, names: Iterable[str], cache: HostCache) -> Contents:
    """Read a version's manifest and digest sums, and rebuild some of its tensors.

    Where keys are required, whole payloads are read: only manifests are signed, and each names the digests of
    its payloads. Elsewhere tensors are read by range, which no digest covers; the version's digest sums tell
    whether they are right. They reveal damage, and not what somebody forged.
    """
    manifest = run.manifest(version)
    with kept.explained(run.store, version):
        recorded = host_cache.cached_sums(run.store, run.schema, manifest, cache)
    wanted = {name: run.schema.by_name()[name] for name in names}

    def rebuilt(route: Plan) -> dict[str, torch.Tensor]:
        found = _rebuilt(run, route, wanted, cache)
        for name in wanted:
            if name not in found or differing(run.schema, {name: of_tensor(found[name])}, recorded):
                raise StateMismatch(f"{name!r} as rebuilt from the store is not what version {version} has")
        return found

    found = run.reach(version, rebuilt) if wanted else {}
    return Contents(manifest=manifest, recorded=recorded, tensors=found)


def _rebuilt(
    run: Run, route: Plan, wanted: Mapping[str, TensorSpec], cache: HostCache
) -> dict[str, torch.Tensor]:
    """Rebuild tensors along a route; they are not proved."""
    specs = run.schema.by_name()
    assert route.anchor is not None
    if run.check_signed is not None:
        with open_anchor(run.store, route.anchor, specs, cache) as anchor:
            found = {name: anchor[name].clone() for name in wanted}
    else:
        found = dict(_of_anchor(run.store, route.anchor, wanted))
    with open_deltas(run.store, route.deltas, run.schema, None, cache) as deltas:
        deltas.apply((wanted[name], found[name]) for name in found.keys() & deltas.names)
    return found


def _of_anchor(
    store: Store, manifest: Manifest, wanted: Mapping[str, TensorSpec]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Read single tensors by range. They are not proved: no digest of the file can be checked."""
    assert manifest.anchor is not None
    for file in manifest.anchor.payloads:
        header = tensor_file.read_header(file.key, file.size, partial(_beginning, store, file))
        for entry in header.entries:
            if wanted.get(entry.spec.name) == entry.spec:
                start = header.data_start + entry.start
                data = _range(store, file, start, start + entry.spec.num_bytes)
                if len(data) != entry.spec.num_bytes:
                    raise CorruptObject(f"{file.key}: it ends before {entry.spec.name!r} does")
                yield entry.spec.name, tensor_file.tensor_of(file.key, entry.spec, data)


def _beginning(store: Store, file: Payload, num_bytes: int) -> bytearray:
    """Read at least as many of a file's first bytes as most headers have."""
    return _range(store, file, 0, min(file.size, max(num_bytes, 1 << 16)))


def _range(store: Store, file: Payload, start: int, end: int) -> bytearray:
    try:
        with host.reading(file.key):
            return bytearray(b"".join(store.read(file.key, start=start, end=end)))
    except NotFound as exc:
        raise missing(store, file) from exc


def read_folder(folder: Path, schema: Schema) -> dict[str, torch.Tensor]:
    """Map those of the schema's tensors that a checkpoint folder has; reads nothing before they are."""
    wanted = schema.by_name()
    found: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        if path.stat().st_size == 0:
            continue
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        # Unmapped with the last tensor over it.
        _, tensors = tensor_file.open_buffer(path.name, memoryview(mapped))
        found |= {name: each for name, each in tensors.items() if wanted.get(name) == spec_of(name, each)}
    return found
