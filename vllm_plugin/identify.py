"""Find out which version of a run some weights are: by their bits, since names and times prove nothing."""

import json
import mmap
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from patchstore.errors import CorruptObject, NotFound, StateMismatch, VersionNotFound
from patchstore.format import history, kept, lineage, planning
from patchstore.format.missing import PayloadMissing, missing
from patchstore.format.records import REQUEST_BYTES, Manifest, Payload, Plan, Schema, TensorSpec
from patchstore.format.state_sums import state_total
from patchstore.payloads import tensor_file
from patchstore.read import host_cache
from patchstore.read.anchors import open_anchor
from patchstore.read.deltas import open_deltas
from patchstore.read.host_cache import HostCache
from patchstore.stores.base import Store
from patchstore.support import host
from patchstore.tensors.bits import spec_of
from patchstore.tensors.state_digest import Sums, of_tensor
from vllm_plugin.mapping import SumsArray

_MANIFESTS_AT_LEAST = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What the store says of a version that seems to be served already."""

    manifest: Manifest
    recorded: Mapping[str, Sums]
    """Its digest sums."""
    tensors: Mapping[str, torch.Tensor]
    """Some of its tensors, in full."""


def find_version(store: Store, schema: Schema, sums: Mapping[str, Sums], cache: HostCache) -> int | None:
    """Return the version whose tensors have these digest sums, or None.

    Looks from the head back for as long as the deltas from there cost no more than the nearest anchor, as
    `planning.plan` counts: knowing an older version would not make the next update cheaper.

    Args:
        sums: of as many of the schema's tensors as are known; without any, nothing is found.
    """
    if not sums:
        return None
    is_all = len(sums) == len(schema.tensors)
    total = state_total(schema, sums) if is_all else None
    with closing(_worth_knowing(store, schema.num_bytes)) as versions:
        for manifest in versions:
            if is_all:
                found = manifest.state.total == total
            else:
                try:
                    recorded = host_cache.cached_sums(store, schema, manifest, cache)
                except PayloadMissing as exc:
                    if not kept.is_of_retired(store, exc):
                        raise
                    # Its sums were deleted. A server of its weights starts from an anchor next.
                    continue
                found = all(recorded[name] == each for name, each in sums.items())
            if found:
                return manifest.version
    return None


def nearly_the_head(store: Store, schema: Schema, sums: Mapping[str, Sums], cache: HostCache) -> str | None:
    """Say how weights of no version differ from those of the newest one; None if they differ in most tensors.

    Args:
        sums: as of `find_version`.
    """
    head = history.head(store)
    if head is None:
        return None
    try:
        recorded = host_cache.cached_sums(store, schema, head, cache)
    except PayloadMissing:
        return None
    wrong = sorted(name for name, each in sums.items() if recorded[name] != each)
    if not wrong or 2 * len(wrong) > len(sums):
        return None
    return (
        f"these weights are no version of the run: {len(wrong)} of {len(sums)} tensors differ from those of "
        f"the newest one, version {head.version}, such as {wrong[0]!r}; the next update starts from an anchor"
    )


def _worth_knowing(store: Store, anchor_bytes: int) -> Generator[Manifest, None, None]:
    """Yield versions from the head back.

    Args:
        anchor_bytes: what an anchor takes at least; there may be one near the head, among the shortcuts.
    """
    head = history.head(store)
    if head is None:
        return
    # Small models: a few more manifests cost less than any anchor with the requests around it.
    spent, anchor, limit = 0, None, anchor_bytes + _MANIFESTS_AT_LEAST * 2 * REQUEST_BYTES
    with closing(history.ancestry(store, head.version)) as versions, suppress(VersionNotFound):
        for manifest in versions:
            yield manifest
            if anchor is None and manifest.anchor is not None:
                anchor = spent + planning.anchor_cost(manifest)
            if manifest.delta is None:
                return
            spent += planning.delta_cost(manifest)
            if spent > (limit if anchor is None else anchor):
                return


def read_contents(
    store: Store,
    schema: Schema,
    version: int,
    names: Iterable[str],
    cache: HostCache,
    check: history.Check | None = None,
) -> Contents:
    """Read a version's manifest and digest sums, and some of its tensors.

    Args:
        check: raises if the version must not be used. With it every byte that is used is verified by a
            digest that the manifest, or one of its ancestors, names; so whole payloads are read.

    Raises:
        VersionRetired: the version is retired, and payloads are deleted.
        As `read_tensors`, and as `check`.
    """
    manifest, data = history.read_stored(store, version)
    if check is not None:
        check(manifest, data)
    with kept.explained(store, version):
        recorded = host_cache.cached_sums(store, schema, manifest, cache)
        found = read_tensors(store, schema, manifest, names, recorded, cache, check)
    return Contents(manifest=manifest, recorded=recorded, tensors=found)


def sums_array(schema: Schema, sums: Mapping[str, Sums]) -> SumsArray:
    """Both digest sums of each tensor of the schema, in its order."""
    return np.array([sums[spec.name] for spec in schema.tensors], dtype=np.uint64).reshape(-1, 2)


def read_tensors(
    store: Store,
    schema: Schema,
    target: Manifest,
    names: Iterable[str],
    recorded: Mapping[str, Sums],
    cache: HostCache,
    check: history.Check | None = None,
) -> dict[str, torch.Tensor]:
    """Rebuild some tensors of a version, reading no more of its anchor than they need.

    Args:
        recorded: the version's digest sums. They reveal damage, and not what somebody forged.
        check: see `read_contents`.

    Raises:
        VersionNotFound, WrongParent: the store has no way to that version.
        CorruptObject, StateMismatch: what it has is wrong.
    """
    wanted = {name: schema.by_name()[name] for name in names}
    if not wanted:
        return {}

    def rebuilt(*, over_rollups: bool) -> dict[str, torch.Tensor]:
        route = lineage.read(store, target.version, check=check, over_rollups=over_rollups).plan()
        return _rebuilt(store, schema, route, wanted, cache, is_whole=check is not None)

    try:
        found = rebuilt(over_rollups=True)
    except PayloadMissing as exc:
        if not kept.is_given_up(store, exc):
            raise
        found = rebuilt(over_rollups=False)
    for name in wanted:
        if name not in found or of_tensor(found[name]) != recorded[name]:
            raise StateMismatch(
                f"{name!r} as rebuilt from the store is not what version {target.version} has"
            )
    return found


def _rebuilt(
    store: Store,
    schema: Schema,
    route: Plan,
    wanted: Mapping[str, TensorSpec],
    cache: HostCache,
    *,
    is_whole: bool,
) -> dict[str, torch.Tensor]:
    """Rebuild tensors along a route; they are not proved.

    Args:
        is_whole: read and verify the whole anchor.
    """
    specs = schema.by_name()
    assert route.anchor is not None
    if is_whole:
        with open_anchor(store, route.anchor, specs, cache) as anchor:
            found = {name: anchor[name].clone() for name in wanted}
    else:
        found = dict(_of_anchor(store, route.anchor, wanted))
    with open_deltas(store, route.deltas, specs, None, cache) as deltas:
        deltas.apply((wanted[name], found[name]) for name in wanted.keys() & deltas.names)
    return found


def _of_anchor(
    store: Store, manifest: Manifest, wanted: Mapping[str, TensorSpec]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Read single tensors by range. They are not proved: no digest of the file can be checked."""
    assert manifest.anchor is not None
    for each in manifest.anchor.payloads:
        beginning = partial(_beginning, store, each)
        header = tensor_file.read_header(each.key, each.size, beginning)
        for entry in header.entries:
            if wanted.get(entry.spec.name) == entry.spec:
                start = header.data_start + entry.start
                data = _range(store, each, start, start + entry.spec.num_bytes)
                if len(data) != entry.spec.num_bytes:
                    raise CorruptObject(f"{each.key}: it ends before {entry.spec.name!r} does")
                yield entry.spec.name, tensor_file.tensor_of(each.key, entry.spec, data)


