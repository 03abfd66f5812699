"""Runs of which versions are retired, and clocks that are told what the time is."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch
from safetensors.torch import load_file

from patchstore import replay
from patchstore.bucket.notes import Clock
from patchstore.ops.retention import tag
from patchstore.stores import layout
from patchstore.stores.base import Store
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.weights import Run, State, assert_same_bits


def later(hours: float) -> Clock:
    """Return a clock that is ahead by so many hours."""
    return lambda: datetime.now(UTC) + timedelta(hours=hours)


def new_run(store: Store, num_versions: int, *, anchor_every: int | None = 4) -> Run:
    """Publish versions of small weights; the publisher is closed."""
    torch.manual_seed(0)
    run = Run(store)
    run.publish_and_close(num_versions, anchor_every=anchor_every)
    return run


def versions_stored(store: Store) -> set[int]:
    """Versions that have payloads."""
    return {found[0] for key in store.list("") if (found := layout.attempt_of(key)) is not None}


def tag_unseen(store: Store, name: str, version: int) -> None:
    """Tag at the moment of a retirement: neither sees the other."""
    tag(FaultyStore(store, Fault(verb="list", key="retired/", effect="stale", times=2)), name, version)


def rebuilt(store: Store, version: int | str | None, folder: Path) -> State:
    """Replay a version, and return its tensors."""
    out = folder / f"replayed-{version}"
    replay(store, version, out=out)
    return load_file(out / "model.safetensors")


def assert_rebuilt(run: Run, versions: Iterable[int], folder: Path) -> None:
    """Fail unless each version can be rebuilt with the bits that the trainer had."""
    for version in versions:
        assert_same_bits(rebuilt(run.store, version, folder), run.history[version])
