"""`patchstore replicate` as a whole: once, or as a service that is left running."""

import threading
import time
from collections.abc import Generator, Iterator
from contextlib import suppress

from patchstore.format import history
from patchstore.replicate.copying import Stopped
from patchstore.replicate.replicator import Replicator
from patchstore.serve.progress import Event, Progress
from patchstore.signing.required import RequiredKeys
from patchstore.stores.base import Store

_RECHECK_S = 30.0
"""After this time without a new version the source is checked: an emptied one seems to have nothing new."""


def replicate(
    source: Store, target: Store, stop: threading.Event, *, required: RequiredKeys | None = None
) -> Generator[Event]:
    """Make the target equal to the source as it is now, and yield each version that is copied.

    With required keys only what one of them has signed is copied. Ends early if `stop` is set. After any
    error, and after a kill, the target is a replica of the versions that it has, and calling again continues.

    Raises:
        As `Replicator.open` and `Replicator.versions`.
    """
    replicator = Replicator(source, target, stop=stop, required=required)
    replicator.open()
    yield from _copied(replicator)
    if not stop.is_set():
        with suppress(Stopped):
            replicator.copy_shortcuts()
            replicator.copy_records()
        # Versions that were removed from the source would seem not to be there yet.
        replicator.check_source()


def follow(
    source: Store,
    target: Store,
    stop: threading.Event,
    *,
    required: RequiredKeys | None = None,
    listen: str | None = None,
    unhealthy_after_s: float = 60.0,
    min_poll_interval_s: float = 0.1,
    max_poll_interval_s: float = 2.0,
) -> Generator[Event]:
    """Keep the target equal to the source until `stop` is set, and yield and log what is done.

    Failures are yielded too, and tried again.

    Args:
        required: keys, one of which must have signed each version that is copied.
        listen: `[HOST:]PORT` for figures and health.
        unhealthy_after_s: how long failures may last before `/healthz` reports them.
        min_poll_interval_s: wait between two looks at the source after a version was copied; doubled by each
            look that finds nothing, and by each failure.
        max_poll_interval_s: longest wait.

    Raises:
        UsageError: both are the same place, or it cannot listen; nothing was done.
    """
    replicator = Replicator(source, target, stop=stop, required=required)
    progress = Progress("replica", source, unhealthy_after_s=unhealthy_after_s)
    is_open, checked, looked = False, 0.0, 0.0

    def work() -> Iterator[Event]:
        nonlocal is_open, checked, looked
        try:
            if not is_open:
                if history.stored_header(source) is None:
                    yield Event(outcome="waiting")
                    return
                replicator.open()
                is_open, checked = True, time.monotonic()
                if replicator.newest is not None:
                    progress.stands_at(replicator.newest.version)
            for event in _copied(replicator):
                checked = time.monotonic()
                yield event
            if not stop.is_set() and time.monotonic() - looked > _RECHECK_S:
                looked = time.monotonic()
                with suppress(Stopped):
                    replicator.copy_shortcuts()
                    replicator.copy_records()
            if not stop.is_set() and time.monotonic() - checked > _RECHECK_S:
                replicator.check_source()
                checked = time.monotonic()
        except Exception:
            # What went wrong may have changed either place, so look at both again.
            is_open = False
            raise

    yield from progress.repeat(
        work, stop, min_interval_s=min_poll_interval_s, max_interval_s=max_poll_interval_s, listen=listen
    )


def _copied(replicator: Replicator) -> Iterator[Event]:
    try:
        for done in replicator.versions():
            yield Event(
                outcome="copied",
                version=done.manifest.version,
                num_bytes=done.num_bytes,
                seconds=done.seconds,
            )
    except Stopped:
        return
