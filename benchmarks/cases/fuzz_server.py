"""Send random calls to a server of two ranks, and prove after each burst that its status is true.

One client, or two at once, call the routes that update weights and others of vLLM's development mode, in any
order, with valid and invalid arguments. Both ranks must fail together, and each reply must belong to its
call, so that the server's next status is true.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file

from benchmarks.fuzz_server.calls import Call, Calls
from benchmarks.support.killable_program import Part
from benchmarks.support.paths import ROOT
from benchmarks.support.tiny_checkpoint import save_checkpoint
from benchmarks.support.vllm_server import VLLM_ENVIRONMENT
from benchmarks.support.work_folder import keep_logs, work_folder
from examples.processes import free_port
from patchstore import PatchstoreError, Publisher, open_store
from patchstore.follow.verify import verify_server
from patchstore.follow.vllm_server import VllmServer
from patchstore.stores import layout

_NUM_VERSIONS = 8
_START_S = 600.0
_CALL_S = 180.0
_ANSWER_S = 3.0
"""Seconds to wait for a completion: a paused server does not answer."""
ALIKE = (
    *("initialised", "asleep", "store", "run_id", "serving", "parent", "state_digest", "staged"),
    *("update_open", "switch", "half_applied"),
)
"""Fields of the status that must be equal in both ranks."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=10.0, help="of calls")
    parser.add_argument("--seed", type=int, default=0, help="of the calls")
    parser.add_argument("--burst", type=int, default=12, help="draws of each client before each check")
    parser.add_argument("--folder", type=Path, help="to work in")
    parser.add_argument("--keep-logs", type=Path, help="a new folder, which takes what the server printed")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row.

    Raises:
        SystemExit: after the row, with the checks that failed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise SystemExit("this benchmark runs vLLM, and it is not installed here")
    with work_folder(args.folder, "fuzz") as folder, ExitStack() as stack:
        if args.keep_logs is not None:
            stack.callback(keep_logs, folder, args.keep_logs)
        fuzz = Fuzz(args, folder)
        stack.callback(fuzz.server.kill)
        row = fuzz.tell()
    yield row
    if row["failed"]:
        raise SystemExit("not so: " + "; ".join(row["failed"]))


