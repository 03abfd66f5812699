"""How an engine core hears that its ranks' threads have ended, without asking the ranks.

A question to the ranks waits for the steps that they compute, and no other is scheduled meanwhile. So a
client that waits for staging does not ask again and again: its call is answered late. A rank rings a bell, a
socket in the file system of this host, which all processes of an engine reach there.
"""

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

WAIT_KEY = "wait_s"
"""Keyword of `delta_prefetch`: seconds after which it is answered at the latest, done or not."""
BELL_KEY = "bell"
"""Keyword of `delta_prefetch` in the ranks: what a rank rings when its staging has ended, or None."""
RINGS_KEY = "rings"
"""In a rank's answer to that: whether it will ring."""

_RING_S = 0.1
"""So long a rank waits at most where the bell takes no more rings."""

Answers = Sequence[Mapping[str, Any]]


def when_rung(seconds: float, ask: Callable[[str | None], Answers]) -> "Answers | Future[Answers]":
    """Ask all ranks, giving them a bell, and answer when each is done, or after some seconds.

    Answers at once for 0 seconds, and where a rank will not ring: it is on another host, or does something
    else first.
    """
    if not seconds:
        return ask(None)
    until, path = time.monotonic() + seconds, None
    with ExitStack() as stack:
        bell = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        # Without room for a file, or in a folder whose path is too long, no rank rings.
        with suppress(OSError):
            folder = stack.enter_context(TemporaryDirectory(prefix="patchstore-", ignore_cleanup_errors=True))
            bell.bind(f"{folder}/bell")
            path = f"{folder}/bell"
        answers = [dict(each) for each in ask(path)]
        rings = [each.pop(RINGS_KEY, False) for each in answers]
        waits = [ring for each, ring in zip(answers, rings, strict=True) if not each.get("is_done")]
        if not waits or not all(waits):
            return answers
        kept = stack.pop_all()
    late: Future[Answers] = Future()

    def wait() -> None:
        is_done = False
        with kept, suppress(TimeoutError):
            for _ in waits:
                bell.settimeout(max(until - time.monotonic(), 1e-3))
                bell.recv(1)
            is_done = True
        late.set_result([{**each, "is_done": each["is_done"] or is_done} for each in answers])

    Thread(target=wait, name="patchstore-wait", daemon=True).start()
    # vLLM answers a call that returns a future when that is done.
    return late


def can_ring(bell: str) -> bool:
    return Path(bell).is_socket()


def ring(bell: str) -> None:
    """Tell the engine core, unless it has stopped waiting."""
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours:
        ours.settimeout(_RING_S)
        ours.sendto(b"!", bell)
