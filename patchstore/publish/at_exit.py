"""At the end of the interpreter, close the publishers that the program left open, and report lost versions.

`threading` calls the function registered here when the main thread has ended, before `concurrent.futures`
refuses new work. An `atexit` handler would come after that. Python has no way to change the exit status at
that point, so after a loss an object that the interpreter destroys at its very end leaves with status 1.
"""

import atexit
import concurrent.futures.thread
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Protocol

from patchstore.errors import UsageError
from patchstore.support.printable import escaped


class Unclosed(Protocol):
    """A publisher, as this module needs it."""

    _process: int
    """The id of the process that opened it."""

    def _close_at_exit(self) -> str | None:
        """Close it, and return a message if something was lost; raises nothing."""
        ...

    def _lost(self, reason: object) -> str:
        """Return a message about publications that are not stored."""
        ...


class _Failure:
    """Ends the process with status 1 when it is destroyed: after all handlers, with all output flushed."""

    def __del__(self, leave: Callable[[int], object] = os._exit) -> None:
        leave(1)


_unclosed: list[Unclosed] = []
_failures: list[_Failure] = []
_registered: list[bool] = []


def check_still_running() -> None:
    """Raise UsageError if the interpreter is ending, because it would close no publisher any more."""
    if not threading.main_thread().is_alive():
        raise UsageError("the interpreter is ending, so no publisher can be opened any more")


def expect(publisher: Unclosed) -> None:
    """Close this publisher at the end of the interpreter, unless `forget` is called before."""
    if not _registered:
        # The last one registered is called first: before that of the pools, which are imported above.
        getattr(threading, "_register_atexit", atexit.register)(_close_all)
        _registered.append(True)
    _unclosed.append(publisher)


def forget(publisher: Unclosed) -> None:
    """Do nothing about this publisher at the end."""
    if publisher in _unclosed:
        _unclosed.remove(publisher)


def _close_all() -> None:
    # A child of a fork also comes here, with its parent's publishers.
    mine = [publisher for publisher in _unclosed if publisher._process == os.getpid()]
    losses = []
    for publisher in mine:
        try:
            _wait_for_threads()
            loss = publisher._close_at_exit()
        except KeyboardInterrupt:
            _say(publisher._lost("interrupted while the process waited for the store"))
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
            raise
        if loss is not None:
            _say(loss)
            losses.append(loss)
    if not losses or getattr(sys, "last_type", None) is not None:
        # An uncaught exception has set the exit status.
        return
    if multiprocessing.parent_process() is not None:
        # It leaves by os._exit, with the status of what was raised.
        raise SystemExit(1)
    _failures.append(_Failure())


def _wait_for_threads() -> None:
    """Wait for the threads that the interpreter would wait for next anyway: they may publish more."""
    pools = concurrent.futures.thread._threads_queues
    for thread in threading.enumerate():
        is_other = thread not in {threading.current_thread(), threading.main_thread()}
        if is_other and not thread.daemon and thread not in pools:
            thread.join()


def _say(message: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"patchstore: {escaped(message)}\n")
        sys.stderr.flush()