class Fuzz:
    """A server, stores for it, and clients."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        """Prepare; nothing is started yet."""
        self._args, self._folder = args, folder
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.counts: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        """Calls by outcome: `200`, `400`, `timeout`."""
        self.failed: list[str] = []
        self._changed = threading.Lock()
        self._checkpoint = folder / "checkpoint"
        # Two runs that fit, one of another shape, and a folder without a run.
        self._stores = [str(folder / name) for name in ("run", "other", "unfit", "nothing")]
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(self._checkpoint)),
            *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"),
            *("--max-model-len", "128", "--block-size", "32", "--enforce-eager"),
            *("--kv-cache-memory-bytes", "67108864", "--gpu-memory-utilization", "0.1"),
            *("--tensor-parallel-size", "2"),
            *("--worker-extension-cls", "vllm_plugin.DeltaWorkerExtension"),
            *("--weight-transfer-config", '{"backend": "delta"}'),
        ]
        environment = VLLM_ENVIRONMENT | {
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        life_s = 60 * args.minutes + 2 * _START_S
        self.server = Part("server", command, folder, life_s=life_s, environment=environment)

    def tell(self) -> dict[str, Any]:
        """Publish, serve, call and check until the time is up or a check fails."""
        save_checkpoint(self._checkpoint)
        for number, url in enumerate(self._stores[:3]):
            _publish(self._checkpoint, url, seed=number, is_unfit=number == 2)
        self.server.start()
        self._wait()
        header = Path(self._stores[0], layout.HEADER).read_text()
        with VllmServer(self.url, timeout_s=_CALL_S) as server:
            server.init_weight_transfer(self._stores[0])
            server.apply(0)
            # vLLM compiles some functions at the first completion, and takes no calls meanwhile.
            prompt = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4}
            httpx.post(f"{self.url}/v1/completions", json=prompt, timeout=_START_S).raise_for_status()
            began, burst = time.monotonic(), 0
            while time.monotonic() - began < 60 * self._args.minutes and not self.failed:
                self._burst(burst, header)
                self.check_ranks(server, burst)
                burst += 1
        return self._row(burst, time.monotonic() - began)

    def _wait(self) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            self.server.check_alive()
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5).is_success:
                    return
            time.sleep(0.25)
        raise TimeoutError("the server did not start")

    def _burst(self, number: int, header: str) -> None:
        """Send a burst of calls: in even bursts of one client, whose effects can be checked, else of two."""
        several = 1 + number % 2
        drawn = [
            Calls(f"{self._args.seed}.{number}.{client}", self._stores, _NUM_VERSIONS, header)
            for client in range(several)
        ]
        threads = [threading.Thread(target=self._client, args=(calls, several == 1)) for calls in drawn]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _client(self, calls: Calls, is_alone: bool) -> None:
        staged: int | None = None
        limits = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(base_url=self.url, limits=limits) as http:
            for _ in range(self._args.burst):
                for call in calls.draw():
                    done = self._send(http, call)
                    if not is_alone or not done:
                        continue
                    if call.path == "/update_weights":
                        staged = call.version
                        self.expect(http, call, "staged", staged)
                    elif call.path == "/finish_weight_update":
                        self.expect(http, call, "serving", staged)

    def _send(self, http: httpx.Client, call: Call) -> bool:
        """Send a call; return whether it succeeded."""
        given: dict[str, Any] = {"params": call.query}
        given |= {"content": call.body} if isinstance(call.body, bytes) else {"json": call.body}
        if call.method == "GET":
            given = {"params": call.query}
        limit_s = _ANSWER_S if call.path == "/v1/completions" else _CALL_S
        try:
            answer = http.request(call.method, call.path, timeout=limit_s, **given)
            said, is_done = str(answer.status_code), answer.is_success
        except httpx.TimeoutException:
            said, is_done = "timeout", False
            if call.path != "/v1/completions":
                self._not_so(f"{call} was not answered within {limit_s:.0f} s")
        except httpx.TransportError as exc:
            said, is_done = type(exc).__name__, False
        with self._changed:
            self.counts["calls"] += 1
            self.answers[said] += 1
        return is_done

    def expect(self, http: httpx.Client, call: Call, key: str, version: int | None) -> None:
        """Check the status of both ranks after a call that succeeded, while no other client calls."""
        body = {"method": "delta_status"}
        ranks = http.post("/collective_rpc", json=body, timeout=_CALL_S).raise_for_status().json()["results"]
        self.counts[f"{call.path.strip('/')}_checked"] += 1
        if [rank[key] for rank in ranks] != [version] * 2:
            self._not_so(f"{call.path} succeeded for {version}, but {key} are {[r[key] for r in ranks]}")

    def _not_so(self, what: str) -> None:
        with self._changed:
            self.failed.append(what)

    def check_ranks(self, server: VllmServer, burst: int) -> None:
        """Check the server's status, bring it to some version, and check that version."""
        try:
            status = server.status()
            said = [rank["rank"] for rank in status.ranks]
            if said != [0, 1]:
                self._not_so(f"burst {burst}: ranks {said} answered")
            one, other = status.ranks
            if differing := [key for key in ALIKE if one[key] != other[key]]:
                self._not_so(f"burst {burst}: ranks differ in {differing}: {one}, {other}")
            self.counts["half_applied"] += status.half_applied
            if status.serving is not None and not one["asleep"]:
                self.prove(server, status.serving, status.store)
                self.counts["held_proved"] += 1
            server._http.post("/wake_up", {})
            server.resume()
            number = burst % 2
            # This also closes an update that was left open.
            server._http.post("/shutdown_weight_transfer_engine", {})
            server.init_weight_transfer(self._stores[number])
            version = burst * 5 % _NUM_VERSIONS
            server.apply(version)
            self.prove(server, version, self._stores[number])
            self.counts["healed_proved"] += 1
        except (PatchstoreError, httpx.HTTPError) as exc:
            self._not_so(f"burst {burst}: {type(exc).__name__}: {exc}")

    def prove(self, server: VllmServer, version: int, url: str | None) -> None:
        """Compare every live weight of both ranks with the published ones."""
        assert url is not None
        with closing(open_store(url)) as store:
            verify_server(store, server, version)

    def _row(self, bursts: int, spent_s: float) -> dict[str, Any]:
        return {
            "seed": self._args.seed,
            "minutes": spent_s / 60,
            "bursts": bursts,
            **dict(sorted(self.counts.items())),
            "answers": dict(sorted(self.answers.items())),
            "failed": self.failed,
            "cores": os.cpu_count(),
            "vllm": importlib.metadata.version("vllm"),
        }


def _publish(checkpoint: Path, url: str, *, seed: int, is_unfit: bool) -> None:
    """Publish some versions; every third is an anchor too."""
    tensors = load_file(checkpoint / "model.safetensors")
    if is_unfit:
        tensors["model.norm.weight"] = torch.zeros(8, dtype=torch.bfloat16)
    random = torch.Generator().manual_seed(seed)
    with closing(open_store(url)) as store, closing(Publisher(store, tensors, anchor_every=3)) as publisher:
        for step in range(_NUM_VERSIONS):
            publisher.publish_patch(step).result(timeout_s=60)
            for tensor in tensors.values():
                chosen = torch.rand(tensor.shape, generator=random) < 0.02
                tensor[chosen] += torch.randn(tensor.shape, generator=random)[chosen].to(tensor.dtype)
