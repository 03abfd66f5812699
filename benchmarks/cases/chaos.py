"""Kill the trainer, the server and `patchstore follow` at random moments, and prove the state afterwards.

A trainer publishes without a break and acknowledges each version that is stored. `patchstore follow` keeps a
server at the newest version. One of the three is killed, with all its children, and started again. In the
end no acknowledged version may be missing, and all three must be at the head without help.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import load_file

from benchmarks.chaos.journal import Journal
from benchmarks.chaos.log_chain import is_one_chain
from benchmarks.chaos.trainer import FINAL
from benchmarks.support.killable_program import Part
from benchmarks.support.paths import ROOT
from benchmarks.support.store_kinds import KINDS, Place, place, versions
from benchmarks.support.tiny_checkpoint import save_checkpoint
from benchmarks.support.vllm_server import VLLM_ENVIRONMENT
from benchmarks.support.work_folder import keep_logs, work_folder
from examples.processes import free_port
from patchstore import Store, open_store
from patchstore.bucket import digests, history
from patchstore.errors import ServerUnavailable
from patchstore.follow.vllm_server import VllmServer
from patchstore.tensors.bits import raw_bytes

_MODEL = "tiny"
_ARRIVE_S = 300.0
"""The longest time that a part may take to recover, vLLM's first start included."""
_PACE_S = 0.2


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=10.0, help="of killing")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed when")
    parser.add_argument("--every-s", type=float, default=20.0, help="seconds between kills, on average")
    parser.add_argument("--publish-s", type=float, default=1.0, help="pause of the trainer between versions")
    parser.add_argument("--store", choices=KINDS, default="folder")
    parser.add_argument(
        "--stub", action="store_true", help="a stand-in for vLLM with real weights, and a smaller model"
    )
    parser.add_argument("--folder", type=Path, help="to work in")
    parser.add_argument("--keep-logs", type=Path, help="a new folder, which takes what all processes printed")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row.

    Raises:
        SystemExit: after the row, with the slice_sums that failed.
    """
    if not args.stub and importlib.util.find_spec("vllm") is None:
        raise SystemExit("this benchmark runs vLLM, and it is not installed here; --stub does without")
    with work_folder(args.folder, "chaos") as folder, ExitStack() as stack:
        where = stack.enter_context(place(args.store, folder / "place"))
        if args.keep_logs is not None:
            stack.callback(keep_logs, folder, args.keep_logs)
        chaos = stack.enter_context(Chaos(args, where, folder).running())
        row, failed = chaos.tell()
    yield row
    if failed:
        raise SystemExit("not so: " + "; ".join(failed))


class Chaos:
    """The three parts, and the slice_sums about them."""

    def __init__(self, args: argparse.Namespace, where: Place, folder: Path) -> None:
        """Prepare; nothing is started yet."""
        self._args, self._folder, self._where = args, folder, where
        self._random = random.Random(args.seed)
        self._journal = Journal()
        self._store: Store = open_store(where.url, **where.options)
        self._options = [
            each
            for key, value in where.options.items()
            for each in ("--option", f"{key}={value if isinstance(value, str) else json.dumps(value)}")
        ]
        self._environment = {
            **where.environment(folder),
            # Files that a killed process leaves behind are removed with our folder.
            "TMPDIR": str(folder),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._trainer = self._part("trainer", self._trainer_command(), self._journal.trainer_said)
        self._server = self._part("server", self._server_command(port))
        self._follow = self._part("follow", self._follow_command(), self._journal.follow_said)
        self._parts = (self._trainer, self._server, self._follow)

    def _part(
        self, name: str, command: list[str], hear: Callable[[int, dict[str, Any]], None] | None = None
    ) -> Part:
        return Part(
            name,
            command,
            self._folder,
            life_s=60 * self._args.minutes + 4 * _ARRIVE_S,
            environment=self._environment | (VLLM_ENVIRONMENT if name == "server" else {}),
            hear=hear,
        )

    def _trainer_command(self) -> list[str]:
        job = {
            "url": self._where.url,
            "options": dict(self._where.options),
            "folder": str(self._folder),
            "checkpoint": None if self._args.stub else str(self._checkpoint),
            "pace_s": self._args.publish_s,
        }
        return [sys.executable, "-m", "benchmarks.chaos.trainer", json.dumps(job)]

    @property
    def _checkpoint(self) -> Path:
        return self._folder / "checkpoint"

    def _server_command(self, port: int) -> list[str]:
        if self._args.stub:
            return [sys.executable, "-m", "benchmarks.chaos.stub", str(port)]
        return [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(self._checkpoint)),
            *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", _MODEL),
            *("--max-model-len", "256", "--block-size", "32", "--enforce-eager"),
            *("--kv-cache-memory-bytes", "67108864", "--gpu-memory-utilization", "0.1"),
            *("--worker-extension-cls", "vllm_plugin.DeltaWorkerExtension"),
            *("--weight-transfer-config", '{"backend": "delta"}'),
        ]

    def _follow_command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "patchstore", "follow", self._where.url, "--server", self._url),
            *("--json", "--pin-file", str(self._folder / "follow.pin"), *self._options),
        ]

    @contextmanager
    def running(self) -> Iterator["Chaos"]:
        """Start all three, and kill those that still run in the end."""
        try:
            if not self._args.stub:
                save_checkpoint(self._checkpoint)
            for part in self._parts:
                part.start()
            yield self
        finally:
            for part in self._parts:
                part.kill()
            self._store.close()

    def tell(self) -> tuple[dict[str, Any], list[str]]:
        """Kill, wait for recovery, and check the slice_sums; return the row and the slice_sums that failed.

        Raises:
            RuntimeError: a part ended without a kill.
            TimeoutError: a part did not recover.
        """
        self._wait("the first version was served", lambda: bool(self._journal.applied))
        began = time.monotonic()
        self.kill_until(began + 60 * self._args.minutes)
        killed_s = time.monotonic() - began
        self._wait("all have come back", lambda: not self._journal.open_kills())
        self._trainer.ask_to_end()
        self._wait("the trainer has ended", lambda: self._journal.final is not None, but=self._trainer)
        self._trainer.wait(_ARRIVE_S)
        with VllmServer(self._url) as server:
            self._wait(
                "the server is at the head", lambda: _held(server) == self._journal.final, but=self._trainer
            )
            found = dict(self._claims(server))
        failed = [claim for claim, is_so in found.items() if not is_so]
        return self._row(killed_s, found), failed

    def kill_until(self, deadline: float) -> None:
        turn: list[Part] = []
        while True:
            # Every part is killed once, in random order, before one is killed again: kills are spread evenly.
            turn = turn or self._random.sample(self._parts, 3)
            due = time.monotonic() + self._random.uniform(0.1, 1.9) * self._args.every_s
            while time.monotonic() < min(due, deadline):
                self._check(None)
                time.sleep(max(0.0, min(_PACE_S, due - time.monotonic())))
            if due > deadline:
                return
            part = turn.pop()
            at = time.monotonic()
            part.kill()
            newest = history.head(self._store)
            assert newest is not None
            self._journal.killed(part, at, newest.version)
            part.start()

    def _wait(self, what: str, is_so: Callable[[], bool], but: Part | None = None) -> None:
        """Wait for a condition, while all parts but one must run."""
        deadline = time.monotonic() + _ARRIVE_S
        while not is_so():
            self._check(but)
            if time.monotonic() > deadline:
                raise TimeoutError(f"not so after {_ARRIVE_S:.0f} s: {what}; {self._journal.open_kills()}")
            with self._journal.changed:
                self._journal.changed.wait(_PACE_S)

    def _check(self, but: Part | None) -> None:
        for part in self._parts:
            if part is not but:
                part.check_alive()

    # The slice_sums.

    def _claims(self, server: VllmServer) -> Iterator[tuple[str, bool]]:
        stored, final = self._journal.stored, self._journal.final
        assert final is not None
        yield "the trainer was told of each version once", not self._journal.twice
        yield "the head is the trainer's last version", _head(self._store) == final
        yield "the log is one chain without gaps", is_one_chain(self._store, final)
        verified = {each["version"]: each["state"] for each in self._verify(self._where.url, "--all")}
        yield "every version can be rebuilt", [*verified] == [*range(final + 1)]
        yield (
            "every version said to be stored has the trainer's weights",
            stored.items() <= verified.items() and final in stored,
        )
        proved = self._verify(self._where.url, "--server", self._url)
        yield "the server's weights are the head's", [each["version"] for each in proved] == [final]
        status = server.status()
        yield "the server's state digest is the trainer's", status.state_digest == stored.get(final)
        yield "the server's weights are the trainer's, bit for bit", self._has_the_trainers_bits(server)
        yield (
            "the server is neither paused nor in a switch",
            not (server.is_paused() or status.half_applied or status.update_open or status.switch),
        )
        if not self._args.stub:
            yield "the server answers, and says which version", self._answers(server, final)

    def _verify(self, *arguments: str) -> list[dict[str, Any]]:
        """Run `patchstore verify`; return the versions that it verified, none if it failed."""
        command = [sys.executable, "-m", "patchstore", "verify", *arguments, *self._options, "--json"]
        done = subprocess.run(
            command, env={**os.environ, **self._environment}, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
            return []
        return [each for each in map(json.loads, done.stdout.splitlines()) if each["verified"]]

    def _has_the_trainers_bits(self, server: VllmServer) -> bool:
        weights = load_file(self._folder / FINAL)
        if self._args.stub:
            expected = {name: digests.digest(raw_bytes(tensor)) for name, tensor in weights.items()}
        else:
            from tests.support.tiny_qwen import served

            expected = served(weights)
        return all(expected.items() <= found.items() for found in server.fingerprint())

    def _answers(self, server: VllmServer, version: int) -> bool:
        request = {"model": _MODEL, "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{self._url}/v1/completions", json=request, timeout=120)
        return answer.is_success and server.weight_version() in {None, str(version)}

    def _row(self, killed_s: float, slice_sums: Mapping[str, bool]) -> dict[str, Any]:
        journal = self._journal
        kills = Counter(kill.victim for kill in journal.kills)
        row: dict[str, Any] = {
            "server": "stub" if self._args.stub else "vllm",
            "store": self._where.kind,
            "seed": self._args.seed,
            "minutes": killed_s / 60,
            "kills": len(journal.kills),
            "kills_not_alone": sum(not kill.alone for kill in journal.kills),
            "versions": (journal.final or 0) + 1,
            "acknowledged": len(journal.stored),
            "applied": len(journal.applied),
        }
        for part in self._parts:
            seconds = journal.recover_s(part.name)
            row |= {
                f"{part.name}_kills": kills[part.name],
                f"{part.name}_recover_s": statistics.median(seconds) if seconds else None,
                f"{part.name}_recover_max_s": max(seconds, default=None),
            }
        row |= {
            "proved": [claim for claim, is_so in slice_sums.items() if is_so],
            "failed": [claim for claim, is_so in slice_sums.items() if not is_so],
            "cores": os.cpu_count(),
            **versions(),
        }
        if not self._args.stub:
            row["vllm"] = importlib.metadata.version("vllm")
        return row


def _head(store: Store) -> int | None:
    newest = history.head(store)
    return None if newest is None else newest.version


def _held(server: VllmServer) -> int | None:
    with suppress(ServerUnavailable):
        return server.status().serving
    return None
