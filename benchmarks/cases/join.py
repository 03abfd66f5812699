"""Have a fresh `vllm serve` join a run: read an anchor and some deltas, and write them, all of the model.

One server has dummy weights, another those of a checkpoint that no version equals. Either proves its map
while the store is opened (`open_s`). Beside them, on the same files: a copy of the anchor, and a load of it
by `safetensors`. `server_cpu_s` is the CPU time of the server's processes during the join.

`boot` starts at the last version instead (`--load-format patchstore`), and `start` from a checkpoint of it.
Of both, `start_s` is the time to the first answer, `load_s` what of it vLLM says that loading took, and
`peak_mib` the most memory of any of the server's processes. Of `boot`, `load_download_s`, `load_compile_s`,
`load_rebuild_s` and `load_loader_s` are its parts, of the slowest rank each, as the server's log says.
"""

import argparse
import dataclasses
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file

from benchmarks.support.shapes import SHAPES, Shape
from benchmarks.support.software import software
from benchmarks.support.trainer import Trainer
from benchmarks.support.vllm_server import question, save_weights, serve
from benchmarks.support.work_folder import work_folder
from patchstore import open_store
from patchstore.follow.verify import verify_server

WAYS = ("cp", "safetensors", "dummy", "checkpoint", "start", "boot")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen2.5-0.5b", help="of the model")
    parser.add_argument("--layers", type=int, help="of the model; all, if not given")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--deltas", type=int, default=3, help="versions after the anchor")
    parser.add_argument("--density", type=float, default=0.01, help="share of elements a version changes")
    parser.add_argument("--repeats", type=int, default=3, help="servers started in each way, in turns")
    parser.add_argument("--eager", action="store_true", help="neither compile the model nor capture graphs")
    parser.add_argument("--engine-args", type=shlex.split, default=[], metavar="ARGS")
    parser.add_argument(
        "--folder",
        type=Path,
        help="to work in; takes four times the model's size, and a server its size in host memory",
    )


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each repeat of each way. Every server is verified, bit for bit."""
    shape = SHAPES[args.shape]
    if args.layers is not None:
        shape = dataclasses.replace(shape, name=f"{shape.name}-{args.layers}-layers", layers=args.layers)
    args.prompt_tokens, args.max_tokens, args.log = 16, 16, None
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    about: dict[str, Any] = {"shape": shape.name, "engine_args": shlex.join(args.engine_args)}
    about |= software(device)
    with work_folder(args.folder, "join") as folder:
        _publish(shape, device, folder, args)
        anchor = folder / "bucket" / "anchors"
        num_bytes = sum(path.stat().st_size for path in anchor.rglob("*.safetensors"))
        about |= {"num_bytes": num_bytes, "deltas": args.deltas, "density": args.density}
        for _ in range(args.repeats):
            for way in args.ways:
                yield {"way": way, **about, **_one(way, shape, args, folder, anchor)}


def _publish(shape: Shape, device: torch.device, folder: Path, args: argparse.Namespace) -> None:
    """Fill a bucket; for the ways that need them, save weights that are in no version, or the last's."""
    with Trainer(shape, device, folder / "bucket") as trainer:
        if "checkpoint" in args.ways:
            others = ((name, tensor.roll(1, 0)) for name, tensor in trainer.tensors.items())
            save_weights(others, folder / "checkpoint")
        for _ in range(args.deltas):
            trainer.step(args.density)
        if "start" in args.ways:
            save_weights(trainer.tensors.items(), folder / "start")
    del trainer
    if device.type == "cuda":
        # The servers need it.
        torch.cuda.empty_cache()


