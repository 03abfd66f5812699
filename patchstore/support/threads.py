"""Threads of a generator, which its reader may abandon; and a thread that does one task after another, for a
caller that Ctrl-C may interrupt at any point.

The primitives of `threading` and `concurrent.futures` are written in Python: an interrupt inside one of them
can leave its lock taken for ever. So one append to a deque hands a task to a `Worker`, which happens or does
not, and a flag says whether the task is done. The lock beside the flag only saves its waiters from polling.
"""

import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sized
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Lock, Thread
from types import TracebackType
from typing import Generic, TypeVar

_Result = TypeVar("_Result")
_Chunk = TypeVar("_Chunk", bound=Sized)

_BESIDE_BYTES = 1 << 19
"""To hand a smaller chunk to a thread takes as long as it saves: to write and digest 256 KiB takes 0.18 ms
in the place of 0.19, and 512 KiB 0.31 in the place of 0.36 (two cores)."""
_LOOK_AGAIN_S = 0.5
"""A waiter that was interrupted may have kept the lock, so the others also look at the flag this often."""


class Threads(ThreadPoolExecutor):
    """A pool for `with` in a generator that yields there. What has not begun at the end is dropped.

    It does not wait for its threads when the generator is closed. An abandoned generator may be closed by the
    garbage collector, on any thread, also on one that is just starting or joining another thread. To join
    threads there would wait forever for a lock of `threading` that this thread has itself.
    """

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(wait=kind is not GeneratorExit, cancel_futures=True)


def beside(work: Callable[[_Chunk], object], chunks: Iterable[_Chunk]) -> Generator[_Chunk, None, None]:
    """Pass chunks on, and do some work with each, on a thread, while the consumer uses it.

    Both are done with a chunk before the next one is asked for. What the work raises passes through.
    """
    with Threads(1, thread_name_prefix="patchstore-beside") as pool:
        for chunk in chunks:
            if len(chunk) < _BESIDE_BYTES:
                work(chunk)
                yield chunk
            else:
                done = pool.submit(work, chunk)
                try:
                    yield chunk
                finally:
                    done.result()


class Task(Generic[_Result]):
    """One piece of work and, later, its result or its error."""

    def __init__(self, work: Callable[[], _Result]) -> None:
        self._work: Callable[[], _Result] | None = work
        self._result: _Result | None = None
        self.error: BaseException | None = None
        """What the work raised; None while it is not done."""
        self.is_done = False
        self._running = Lock()
        self._running.acquire()

    def run(self) -> None:
        """Do the work, once; never raises."""
        assert self._work is not None
        try:
            self._result = self._work()
        except BaseException as exc:  # noqa: BLE001 -- it is raised where the result is asked for
            # The frames hold what the task worked on, which may be large, for as long as the error is kept.
            traceback.clear_frames(exc.__traceback__)
            self.error = exc
        self._work = None
        self.is_done = True
        self._running.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the task is done; return whether it is."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.is_done:
            left_s = _LOOK_AGAIN_S if end is None else min(_LOOK_AGAIN_S, end - time.monotonic())
            if left_s <= 0:
                break
            if self._running.acquire(timeout=left_s):
                self._running.release()
        return self.is_done

    def is_lost(self) -> bool:
        """Whether the work has no result, and will have none unless it is still under way."""
        return not self.is_done or self.error is not None

    def result(self) -> _Result:
        """Wait for the result."""
        self.wait()
        if self.error is not None:
            raise self.error
        return self._result  # type: ignore[return-value]


class Worker:
    """A daemon thread with a queue of tasks, until it is stopped."""

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self._tasks: deque[Task[object]] = deque()
        self._bell: SimpleQueue[bool] = SimpleQueue()
        """Wakes the thread to look for tasks; True ends it when there are none."""
        self._thread = Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def hand_over(self, task: Task[_Result]) -> None:
        """Queue a task. Once it is appended, the thread will do it."""
        self._tasks.append(task)  # type: ignore[arg-type]
        self._bell.put(False)

    def under_way(self) -> tuple[Task[object], ...]:
        """Return the tasks that are not done, oldest first."""
        # An interrupt may have come between the append and the bell.
        self._bell.put(False)
        return tuple(task for task in tuple(self._tasks) if not task.is_done)

    def wait_until_at_most(self, count: int) -> None:
        """Wait until no more than so many tasks are under way."""
        while len(tasks := self.under_way()) > count:
            tasks[0].wait()

    def stop(self) -> None:
        """Wait until the remaining tasks are done and the thread has ended."""
        self._bell.put(True)
        # After an interrupt `join` may believe that the thread has ended although it has not.
        self.wait_until_at_most(0)
        self._thread.join()

    def _work(self) -> None:
        is_over = False
        while self._tasks or not is_over:
            if self._tasks:
                self._tasks[0].run()
                self._tasks.popleft()
            else:
                is_over = self._bell.get()
