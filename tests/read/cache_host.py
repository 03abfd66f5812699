"""A host with a cache, and processes that use it."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from patchstore.bucket import digests
from patchstore.bucket.records import Payload
from patchstore.errors import PatchstoreError
from patchstore.read.host_cache import HostCache
from patchstore.stores.base import Store
from patchstore.stores.folder import FolderStore

WORKERS = multiprocessing.get_context("forkserver")
# torch is imported once, and not by each of some twenty processes.
WORKERS.set_forkserver_preload([__name__, "tests.support.weights"])


class LoggedStore(FolderStore):
    """A folder that notes each reading of an object in a file, for all processes that read."""

    def __init__(self, bucket: Path, reads: Path) -> None:
        super().__init__(bucket)
        self._bucket, self._reads = bucket, reads

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """Be opened anew in another process."""
        return type(self), (self._bucket, self._reads)

    def read(self, key: str, *, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        with self._reads.open("a") as file:
            file.write(f"{key}\n")
        yield from super().read(key, start=start, end=end)


class StuckStore(LoggedStore):
    """Sends half of each object, says so, and then nothing more."""

    def __init__(self, bucket: Path, reads: Path, is_stuck: Any) -> None:
        super().__init__(bucket, reads)
        self.is_stuck = is_stuck

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self._bucket, self._reads, self.is_stuck)

    def read(self, key: str, *, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        data = b"".join(super().read(key, start=start, end=end))
        yield data[: len(data) // 2]
        self.is_stuck.set()
        threading.Event().wait()


def idle_child() -> int:
    """Fork a child that does nothing, and return its id."""
    child = os.fork()
    if child == 0:
        threading.Event().wait(60)
        signal.raise_signal(signal.SIGKILL)
    return child


@contextmanager
def parent(task: Callable[..., Any], *args: Any) -> Iterator[tuple[Any, int]]:
    """Have a process do a task that puts the id of a child into its last argument; yield both."""
    pids = WORKERS.SimpleQueue()
    process = WORKERS.Process(target=task, args=(*args, pids), daemon=True)
    process.start()
    child = pids.get()
    try:
        yield process, child
    finally:
        process.kill()
        process.join()
        os.kill(child, signal.SIGKILL)


def stuck(task: Callable[..., Any], store: StuckStore, *args: Any) -> None:
    """Do a task with a store that gets stuck, and fork a child then."""
    *others, pids = args

    def fork() -> None:
        store.is_stuck.wait()
        pids.put(idle_child())

    threading.Thread(target=fork, daemon=True).start()
    task(store, *others)


class Host:
    """A bucket with one payload, and a host with a cache that keeps nothing."""

    def __init__(self, tmp_path: Path) -> None:
        self.bucket, self.folder, self.reads = (tmp_path / name for name in ("bucket", "cache", "reads"))
        self.store = LoggedStore(self.bucket, self.reads)
        self.data = Random(0).randbytes(300_000)
        self.payload = self.stored("deltas/one", self.data)

    def stored(self, key: str, data: bytes) -> Payload:
        self.store.put(key, data)
        return Payload(key=key, size=len(data), digest=digests.digest(data))

    @property
    def num_reads(self) -> int:
        return len(self.reads.read_text().splitlines()) if self.reads.exists() else 0

    @property
    def path(self) -> Path:
        """Of the payload's file in the cache."""
        return self.folder / self.payload.digest.removeprefix("blake3:")

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


def results(processes: int, task: Callable[..., Any], *args: Any) -> list[Any]:
    """What a task returns in so many processes, or the kind of error that it raises there."""
    answers = WORKERS.SimpleQueue()
    running = [WORKERS.Process(target=_answer, args=(answers, task, *args)) for _ in range(processes)]
    for process in running:
        process.start()
    found = [answers.get() for _ in running]
    for process in running:
        process.join()
    return found


def _answer(answers: Any, task: Callable[..., Any], *args: Any) -> None:
    try:
        answers.put(task(*args))
    except Exception as exc:  # noqa: BLE001 - whatever it is, the test must see it
        answers.put(exc.kind if isinstance(exc, PatchstoreError) else repr(exc))


def fetched(store: Store, folder: Path, wanted: Payload, everybody: Any = None) -> str:
    """Fetch a payload, return its digest, and let go of it when everybody has it."""
    with HostCache(folder, max_bytes=0).fetch(store, wanted) as file:
        found = digests.digest(file.read())
        if everybody is not None:
            everybody.wait()
    return found


def keep(host: Host, *payloads: Payload, max_bytes: int) -> list[bytes]:
    """Fetch payloads, one after the other, and return what was in their files."""
    cache, found = HostCache(host.folder, max_bytes=max_bytes), []
    for wanted in payloads:
        with cache.fetch(host.store, wanted) as file:
            found.append(file.read())
    return found


def kept(host: Host) -> set[str]:
    """Digests of the payloads that lie in the cache."""
    return {f"blake3:{name}" for name in host.files() if len(name) == 64}


def three(host: Host) -> list[Payload]:
    return [host.stored(f"deltas/{number}", bytes([number]) * 1000) for number in range(3)]
