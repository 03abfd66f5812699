"""Stores that tests change: copies of what was made once, objects that look old, faults that come and go."""

from collections.abc import Callable, Mapping
from datetime import datetime

import torch

from patchstore.ops.compact.service import Compactor
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore, Verb
from tests.support.weights import Run


class Unsteady(FaultyStore):
    """A store with faults that come and go."""

    def arm(self, *faults: Fault) -> None:
        """Have these faults instead of those so far."""
        self._faults, self._matches = faults, [0] * len(faults)


class Dated(MemoryStore):
    """A store that says of some objects that they were stored at another time."""

    def __init__(self, url: str = "memory://") -> None:
        super().__init__(url)
        self.times: dict[str, datetime] = {}

    def stored_at(self, key: str) -> datetime | None:
        return self.times.get(key) or super().stored_at(key)


def before(
    store: Store, verb: Verb, key: str, do: Callable[[], object], times: int | None = None
) -> FaultyStore:
    """Return a store where something is done before each call of a kind, or so many; it may wait or raise."""
    fault = Fault(verb=verb, key=key, effect="delay", times=times)
    return FaultyStore(store, fault, sleep=lambda _: do())


def objects_of(store: Store) -> dict[str, bytes]:
    """Return all objects by key."""
    return {key: store.get(key) for key in store.list()}


def put_back(store: Store, objects: Mapping[str, bytes]) -> None:
    """Have a store hold these objects and no others."""
    for key in [*store.list()]:
        store.delete(key)
    for key, data in objects.items():
        store.put(key, data)


def copy_of(store: Store) -> Dated:
    """Return a store with the same objects, stored at the same times."""
    copy = Dated()
    for key, data in objects_of(store).items():
        copy.put(key, data)
        if (at := store.stored_at(key)) is not None:
            copy.times[key] = at
    return copy


def copy_of_run(run: Run) -> Run:
    """Return a trainer's run in a store of its own, with what it published so far."""
    copy = Run(copy_of(run.store))
    copy.history = run.history
    return copy


def long_run(store: Store, num_versions: int, every: int | None = None) -> Run:
    """Publish versions of which the first has the only anchor, and add shortcuts as often as is said."""
    torch.manual_seed(0)
    run = Run(store)
    run.open(anchor_every=None)
    run.train_versions(num_versions)
    run.close()
    if every is not None:
        list(Compactor(store, anchor_every=every).compact())
    return run
