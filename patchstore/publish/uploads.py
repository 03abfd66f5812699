"""Uploads that are tried several times, and make sure that all of an object is stored."""

import logging
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from patchstore.errors import NotFound, PublishFailed, StoreUnavailable
from patchstore.format import hashing
from patchstore.format.records import Payload
from patchstore.stores.base import Chunk, Store

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

ATTEMPTS = 5
"""Tries of a store request, each within the time of the store (`docs/stores.md`, "Time")."""
FIRST_PAUSE_S = 0.5  # doubles with each try: 7.5 s in all, longer than a load balancer takes to fail over


class Uploads:
    """Requests of one publisher to a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def upload(self, key: str, chunks: Callable[[], Iterable[Chunk]]) -> Payload:
        """Store an object and make sure that all of it is there.

        Args:
            chunks: returns the object's bytes; called again for each try.

        Raises:
            PublishFailed: the store does not take it.
        """

        def attempt() -> Payload:
            hasher = hashing.Hasher()
            self._store.upload(key, hasher.through(chunks()))
            try:
                stored = self._store.size(key)
            except NotFound as exc:
                raise StoreUnavailable(f"{key} was sent, but is not stored") from exc
            if stored != hasher.num_bytes:
                raise StoreUnavailable(f"{key}: sent {hasher.num_bytes:,} bytes, but {stored:,} are stored")
            return Payload(key=key, size=hasher.num_bytes, digest=hasher.digest())

        return self.retried(f"upload of {key}", attempt)

    def retried(self, what: str, attempt: Callable[[], _Result]) -> _Result:
        """Try a request until the store answers it.

        Raises:
            PublishFailed: it did not, `ATTEMPTS` times.
        """
        pause_s = FIRST_PAUSE_S
        for tries in range(1, ATTEMPTS + 1):
            try:
                return attempt()
            except StoreUnavailable as exc:
                if tries == ATTEMPTS:
                    raise PublishFailed(
                        f"{what} failed {tries} times; the store holds the version before still, and the "
                        f"next publication will be an anchor: {exc}"
                    ) from exc
                logger.warning("%s failed, trying again in %.1f s: %s", what, pause_s, exc)
                time.sleep(pause_s)
                pause_s *= 2
        raise AssertionError("unreachable")
