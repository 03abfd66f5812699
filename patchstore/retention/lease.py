"""A lease: a reader's word that it still needs versions that others may retire meanwhile.

A version that is not retired when a reader begins stays whole for `times.GRACE` at least. So a lease costs
nothing at first: its first record is written only if the reader takes longer than `START_AFTER`.
"""

import logging
import threading
import uuid
from collections.abc import Iterable
from datetime import timedelta
from types import TracebackType
from typing import Self

from patchstore.errors import PatchstoreError, UsageError
from patchstore.format import layout, leases
from patchstore.format.history import create
from patchstore.format.leases import MAX_LIFETIME, LeaseRecord
from patchstore.format.times import Clock, spelled, utc_now
from patchstore.stores.base import Store

logger = logging.getLogger(__name__)

LIFETIME = timedelta(hours=4)
"""From the creation of a record until it expires. It is renewed after half of that."""
START_AFTER = timedelta(hours=1)
"""From the begin of a reader until its first record: far less than the grace period of a retirement."""
_END_S = 5.0
"""Seconds that the end of a lease waits for a renewal under way."""
_AGAIN_S = 60.0
"""Seconds until a renewal that failed is tried again."""


class Lease:
    """Holds versions while a block runs. A lease never fails its reader: what goes wrong is logged.

    In a store where this process may not write, and in one that has a single writer, nothing is written. The
    versions are then protected for `times.GRACE` from their retirement on, and no longer.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        versions: Iterable[int],
        *,
        after: timedelta = START_AFTER,
        lifetime: timedelta = LIFETIME,
        clock: Clock = utc_now,
    ) -> None:
        """Prepare; nothing is written, and no thread runs yet.

        Args:
            versions: that the reader needs. All that they are rebuilt from is protected too. The caller
                checked that none of them is retired.
            after: the first record is written so long after the block began; zero for at once.
            lifetime: of one record.

        Raises:
            UsageError: no versions, or a lifetime that the format does not allow.
        """
        self.versions = tuple(sorted(set(versions)))
        if not self.versions:
            raise UsageError("name at least one version to hold")
        if not timedelta() < lifetime <= MAX_LIFETIME:
            raise UsageError(f"a lease lives for at most {MAX_LIFETIME}, not {lifetime}")
        self.holder = uuid.uuid4().hex
        self.num_records = 0
        """Records that were written, or may have been."""
        self._store, self._run_id = store, run_id
        self._after, self._lifetime, self._clock = after, lifetime, clock
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="patchstore-lease", daemon=True)

    def __enter__(self) -> Self:
        if not self._store.single_writer:
            if not self._after:
                self.renew()
            try:
                self._thread.start()
            except RuntimeError as exc:
                logger.info("versions %s are read without a lease: %s", self.versions, exc)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def renew(self) -> bool:
        """Write one more record; return whether that is certain."""
        now = self._clock()
        record = LeaseRecord(
            run_id=self._run_id,
            holder=self.holder,
            versions=self.versions,
            created_at=spelled(now),
            expires_at=spelled(now + self._lifetime),
        )
        key = layout.record_key(layout.lease_prefix(self.holder), self.num_records)
        # Counted first: if there is no answer it may be there, and is deleted at the end.
        self.num_records += 1
        try:
            create(self._store, key, leases.to_json(record))
        except UsageError as exc:
            logger.info("versions %s are read without a lease: %s", self.versions, exc)
            self._ended.set()
            return False
        except PatchstoreError as exc:
            logger.info("the lease of versions %s was not renewed, trying again: %s", self.versions, exc)
            return False
        return True

    def end(self) -> None:
        """Delete the records. What cannot be deleted expires. Calling again does nothing."""
        self._ended.set()
        if self._thread.is_alive():
            # It may wait for a store that does not answer. What it writes then expires.
            self._thread.join(_END_S)
        # The newest first: until it is gone, the others do not count.
        while self.num_records:
            self.num_records -= 1
            try:
                self._store.delete(layout.record_key(layout.lease_prefix(self.holder), self.num_records))
            except PatchstoreError as exc:
                logger.info("a lease of versions %s stays until it expires: %s", self.versions, exc)

    def _run(self) -> None:
        half_s = (self._lifetime / 2).total_seconds()
        wait_s = self._after.total_seconds() or half_s
        while not self._ended.wait(wait_s):
            wait_s = half_s if self.renew() else min(_AGAIN_S, half_s)
