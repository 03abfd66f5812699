"""Runs of which versions are retired, and clocks that are told what the time is."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch
from safetensors.torch import load_file

from patchstore import replay
from patchstore.format.times import Clock
from patchstore.stores.base import Store
from tests.support.weights import Run, State, assert_same_bits


def later(hours: float) -> Clock:
    """Return a clock that is ahead by so many hours."""
    return lambda: datetime.now(UTC) + timedelta(hours=hours)


def new_run(store: Store, num_versions: int, *, anchor_every: int | None = 4) -> Run:
    """Publish versions of small weights; the publisher is closed."""
    torch.manual_seed(0)
    run = Run(store)
    run.open(anchor_every=anchor_every)
    run.publish_versions(num_versions)
    run.close()
    return run


def rebuilt(store: Store, version: int | str | None, folder: Path) -> State:
    """Replay a version, and return its tensors."""
    out = folder / f"replayed-{version}"
    replay(store, version, out=out)
    return load_file(out / "model.safetensors")


def assert_rebuilt(run: Run, versions: Iterable[int], folder: Path) -> None:
    """Fail unless each version can be rebuilt with the bits that the trainer had."""
    for version in versions:
        assert_same_bits(rebuilt(run.store, version, folder), run.history[version])
