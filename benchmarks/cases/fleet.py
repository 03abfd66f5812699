"""Measure a rolling update: one `patchstore follow` brings many servers, some unwell, to each new version.

Servers are stubs of vLLM's routes over HTTP that take no time themselves, so the follower is measured: one
process with one thread per server. The lag of a version runs from the time in its manifest until a server
holds it, or a later one.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.paths import ROOT
from patchstore import Publisher, open_store

_STUBS = ROOT / "tests" / "serve" / "stub_fleet.py"
_KINDS = ("slow", "failing", "restarting")
_PER_PROCESS = 25
_ARRIVE_S = 300.0
_SAMPLE_S = 0.1


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--servers", type=int, default=100)
    parser.add_argument("--unwell", type=float, default=0.1, help="share of servers of each unwell kind")
    parser.add_argument("--versions", type=int, default=20)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between versions")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row for all servers, and one per kind."""
    found = measure(
        args.servers, num_unwell=int(args.unwell * args.servers), versions=args.versions, every_s=args.every
    )
    for kind in ("all", "well", *_KINDS):
        if rows := found.row(kind):
            yield rows


@dataclass(slots=True)
class Fleet:
    """Servers, and the versions that each held, with the times of the machine's clock."""

    kinds: dict[str, str] = field(default_factory=dict)
    """URL -> kind."""
    events: dict[str, list[tuple[float, int | None]]] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    """Servers that were paused, half applied or in a switch at the end."""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def listen(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            with self.changed:
                if "left" not in event:
                    self.events[event["server"]].append((event["at"], event["held"]))
                elif event["left"]:
                    self.left.add(event["server"])
                self.changed.notify_all()

    def wait_for(self, version: int) -> set[str]:
        """Wait until all servers hold a version, and return those that do not at the end of the wait."""

        def late() -> set[str]:
            return {url for url, events in self.events.items() if not events or events[-1][1] != version}

        with self.changed:
            self.changed.wait_for(lambda: not late(), timeout=_ARRIVE_S)
            return late()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The outcome of a rolling update."""

    fleet: Fleet
    created: Sequence[float]
    """The time in each manifest, from version 0 on."""
    late: set[str]
    """Servers that did not reach the last version."""
    follower: Mapping[str, Any]

    def row(self, kind: str) -> dict[str, Any] | None:
        urls = [url for url, each in self.fleet.kinds.items() if kind in ("all", each)]
        if not urls:
            return None
        seconds = sorted(lag for url in urls for lag in self.lags_s(url))
        behind = sorted(lag for url in urls for lag in self.versions_behind(url))
        return {
            "kind": kind,
            "servers": len(urls),
            "at_head": len(set(urls) - self.late),
            "left_paused": len(set(urls) & self.fleet.left),
            "versions": len(self.created) - 1,
            **{f"lag_{name}_s": value for name, value in quantiles(seconds).items()},
            **{f"lag_{name}versions_behind": value for name, value in quantiles(behind).items()},
            **(self.follower if kind == "all" else {}),
        }

    def lags_s(self, url: str) -> Iterator[float]:
        """Yield the lag of each version after the first: seconds until the server held it, or a later one."""
        events = self.fleet.events[url]
        for version, created in enumerate(self.created):
            if version > 0:
                arrived = [
                    at for at, held in events if held is not None and held >= version and at >= created
                ]
                if arrived:
                    yield arrived[0] - created

    def versions_behind(self, url: str) -> Iterator[int]:
        """Yield by how many versions the server was behind, at many moments, while it held one."""
        events = self.fleet.events[url]
        times = [at for at, _ in events]
        moment = self.created[1]
        while moment < self.created[-1]:
            held = events[bisect_right(times, moment) - 1][1]
            if held is not None:
                yield max(0, bisect_right(self.created, moment) - 1 - held)
            moment += _SAMPLE_S


def quantiles(values: Sequence[float]) -> dict[str, float | None]:
    """Return the median, the 95th percentile and the greatest of ascending values."""
    if not values:
        return {"p50": None, "p95": None, "max": None}
    last = len(values) - 1
    return {"p50": values[last // 2], "p95": values[-(-last * 95 // 100)], "max": values[-1]}


def measure(num_servers: int, *, num_unwell: int, versions: int, every_s: float) -> Measured:
    """Publish versions at a steady pace while one process follows for all servers."""
    kinds = [kind for kind in _KINDS for _ in range(num_unwell)]
    kinds += ["well"] * (num_servers - len(kinds))
    # Each process has servers of all kinds.
    num_processes = -(-num_servers // _PER_PROCESS)
    weights = {"w": torch.zeros(1000)}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = open_store(folder / "bucket")
        publisher = stack.enter_context(Publisher(store, weights))
        fleet = Fleet()
        for number in range(num_processes):
            stack.enter_context(_stubs(fleet, publisher.run_id, kinds[number::num_processes]))
        servers = folder / "servers"
        servers.write_text("\n".join(fleet.kinds))
        follower = stack.enter_context(_follower(folder / "bucket", servers, folder / "log"))
        created = [_publish(publisher, weights, 0)]
        if late := fleet.wait_for(0):
            raise RuntimeError(f"{len(late)} servers did not come to the first version, such as {late.pop()}")
        began, cpu_s = time.monotonic(), _cpu_s(follower.pid)
        for version in range(1, versions + 1):
            created.append(_publish(publisher, weights, version))
            # Keeps the pace.
            time.sleep(max(0.0, began + version * every_s - time.monotonic()))
        late = fleet.wait_for(versions)
        spent_s = time.monotonic() - began
        cost = {
            "every_s": every_s,
            "updates": sum(held is not None for events in fleet.events.values() for _, held in events),
            "follower_cores": (_cpu_s(follower.pid) - cpu_s) / spent_s,
            "follower_mib": _status(follower.pid, "VmHWM") / 1024,
            "follower_threads": _status(follower.pid, "Threads"),
            "seconds": spent_s,
        }
        return Measured(fleet=fleet, created=created, late=late, follower=cost)


def _publish(publisher: Publisher, weights: dict[str, torch.Tensor], version: int) -> float:
    weights["w"][version % 1000] += 1
    return datetime.fromisoformat(publisher.publish_patch(version).result().created_at).timestamp()


@contextmanager
def _stubs(fleet: Fleet, run_id: str, kinds: Sequence[str]) -> Iterator[None]:
    command = [sys.executable, str(_STUBS), run_id, *kinds]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            urls = json.loads(process.stdout.readline())["urls"]
            fleet.kinds |= dict(zip(urls, kinds, strict=True))
            fleet.events |= {url: [] for url in urls}
            listener = threading.Thread(target=fleet.listen, args=(process,))
            listener.start()
            yield
            process.stdin.close()
            listener.join()
        finally:
            process.kill()


@contextmanager
def _follower(bucket: Path, servers: Path, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-m", "patchstore", "follow", str(bucket), "--servers-file", str(servers)]
    with log.open("wb") as errors:
        process = subprocess.Popen([*command, "--log-format", "json"], cwd=ROOT, stdout=errors, stderr=errors)
        try:
            yield process
            process.terminate()
            if process.wait(60) != 0:
                raise RuntimeError(f"the follower ended with {process.returncode}: {log.read_text()[-2000:]}")
        finally:
            process.kill()
            process.wait()


def _status(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def _cpu_s(pid: int) -> float:
    # Eleven fields and then user and system ticks follow the name, which may have spaces.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100
