"""`patchstore replicate` as a whole: once, or as a service that is left running."""

import threading
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from patchstore.bucket import history
from patchstore.follow.loop import Event, Loop, LoopSettings
from patchstore.ops.replicate.copying import Stopped
from patchstore.ops.replicate.replicator import Replicator
from patchstore.signing.required import RequiredKeys
from patchstore.stores.base import Store

if TYPE_CHECKING:
    # It imports torch, which a copy does not need.
    from patchstore.read.rebuild import Progress

RECHECK_S = 30.0
"""After this time without a new version the source is checked: an emptied one seems to have nothing new."""


def replicate(
    source: Store,
    target: Store,
    stop: threading.Event,
    *,
    required: RequiredKeys | None = None,
    progress: "Progress | None" = None,
) -> Generator[Event]:
    """Make the target equal to the source as it is now, and yield each version that is copied.

    With required keys only what one of them has signed can be used there. Ends early if `stop` is set. After
    any error, and after a kill, the target is a replica of the versions that it has, and calling again
    continues.
    """
    replicator = Replicator(source, target, stop=stop, required=required, progress=progress)
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
    settings: LoopSettings,
    *,
    required: RequiredKeys | None = None,
) -> Generator[Event]:
    """Keep the target equal to the source until `stop` is set, and yield and log what is done.

    Failures are yielded too, and tried again.
    """
    replicator = Replicator(source, target, stop=stop, required=required)
    loop = Loop("replica", source, settings)
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
                    loop.stands_at(replicator.newest.version)
            for event in _copied(replicator):
                checked = time.monotonic()
                yield event
            if not stop.is_set() and time.monotonic() - looked > RECHECK_S:
                looked = time.monotonic()
                with suppress(Stopped):
                    replicator.check_way()
                    replicator.copy_shortcuts()
                    replicator.copy_records()
            if not stop.is_set() and time.monotonic() - checked > RECHECK_S:
                replicator.check_source()
                checked = time.monotonic()
        except Exception:
            # What went wrong may have changed either place, so look at both again.
            is_open = False
            raise

    yield from loop.run(work, stop)


def _copied(replicator: Replicator) -> Iterator[Event]:
    try:
        for done in replicator.versions():
            yield Event(
                outcome="copied",
                version=done.manifest.version,
                num_bytes=done.num_bytes,
                seconds=done.seconds,
                detail="given up: without payloads, and retired here" if done.is_given_up else None,
            )
    except Stopped:
        return