def _one(
    way: str,
    shape: Shape,
    args: argparse.Namespace,
    folder: Path,
    anchor: Path,
) -> dict[str, float]:
    out = folder / "work"
    try:
        if way == "cp":
            return {"join_s": _timed(lambda: shutil.copytree(anchor, out))}
        if way == "safetensors":
            return {"join_s": _timed(lambda: _load(anchor))}
        weights = folder / way if way in {"checkpoint", "start"} else None
        if way == "boot":
            given = {"store": str(folder / "bucket"), "version": args.deltas, "scratch": str(out / "scratch")}
            loads = ["--load-format", "patchstore", "--model-loader-extra-config", json.dumps(given)]
            args = argparse.Namespace(**vars(args) | {"engine_args": [*args.engine_args, *loads]})
        with (
            serve(shape, args, out, 1, weights) as server,
            closing(open_store(folder / "bucket")) as store,
        ):
            if way in {"start", "boot"}:
                _ask(server.url, shape, args)
                found = {"start_s": time.monotonic() - server.started, "peak_mib": _peak_mib()}
                found["load_s"] = _load_s(out / "vllm.log")
                found |= _parts_of_load(out / "vllm.log") if way == "boot" else {}
                server.init_weight_transfer(store.url, scratch=str(out / "scratch"))
                verify_server(store, server, args.deltas)
                return found
            open_s = _timed(lambda: server.init_weight_transfer(store.url, scratch=str(out / "scratch")))
            # The first forward pass allocates and converts.
            _ask(server.url, shape, args)
            cpu_s = _cpu_s_of_children()
            join_s = _timed(lambda: server.apply(args.deltas))
            cpu_s = _cpu_s_of_children() - cpu_s
            verify_server(store, server, args.deltas)
            spans, timings = server.spans, server.status().ranks[0]["timings"]
            return {
                "open_s": open_s,
                "join_s": join_s,
                "server_cpu_s": cpu_s,
                "pause_s": spans["resume"][1] - spans["pause"][0],
                **{f"engine_{part}_s": seconds for part, seconds in timings.items()},
            }
    finally:
        shutil.rmtree(out, ignore_errors=True)


def _timed(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def _load_s(log: Path) -> float:
    """How long the slowest rank loaded weights."""
    return max(map(float, re.findall(r"Loading weights took ([0-9.]+) seconds", log.read_text())))


def _parts_of_load(log: Path) -> dict[str, float]:
    """What the slowest rank took for each part of a start at a version."""
    found = re.findall(
        r"([0-9.]+) s to download it, ([0-9.]+) more until kernels were compiled, ([0-9.]+) to rebuild it, "
        r"([0-9.]+) in the model's own loader",
        log.read_text(),
    )
    parts = ("load_download_s", "load_compile_s", "load_rebuild_s", "load_loader_s")
    return {part: max(map(float, each)) for part, each in zip(parts, zip(*found, strict=True), strict=True)}


def _ask(url: str, shape: Shape, args: argparse.Namespace) -> None:
    asked = question(shape, args, 0) | {"max_tokens": 1}
    httpx.post(f"{url}/v1/completions", json=asked, timeout=300).raise_for_status()


def _cpu_s_of_children() -> float:
    """The CPU time so far of all running processes that this one started, or these did."""
    return sum(_ticks_of_children().values()) / os.sysconf("SC_CLK_TCK")


def _peak_mib() -> float:
    """The most resident memory that any of them had; mapped files count too."""
    peaks = [0.0]
    for process in _ticks_of_children():
        with suppress(OSError, StopIteration):  # It has ended.
            lines = Path(f"/proc/{process}/status").read_text().splitlines()
            peaks.append(next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")))
    return max(peaks)


def _ticks_of_children() -> dict[int, int]:
    ours, ticks, rest = {os.getpid()}, dict[int, int](), list[tuple[int, int, int]]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # It has ended.
            fields = path.read_text().rpartition(")")[2].split()
            rest.append((int(path.parent.name), int(fields[1]), int(fields[11]) + int(fields[12])))
    while found := [each for each in rest if each[1] in ours]:
        ours |= {process for process, _, _ in found}
        ticks |= {process: of_it for process, _, of_it in found}
        rest = [each for each in rest if each not in found]
    return ticks


def _load(anchor: Path) -> None:
    for path in anchor.rglob("*.safetensors"):
        # A view of a mapped file reads nothing by itself.
        for tensor in load_file(path).values():
            tensor.clone()
