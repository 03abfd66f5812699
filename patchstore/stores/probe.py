"""Test that a store's create-only put is real, before a version depends on it.

Servers exist that ignore the condition, and others that check it and then let every writer of a
race win. Neither reports an error, so the only way to know is to try.
"""

import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier

from patchstore.errors import AlreadyExists, NotFound, PatchstoreError, StoreUnavailable, UnsupportedStore
from patchstore.stores import layout
from patchstore.stores.base import Store

_NUM_RACERS = 8
_NUM_ROUNDS = 5
_ATTEMPTS = 5


def check_create_only(store: Store) -> None:
    """Create a key twice, then let 8 threads race for one, 5 times; the probes' keys are deleted.

    A lost answer is no reason for refusal: a writer that gets "exists" reads the object back. For publishers;
    readers need no such guarantee, and may lack the right to write. If the caller promised a single writer,
    there is no race: the test is only that writers one after the other see each other.

    Raises UnsupportedStore where more than one writer took a key, and StoreUnavailable without an answer.
    """
    folder = f"{layout.PROBES}{uuid.uuid4().hex}/"
    races = () if store.single_writer else tuple(f"race-{turn}" for turn in range(_NUM_ROUNDS))
    try:
        _prove_in_turn(store, f"{folder}turn")
        for race in races:
            _prove_in_a_race(store, folder + race)
    finally:
        for name in ("turn", *races):
            # A few bytes left behind are no harm, and a publisher need not have the right to delete.
            with suppress(PatchstoreError):
                store.delete(folder + name)


def _prove_in_turn(store: Store, key: str) -> None:
    for data in (b"first", b"second", b"third"):
        if _create(store, key, data) != b"first":
            raise _refusal(store, f"after the first writer of {key} another's bytes were stored")


def _prove_in_a_race(store: Store, key: str) -> None:
    start = Barrier(_NUM_RACERS)

    def race(racer: int) -> bytes:
        start.wait()
        return _create(store, key, b"racer %d" % racer)

    with ThreadPoolExecutor(_NUM_RACERS, thread_name_prefix="patchstore-probe") as pool:
        try:
            racers = [pool.submit(race, racer) for racer in range(_NUM_RACERS)]
        except BaseException:
            # Those that have started would wait for the others for ever.
            start.abort()
            raise
        believed = {racer.result() for racer in racers}
    believed.add(_create(store, key, b"too late"))
    if len(believed) != 1:
        seen = ", ".join(sorted(data.decode(errors="replace") for data in believed))
        raise _refusal(store, f"{_NUM_RACERS} writers raced for {key}, and more than one won: {seen}")


def _create(store: Store, key: str, data: bytes) -> bytes:
    """Create an object unless there is one, and return what is stored then, as this writer sees it."""
    failure: PatchstoreError | None = None
    for _ in range(_ATTEMPTS):
        try:
            store.put(key, data, if_absent=True)
        except (AlreadyExists, StoreUnavailable) as exc:
            failure = exc
            # Perhaps it is our own object, and the answer was lost. If there is no object, try again.
            with suppress(NotFound, StoreUnavailable):
                return store.get(key)
        else:
            return data
    raise StoreUnavailable(
        f"{store.url}: {_ATTEMPTS} attempts to create {key} failed; the last error: {failure}"
    ) from failure


def _refusal(store: Store, seen: str) -> UnsupportedStore:
    return UnsupportedStore(
        f"{store.url} does not keep create-only puts: {seen}. Two publishers could both commit a version "
        "there; use a folder, or an S3 service that honours If-None-Match on PutObject"
    )
