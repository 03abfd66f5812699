"""How long an operation of a store may take, whatever timeouts and retries its client has of its own.

The limit is `timeout_s`, and as much again for each `PART_BYTES` that a request carries: a slow line is
not cut off, but a stalled one is. The total time of a large object is not limited, because each of its parts
has a limit of its own.

A client that cannot be interrupted is called on a daemon thread, and the caller waits for it until the limit.
The thread ends when the client gives up, and does not keep the interpreter from exiting.

A request that fails at once is repeated until the same limit (`Deadline.repeat`): a service that restarts or
asks for fewer requests is away for as long as one that hangs, and no number of attempts says how long.
"""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

from patchstore.stores.base import PART_BYTES

DEFAULT_TIMEOUT_S = 60.0
LONGEST_S = 86_400.0
FIRST_PAUSE_S = 0.1
"""Before a request is repeated; doubles with each repetition."""
LONGEST_PAUSE_S = 5.0
FIRST_ANSWER_S = 5.0
"""As long as nothing has ever answered at an endpoint it may be the wrong one, and is tried no longer."""
_PASSING = {408, 425, 429}
_FINAL = {501, 505}
_LAST_S = 1.0
"""What is left for the last attempt, where a service asks to wait beyond the limit."""

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

    def spent(self) -> float:
        """Return the seconds that have passed."""
        return self.limit_s - (self._end - time.monotonic())

    def left(self) -> float:
        """Return the seconds that are left; raise Overdue if none are."""
        left_s = self._end - time.monotonic()
        if left_s <= 0:
            raise Overdue(self.limit_s)
        return left_s

    def request(self) -> "Deadline":
        """Return the limit for one of the requests that the operation makes."""
        return self

    def run(self, call: Callable[[], _Result], moved: Callable[[], object] = int) -> _Result:
        """Call on a thread of its own and return the result, or raise what the call raises.

        Raises Overdue if there is no result in time. The call continues then, so it must not touch objects
        of the caller.
        """
        left_s, running = self.left(), started(call)
        if not ended(running, left_s):
            raise Overdue(self.limit_s)
        return running.result()

    def repeat(self, call: Callable[[], _Result], asked: Callable[[Exception], float | None]) -> _Result:
        """Call until that succeeds, fails for good, or the time is over; the pauses grow and vary.

        `asked` returns, for an error, how many seconds the service asks to wait: 0 if it does not say, and
        None if another attempt would fail as well. What is longer than the time left ends with one last
        attempt before the limit. Raises the error of the last attempt that ended, or Overdue if none did.
        """
        pause_s, is_last = FIRST_PAUSE_S, False
        failure: Exception | None = None
        try:
            while True:
                try:
                    return call()
                except Exception as exc:
                    # An attempt may have had a limit of its own, and another one may be in time.
                    is_overdue = isinstance(exc, Overdue)
                    asked_s, left_s = 0.0 if is_overdue else asked(exc), self._end - time.monotonic()
                    if asked_s is None or is_last or left_s <= pause_s:
                        if is_overdue and failure is not None:
                            # What a service answered says more than that the time is over.
                            raise failure from None
                        raise
                    failure = failure if is_overdue else exc
                is_last = asked_s > left_s
                # Many clients that failed at one moment must not come back at one moment.
                wait_s = random.uniform(pause_s / 2, pause_s)  # noqa: S311
                time.sleep(max(wait_s, min(asked_s, left_s - _LAST_S)))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        finally:
            # An error has this frame, so it would keep itself and what was sent in memory.
            failure = None


class Service:
    """Counts whether a service has ever answered."""

    def __init__(self) -> None:
        self.has_answered = False

    def waits_s(self, deadline: Deadline) -> float | None:
        """Seconds to wait after no answer came, as `Deadline.repeat` asks for."""
        return 0.0 if self.has_answered or deadline.spent() < FIRST_ANSWER_S else None


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


def passes(status: int) -> bool:
    """Whether another attempt may have another answer than one with this status of HTTP."""
    return status in _PASSING or (status >= 500 and status not in _FINAL)


def retry_after(text: str) -> float:
    """Return the seconds that a header `Retry-After` asks to wait: a number, or a date; 0 if it is neither.

    >>> retry_after("120"), retry_after("Thu, 01 Jan 2026 00:00:00 GMT"), retry_after("soon")
    (120.0, 0.0, 0.0)
    """
    if text.isascii() and text.isdecimal():
        return min(float(text), LONGEST_S)
    try:
        date = parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    at = date if date.tzinfo else date.replace(tzinfo=UTC)
    return min(max(0.0, (at - datetime.now(UTC)).total_seconds()), LONGEST_S)


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
