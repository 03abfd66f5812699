"""Keep a folder at a version, and run commands for each: once, or as a service that is left running."""

import logging
import os
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path

from patchstore.bucket import history, kept
from patchstore.bucket.records import Manifest, Plan
from patchstore.errors import (
    ConsumerFailed,
    DataError,
    StoreReplaced,
    UsageError,
    VersionNotFound,
    WrongParent,
)
from patchstore.follow.desired import DesiredVersion, HeadWatcher
from patchstore.follow.loop import Event, Loop, LoopSettings
from patchstore.ops.mirror import build
from patchstore.ops.mirror.place import FLOOR, LINK, Place, Stat, stats, version_of
from patchstore.read import replay
from patchstore.read.rebuild import Progress
from patchstore.read.run import Run
from patchstore.signing.required import Floor, RequiredKeys
from patchstore.stores.base import Store
from patchstore.support import host

logger = logging.getLogger(__name__)

_MAX_FAILURE_INTERVAL_S = 15.0
"""A command that refuses a version is run again after so long: it may load a whole model each time."""

FIELDS = ("folder", "link", "version", "step", "run_id", "store")
"""What `{...}` may name in a command."""
_FIELD = re.compile(r"\{([A-Za-z_]+)\}")
_LOOK_S = 0.2
_END_S = 10.0
"""Time that a command has to end after SIGTERM."""


class Stopped(Exception):
    """The caller asked for an end before the command had accepted the version."""