def _beginning(store: Store, file: Payload, num_bytes: int) -> bytearray:
    """Read so many of a file's first bytes, and at least as many as most headers have."""
    return _range(store, file, 0, min(file.size, max(num_bytes, 1 << 16)))


def _range(store: Store, file: Payload, start: int, end: int) -> bytearray:
    try:
        with host.reading(file.key):
            return bytearray(b"".join(store.read(file.key, start=start, end=end)))
    except NotFound as exc:
        raise missing(store, file) from exc


def read_folder(folder: Path, schema: Schema) -> dict[str, torch.Tensor]:
    """Map those of the schema's tensors that a checkpoint folder has; reads nothing before they are.

    Raises:
        CorruptObject: a file is not a safetensors file.
    """
    wanted = schema.by_name()
    found: dict[str, torch.Tensor] = {}
    for path in checkpoint_files(folder):
        if path.stat().st_size == 0:
            continue
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        # Unmapped with the last tensor over it.
        _, tensors = tensor_file.open_buffer(path.name, memoryview(mapped))
        found |= {name: each for name, each in tensors.items() if wanted.get(name) == spec_of(name, each)}
    return found


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the files that make up a checkpoint; folders may hold further copies in other layouts.

    Raises:
        CorruptObject: its index is none.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise CorruptObject(f"{index}: it should have a weight_map of names to files: {exc!r}") from exc
        return [folder / name for name in sorted(names)]
    single = folder / "model.safetensors"
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
