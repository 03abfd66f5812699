"""Serve a model with `vllm serve`, train beside it, and time each version from the optimiser to an answer.

Every update takes the path of a user's update: `Publisher.publish_patch`, then `VllmServer.apply` over vLLM's
own HTTP routes. The first updates are of an idle server. The later ones are of a server with a steady load of
streamed answers. The arrival of every token is kept, and the cost of an update is the delay of tokens.
"""

import argparse
import dataclasses
import importlib.util
import json
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.serving.episodes import Episode, analyse, around
from benchmarks.serving.latency import Span
from benchmarks.serving.load import Load
from benchmarks.serving.updates import Bench, Update, path
from benchmarks.support.shapes import SHAPES, Shape
from benchmarks.support.software import software
from benchmarks.support.trainer import CHANGES, Trainer
from benchmarks.support.vllm_server import question, serve
from patchstore import open_store
from patchstore.follow.settings import PauseMode, PrefixCache
from patchstore.publish.sources.quantized import quantize
from patchstore.quantization import CHOICES, FORMS


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen2.5-0.5b", help="of the model")
    parser.add_argument("--layers", type=int, help="of the model; all, if not given")
    parser.add_argument(
        "--forms", nargs="+", choices=["bf16", *CHOICES], default=["bf16"], help="one server each"
    )
    parser.add_argument(
        "--start",
        choices=["dummy", "checkpoint"],
        default="dummy",
        help="what the server loads: nothing, or weights that differ from version 0's",
    )
    parser.add_argument(
        "--reload",
        action="store_true",
        help="end with vLLM's own reload of the newest version, from a folder; needs --start checkpoint",
    )
    parser.add_argument(
        "--densities",
        type=float,
        nargs="+",
        default=[0.003, 0.01, 0.03],
        help="share of the elements that a version changes, about",
    )
    parser.add_argument(
        "--changes",
        choices=list(CHANGES),
        default="flips",
        help="of each version: " + "; ".join(f"{name}: {told}" for name, told in CHANGES.items()),
    )
    parser.add_argument("--repeats", type=int, default=5, help="updates of the idle server, per density")
    parser.add_argument(
        "--loaded-repeats",
        type=int,
        default=3,
        help="updates of the loaded server, per density; 0 for no load",
    )
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[16], help="streamed answers at a time, one load each"
    )
    parser.add_argument(
        "--pause-mode",
        type=PauseMode,
        choices=list(PauseMode),
        nargs="+",
        default=[PauseMode.KEEP],
        help="what `patchstore follow --pause-mode` does, one load each; the idle server has the first",
    )
    parser.add_argument(
        "--prefix-cache",
        type=PrefixCache,
        choices=list(PrefixCache),
        nargs="+",
        default=[PrefixCache.RESET],
        help="what `patchstore follow --prefix-cache` does, one load each; the idle server has the first",
    )
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of each request of the load")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of each answer of the load")
    parser.add_argument(
        "--quiet-s", type=float, default=2.0, help="seconds before and after each update of the loaded server"
    )
    parser.add_argument(
        "--poll-s",
        type=float,
        default=0.02,
        help="how often the driver looks for a version; 0: the trainer tells it",
    )
    parser.add_argument(
        "--trainer-device",
        help="of the trainer's weights: cpu, cuda:1; the last GPU, if not given, or the CPU",
    )
    parser.add_argument(
        "--snapshot",
        choices=["device", "host"],
        default="device",
        help="where the publisher keeps what it compares with, as its option of this name",
    )
    parser.add_argument(
        "--store",
        help="URL of an empty store, which keeps what is published; or a new folder, such as /dev/shm/bench, "
        "which holds twice the model's size and is removed afterwards; a temporary one, if not given",
    )
    parser.add_argument(
        "--storage-options", type=json.loads, default={}, metavar="JSON", help="options of the store's URL"
    )
    parser.add_argument("--eager", action="store_true", help="neither compile the model nor capture graphs")
    parser.add_argument(
        "--engine-args",
        type=shlex.split,
        default=[],
        metavar="ARGS",
        help="further arguments of `vllm serve`: --engine-args='--tensor-parallel-size 2'",
    )
    parser.add_argument("--log", type=Path, help="file that takes what the server prints")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield rows about the server and the anchor, then `path`, `latency` and `series` per density."""
    _check(args)
    # Without a handler, SIGTERM would leave the server and the folder behind.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    shape = SHAPES[args.shape]
    if args.layers is not None:
        shape = dataclasses.replace(shape, name=f"{shape.name}-{args.layers}-layers", layers=args.layers)
    for form in args.forms:
        yield from _serve(args, shape, None if form == "bf16" else form)


def _serve(args: argparse.Namespace, shape: Shape, form: str | None) -> Iterator[dict[str, Any]]:
    trains_on = torch.device(args.trainer_device or _last_device())
    with ExitStack() as stack:
        folder = _work_folder(stack, args.store)
        trainer = Trainer(shape, trains_on, None, args.changes)
        weights = None
        if args.start == "checkpoint":
            others = {name: tensor.roll(1, 0) for name, tensor in trainer.tensors.items()}
            weights = _as_loaded(others, shape, form)
            del others
        is_url = "://" in (args.store or "")
        store = stack.enter_context(
            closing(open_store(args.store if is_url else folder / "store", **args.storage_options))
        )
        began = time.monotonic()
        server = stack.enter_context(serve(shape, args, folder, max(args.concurrency), weights, form))
        if weights is not None:
            # The server has read them.
            weights.clear()
        start_s = time.monotonic() - began
        about = {
            "shape": shape.name,
            "form": form or "bf16",
            "start": args.start,
            **software(torch.device("cuda:0" if torch.cuda.is_available() else "cpu")),
            "trainer_on": str(trains_on),
            "changes": args.changes,
            "snapshot": args.snapshot,
            "poll_s": args.poll_s,
            "store": store.url.partition("://")[0] if is_url else str(folder.parent),
            "is_eager": args.eager,
            "engine_args": shlex.join(args.engine_args),
            "pause_mode": args.pause_mode[0].value,
            "prefix_cache": args.prefix_cache[0].value,
        }
        yield {"row": "server", **about, "start_s": start_s}
        server.use(args.pause_mode[0], args.prefix_cache[0])
        asked = question(shape, args, 0) | {"max_tokens": 1}
        bench = stack.enter_context(
            closing(Bench(trainer, store, server, asked, args.poll_s, form, args.snapshot))
        )
        yield {"row": "anchor", **about, **bench.anchor(folder / "scratch", args.storage_options)}
        # The first update compiles and allocates, so it is not counted.
        bench.update(max(args.densities))
        for density in args.densities:
            updates = [bench.update(density) for _ in range(args.repeats)]
            yield {"row": "path", **about, "density": density, "concurrency": 0, **path(updates)}
        if args.loaded_repeats:
            for concurrency, pause_mode, prefix_cache in product(
                args.concurrency, args.pause_mode, args.prefix_cache
            ):
                server.use(pause_mode, prefix_cache)
                about |= {"pause_mode": pause_mode.value, "prefix_cache": prefix_cache.value}
                for row in _loaded(bench, shape, args, concurrency):
                    yield {"row": row.pop("row"), **about, **row}
        if args.reload:
            weights = _as_loaded(trainer.tensors, shape, form)
            yield {"row": "reload", **about, "reload_s": bench.reload(folder / "model", weights)}


def _as_loaded(
    tensors: Mapping[str, torch.Tensor], shape: Shape, form: str | None
) -> dict[str, torch.Tensor]:
    """Return weights as the server loads them, in host memory."""
    rounded = set() if form is None else set(shape.quantized(form))
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if form is not None and name in rounded:
            codes, scales = quantize(FORMS[form], tensor)
            found |= {name: codes.cpu(), FORMS[form].scale_name(name): scales.cpu()}
        else:
            found[name] = tensor.cpu()
    return found


def _check(args: argparse.Namespace) -> None:
    if importlib.util.find_spec("vllm") is None:
        raise SystemExit("this benchmark runs vLLM, and it is not installed here")
    if args.repeats < 1 or args.loaded_repeats < 0 or min(args.concurrency) < 1 or args.max_tokens < 2:
        raise SystemExit("--repeats and --concurrency must be at least 1, and --max-tokens 2")
    if args.reload and args.start != "checkpoint":
        raise SystemExit("--reload needs --start checkpoint: vLLM reloads no server with dummy weights")
    if not all(0 < density < 1 for density in args.densities):
        raise SystemExit("--densities are shares, between 0 and 1")


def _last_device() -> str:
    """Return the last GPU, because the server takes the first ones."""
    return f"cuda:{torch.cuda.device_count() - 1}" if torch.cuda.is_available() else "cpu"


def _work_folder(stack: ExitStack, store: str | None) -> Path:
    """Make a folder that is removed with the stack."""
    if store is None or "://" in store:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="patchstore-serving-")))
    folder = Path(store).absolute()
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise SystemExit(f"{folder} exists, and would be removed: name a new folder") from None
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _loaded(
    bench: Bench, shape: Shape, args: argparse.Namespace, concurrency: int
) -> Iterator[dict[str, Any]]:
    """Yield the rows of the server under load, after the load has ended."""
    questions = [question(shape, args, 1 + client) for client in range(concurrency)]
    with Load(bench.server.url, questions) as load:
        load.wait_until_steady()
        episodes = [_episode(bench, load, density, args) for density in args.densities]
        requests = load.stop()
    for episode in episodes:
        about = {"density": episode.density, "concurrency": concurrency}
        yield {"row": "path", **about, **path(episode.updates)}
        found, row = analyse(episode, requests)
        yield {"row": "latency", **about, **row}
        yield {"row": "series", **about, **around(found, episode)}


def _episode(bench: Bench, load: Load, density: float, args: argparse.Namespace) -> Episode:
    updates: list[Update] = []
    quiet: list[Span] = []

    def rest() -> None:
        began = time.monotonic()
        time.sleep(args.quiet_s)
        quiet.append(Span(window="quiet", began=began, ended=time.monotonic()))
        load.check()

    for _ in range(args.loaded_repeats):
        # The step comes before the quiet time, which it would disturb on a shared device.
        bench.step(density)
        rest()
        updates.append(bench.follow())
        rest()
    return Episode(density=density, updates=updates, quiet=quiet)