class Command:
    """A command, which accepts a version by exit status 0. Its output goes to standard error."""

    def __init__(self, line: str, *, timeout_s: float) -> None:
        """Split a command line as a shell does; no shell runs it."""
        try:
            self._words = shlex.split(line)
        except ValueError as exc:
            raise UsageError(f"the command {line!r} cannot be split into words: {exc}") from exc
        if not self._words:
            raise UsageError("the command is empty")
        for word in self._words:
            if unknown := sorted(set(_FIELD.findall(word)) - set(FIELDS)):
                known = ", ".join(f"{{{name}}}" for name in FIELDS)
                raise UsageError(f"{{{unknown[0]}}} is not known: a command may have {known}")
        self.name, self._timeout_s = self._words[0], timeout_s

    def tell(self, values: Mapping[str, str], stop: threading.Event) -> None:
        """Run the command for a version, and wait until it has accepted it."""
        words = [_filled(word, values) for word in self._words]
        environment = {f"PATCHSTORE_{name.upper()}": value for name, value in values.items()}
        try:
            # A session of its own: Ctrl-C is for this process, which ends the command then.
            process = subprocess.Popen(  # noqa: S603 -- the caller's own command, without a shell
                words,
                stdin=subprocess.DEVNULL,
                stdout=2,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        except OSError as exc:
            raise ConsumerFailed(f"{words[0]} cannot be started: {exc}") from exc
        end = time.monotonic() + self._timeout_s
        try:
            while True:
                try:
                    code = process.wait(_LOOK_S)
                    break
                except subprocess.TimeoutExpired:
                    if stop.is_set():
                        raise Stopped from None
                    if time.monotonic() > end:
                        raise ConsumerFailed(
                            f"{shlex.join(words)} did not end within {self._timeout_s:.0f} s"
                        ) from None
        finally:
            _end(process)
        if code:
            how = f"status {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
            raise ConsumerFailed(f"{shlex.join(words)} ended with {how}; it is run again")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a command and what it started, if it runs still."""
    if process.poll() is not None:
        return
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    except ProcessLookupError:
        process.wait()


def _filled(text: str, values: Mapping[str, str]) -> str:
    """Replace each field by its value; values are not looked at again."""
    return _FIELD.sub(lambda match: values[match[1]], text)


class Mirror:
    """Brings a folder to the version that is wanted. Not for use from several threads at once."""

    def __init__(
        self,
        store: Store,
        place: Place,
        *,
        at: int | None = None,
        keep: int | None = None,
        commands: Sequence[Command] = (),
        stop: threading.Event | None = None,
        required: RequiredKeys | None = None,
        allow_rollback: bool = False,
        max_head_age_s: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Prepare; nothing is read yet.

        Args:
            progress: told of folders that are made from an anchor.
            keep: how many older folders to keep; None for one where there are no commands, which then has
                until the next version to be read. The folder that commands accepted last is always kept.
        """
        place.check_signed(is_signed=required is not None)
        self.version: int | None = None
        """What the link leads to, once it was verified."""
        self.store, self._place, self._commands = store, place, commands
        self._keep = keep if keep is not None else 0 if commands else 1
        self._required, self._progress = required, progress
        self._desired = DesiredVersion(
            HeadWatcher(
                store,
                run_id=None if place.record is None else place.record.run_id,
                then=f"{place.path} was left as it was: name another folder",
            ),
            at=at,
            required=required,
            floor=None if required is None else Floor(place.path / FLOOR),
            allow_rollback=allow_rollback,
            max_head_age_s=max_head_age_s,
        )
        self._was_old = False
        self._stop = threading.Event() if stop is None else stop
        self._run: Run | None = None
        self._held: Manifest | None = None
        self._folder: Path | None = None
        self._stats: Mapping[str, Stat] | None = None

    def work(self) -> Iterator[Event]:
        """Do what there is to do now: make the folder, switch the link, run the commands.

        Whatever it raises, the link leads to a whole version: as before, or to the wanted one.
        """
        wanted = self._desired.refresh()
        self._say_age()
        if wanted is None:
            yield Event(outcome="waiting")
            return
        run = self._opened(wanted)
        if self._held is None or self._held.version != wanted.version:
            began = time.monotonic()
            folder, num_bytes = self._made(run, wanted.version)
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
        if self._commands:
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
                self.store.url,
                extra={"event": "old-head"},
            )

    def _opened(self, wanted: Manifest) -> Run:
        """Open the run that the wanted version is of, and verify what an earlier process left."""
        if self._run is None:
            found = history.read_header(self.store)
            history.check_run(self.store, found, wanted.run_id, f"{self._place.path} was left as it was")
            assert found is not None
            run = Run(self.store, found, self._required)
            self._place.begin(wanted.run_id, self.store.url, is_signed=self._required is not None)
            folder = self._place.current
            if folder is not None and (held := self._verified(run, folder)) is not None:
                self._take(folder, held)
            self._run = run
        return self._run

    def _take(self, folder: Path, manifest: Manifest) -> None:
        self._held, self._folder, self._stats = manifest, folder, stats(folder)
        self.version = manifest.version

    def _verified(self, run: Run, folder: Path) -> Manifest | None:
        """Return the version that a folder has, if it has the one of its name."""
        try:
            manifest = history.read_manifest(self.store, version_of(folder))
            with host.asked(f"reading {folder}", kinds=(OSError,)):
                build.verify(run, manifest, folder)
        except (DataError, VersionNotFound, WrongParent) as exc:
            logger.warning("%s is not used: %s", folder, exc)
            return None
        return manifest

    def _made(self, run: Run, version: int) -> tuple[Path, int]:
        """Return a folder that has a version, and how many bytes of payloads were fetched for it."""
        for folder in self._place.existing(version):
            # Kept, or made by a process that was killed before it switched the link.
            if folder != self._folder and self._verified(run, folder) is not None:
                return folder, 0
        # Room for the next one.
        self._place.prune(max(0, self._keep - 1))
        out = self._place.free_name(version)

        def make(way: Plan) -> int:
            if way.anchor is None:
                assert self._folder is not None and self._held is not None
                build.patch(run, self._folder, self._held, way.deltas, out)
            else:
                kept.check(self.store, version)
                replay.write(run, way, out, self._progress)
                build.protect(out)
            return way.num_bytes

        if self._is_untouched():
            try:
                return out, run.reach(version, make, held=self._held)
            except (DataError, StoreReplaced) as exc:
                # Perhaps the folder's own bytes are wrong, or it has what was replaced in the store.
                logger.warning("version %d is made from its anchor: %s", version, exc)
        return out, run.reach(version, make)

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
        """Run the commands for the present version unless they have accepted it."""
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
            "store": self.store.url,
        }
        try:
            for each in self._commands:
                each.tell(values, self._stop)
                logger.info("%s accepted version %d", each.name, wanted.version)
        except Stopped:
            return
        self._place.tell(folder)
        self._place.prune(self._keep)


def once(mirror: Mirror) -> Generator[Event]:
    """Bring a folder to a version, run the commands, and yield what was done; nothing if it was there."""
    for event in mirror.work():
        if event.outcome == "waiting":
            raise VersionNotFound(f"{mirror.store.url} holds no version yet; publish one, or use --follow")
        yield event


def follow(mirror: Mirror, stop: threading.Event, settings: LoopSettings) -> Generator[Event]:
    """Keep a folder at a version until `stop` is set, and yield and log what is done.

    Failures are yielded too, and tried again: after failures in a row 15 s later at the most, or after
    `max_poll_interval_s` if that is more.
    """
    most_s = max(settings.max_poll_interval_s, _MAX_FAILURE_INTERVAL_S)
    loop = Loop("mirror", mirror.store, settings, most_after_failures_s=most_s)
    loop.watch_head(mirror.is_head_old)

    def work() -> Iterator[Event]:
        try:
            yield from mirror.work()
        finally:
            loop.stands_at(mirror.version)

    yield from loop.run(work, stop)
