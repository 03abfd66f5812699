"""Move the same bytes through every client of a store, in large and small objects, on one server.

The server runs on the same machine, so rates compare the clients and do not say how fast a client is. CPU
time is the client's own. A folder is measured beside them, for the rate of the disk.
"""

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from patchstore.stores import Store, open_store
from patchstore.stores.base import NUM_PARTS, PART_BYTES

_SMALL_BYTES = 1024
_CLIENTS = ("s3fs", "obstore")


@dataclass(frozen=True, slots=True)
class Spent:
    """The time of one call, by the clock and in CPU time of all threads of this process."""

    s: float
    cpu_s: float


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--large-mib", type=int, default=256, help="size of the large object")
    parser.add_argument("--objects", type=int, default=64, help="number of objects of 4 MiB")
    parser.add_argument(
        "--small", type=int, default=200, help="number of objects of 1 KiB, one after the other"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--url", help="a prefix of a service, instead of a ministack that is started here")
    parser.add_argument("--endpoint-url", help="its endpoint, if it is not AWS")
    parser.add_argument(
        "--ministack",
        default=os.environ.get("MINISTACK") or str(Path(sys.prefix, "ministack", "bin", "ministack")),
        help="its program",
    )


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row per measure and store. The bytes read are compared with those written."""
    with tempfile.TemporaryDirectory(prefix="patchstore-stores-") as folder, _service(args) as (url, options):
        prefix = f"{url.rstrip('/')}/{uuid.uuid4().hex}"
        works = {"folder": Work(open_store(folder), args)}
        for client in _CLIENTS:
            works[client] = Work(open_store(f"{prefix}-{client}", client=client, **options), args)
        about = {
            "server": args.url or "ministack",
            "obstore": version("obstore"),
            "s3fs": version("s3fs"),
            "cores": os.cpu_count(),
        }
        for measure in _MEASURES:
            spent: dict[str, list[Spent]] = {client: [] for client in works}
            # Clients take turns, so that other load on the machine affects all. The first round is left out.
            for turn in range(args.repeats + 1):
                for client, work in works.items():
                    each = _timed(getattr(work, measure))
                    spent[client] += [each] if turn else []
            for client, work in works.items():
                yield {
                    "measure": measure,
                    "client": client,
                    **_row(work.moved(measure), spent[client]),
                    **about,
                }
        for client, work in works.items():
            if not work.is_true():
                raise SystemExit(f"{client} read other bytes than it wrote")
            work.clear()


@contextmanager
def _service(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a prefix and the options that open it."""
    if args.url:
        yield args.url, {"endpoint_url": args.endpoint_url} if args.endpoint_url else {}
        return
    if not Path(args.ministack).exists():
        raise SystemExit(f"no {args.ministack}: `make setup` installs it; or give --ministack, or --url")
    environment = {**os.environ, "BIND_HOST": "127.0.0.1", "GATEWAY_PORT": "0", "SERVICES": "s3"}
    # A pipe that is not read would fill up and block the server.
    with tempfile.TemporaryDirectory(prefix="patchstore-ministack-") as folder:
        log = Path(folder, "log")
        with log.open("wb") as output:
            server = subprocess.Popen([args.ministack], stdout=output, stderr=output, env=environment)
        try:
            options = {"endpoint_url": _endpoint(server, log), "key": "test", "secret": "test"}
            # Here, as all cases are imported to run one: a machine with a GPU may have no clients of stores.
            import s3fs

            fs = s3fs.S3FileSystem(**options, skip_instance_cache=True)
            fs.call_s3("create_bucket", Bucket="bucket")
            yield "s3://bucket", options
        finally:
            server.terminate()
            server.wait()


def _endpoint(server: "subprocess.Popen[bytes]", log: Path) -> str:
    while server.poll() is None:
        if found := re.search(r"Running on (http://127\.0\.0\.1:\d+)", log.read_text()):
            return found[1]
        time.sleep(0.05)
    raise SystemExit(f"ministack did not start: {log.read_text()}")


class Work:
    """The objects that are moved through one store. Each measure is the method of its name."""

    def __init__(self, store: Store, args: argparse.Namespace) -> None:
        self._store = store
        self._large = os.urandom(1 << 20) * args.large_mib
        self._medium = self._large[: 4 << 20]
        self._tiny = self._large[:_SMALL_BYTES]
        self._keys = [f"medium/{number}" for number in range(args.objects)]
        self._num_small = args.small
        self._buffer = bytearray(len(self._large))
        store.put("one", self._tiny)

    def moved(self, measure: str) -> tuple[int, int]:
        """Return how many objects a call moves, and their size in bytes."""
        if measure.endswith("_small"):
            return self._num_small, len(self._tiny)
        if measure in {"put", "get"}:
            return len(self._keys), len(self._medium)
        return 1, len(self._large)

    def upload(self) -> None:
        with memoryview(self._large) as whole:
            starts = range(0, len(whole), PART_BYTES)
            self._store.upload("large", (whole[start : start + PART_BYTES] for start in starts))

    def read(self) -> None:
        at = 0
        for part in self._store.read("large"):
            self._buffer[at : at + len(part)] = part
            at += len(part)

    def put(self) -> None:
        self._each(lambda key: self._store.put(key, self._medium))

    def get(self) -> None:
        self._each(self._store.get)

    def create_small(self) -> None:
        folder = uuid.uuid4().hex
        for number in range(self._num_small):
            self._store.put(f"small/{folder}/{number}", self._tiny, if_absent=True)

    def get_small(self) -> None:
        for _ in range(self._num_small):
            self._store.get("one")

    def is_true(self) -> bool:
        """Return whether the bytes last read, and those stored, are the bytes written."""
        stored = self._each(self._store.get)
        return self._buffer == self._large and all(data == self._medium for data in stored)

    def clear(self) -> None:
        for key in self._store.list():
            self._store.delete(key)
        self._store.close()

    def _each(self, call: Callable[[str], object]) -> list[object]:
        with ThreadPoolExecutor(NUM_PARTS) as pool:
            return list(pool.map(call, self._keys))


_MEASURES = ("upload", "read", "put", "get", "create_small", "get_small")


def _row(moved: tuple[int, int], spent: list[Spent]) -> dict[str, Any]:
    num_objects, num_bytes = moved
    seconds = statistics.median(each.s for each in spent)
    cpu_s = statistics.median(each.cpu_s for each in spent)
    return {
        "num_objects": num_objects,
        "object_bytes": num_bytes,
        "s": seconds,
        "min_s": min(each.s for each in spent),
        "max_s": max(each.s for each in spent),
        "mb_s": num_objects * num_bytes / seconds / 1e6,
        "ms_each": seconds / num_objects * 1e3,
        "cpu_ms_each": cpu_s / num_objects * 1e3,
        "cpu_s_per_gib": cpu_s / (num_objects * num_bytes / 2**30),
        "repeats": len(spent),
    }


def _timed(call: Callable[[], object]) -> Spent:
    began, before = time.perf_counter(), _cpu_s()
    call()
    return Spent(time.perf_counter() - began, _cpu_s() - before)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
