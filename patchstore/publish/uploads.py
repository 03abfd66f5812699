"""Uploads that are tried several times, and make sure that all of an object is stored."""

import logging
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from patchstore.bucket import digests
from patchstore.bucket.records import Payload
from patchstore.errors import NotFound, PublishFailed, StoreUnavailable
from patchstore.stores import tries
from patchstore.stores.base import Chunk, Store

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


def upload(store: Store, key: str, chunks: Callable[[], Iterable[Chunk]]) -> Payload:
    """Store an object and make sure that all of it is there; `chunks` is called again for each try."""

    def attempt() -> Payload:
        hasher = digests.Hasher()
        store.upload(key, hasher.through(chunks()))
        try:
            stored = store.size(key)
        except NotFound as exc:
            raise StoreUnavailable(f"{key} was sent, but is not stored") from exc
        if stored != hasher.num_bytes:
            raise StoreUnavailable(f"{key}: sent {hasher.num_bytes:,} bytes, but {stored:,} are stored")
        return Payload(key=key, size=hasher.num_bytes, digest=hasher.digest())

    return retried(f"upload of {key}", attempt)


def retried(what: str, attempt: Callable[[], _Result]) -> _Result:
    """Try a request, at most `tries.ATTEMPTS` times; a PublishFailed says that the store gave no answer."""
    num_tries, pause_s = 0, tries.FIRST_PAUSE_S
    while True:
        num_tries += 1
        try:
            return attempt()
        except StoreUnavailable as exc:
            if num_tries == tries.ATTEMPTS:
                raise PublishFailed(
                    f"{what} failed {num_tries} times. The versions before are as they were, and the next "
                    f"publication will be an anchor: {exc}"
                ) from exc
            logger.warning("%s failed, trying again in %.1f s: %s", what, pause_s, exc)
            time.sleep(pause_s)
            pause_s *= 2
