"""Reads that end before the object does: the garbage collector may be the one that ends them."""

import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from types import FrameType
from typing import Any

import pytest

from patchstore.bucket.digests import Hasher
from patchstore.stores.base import PART_BYTES, in_parts
from patchstore.support.threads import Threads, beside


def parts() -> Iterator[bytes]:
    return in_parts(lambda start, end: bytes(end - start), 0, 3 * PART_BYTES)


def through() -> Iterator[bytes]:
    return Hasher().through(parts())


def is_ended_at(number: int, reading: Iterator[bytes]) -> bool:
    """Start and join a thread, and end a read at this line that `threading` runs; return whether it came."""
    lines = count(1)

    def look(frame: FrameType, event: str, _: object) -> Any:
        # As the collector, which may run at any line, also where the thread has a lock.
        is_here = event == "line" and frame.f_code.co_filename == threading.__file__
        if is_here and next(lines) == number:
            reading.close()  # type: ignore[attr-defined]
        return look

    def work() -> None:
        other = threading.Thread(target=int)
        sys.settrace(look)
        try:
            other.start()
            other.join()
        finally:
            sys.settrace(None)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    worker.join(60)
    assert not worker.is_alive(), f"it hangs at line {number}"
    return next(lines) > number


@pytest.mark.parametrize("make", [parts, through])
def test_an_abandoned_read_ends_wherever_threads_are_being_started_and_joined(
    make: Callable[[], Iterator[bytes]],
) -> None:
    for number in count(1):
        reading = make()
        next(reading)
        if not is_ended_at(number, reading):
            break
    assert number > 10


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


@pytest.mark.parametrize("ends", ["closed", "read on"])
def test_work_beside_a_chunk_is_done_when_the_next_is_asked_for_or_the_reading_ends(ends: str) -> None:
    go, done = threading.Event(), list[int]()

    def work(chunk: bytes) -> None:
        go.wait(60)
        done.append(len(chunk))

    chunks = beside(work, parts())
    next(chunks)
    assert not done
    threading.Timer(0.1, go.set).start()
    if ends == "closed":
        chunks.close()
    else:
        next(chunks)
    assert done[0] == PART_BYTES
    chunks.close()


def test_what_work_beside_a_chunk_raises_is_raised_where_the_next_is_asked_for() -> None:
    def work(chunk: bytes) -> None:
        raise OSError(len(chunk))

    for size in (1, PART_BYTES):
        with pytest.raises(OSError, match=str(size)):
            list(beside(work, [bytes(size)]))
