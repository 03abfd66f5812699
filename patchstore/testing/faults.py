"""Stores that fail as real ones do, on a script or by chance.

    store = FaultyStore(inner, Fault(verb="put", key="versions/*", effect="fail-after"))

The first put of a manifest is then carried out, and reported as failed.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from random import Random
from typing import Literal

from patchstore.errors import AlreadyExists, NotFound, StoreUnavailable
from patchstore.stores.base import Chunk, Store

Verb = Literal["get", "size", "stored_at", "put", "list", "delete", "upload"]
Effect = Literal["fail-before", "fail-after", "exists", "stale", "truncate", "flip", "delay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong, and with which calls."""

    verb: Verb | Literal["*"]
    """`read` consists of `size` and `get`."""
    effect: Effect
    """- `fail-before`: `StoreUnavailable`, and nothing happened
    - `fail-after`: `StoreUnavailable`, although it happened: a lost answer
    - `exists`: `AlreadyExists` for one's own put, which happened: a lost answer, and a client that retried
    - `stale`: `NotFound` for an object that is there; `list` leaves out the last key
    - `truncate`: half of the bytes, stored or got; `flip`: one bit is another
    - `delay`: `delay_s` later
    """
    key: str = "*"
    """Which keys, or prefixes of `list`; `*` and `?` as in file names."""
    skip: int = 0
    """Calls that match and go well first."""
    times: int | None = 1
    """Calls that then go wrong; None for all."""
    chance: float = 1.0
    """Probability that a call counts as a match at all."""
    delay_s: float = 0.0


class FaultyStore(Store):
    """Another store, with faults; of those that match a call, the first one strikes.

    The same seed and the same order of calls give the same faults. `before` is called with the verb and
    key of every call before anything else happens; it may wait, or raise what the call is to raise.
    """

    def __init__(
        self,
        inner: Store,
        *faults: Fault,
        seed: int = 0,
        sleep: Callable[[float], None] = time.sleep,
        before: Callable[[Verb, str], object] | None = None,
    ) -> None:
        self.url, self.single_writer = inner.url, inner.single_writer
        self.calls: list[tuple[str, str]] = []
        """Verb and key of every call so far."""
        self._inner = inner
        self._faults = faults
        self._matches = [0] * len(faults)
        self._random = Random(seed)
        self._sleep, self._watcher = sleep, before
        self._lock = threading.Lock()

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        with self._call("get", key) as effect:
            return self._spoiled(effect, self._inner.get(key, start, end))

    def size(self, key: str) -> int:
        with self._call("size", key):
            return self._inner.size(key)

    def stored_at(self, key: str) -> datetime | None:
        with self._call("stored_at", key):
            return self._inner.stored_at(key)

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        with self._call("put", key) as effect:
            self._inner.put(key, self._spoiled(effect, data), if_absent=if_absent)

    def list(self, prefix: str = "") -> Iterator[str]:
        with self._call("list", prefix) as effect:
            keys = [*self._inner.list(prefix)]
        yield from keys[:-1] if effect == "stale" else keys

    def delete(self, key: str) -> None:
        with self._call("delete", key):
            self._inner.delete(key)

    def upload(self, key: str, chunks: Iterable[Chunk]) -> None:
        with self._call("upload", key) as effect:
            if effect in {"truncate", "flip"}:
                chunks = [self._spoiled(effect, b"".join(bytes(chunk) for chunk in chunks))]
            self._inner.upload(key, chunks)

    def close(self) -> None:
        self._inner.close()

    @contextmanager
    def _call(self, verb: Verb, key: str) -> Iterator[Effect | None]:
        """Let a call happen, with what goes wrong before it or after it; yields what else is to go wrong."""
        effect = self._before(verb, key)
        yield effect
        if effect == "fail-after":
            raise StoreUnavailable(f"{self.url}: no answer for {key} (injected)")
        if effect == "exists":
            raise AlreadyExists(f"{self.url} already has {key} (injected)")

    def _before(self, verb: Verb, key: str) -> Effect | None:
        """Count a call, and return the effect that it is to suffer later on, if any."""
        if self._watcher is not None:
            self._watcher(verb, key)
        with self._lock:
            self.calls.append((verb, key))
            fault = self._next_fault(verb, key)
        if fault is None:
            return None
        if fault.effect == "delay":
            self._sleep(fault.delay_s)
        if fault.effect == "fail-before":
            raise StoreUnavailable(f"{self.url}: {verb} {key} did not happen (injected)")
        if fault.effect == "stale" and verb in {"get", "size", "stored_at"}:
            raise NotFound(f"{self.url} has no {key} (injected)")
        return fault.effect

    def _next_fault(self, verb: Verb, key: str) -> Fault | None:
        for index, fault in enumerate(self._faults):
            if fault.verb not in {verb, "*"} or not fnmatchcase(key, fault.key):
                continue
            if fault.chance < 1 and self._random.random() >= fault.chance:
                continue
            self._matches[index] += 1
            turn = self._matches[index] - fault.skip
            if turn >= 1 and (fault.times is None or turn <= fault.times):
                return fault
        return None

    def _spoiled(self, effect: Effect | None, data: bytes) -> bytes:
        if effect == "truncate":
            return data[: len(data) // 2]
        if effect == "flip" and data:
            with self._lock:
                bit = self._random.randrange(8 * len(data))
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            return bytes(flipped)
        return data
