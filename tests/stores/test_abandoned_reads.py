"""Reads that end before the object does: the garbage collector may be the one that ends them."""

import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from patchstore.format.hashing import Hasher
from patchstore.stores.base import PART_BYTES, in_parts
from patchstore.support.threads import Threads


def parts() -> Iterator[bytes]:
    return in_parts(lambda start, end: bytes(end - start), 0, 20 * PART_BYTES)


def through() -> Iterator[bytes]:
    return Hasher().through(parts())


@pytest.mark.parametrize("make", [parts, through])
def test_an_abandoned_read_ends_where_threads_are_being_joined(make: Callable[[], Iterator[bytes]]) -> None:
    if not hasattr(threading, "_shutdown_locks_lock"):
        pytest.skip("this Python has no such lock")
    reading = make()
    next(reading)

    def collect() -> None:
        # As in the middle of `Thread.start` and `Thread.join`, where the collector may run.
        with threading._shutdown_locks_lock:
            reading.close()  # type: ignore[attr-defined]

    collector = threading.Thread(target=collect, daemon=True)
    collector.start()
    collector.join(60)
    assert not collector.is_alive()


@pytest.mark.parametrize("ends", [None, ValueError])
def test_work_that_has_not_begun_at_the_end_is_dropped(ends: type[Exception] | None) -> None:
    begun, go = threading.Event(), threading.Event()
    done: list[int] = []

    def work(number: int) -> None:
        begun.set()
        go.wait(60)
        done.append(number)

    def jobs() -> None:
        with Threads(1) as pool:
            for number in range(3):
                pool.submit(partial(work, number))
            begun.wait(60)
            threading.Timer(0.1, go.set).start()
            if ends is not None:
                raise ends

    if ends is None:
        jobs()
    else:
        with pytest.raises(ends):
            jobs()
    # What was under way is waited for.
    assert done == [0]
