"""How long an operation of a store may take, whatever timeouts and retries its client has of its own.

The limit is `timeout_s`, and as much again for each `PART_BYTES` that a request carries: a slow line is
not cut off, but a stalled one is. The total time of a large object is not limited, because each of its parts
has a limit of its own.

A client that cannot be interrupted is called on a daemon thread, and the caller waits for it until the limit.
The thread ends when the client gives up, and does not keep the interpreter from exiting.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from patchstore.stores.base import PART_BYTES

DEFAULT_TIMEOUT_S = 60.0
LONGEST_S = 86_400.0

_Result = TypeVar("_Result")


class Overdue(Exception):
    """The limit has passed; the operation may still take place."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"{limit_s:.4g} s have passed")
        self.limit_s = limit_s


class Deadline:
    """The time by which an operation must have ended; starts now."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._end = time.monotonic() + limit_s

    def left(self) -> float:
        """Return the seconds that are left.

        Raises:
            Overdue: none are.
        """
        left_s = self._end - time.monotonic()
        if left_s <= 0:
            raise Overdue(self.limit_s)
        return left_s

    def request(self) -> "Deadline":
        """Return the limit for one of the requests that the operation makes."""
        return self

    def run(self, call: Callable[[], _Result], moved: Callable[[], object] = int) -> _Result:
        """Call on a thread of its own and return the result, or raise what the call raises.

        Raises:
            Overdue: no result in time. The call continues, so it must not touch objects of the caller.
        """
        left_s, running = self.left(), started(call)
        if not ended(running, left_s):
            raise Overdue(self.limit_s)
        return running.result()


class Patience:
    """A limit on the time in which a transfer makes no progress; otherwise used as a `Deadline`."""

    def __init__(self, timeout_s: float, num_bytes: int = PART_BYTES) -> None:
        """Up to `num_bytes` may be transferred before any progress is visible."""
        self._timeout_s = timeout_s
        self.limit_s = allowance(timeout_s, num_bytes)

    def request(self) -> Deadline:
        """Return the limit for one of the requests that the transfer makes beside its bytes."""
        return Deadline(self._timeout_s)

    def run(self, call: Callable[[], _Result], moved: Callable[[], object] = int) -> _Result:
        """As `Deadline.run`, with more time as long as what `moved` returns changes."""
        running, before = started(call), moved()
        while not ended(running, self.limit_s):
            now = moved()
            if now == before:
                raise Overdue(self.limit_s)
            before = now
        return running.result()


def allowance(timeout_s: float, num_bytes: int) -> float:
    """Return the limit in seconds for a request that carries so many bytes.

    >>> allowance(60, 0), allowance(60, PART_BYTES)
    (60.0, 120.0)
    """
    return min(timeout_s * (1 + num_bytes / PART_BYTES), LONGEST_S)


def started(call: Callable[[], _Result]) -> Future[_Result]:
    """Begin a call on a daemon thread."""
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            result = call()
        except BaseException as exc:  # noqa: BLE001 - raised again where the result is asked for
            future.set_exception(exc)
        else:
            future.set_result(result)

    # Not an executor: the interpreter waits for the threads of one before it exits.
    threading.Thread(target=run, name="patchstore-request", daemon=True).start()
    return future


def ended(running: Future[_Result], limit_s: float) -> bool:
    """Wait until a call has ended, or the limit has passed; return whether it has ended."""
    try:
        running.exception(limit_s)
    except TimeoutError:
        return running.done()
    return True
