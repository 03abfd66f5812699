"""`patchstore mirror` as a whole: once, or as a service that is left running."""

import logging
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from patchstore.errors import DataError, VersionNotFound, WrongParent
from patchstore.format import history, lineage
from patchstore.format.records import Manifest, StoreHeader
from patchstore.mirror import build
from patchstore.mirror.consumers import Consumer, Stopped
from patchstore.mirror.place import FLOOR, LINK, Place, Stat, stats, version_of
from patchstore.serve.desired import DesiredVersion, HeadWatcher
from patchstore.serve.progress import Event, Progress
from patchstore.signing.floor import Floor
from patchstore.signing.required import RequiredKeys, checks
from patchstore.stores.base import Store
from patchstore.support import host
from patchstore.support.arguments import local_path

logger = logging.getLogger(__name__)

_MAX_FAILURE_INTERVAL_S = 15.0
"""A consumer that refuses a version is told again after so long: it may load a whole model each time."""


class Mirror:
    """Brings a folder to the version that is wanted. Not for use from several threads at once."""

    def __init__(
        self,
        store: Store,
        place: Place,
        *,
        at: int | None = None,
        keep: int | None = None,
        consumers: Sequence[Consumer] = (),
        stop: threading.Event | None = None,
        required: RequiredKeys | None = None,
        allow_rollback: bool = False,
        max_head_age_s: float | None = None,
    ) -> None:
        """Prepare; nothing is read yet.

        Args:
            at: the version that is wanted; None for the newest.
            keep: how many older folders to keep; None for one where there are no consumers, which then has
                until the next version to be read. The folder that consumers accepted last is always kept.
            consumers: are told of each version, one after the other, until all have accepted it.
            stop: ends the wait for a consumer.
            required: keys, one of which must have signed each version that is mirrored. An older version than
                the folder was to have before is then refused.
            allow_rollback, max_head_age_s: see `DesiredVersion`.

        Raises:
            UsageError: the folder was begun with required keys and there are none now, or the reverse.
        """
        place.check_signed(is_signed=required is not None)
        self.version: int | None = None
        """What the link leads to, once it was verified."""
        self._store, self._place, self._consumers = store, place, consumers
        self._keep = keep if keep is not None else 0 if consumers else 1
        self._required = required
        self._desired = DesiredVersion(
            HeadWatcher(store),
            at=at,
            required=required,
            floor=None if required is None else Floor(place.path / FLOOR),
            allow_rollback=allow_rollback,
            max_head_age_s=max_head_age_s,
        )
        self._was_old = False
        self._stop = threading.Event() if stop is None else stop
        self._header: StoreHeader | None = None
        self._held: Manifest | None = None
        self._folder: Path | None = None
        self._stats: dict[str, Stat] | None = None
        self._is_known = False
        """Whether the folder that an earlier process left was looked at."""

    def work(self) -> Iterator[Event]:
        """Do what there is to do now: make the folder, switch the link, tell the consumers.

        Raises:
            VersionNotFound: the store lacks the wanted version.
            Unsigned, WrongSignature: keys are required, and none has signed the wanted version.
            RollbackRefused: keys are required, and it is older than a version that was mirrored before.
            StoreReplaced: the store holds another run than the one that is mirrored.
            ConsumerFailed: a consumer did not accept the version; the link leads to it already.
            HostError: there is no space, or the system refuses something else. The link leads where it did.
            CorruptObject, StateMismatch, WrongParent, StoreUnavailable: as `replay`; likewise.
        """
        wanted = self._desired.refresh()
        self._say_age()
        if wanted is None:
            yield Event(outcome="waiting")
            return
        header = self._run(wanted)
        self._place.begin(header.run_id, self._store.url, is_signed=self._required is not None)
        if not self._is_known:
            self._look(header)
        if self._held is None or self._held.version != wanted.version:
            began = time.monotonic()
            folder, num_bytes = self._made(header, wanted)
            self._place.switch(folder)
            self._take(folder, wanted)
            yield Event(
                outcome="mirrored",
                version=wanted.version,
                num_bytes=num_bytes,
                seconds=time.monotonic() - began,
                detail=str(folder),
            )
            self._place.prune(self._keep)
        if self._consumers:
            self._tell(wanted)

    def is_head_old(self) -> bool:
        """Whether the store's newest version is older than it may be. For any thread."""
        return self._desired.is_head_old()

    def _say_age(self) -> None:
        was, self._was_old = self._was_old, self.is_head_old()
        if self._was_old and not was:
            logger.warning(
                "the newest version of %s is older than --max-head-age allows: did the trainer stop, or does "
                "the store answer with an old state?",
                self._store.url,
                extra={"event": "old-head"},
            )

    def _run(self, wanted: Manifest) -> StoreHeader:
        if self._header is None or self._header.run_id != wanted.run_id:
            found = history.read_header(self._store)
            if found is None or found.run_id != wanted.run_id:
                raise VersionNotFound(f"{self._store.url} no longer holds run {wanted.run_id}")
            self._header = found
        return self._header

    def _take(self, folder: Path, manifest: Manifest) -> None:
        self._held, self._folder, self._stats = manifest, folder, dict(stats(folder))
        self.version = manifest.version

    def _look(self, header: StoreHeader) -> None:
        """Find what an earlier process left, and verify it."""
        folder = self._place.current
        if folder is not None and (found := self._verified(header, folder)) is not None:
            self._take(folder, found)
        self._is_known = True

    def _verified(self, header: StoreHeader, folder: Path) -> Manifest | None:
        """Return the version that a folder has, if it has the one of its name."""
        try:
            manifest = history.read_manifest(self._store, version_of(folder))
            with host.asked(f"reading {folder}", kinds=(OSError,)):
                build.verify(self._store, header, manifest, folder, self._required)
        except (DataError, VersionNotFound, WrongParent) as exc:
            logger.warning("%s is not used: %s", folder, exc)
            return None
        return manifest

    def _made(self, header: StoreHeader, wanted: Manifest) -> tuple[Path, int]:
        """Return a folder that has the wanted version, and how many bytes of payloads were fetched for it."""
        for folder in self._place.existing(wanted.version):
            # Kept, or made by a process that was killed before it switched the link.
            if folder != self._folder and self._verified(header, folder) is not None:
                return folder, 0
        # Room for the next one.
        self._place.prune(max(0, self._keep - 1))
        out = self._place.free_name(wanted.version)
        held = self._held if self._is_untouched() else None
        check = checks(self._required, self._store, header)
        plan = lineage.read(self._store, wanted.version, None if held is None else held.version, check).plan()
        if plan.anchor is None and held is not None and self._folder is not None:
            try:
                build.patch(self._store, header, self._folder, held, plan.deltas, out)
            except DataError as exc:
                logger.warning("version %d is made from its anchor: %s", wanted.version, exc)
            else:
                return out, plan.num_bytes
            plan = lineage.read(self._store, wanted.version, check=check).plan()
        build.rebuild(self._store, wanted.version, out, self._required)
        return out, plan.num_bytes

    def _is_untouched(self) -> bool:
        """Whether the present folder's files are as this process left them."""
        if self._folder is None:
            return False
        try:
            found = stats(self._folder)
        except OSError:
            found = {}
        if found != self._stats:
            logger.warning("%s was changed by another process, so it is not used further", self._folder)
        return found == self._stats

    def _tell(self, wanted: Manifest) -> None:
        """Tell the consumers of the present version unless they have accepted it."""
        record, folder = self._place.record, self._folder
        assert record is not None and folder is not None
        if record.told == folder.name:
            return
        values = {
            "folder": str(folder),
            "link": str(self._place.path / LINK),
            "version": str(wanted.version),
            "step": str(wanted.step),
            "run_id": wanted.run_id,
            "store": self._store.url,
        }
        try:
            for each in self._consumers:
                each.tell(values, self._stop)
                logger.info("%s accepted version %d", each.name, wanted.version)
        except Stopped:
            return
        self._place.tell(folder)
        self._place.prune(self._keep)


