"""Verify which version a running server serves: its live weights, summed over its ranks, against a manifest.

The server only computes sums. The expected sums come from the store, so a server that reports a wrong version
is noticed. Generation waits while a part of the weights is read, and continues between the parts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from patchstore.bucket import history
from patchstore.bucket.records import Manifest, Schema
from patchstore.bucket.state_sums import Sums, SumsArray, read_sums
from patchstore.errors import ServerUnavailable, StateMismatch, UsageError, VersionNotFound
from patchstore.follow.vllm_server import VllmServer
from patchstore.stores.base import Store

_MAX_RESTARTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Which tensors were compared, bit for bit, and which could not be."""

    manifest: Manifest
    """Of the version that the server serves."""
    num_verified: int
    """Tensors whose every element was summed."""
    computed: tuple[str, ...]
    """Tensors from which the server computes its weights, and whose own bits it does not serve."""
    unverified: tuple[str, ...]
    """Tensors that the server does not use, or has only in part."""
    num_engines: int
    """Data-parallel engines of the server, all of which have these weights."""


@dataclass(slots=True)
class _RankSums:
    """What all ranks reported so far, all of one version."""

    serving: int
    num_updates: int
    slices: dict[str, dict[tuple[int, ...], str]] = field(default_factory=dict)
    computed: set[str] = field(default_factory=set)
    unverified: set[str] = field(default_factory=set)


def verify_server(
    store: Store, server: VllmServer, version: int | None = None, *, num_elements: int = 100_000_000
) -> Verification:
    """Compare what a server serves with a version of a store; by default with the version that it reports.

    Each rank reads `num_elements` at a time, while generation waits.
    """
    header = history.read_header(store)
    if header is None:
        raise VersionNotFound(f"{store.url} holds no run")
    if num_elements < 1:
        raise UsageError(f"each rank must read at least one element at a time, not {num_elements}")
    status = server.status()
    if status.run_id != header.run_id:
        raise UsageError(f"{server.url} follows run {status.run_id}, but {store.url} holds {header.run_id}")
    for _ in range(_MAX_RESTARTS):
        said = _ask(server, num_elements, status.num_engines)
        if said is not None:
            break
    else:
        raise ServerUnavailable(f"{server.url} was updated {_MAX_RESTARTS} times while it was being read")
    if version not in (None, said.serving):
        raise UsageError(f"{server.url} serves version {said.serving}, not {version}")
    if not said.slices:
        raise UsageError(f"{server.url} computes all of its weights, so none can be compared")
    manifest = history.read_manifest(store, said.serving)
    _compare(header.schema, manifest, read_sums(store, header.schema, manifest), said, server.url)
    return Verification(
        manifest=manifest,
        num_verified=len(said.slices),
        computed=tuple(sorted(said.computed)),
        unverified=tuple(sorted(said.unverified)),
        num_engines=status.num_engines,
    )


def _ask(server: VllmServer, num_elements: int, num_engines: int) -> _RankSums | None:
    """Ask for all parts; None if the server was updated between them."""
    said: _RankSums | None = None
    first: int | None = 0
    while first is not None:
        ranks = server.sums(first, num_elements)
        if any(rank["serving"] is None for rank in ranks):
            raise UsageError(
                f"{server.url} serves no version: it sleeps, or one is half applied; see its status"
            )
        for rank in ranks:
            said = said or _RankSums(serving=rank["serving"], num_updates=rank["num_applied"])
            if (rank["serving"], rank["num_applied"]) != (said.serving, said.num_updates):
                return None
            said.computed.update(rank["computed"])
            said.unverified.update(rank["unverified"])
            for name, slices in rank["sums"].items():
                _merge(said.slices.setdefault(name, {}), name, slices)
        if num_engines > 1 and not server.engines_have(ranks, first, num_elements):
            if server.sums(first, num_elements) != ranks:
                return None
            raise StateMismatch(f"the {num_engines} engines of {server.url} do not serve the same weights")
        ends = [rank["next"] for rank in ranks]
        left = [end for end in ends if end is not None]
        # A rank that has less of each tensor gets further; what it reports twice is the same.
        after = min(left) if left else None
        if after is not None and after <= first:
            raise ServerUnavailable(
                f"{server.url} was asked for the tensors from {first} on, and says to go on at {after}, "
                "which is no progress: install this release's plugin there"
            )
        first = after
    assert said is not None
    return said


def _merge(known: dict[tuple[int, ...], str], name: str, slices: list[list[Any]]) -> None:
    for where, sums in slices:
        if known.setdefault(tuple(where), sums) != sums:
            raise StateMismatch(f"copies of {name!r} in the server differ from each other")


def _compare(schema: Schema, manifest: Manifest, recorded: SumsArray, said: _RankSums, url: str) -> None:
    wrong = []
    for spec, its in zip(schema.tensors, recorded.tolist(), strict=True):
        name = spec.name
        if name in said.computed | said.unverified:
            continue
        slices: Mapping[tuple[int, ...], str] = said.slices.get(name, {})
        total = Sums()
        for sums in slices.values():
            total = total.plus(Sums.from_hex(sums))
        num_seen = sum(prod(where[1 : 1 + len(where) // 2]) for where in slices)
        if num_seen != spec.num_elements or total != Sums(*its):
            wrong.append(name)
    if wrong:
        raise StateMismatch(
            f"{url} does not serve version {manifest.version}, as it says: {len(wrong)} tensors differ, "
            f"such as {', '.join(wrong[:3])}"
        )
