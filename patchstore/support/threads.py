"""Threads of a generator, which its reader may abandon."""

from concurrent.futures import ThreadPoolExecutor
from types import TracebackType


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
