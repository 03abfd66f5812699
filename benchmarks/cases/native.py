"""vLLM's own weight transfers beside patchstore: the same server, the same changes, one run.

A trainer on the first GPU brings a server on the second to its weights: through a store, by vLLM's packed
dense broadcast (`nccl`), and by its broadcast of changes alone (`sparse_nccl`). With one GPU both share it,
and vLLM's transfer is `ipc`. The server starts once for each shape, and its worker changes its transfer
engine between ways.
"""

import argparse
import dataclasses
import importlib.util
import os
import shlex
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from benchmarks.native.trainer import note
from benchmarks.support.child_process import Child
from benchmarks.support.shapes import SHAPES
from benchmarks.support.software import software
from benchmarks.support.vllm_server import question, serve
from benchmarks.support.work_folder import work_folder
from examples.processes import free_port

WAYS = {"patchstore": 0, "nccl": 2, "sparse_nccl": 2, "ipc": 1}
"""Number of GPUs that each needs; `ipc` needs that both sides have the same one."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=list(SHAPES),
        default=["qwen3-8b", "qwen3-30b-a3b"],
        help="of the models, one server each",
    )
    parser.add_argument("--layers", type=int, help="of each model; all, if not given")
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=list(WAYS),
        help="patchstore goes first, always; all that work here, if not given",
    )
    parser.add_argument(
        "--densities",
        type=float,
        nargs="+",
        default=[0.01],
        help="share of the elements that a version changes, about",
    )
    parser.add_argument("--rounds", type=int, default=3, help="updates per way and density, at least")
    parser.add_argument(
        "--snapshot",
        choices=["device", "host"],
        help="where the publisher keeps what it compares with; on the device, if not given and it fits there",
    )
    parser.add_argument(
        "--poll-s",
        type=float,
        default=0.0,
        help="how often the driver looks for a version; 0: the trainer tells it, as in the other ways",
    )
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of the request that ends an update")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("/dev/shm"),
        help="to work in; the store takes the model's size there and is removed afterwards",
    )
    parser.add_argument("--eager", action="store_true", help="neither compile the model nor capture graphs")
    parser.add_argument(
        "--engine-args",
        type=shlex.split,
        default=[],
        metavar="ARGS",
        help="further arguments of `vllm serve`: --engine-args='--moe-backend triton'",
    )
    parser.add_argument("--log", type=Path, help="file that takes what the server prints")
    parser.add_argument("--limit-s", type=int, default=280, help="the run is cut off after so many seconds")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each shape's anchor, and one for each way and density, as soon as it is known."""
    num_gpus = torch.cuda.device_count()
    ways = _ways(args, num_gpus)
    if args.rounds < 1 or not all(0 < density < 1 for density in args.densities):
        raise SystemExit("--rounds must be at least 1, and --densities are shares, between 0 and 1")
    args.max_tokens, began, failed = 1, time.monotonic(), False

    def cut_off(_: int, __: FrameType | None) -> NoReturn:
        raise SystemExit(f"cut off after {args.limit_s} s")

    signal.signal(signal.SIGALRM, cut_off)
    signal.alarm(args.limit_s)
    try:
        for shape in args.shapes:
            try:
                for row in _shape(args, shape, ways, num_gpus, began):
                    failed |= not row.get("is_exact", True)
                    yield row
            except RuntimeError as exc:
                note(began, f"{shape} failed: {exc}")
                failed = True
    finally:
        signal.alarm(0)
    if failed:
        raise SystemExit("a shape failed, or a server did not have the bits that it should: see above")


def _ways(args: argparse.Namespace, num_gpus: int) -> list[str]:
    if importlib.util.find_spec("vllm") is None:
        raise SystemExit("this benchmark runs vLLM, and it is not installed here")
    able = [way for way, needed in WAYS.items() if needed in {0, min(num_gpus, 2)}]
    if unable := set(args.ways or ()) - set(able):
        raise SystemExit(f"with {num_gpus} GPUs there is no {', '.join(unable)}, but {', '.join(able)}")
    return [way for way in able if args.ways is None or way in {"patchstore", *args.ways}]


def _shape(
    args: argparse.Namespace, name: str, ways: list[str], num_gpus: int, began: float
) -> Iterator[dict[str, Any]]:
    shape = SHAPES[name]
    if args.layers is not None:
        shape = dataclasses.replace(shape, name=f"{name}-{args.layers}-layers", layers=args.layers)
    port = free_port()
    job: dict[str, Any] = {
        "shape": name,
        "layers": args.layers,
        "ways": ways,
        "densities": args.densities,
        "rounds": args.rounds,
        "snapshot": args.snapshot,
        "poll_s": args.poll_s,
        "question": question(shape, args, 0),
        "url": f"http://127.0.0.1:{port}",
        "device": "cuda:0" if num_gpus else "cpu",
        "patience_s": args.limit_s,
        "began": began,
    }
    about = {
        "shape": shape.name,
        **software(torch.device("cuda:0" if num_gpus else "cpu")),
        "store": str(args.folder),
        "poll_s": args.poll_s,
        "is_eager": args.eager,
        "engine_args": shlex.join(args.engine_args),
    }
    switching = ["--worker-extension-cls", "benchmarks.native.worker.SwitchingWorkerExtension"]
    args = argparse.Namespace(**{**vars(args), "engine_args": [*switching, *args.engine_args]})
    # vLLM logs to standard output, where the trainer answers.
    quiet = {"VLLM_CONFIGURE_LOGGING": "0"}
    with work_folder(args.folder, "native") as folder:
        job |= {"store": str(folder / "store"), "scratch": str(folder / "scratch")}
        # The trainer publishes its first version while the server starts.
        with (
            Child("benchmarks.native.trainer", "trainer", job, quiet) as trainer,
            serve(shape, args, folder, 1, environment=_of_server(num_gpus), port=port),
        ):
            note(began, f"{name}: the server has started")
            trainer.tell(go=True)
            while (row := trainer.hear())["row"] != "end":
                yield {"row": row.pop("row"), **about, **row}


def _of_server(num_gpus: int) -> dict[str, str]:
    """Return the environment in which the server has the second GPU, if there are two."""
    # Without it, vLLM takes no handle of memory over HTTP.
    found = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if num_gpus == 1 else {}
    if num_gpus > 1:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        found["CUDA_VISIBLE_DEVICES"] = seen[1]
    return found
