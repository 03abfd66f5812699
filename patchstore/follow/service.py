"""`patchstore follow` as a whole: connects its parts, and logs and yields events."""

import logging
import threading
from collections import deque
from collections.abc import Generator
from contextlib import ExitStack

from patchstore.errors import ServerUnavailable, UsageError
from patchstore.follow.desired import DesiredVersion, HeadWatcher, check_kind
from patchstore.follow.fleet import Fleet, FollowEvent
from patchstore.follow.http_api import Control
from patchstore.follow.loop import address_of
from patchstore.follow.metrics import Metrics
from patchstore.follow.settings import DEFAULTS, Settings
from patchstore.ops.report.logs import MOST_EVENTS, Happened
from patchstore.ops.report.page import Report
from patchstore.signing.required import Floor
from patchstore.stores.base import Store

logger = logging.getLogger(__name__)


def follow(store: Store, settings: Settings, stop: threading.Event) -> Generator[FollowEvent]:
    """Follow until `stop` is set, and yield and log what is done."""
    watcher = HeadWatcher(store, run_id=settings.run_id)
    if settings.floor_file is not None and settings.required_keys is None:
        raise UsageError(
            "a floor file is of use only where signatures are required: name the public keys too"
        )
    modes = (settings.pause_mode, settings.prefix_cache)
    if settings.adapter is not None and modes != (DEFAULTS.pause_mode, DEFAULTS.prefix_cache):
        raise UsageError(
            "a new version of an adapter pauses nothing, and nothing of older ones is reused: leave out "
            "--pause-mode and --prefix-cache, which are for whole weights"
        )
    if settings.adapter is None and settings.keep != DEFAULTS.keep:
        raise UsageError("--keep is of use only with --adapter")
    desired = DesiredVersion(
        watcher,
        at=settings.at,
        pin_file=settings.pin_file,
        required=settings.required_keys,
        floor=Floor(settings.floor_file),
        allow_rollback=settings.allow_rollback,
        max_head_age_s=settings.max_head_age_s,
        check_run=lambda header: check_kind(store, header, settings.adapter),
    )
    metrics = Metrics(watcher)
    fleet = Fleet(desired, settings, observe=metrics.observe)
    metrics.watch(fleet.status)
    happened: deque[Happened] = deque(maxlen=MOST_EVENTS)
    # Without changes by layer, for which this process would import torch.
    report = Report(store, events=happened.copy, has_layers=False)
    with ExitStack() as stack:
        if settings.listen is not None:
            # A server that waits for `update_interval_s` is not late.
            unhealthy_after_s = settings.unhealthy_after_s + settings.update_interval_s
            address = address_of(settings.listen)
            control = Control(address, fleet, desired, metrics, report, unhealthy_after_s=unhealthy_after_s)
            stack.enter_context(control)
            logger.info("listening at %s", control.url, extra={"event": "listening", "url": control.url})
        if desired.pinned is not None:
            version = desired.pinned.version
            fields = {"event": "pinned", "version": version}
            logger.info("servers are pinned to version %d", version, extra=fields)
        for event in fleet.run(stop, grace_s=settings.grace_s):
            _log(event, store.url)
            if (told := Happened.of(event.to_dict())) is not None:
                happened.append(told)
            yield event
    if fleet.left:
        raise ServerUnavailable(
            f"{', '.join(fleet.left)}: an update did not end in time, so generation may be paused; start "
            "patchstore follow again to end it"
        )


def _log(event: FollowEvent, store: str) -> None:
    done = event.step
    fields = {
        "event": done.outcome,
        "server": event.server,
        "store": store if event.server is None else None,
        "version": done.version,
        "seconds": round(done.seconds, 3),
        "kind": None if done.error is None else done.error.kind,
        "num_times": event.num_times if done.outcome == "failed" else None,
    }
    is_well = done.error is None and done.outcome != "old-head"
    level = logging.INFO if is_well else logging.WARNING
    logger.log(level, "%s: %s", event.server or store, done, extra=fields)
