"""Prove which version a running server serves: its live weights, summed over its ranks, against a manifest.

The server only adds up; what the sums should be comes from the store, so a server that is wrong about itself
is found out. Generation waits while a part of the weights is read, and goes on between the parts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from patchstore import log
from patchstore.errors import ServerUnavailable, StateMismatch, UsageError, VersionNotFound
from patchstore.integrations.vllm_server import VllmServer
from patchstore.model import Manifest, Schema
from patchstore.stores.base import Store
from patchstore.sums import Sums, read_sums

_MAX_RESTARTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What was compared, bit for bit, and what could not be."""

    manifest: Manifest
    """Of the version that the server serves."""
    num_proved: int
    """Tensors whose every element was summed."""
    computed: tuple[str, ...]
    """Tensors that the server calculates its weights from, and whose own bits it does not serve."""
    unproved: tuple[str, ...]
    """Tensors that the server has no use for, or holds only in part."""
    num_engines: int
    """Data-parallel engines of the server, all of which have these weights."""


@dataclass(slots=True)
class _Survey:
    """What all ranks said so far, all of one version."""

    held: int
    num_commits: int
    slices: dict[str, dict[tuple[int, ...], str]] = field(default_factory=dict)
    computed: set[str] = field(default_factory=set)
    unproved: set[str] = field(default_factory=set)


def prove(
    store: Store, server: VllmServer, version: int | None = None, *, num_elements: int = 100_000_000
) -> Proof:
    """Compare what a server serves with a version of a store.

    Args:
        version: that it should serve; None for whatever it says that it holds.
        num_elements: how many each rank reads in one go, while generation waits.

    Raises:
        UsageError: the server follows another run, or holds no version, or not the given one.
        StateMismatch: its weights are not those of the version, or differ between ranks.
        ServerUnavailable: it cannot be reached, or moves from version to version all the time.
    """
    header = log.read_header(store)
    if header is None:
        raise VersionNotFound(f"{store.url} holds no run")
    if num_elements < 1:
        raise UsageError(f"each rank must read at least one element at a time, not {num_elements}")
    status = server.status()
    if status.run_id != header.run_id:
        raise UsageError(f"{server.url} follows run {status.run_id}, but {store.url} holds {header.run_id}")
    for _ in range(_MAX_RESTARTS):
        survey = _survey(server, num_elements, status.num_engines)
        if survey is not None:
            break
    else:
        raise ServerUnavailable(f"{server.url} was updated {_MAX_RESTARTS} times while it was being read")
    if version not in (None, survey.held):
        raise UsageError(f"{server.url} holds version {survey.held}, not {version}")
    if not survey.slices:
        raise UsageError(f"{server.url} calculates all of its weights, so that none can be compared")
    manifest = log.read_manifest(store, survey.held)
    _compare(header.schema, manifest, read_sums(store, header.schema, manifest), survey, server.url)
    return Proof(
        manifest=manifest,
        num_proved=len(survey.slices),
        computed=tuple(sorted(survey.computed)),
        unproved=tuple(sorted(survey.unproved)),
        num_engines=status.num_engines,
    )


def _survey(server: VllmServer, num_elements: int, num_engines: int) -> _Survey | None:
    """Ask for all parts; None if the server was updated between them.

    Raises:
        StateMismatch: copies of a part differ, in a rank, between ranks or between engines.
    """
    survey: _Survey | None = None
    first: int | None = 0
    while first is not None:
        ranks = server.sums(first, num_elements)
        if any(rank["held"] is None for rank in ranks):
            raise UsageError(f"{server.url} holds no version; it may be torn or asleep, see its status")
        for rank in ranks:
            survey = survey or _Survey(held=rank["held"], num_commits=rank["num_commits"])
            if (rank["held"], rank["num_commits"]) != (survey.held, survey.num_commits):
                return None
            survey.computed.update(rank["computed"])
            survey.unproved.update(rank["unproved"])
            for name, slices in rank["sums"].items():
                _merge(survey.slices.setdefault(name, {}), name, slices)
        if num_engines > 1 and not server.engines_have(ranks, first, num_elements):
            if server.sums(first, num_elements) != ranks:
                return None
            raise StateMismatch(f"the {num_engines} engines of {server.url} do not serve the same weights")
        ends = [rank["next"] for rank in ranks]
        left = [end for end in ends if end is not None]
        # A rank that holds less of each tensor comes further; what it says twice is the same.
        first = min(left) if left else None
    assert survey is not None
    return survey


def _merge(known: dict[tuple[int, ...], str], name: str, slices: list[list[Any]]) -> None:
    for where, sums in slices:
        if known.setdefault(tuple(where), sums) != sums:
            raise StateMismatch(f"copies of {name!r} in the server differ from each other")


def _compare(
    schema: Schema, manifest: Manifest, recorded: Mapping[str, Sums], survey: _Survey, url: str
) -> None:
    wrong = []
    for name, spec in schema.by_name().items():
        if name in survey.computed | survey.unproved:
            continue
        slices: Mapping[tuple[int, ...], str] = survey.slices.get(name, {})
        total = Sums()
        for sums in slices.values():
            total = total.plus(Sums.from_hex(sums))
        held = sum(prod(where[1 : 1 + len(where) // 2]) for where in slices)
        if held != spec.num_elements or total != recorded[name]:
            wrong.append(name)
    if wrong:
        raise StateMismatch(
            f"{url} does not serve version {manifest.version}, as it says: {len(wrong)} tensors differ, "
            f"such as {', '.join(wrong[:3])}"
        )
