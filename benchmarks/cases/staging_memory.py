"""Measure the GPU memory that staging takes beside a server that took most of it, under load.

A process publishes the versions and ends before the server starts. `nvidia-smi` reports the free memory
several times per second.
"""

import argparse
import multiprocessing
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.support.shapes import SHAPES, Shape
from benchmarks.support.vllm_server import TimedServer, question, serve
from patchstore import Publisher
from patchstore.bucket import history
from patchstore.stores import open_store
from patchstore.tensors.bits import bits

_UPDATES = (("first anchor", 0), ("one version", 1), ("five versions", 6), ("anchor", 0))
"""The measured updates: the versions that the server is brought to, in this order."""
_NEWEST = 6
_READ_MS = 100


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-8b", help="of the model")
    parser.add_argument(
        "--density", type=float, default=0.03, help="share of the elements that a version changes"
    )
    parser.add_argument(
        "--utilization", type=float, nargs="+", default=[0.9, 0.95], help="--gpu-memory-utilization"
    )
    parser.add_argument("--concurrency", type=int, default=32, help="requests at a time")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of each request")
    parser.add_argument("--max-tokens", type=int, default=128, help="of each answer")
    parser.add_argument(
        "--folder", type=Path, help="for the store, such as /dev/shm; a temporary one, if not given"
    )
    parser.add_argument("--log", type=Path, help="file that takes what the servers print")
    parser.set_defaults(eager=True, engine_args=[])


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row per update of each server."""
    if not torch.cuda.is_available():
        raise SystemExit("staging-memory needs a GPU")
    shape = SHAPES[args.shape]
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder = Path(temporary)
        trainer = multiprocessing.get_context("spawn").Process(
            target=_publish, args=(shape, str(folder / "store"), args.density)
        )
        trainer.start()
        trainer.join()
        if trainer.exitcode:
            raise RuntimeError(f"publishing ended with status {trainer.exitcode}")
        for utilization in args.utilization:
            args.engine_args = ["--gpu-memory-utilization", str(utilization)]
            with (
                serve(shape, args, folder / f"at-{utilization}", args.concurrency) as server,
                _load(shape, args, server),
            ):
                yield from _updates(server, folder, utilization)


def _updates(server: TimedServer, folder: Path, utilization: float) -> Iterator[dict[str, Any]]:
    server.init_weight_transfer(str(folder / "store"), scratch=str(folder / "cache"))
    store = open_store(folder / "store")
    held: int | None = None
    for name, version in _UPDATES:
        with _free() as free:
            before = free[-1]
            server.apply(version)
        status = server.status()
        first = version if held is None or held >= version else held + 1
        manifests = [history.read_manifest(store, each) for each in range(first, version + 1)]
        yield {
            "utilization": utilization,
            "update": name,
            "version": version,
            "changes": sum(each.delta.num_changed for each in manifests if each.delta),
            "payload_mib": sum(each.delta.num_bytes for each in manifests if each.delta) / 2**20,
            "staging_mib": status.ranks[0]["staging_bytes"] / 2**20,
            "free_before_mib": before,
            "free_least_mib": min(free),
            "stage_s": status.ranks[0]["timings"]["stage"],
            "pause_s": server.spans["resume"][1] - server.spans["pause"][0],
        }
        held = version


def _publish(shape: Shape, url: str, density: float) -> None:
    device = torch.device("cuda")
    torch.manual_seed(0)
    weights = {
        name: (0.02 * torch.randn(size, device=device)).bfloat16() for name, size in shape.tensors().items()
    }
    with Publisher(url, weights, anchor_every=1000) as publisher:
        for step in range(_NEWEST + 1):
            if step:
                for tensor in weights.values():
                    # A step of one unit in the last place, as an optimiser makes.
                    bits(tensor).add_((torch.rand(tensor.numel(), device=device) < density).to(torch.int16))
            publisher.publish_patch(step).result()


@contextmanager
def _load(shape: Shape, args: argparse.Namespace, server: TimedServer) -> Iterator[None]:
    """Run clients that send one request after the other."""
    done = threading.Event()

    def ask(client: int) -> None:
        with httpx.Client(base_url=server.url, timeout=300) as http:
            while not done.is_set():
                http.post("/v1/completions", json=question(shape, args, client)).raise_for_status()

    with ThreadPoolExecutor(args.concurrency) as pool:
        clients = [pool.submit(ask, number) for number in range(args.concurrency)]
        try:
            # Time for all clients to be served.
            time.sleep(5)
            yield
        finally:
            done.set()
        for each in clients:
            # A client that failed has left less load than the row says.
            each.result()


@contextmanager
def _free() -> Iterator[list[int]]:
    """Yield a list to which a thread adds the GPU's free MiB every `_READ_MS`."""
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits", "-i", "0"]
    found = [int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)]
    with subprocess.Popen([*command, "-lms", str(_READ_MS)], stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        lines = reader.stdout

        def read() -> None:
            found.extend(int(line) for line in lines)

        thread = threading.Thread(target=read)
        thread.start()
        try:
            yield found
        finally:
            reader.terminate()
            thread.join()
