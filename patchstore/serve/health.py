"""Whether a fleet is healthy, and its problems; and whether servers are ready: `/healthz` and `/readyz`."""

import time
from collections.abc import Iterator
from typing import Any

from patchstore.errors import NotFound
from patchstore.format.records import Manifest
from patchstore.serve.fleet_status import FleetStatus, ServerView

_NUM_LOOKS = 10
"""So many polling intervals without an answer of the store are a problem, whatever `unhealthy_after_s` is."""


def describe(fleet: FleetStatus, *, unhealthy_after_s: float) -> dict[str, Any]:
    """Return the state as JSON values; `problems` is empty if the fleet is healthy.

    Args:
        unhealthy_after_s: time before a failure, or a late version, is reported as a problem. A server that
            has not reached its version since this process began is a problem at once.
    """
    return {
        "problems": list(_problems(fleet, unhealthy_after_s)),
        "store": fleet.store,
        "run_id": None if fleet.head is None else fleet.head.run_id,
        "head": None if fleet.head is None else fleet.head.version,
        "pinned": None if fleet.pin is None else fleet.pin.version,
        "target": None if fleet.target is None else fleet.target.version,
        "servers": {view.url: _server(view) for view in fleet.servers},
    }


def _server(view: ServerView) -> dict[str, Any]:
    error = view.failure and view.failure.error
    return {
        "up": view.is_up,
        "serving": view.serving,
        "run_id": view.run_id,
        "num_engines": view.num_engines,
        "engines_differ": view.engines_differ,
        "half_applied": view.half_applied,
        "error": error and {"kind": error.kind, "message": str(error)},
    }


def _problems(fleet: FleetStatus, unhealthy_after_s: float) -> Iterator[dict[str, Any]]:
    now = time.monotonic()
    if not fleet.is_alive:
        yield {"problem": "stopped", "of": "store"}
    silent_s = None if fleet.looked is None else now - fleet.looked
    if silent_s is None or silent_s > max(unhealthy_after_s, _NUM_LOOKS * fleet.interval_s):
        yield {"problem": "silent", "of": "store", "seconds": silent_s}
    if fleet.failure is not None and now - fleet.failure.since > unhealthy_after_s:
        kind = fleet.failure.error.kind
        yield {"problem": "failing", "of": "store", "seconds": now - fleet.failure.since, "kind": kind}
    if fleet.is_head_old:
        yield {"problem": "old-head", "of": "store", "seconds": fleet.head_age_s}
    for view in fleet.servers:
        if not view.is_alive:
            yield {"problem": "stopped", "of": view.url}
        if view.failure is not None and now - view.failure.since > unhealthy_after_s:
            kind = view.failure.error.kind
            yield {"problem": "failing", "of": view.url, "seconds": now - view.failure.since, "kind": kind}
        late_s = None if view.current is None else now - view.current
        is_behind = fleet.target is not None and view.serving != fleet.target.version
        if is_behind and (late_s is None or late_s > unhealthy_after_s):
            yield {"problem": "behind", "of": view.url, "seconds": late_s}


def readiness(fleet: FleetStatus, *, server: str | None = None, max_lag: int = 0) -> dict[str, Any]:
    """Return as JSON values whether servers serve the desired version, as their last step found them.

    Args:
        server: the URL of the only server to look at; None for all.
        max_lag: so many versions may a server be behind. A server that is ahead, because an older version is
            desired, is not ready.

    Returns:
        `ready`, `target`, and `reasons`: one sentence for each server, or for the store, that is not ready.
        While the store does not answer, the last desired version counts.

    Raises:
        NotFound: no server with that URL is followed.
    """
    views = [view for view in fleet.servers if server is None or view.url == server.rstrip("/")]
    if server is not None and not views:
        raise NotFound(f"{server} is not followed here")
    reasons = list(_unready(fleet, views, max_lag))
    target = None if fleet.target is None else fleet.target.version
    return {"ready": not reasons, "target": target, "reasons": reasons}


def _unready(fleet: FleetStatus, views: list[ServerView], max_lag: int) -> Iterator[str]:
    if not fleet.is_alive:
        yield "the store is not polled any more; restart this process"
    if not views:
        yield "no server is followed"
    if fleet.is_head_old and fleet.head is not None:
        yield f"version {fleet.head.version}, the newest, is {fleet.head_age_s:.0f} s old, which is too old"
    if fleet.target is None:
        error = fleet.failure and fleet.failure.error
        yield f"the desired version is not known: {error or f'{fleet.store} has no version yet'}"
        return
    for view in views:
        if reason := _lack(view, fleet.target, max_lag):
            yield f"{view.url} {reason}"


def _lack(view: ServerView, target: Manifest, max_lag: int) -> str | None:
    """What keeps a server from being ready."""
    if not view.is_alive:
        return "is not followed any more; restart this process"
    if not view.is_up:
        return f"does not answer{f': {view.failure.error}' if view.failure else ''}"
    if view.half_applied:
        return "has parts of two versions"
    if view.engines_differ:
        return "has data-parallel engines with different versions"
    if view.serving is None:
        return f"serves no version yet; version {target.version} is desired"
    if view.run_id != target.run_id:
        return f"serves version {view.serving} of run {view.run_id}; run {target.run_id} is desired"
    if not 0 <= target.version - view.serving <= max_lag:
        return f"serves version {view.serving}; version {target.version} is desired"
    return None
