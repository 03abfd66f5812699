"""Whether a fleet is healthy, and its problems: values for `/healthz`."""

import time
from collections.abc import Iterator
from typing import Any

from patchstore.serve.fleet import FleetStatus, ServerView

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
