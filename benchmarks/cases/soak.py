"""Publish thousands of versions while everything is killed and the store fails, and prove the end.

A trainer publishes; three followers keep up; a compactor adds anchors and rollups; a collector retires
versions and deletes what they had. All but one follower are killed with SIGKILL at random moments, and
started again. By chance a request to the store fails, hangs, loses its answer, cuts an upload or leaves
keys out of a listing. At the end each follower must have the bits of the newest version. Each version that
was acknowledged to the trainer must be in the store with its digest. `verify --all` must find nothing. The
follower that lives all the time must not have grown.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.support.killable_program import Part
from benchmarks.support.paths import ROOT
from benchmarks.support.work_folder import keep_logs, work_folder

FOLLOWERS = ("follower-0", "follower-1", "steady")
_ROLES = {"trainer": "trainer", "compactor": "compactor", "collector": "collector"} | dict.fromkeys(
    FOLLOWERS, "follower"
)
_STALLED_S = 240.0


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--versions", type=int, default=2000)
    parser.add_argument(
        "--step-s", type=float, default=0.2, help="that the trainer waits before each version"
    )
    parser.add_argument("--every-s", type=float, default=4.0, help="seconds between kills, on average")
    parser.add_argument("--chance", type=float, default=0.002, help="of each fault, at each request")
    parser.add_argument("--anchor-every", type=int, default=50)
    parser.add_argument("--keep-last", type=int, default=200)
    parser.add_argument("--keep-every", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of what is killed when")
    parser.add_argument("--folder", type=Path, help="to work in")
    parser.add_argument("--keep-logs", type=Path, help="a new folder, which takes what all processes printed")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row.

    Raises:
        SystemExit: after the row, with what is wrong.
    """
    with work_folder(args.folder, "soak") as folder, ExitStack() as stack:
        if args.keep_logs is not None:
            stack.callback(keep_logs, folder, args.keep_logs)
        soak = Soak(args, folder)
        stack.callback(soak.stop)
        soak.go_on_until_all_are_there()
        row, failed = soak.tell()
    yield row
    if failed:
        raise SystemExit("; ".join(failed))


class Soak:
    """The programs, and what they said."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        """Start all programs."""
        self._args, self._folder = args, folder
        self._random = random.Random(args.seed)
        self._url = str(folder / "bucket")
        self._head = -1
        self._totals: dict[int, str] = {}
        """State digests of versions that were acknowledged."""
        self._is_trained = False
        self._digests: dict[str, str] = {}
        self._held = dict.fromkeys(FOLLOWERS, -1)
        self._steady: list[tuple[float, int]] = []
        self._kills: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._began = time.monotonic()
        self._parts = {name: self._part(name) for name in _ROLES}
        for each in self._parts.values():
            each.start()

    def _part(self, name: str) -> Part:
        job = {
            "url": self._url,
            "versions": self._args.versions,
            "chance": self._args.chance,
            "step_s": self._args.step_s,
            "anchor_every": self._args.anchor_every,
            "keep_last": self._args.keep_last,
            "keep_every": self._args.keep_every,
            "pause_s": 0.2 if name == "steady" else 0.05,
        }
        environment = {
            **os.environ,
            "TMPDIR": str(self._folder),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        return Part(
            name,
            [sys.executable, "-m", "benchmarks.soak.part", _ROLES[name], json.dumps(job)],
            self._folder,
            life_s=4 * 3600,
            environment=environment,
            hear=lambda _, said: self._heard(name, said),
        )

    def _heard(self, name: str, said: dict[str, Any]) -> None:
        if "version" in said:
            self._head = max(self._head, said["version"])
            self._totals[said["version"]] = said["total"]
        self._is_trained |= said.get("done", False)
        self._failures.update(said.get("failures", {}))
        if "held" in said:
            self._held[name] = said["held"]
        if name == "steady" and "mib" in said:
            self._steady.append((said["mib"], said["descriptors"]))
        if "digest" in said:
            self._digests[name] = said["digest"]

    def go_on_until_all_are_there(self) -> None:
        """Kill one program after the other until the trainer and all followers have ended.

        Raises:
            SystemExit: nothing goes on any more.
            RuntimeError: the compactor or the collector ended by itself.
        """
        last, since = (-1, 0), time.monotonic()
        while len(self._digests) < len(FOLLOWERS) or not self._is_trained:
            time.sleep(self._random.expovariate(1 / self._args.every_s))
            for name in ("compactor", "collector"):
                self._parts[name].check_alive()
            now = (self._head, sum(self._held.values()))
            if now != last:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > _STALLED_S:
                raise SystemExit(f"nothing goes on: head {self._head}, followers at {self._held}")
            ended = self._digests.keys() | ({"trainer"} if self._is_trained else set())
            name = self._random.choice([each for each in _ROLES if each != "steady"])
            if name not in ended:
                self._parts[name].kill()
                self._parts[name].start()
                self._kills[name] += 1
        self._seconds = time.monotonic() - self._began

    def stop(self) -> None:
        for each in self._parts.values():
            each.kill()

    def tell(self) -> tuple[dict[str, Any], list[str]]:
        """Return the row, and what is wrong."""
        self.stop()
        # In a process of its own, with the same grace period.
        proved = subprocess.run(
            [sys.executable, "-m", "benchmarks.soak.part", "prover", json.dumps({"url": self._url})],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
        told, _, verified = proved.stdout.partition("\n")
        has = json.loads(told) if told else {"head": None, "totals": {}}
        failed = [f"{name} has other bits" for name, each in self._digests.items() if each != has["head"]]
        # The trainer's last word may be lost with it, but nothing that it heard.
        lost = [number for number, total in self._totals.items() if has["totals"].get(str(number)) != total]
        if lost:
            failed.append(f"acknowledged versions are lost or replaced: {lost[:10]}")
        if proved.returncode:
            failed.append(f"verify: {(verified + proved.stderr)[-2000:]}")
        # The first seconds are imports, and the first tensors.
        settled = self._steady[len(self._steady) // 10 :]
        part = len(settled) // 5
        if not part:
            raise SystemExit("too few versions to see whether memory grows: give --versions 500 or more")
        first, last = settled[:part], settled[-part:]
        mib = [median(each for each, _ in some) for some in (first, last)]
        descriptors = [max(each for _, each in some) for some in (first, last)]
        if mib[1] > mib[0] + 20:
            failed.append(f"the steady follower grew from {mib[0]:.0f} to {mib[1]:.0f} MiB")
        if descriptors[1] > descriptors[0] + 2:
            failed.append(f"the steady follower has {descriptors[1]} descriptors, and had {descriptors[0]}")
        return {
            "versions": self._head,
            "acknowledged": len(self._totals),
            "seconds": self._seconds,
            "step_s": self._args.step_s,
            "chance": self._args.chance,
            "kills": self._kills.total(),
            **{f"kills_of_{name}": self._kills[name] for name in _ROLES if name != "steady"},
            "failed_calls": self._failures.total(),
            "shortcuts": len(list((self._folder / "bucket" / "shortcuts").rglob("*.json"))),
            "deltas_left": len(list((self._folder / "bucket" / "deltas").iterdir())),
            "mib_first": mib[0],
            "mib_last": mib[1],
            "descriptors_first": descriptors[0],
            "descriptors_last": descriptors[1],
            "verified": " ".join(verified.split())[-200:],
        }, failed
