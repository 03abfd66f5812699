"""Whether a fleet is well, and what is wrong where it is not: values for `/healthz`."""

import time
from collections.abc import Iterator
from typing import Any

from patchstore.integrations.fleet import ServerView, Survey

_NUM_LOOKS = 10
"""So many looks at the store that did not come back are a problem, also to those without patience."""


def describe(survey: Survey, *, patience_s: float) -> dict[str, Any]:
    """Return all that is known as JSON values; `problems` is empty where all is well.

    Args:
        patience_s: how long a failure, or a version that does not arrive, is nobody's problem. A server
            that has not come to its version since this process began is one at once.
    """
    return {
        "problems": list(_problems(survey, patience_s)),
        "store": survey.store,
        "run_id": None if survey.head is None else survey.head.run_id,
        "head": None if survey.head is None else survey.head.version,
        "hold": None if survey.hold is None else survey.hold.version,
        "target": None if survey.target is None else survey.target.version,
        "servers": {view.url: _server(view) for view in survey.servers},
    }


def _server(view: ServerView) -> dict[str, Any]:
    error = view.trouble and view.trouble.error
    return {
        "up": view.is_up,
        "held": view.held,
        "num_engines": view.num_engines,
        "engines_differ": view.engines_differ,
        "torn": view.torn,
        "error": error and {"kind": error.kind, "message": str(error)},
    }


def _problems(survey: Survey, patience_s: float) -> Iterator[dict[str, Any]]:
    now = time.monotonic()
    if not survey.is_alive:
        yield {"problem": "stopped", "of": "store"}
    silent_s = None if survey.looked is None else now - survey.looked
    if silent_s is None or silent_s > max(patience_s, _NUM_LOOKS * survey.interval_s):
        yield {"problem": "silent", "of": "store", "seconds": silent_s}
    if survey.trouble is not None and now - survey.trouble.since > patience_s:
        kind = survey.trouble.error.kind
        yield {"problem": "failing", "of": "store", "seconds": now - survey.trouble.since, "kind": kind}
    for view in survey.servers:
        if not view.is_alive:
            yield {"problem": "stopped", "of": view.url}
        if view.trouble is not None and now - view.trouble.since > patience_s:
            kind = view.trouble.error.kind
            yield {"problem": "failing", "of": view.url, "seconds": now - view.trouble.since, "kind": kind}
        late_s = None if view.current is None else now - view.current
        is_behind = survey.target is not None and view.held != survey.target.version
        if is_behind and (late_s is None or late_s > patience_s):
            yield {"problem": "behind", "of": view.url, "seconds": late_s}
