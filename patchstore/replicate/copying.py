"""Copy one payload from a store to another, verified on its way."""

import logging
import threading
from collections import deque
from collections.abc import Iterator

from patchstore.errors import CorruptObject, NotFound, PatchstoreError, StoreUnavailable
from patchstore.format import hashing
from patchstore.format.missing import missing
from patchstore.format.records import Payload
from patchstore.stores.base import Store
from patchstore.support import host

logger = logging.getLogger(__name__)

ATTEMPTS = 5
"""Tries of a copy that gets no answer."""
_CORRUPT_ATTEMPTS = 2
"""Tries of a copy whose bytes arrive wrong or not at all: they may be wrong there, or only on their way."""
_FIRST_PAUSE_S = 0.5  # doubles with each try


class Stopped(Exception):
    """The caller asked for an end; nothing of the object was stored."""


def copy(source: Store, target: Store, wanted: Payload, stop: threading.Event) -> int:
    """Make sure that the target has a payload; return how many bytes were copied, 0 if it had it.

    An object that is there is read and verified. If it has other bytes, it is replaced: no version of the
    target needs those, and a store that kept only a part of an upload would stop the replica for ever. What
    is stored always has the digest that the manifest names. Memory: 8 parts each way.

    Args:
        stop: ends the copy between two parts.

    Raises:
        CorruptObject: the source lacks it, or has other bytes.
        StoreUnavailable: either store did not answer, `ATTEMPTS` times.
        Stopped: `stop` was set.
    """
    num_sent, num_corrupt, pause_s = 0, 0, _FIRST_PAUSE_S
    for tries in range(1, ATTEMPTS + 1):
        try:
            if _has(target, wanted, stop):
                return num_sent
            num_sent = wanted.size
            _send(source, target, wanted, stop)
        except (StoreUnavailable, _Arrived) as exc:
            num_corrupt += isinstance(exc, _Arrived)
            if tries == ATTEMPTS or num_corrupt == _CORRUPT_ATTEMPTS:
                raise (exc.error if isinstance(exc, _Arrived) else exc) from exc
            logger.warning("copying %s failed, trying again in %.1f s: %s", wanted.key, pause_s, exc)
            if stop.wait(pause_s):
                raise Stopped from exc
            pause_s *= 2
        else:
            return num_sent
    raise AssertionError("unreachable")


class _Arrived(Exception):
    """Wrong bytes arrived."""

    def __init__(self, error: PatchstoreError) -> None:
        super().__init__(str(error))
        self.error = error


def _send(source: Store, target: Store, wanted: Payload, stop: threading.Event) -> None:
    target.upload(wanted.key, _verified(source, wanted, stop))
    try:
        stored = target.size(wanted.key)
    except NotFound as exc:
        raise StoreUnavailable(f"{target.url}: {wanted.key} was sent, but is not stored") from exc
    if stored != wanted.size:
        raise StoreUnavailable(
            f"{target.url}: {wanted.key}: sent {wanted.size:,} bytes, but {stored:,} are stored"
        )


def _verified(source: Store, wanted: Payload, stop: threading.Event) -> Iterator[bytes]:
    """Stream a payload from the source; raises at the end, before it is stored, if its bytes are wrong."""
    try:
        with host.reading(wanted.key):
            yield from hashing.verified(_until(stop, source.read(wanted.key, end=wanted.size + 1)), wanted)
    except NotFound as exc:
        raise missing(source, wanted) from exc
    except CorruptObject as exc:
        raise _Arrived(CorruptObject(f"{source.url}: {exc}")) from exc


def _has(target: Store, wanted: Payload, stop: threading.Event) -> bool:
    """Whether the target has a payload with the right bytes, as a replicator leaves it that was killed."""
    try:
        if target.size(wanted.key) != wanted.size:
            raise CorruptObject(f"{wanted.key} should have {wanted.size:,} bytes")
        with host.reading(wanted.key):
            deque(
                hashing.verified(_until(stop, target.read(wanted.key, end=wanted.size + 1)), wanted), maxlen=0
            )
    except NotFound:
        return False
    except CorruptObject as exc:
        logger.warning("%s: %s. It is replaced by the source's", target.url, exc)
        return False
    return True


def _until(stop: threading.Event, chunks: Iterator[bytes]) -> Iterator[bytes]:
    for chunk in chunks:
        if stop.is_set():
            raise Stopped
        yield chunk