def mirror(
    store: Store,
    folder: str | Path,
    *,
    at: int | None = None,
    keep: int | None = None,
    consumers: Sequence[Consumer] = (),
    stop: threading.Event | None = None,
    required: RequiredKeys | None = None,
    allow_rollback: bool = False,
) -> Generator[Event]:
    """Bring a folder to a version, tell the consumers, and yield what was done; nothing if it was there.

    Raises:
        UsageError: the folder holds something else, or another process keeps it.
        And as `Mirror.work`.
    """
    with closing(Place(local_path("folder", folder))) as place:
        found = Mirror(
            store,
            place,
            at=at,
            keep=keep,
            consumers=consumers,
            stop=stop,
            required=required,
            allow_rollback=allow_rollback,
        )
        for event in found.work():
            if event.outcome == "waiting":
                raise VersionNotFound(f"{store.url} holds no version yet; publish one, or use --follow")
            yield event


def follow(
    store: Store,
    folder: str | Path,
    stop: threading.Event,
    *,
    at: int | None = None,
    keep: int | None = None,
    consumers: Sequence[Consumer] = (),
    required: RequiredKeys | None = None,
    allow_rollback: bool = False,
    max_head_age_s: float | None = None,
    listen: str | None = None,
    unhealthy_after_s: float = 60.0,
    min_poll_interval_s: float = 0.1,
    max_poll_interval_s: float = 2.0,
) -> Generator[Event]:
    """Keep a folder at a version until `stop` is set, and yield and log what is done.

    Failures are yielded too, and tried again.

    Args:
        required, allow_rollback, max_head_age_s: as `Mirror` takes them.
        listen: `[HOST:]PORT` for figures and health.
        unhealthy_after_s: how long failures may last before `/healthz` reports them.
        min_poll_interval_s: wait between two looks at the store after something was done; doubled by each
            look that finds nothing, and by each failure.
        max_poll_interval_s: longest wait; after failures 15 s, if that is more.

    Raises:
        UsageError: the folder holds something else, another process keeps it, or it cannot listen.
    """
    progress = Progress("mirror", store, unhealthy_after_s=unhealthy_after_s)
    with closing(Place(local_path("folder", folder))) as place:
        found = Mirror(
            store,
            place,
            at=at,
            keep=keep,
            consumers=consumers,
            stop=stop,
            required=required,
            allow_rollback=allow_rollback,
            max_head_age_s=max_head_age_s,
        )
        progress.watch_head(found.is_head_old)

        def work() -> Iterator[Event]:
            try:
                yield from found.work()
            finally:
                progress.stands_at(found.version)

        yield from progress.repeat(
            work,
            stop,
            min_interval_s=min_poll_interval_s,
            max_interval_s=max_poll_interval_s,
            max_failure_interval_s=max(max_poll_interval_s, _MAX_FAILURE_INTERVAL_S),
            listen=listen,
        )
