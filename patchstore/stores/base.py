"""What patchstore needs from a store: six operations and one guarantee.

The guarantee is `put(..., if_absent=True)`: of any number of writers of a key exactly one
succeeds, and a reader sees all of the object or none of it. Everything else may be as weak as
object stores are: listings may lag, and a write may have happened although it reported an error.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any

from patchstore.errors import UsageError
from patchstore.stores import layout
from patchstore.support.threads import Threads

PART_BYTES = 8 << 20
"""Size of a part of a streamed object; with `NUM_PARTS` it bounds memory per transfer."""
NUM_PARTS = 8
"""Parts of one transfer that are under way at once."""

Chunk = bytes | bytearray | memoryview
"""A piece of an object; a memoryview must be contiguous."""


class Store(ABC):
    """A flat set of objects under keys such as `versions/00000012.json`.

    All methods may be called from several threads. Keys are those that `layout.check_key` admits;
    any other raises `UsageError`, and so does a store that refuses the caller (no such bucket, no
    right to it). Any method raises `StoreUnavailable` if the store cannot be reached, does not answer in
    time, or returns an unexpected error. After that it is unknown whether a write happened.

    Stores behind a network have an option `timeout_s`. It limits a request with all repetitions of the client
    library; each `PART_BYTES` that the request carries adds the same time again. Messages begin with the
    store, the operation and the key, and contain no secrets.
    """

    url: str
    """The URL or path, as given to `open_store`; contains no secrets."""
    single_writer: bool = False
    """Whether the store has no atomic create-only put, and the caller promised instead that no other
    publisher uses this place. A second publisher is not prevented, and not always noticed."""
    endpoint: str | None = None
    """The URL at which its service answers over HTTP; None if there is none, or it is not known."""
    opened_as: tuple[str, Mapping[str, Any]] | None = None
    """URL and options with which `open_store` opened it; None if the caller made it, or it is in memory.
    Contains secrets."""

    @abstractmethod
    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Return bytes `start` to `end` (exclusive) of an object, cut at its size.

        Raises:
            NotFound: no such object.
        """

    @abstractmethod
    def size(self, key: str) -> int:
        """Return an object's size in bytes.

        Raises:
            NotFound: no such object.
        """

    def stored_at(self, key: str) -> datetime | None:
        """Return when an object was stored by `put`, by the store's own clock, to a second or better.

        None if the store does not tell. The clocks of those who use the store do not count, so two of these
        times can be compared also where several machines stored the objects.

        Raises:
            NotFound: no such object.
        """
        return None

    @abstractmethod
    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        """Store a small object in one step: a reader sees the old one, or all of the new one.

        Raises:
            AlreadyExists: `if_absent` and the key is taken; the stored object is unchanged.
                A client that retried after a lost answer may report this about its own object.
        """

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[str]:
        """Yield the keys that start with `prefix`, in ascending order.

        A place may hold objects that other programs named. Names that are no keys are left out.
        The prefix is a string, not a folder: `versions/0000` finds `versions/00000012.json`.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove an object; no error if there is none."""

    @abstractmethod
    def upload(self, key: str, chunks: Iterable[Chunk]) -> None:
        """Store an object of any size from chunks of any sizes, in place of one that was there.

        Holds at most `NUM_PARTS` parts in memory, and is done with a chunk before it asks for the
        next, so a producer may use one buffer for all. The object becomes visible when complete;
        if `chunks` raises, the error passes through and nothing becomes visible.
        """

    def read(self, key: str, *, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yield bytes `start` to `end` of an object in order, as parts fetched in parallel.

        Holds at most `NUM_PARTS` parts in memory, however large the object is. Each part is
        whole, but an object that is replaced meanwhile may come out mixed; payloads never are.

        Raises:
            NotFound: no such object; like all errors, when the first part is asked for.
        """
        check_range(self.url, "read", key, start, end)
        stop = self.size(key) if end is None else end
        yield from in_parts(partial(self.get, key), start, stop)

    def is_on_this_host(self, key: str) -> bool:
        """Whether an object is a file of this host, on a disk or in memory: a copy of it would gain nothing.

        False if there is no such object.
        """
        return False

    def read_into(self, key: str, memory: memoryview) -> int:
        """Copy an object, or as many of its first bytes as there is room for, and return their number.

        Args:
            memory: writable, of bytes.

        Raises:
            NotFound: no such object.
        """
        at = 0
        for part in self.read(key, end=len(memory)):
            memory[at : at + len(part)] = part
            at += len(part)
        return at

    def subscribe(self, wake: Callable[[], None]) -> Callable[[], None] | None:
        """Call `wake`, on a thread of the store, whenever something may have changed here.

        A hint only: calls may be missing, late or needless, so the caller must also poll. Returns a function
        that ends the subscription, or None if the store has no such feed.
        """
        return None

    def close(self) -> None:
        """Release connections; the store must not be used afterwards."""


def keys_of(names: Iterable[str], prefix: str) -> list[str]:
    """Return those names that are keys and start with `prefix`, in ascending order.

    What a store lists may also be empty, end in `/` as the folders of web consoles do, or have spaces and
    control characters. Such an object is none of ours, and cannot be asked for.
    """
    return sorted(name for name in names if name.startswith(prefix) and layout.is_key(name))


def in_parts(get: Callable[[int, int], bytes], start: int, stop: int) -> Iterator[bytes]:
    """Yield bytes `start` to `stop` of an object in order, as `Store.read` does.

    `get` returns the bytes from one place to another, cut at the object's size. Several threads call it.
    """
    if stop - start <= PART_BYTES:
        if part := get(start, max(start, stop)):
            yield part
        return
    with Threads(NUM_PARTS, thread_name_prefix="patchstore-read") as pool:
        parts: deque[Future[bytes]] = deque()
        offsets = iter(range(start, stop, PART_BYTES))
        for offset in islice(offsets, NUM_PARTS):
            parts.append(pool.submit(get, offset, min(offset + PART_BYTES, stop)))
        while parts:
            part = parts.popleft().result()
            yield part
            if len(part) < PART_BYTES:
                # The object ends here, even if the caller asked for more.
                return
            for offset in islice(offsets, 1):
                parts.append(pool.submit(get, offset, min(offset + PART_BYTES, stop)))


def check_range(url: str, operation: str, key: str, start: int, end: int | None) -> None:
    """Refuse a range that counts from the end or runs backwards."""
    if start < 0 or (end is not None and end < start):
        raise UsageError(
            f"{url}: {operation} {key}: bytes {start} to {end} are no range: give 0 <= start <= end"
        )


def cut(
    chunks: Iterable[Chunk], part_bytes: Callable[[int], int] = lambda _: PART_BYTES
) -> Iterator[bytearray]:
    """Cut chunks of any sizes into parts: all full but the last, and at least one, maybe empty.

    `part_bytes` returns the size of a part by its number, from 1.
    """
    number, part = 1, bytearray()
    for chunk in chunks:
        rest = memoryview(chunk).cast("B")
        while rest:
            # A full part waits for a further byte, so that an empty one never follows it.
            if len(part) == part_bytes(number):
                yield part
                number, part = number + 1, bytearray()
            room = part_bytes(number) - len(part)
            part += rest[:room]
            rest = rest[room:]
    yield part
