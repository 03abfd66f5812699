"""Serve a model with `vllm serve`, train beside it, and time each version from the optimiser to an answer.

Every update goes the way a user's does: `Publisher.publish_patch` here, `VllmServer.apply` there, vLLM's own
HTTP routes in between. The first updates meet an idle server, the later ones a steady load of streamed
answers, of which every token's arrival is kept: what an update costs is how late tokens were.
"""

import argparse
import importlib.util
import json
import shlex
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, get_args

import httpx
import torch

from benchmarks.serving import latency
from benchmarks.serving.latency import Gap, Load, Request, Span, Window
from benchmarks.support.shapes import SHAPES, Shape
from benchmarks.support.software import software
from benchmarks.support.trainer import Trainer
from benchmarks.support.vllm_server import TimedServer, question, serve
from patchstore import Manifest, Publisher, Store, open_store
from patchstore.format import history

PARTS: Mapping[str, str] = {
    "compare_s": "the trainer waits: what changed",
    "store_s": "encode, upload, commit",
    "notice_s": "until the driver sees the version",
    "prefetch_s": "fetch, decode, translate, digest",
    "prove_s": "start_weight_update, update_weights",
    "pause_s": "pause, write, reset the prefix cache, resume",
    "end_s": "the driver's last mark",
    "answer_s": "a request of one token",
}
"""Every second from `publish_patch` to the first answer of the new weights, in order."""

_CALLS = {"hold": "pause", "finish": "finish", "reset": "reset", "resume": "resume"}
"""Within the pause."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen2.5-0.5b", help="of the model")
    parser.add_argument(
        "--densities",
        type=float,
        nargs="+",
        default=[0.003, 0.01, 0.03],
        help="share of every tensor's elements that a version changes",
    )
    parser.add_argument("--repeats", type=int, default=5, help="updates of the idle server, per density")
    parser.add_argument(
        "--loaded-repeats",
        type=int,
        default=3,
        help="updates of the loaded server, per density; 0 for no load",
    )
    parser.add_argument("--concurrency", type=int, default=16, help="streamed answers at a time")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of each request of the load")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of each answer of the load")
    parser.add_argument(
        "--quiet-s", type=float, default=2.0, help="seconds before and after each update of the loaded server"
    )
    parser.add_argument("--poll-s", type=float, default=0.02, help="how often the driver looks for a version")
    parser.add_argument(
        "--trainer-device",
        help="of the trainer's weights: cpu, cuda:1; the last GPU, if not given, or the CPU",
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
    """Rows about the server and the anchor, then `path`, `latency` and `series` for each density."""
    _check(args)
    # Else nothing below would be ended and removed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    shape = SHAPES[args.shape]
    trains_on = torch.device(args.trainer_device or _last_device())
    with ExitStack() as stack:
        folder = _work_folder(stack, args.store)
        is_url = "://" in (args.store or "")
        store = stack.enter_context(
            closing(open_store(args.store if is_url else folder / "store", **args.storage_options))
        )
        began = time.monotonic()
        server = stack.enter_context(serve(shape, args, folder))
        start_s = time.monotonic() - began
        about = {
            "shape": shape.name,
            **software(torch.device("cuda:0" if torch.cuda.is_available() else "cpu")),
            "trainer_on": str(trains_on),
            "store": store.url.partition("://")[0] if is_url else str(folder.parent),
            "is_eager": args.eager,
            "engine_args": shlex.join(args.engine_args),
        }
        yield {"row": "server", **about, "start_s": start_s}
        trainer = Trainer(shape, trains_on, None)
        bench = stack.enter_context(
            closing(Bench(trainer, store, server, question(shape, args, 0) | {"max_tokens": 1}, args.poll_s))
        )
        yield {"row": "anchor", **about, **bench.anchor(folder / "scratch", args.storage_options)}
        # What is compiled and allocated once is not an update's.
        bench.update(max(args.densities))
        for density in args.densities:
            updates = [bench.update(density) for _ in range(args.repeats)]
            yield {"row": "path", **about, "density": density, "concurrency": 0, **path(updates)}
        if args.loaded_repeats:
            for row in _loaded(bench, shape, args):
                yield {"row": row.pop("row"), **about, **row}


def _check(args: argparse.Namespace) -> None:
    if importlib.util.find_spec("vllm") is None:
        raise SystemExit("this benchmark runs vLLM, and it is not installed here")
    if args.repeats < 1 or args.loaded_repeats < 0 or args.concurrency < 1 or args.max_tokens < 2:
        raise SystemExit("--repeats and --concurrency must be at least 1, and --max-tokens 2")
    if not all(0 < density < 1 for density in args.densities):
        raise SystemExit("--densities are shares, between 0 and 1")


def _last_device() -> str:
    """The server begins with the first GPU."""
    return f"cuda:{torch.cuda.device_count() - 1}" if torch.cuda.is_available() else "cpu"


def _work_folder(stack: ExitStack, store: str | None) -> Path:
    """Make the folder that is removed afterwards."""
    if store is None or "://" in store:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="patchstore-serving-")))
    folder = Path(store).absolute()
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise SystemExit(f"{folder} exists, and would be removed: name a new folder") from None
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


# Updates.


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One version on its way; times are of `time.monotonic`."""

    version: int
    num_changed: int
    payload_bytes: int
    called: float
    """`publish_patch` was."""
    compared: float
    """It returned."""
    published: float
    """The version existed."""
    noticed: float
    prefetched: float
    pausing: float
    """`pause` was called."""
    resumed: float
    """`resume` returned."""
    applied: float
    answered: float
    calls: Mapping[str, float]
    """Seconds of each call within the pause: `hold` (`/pause`), `finish`, `reset`, `resume`."""
    timings: Mapping[str, float]
    """What the server's first rank measured: `fetch`, `stage`, `apply`."""

    @property
    def pause(self) -> Span:
        return Span(window="commit", began=self.pausing, ended=self.resumed)

    def parts(self) -> dict[str, float]:
        """Seconds of each of `PARTS`; together they are the whole path."""
        marks = (
            self.called,
            self.compared,
            self.published,
            self.noticed,
            self.prefetched,
            self.pausing,
            self.resumed,
            self.applied,
            self.answered,
        )
        return {name: ended - began for name, (began, ended) in zip(PARTS, pairwise(marks), strict=True)}

    def spans(self) -> list[Span]:
        """When it was published, staged and committed."""
        return [
            Span(window="publishing", began=self.called, ended=self.noticed),
            Span(window="staging", began=self.noticed, ended=self.pausing),
            self.pause,
        ]


class Bench:
    """A trainer and its publisher, a server, and what leads from one to the other."""

    def __init__(
        self, trainer: Trainer, store: Store, server: TimedServer, question: Mapping[str, Any], poll_s: float
    ) -> None:
        """Prepare; nothing is published yet.

        Args:
            question: the request whose answer ends an update.
        """
        self.server = server
        self._trainer, self._store, self._question, self._poll_s = trainer, store, question, poll_s
        self._device = next(iter(trainer.tensors.values())).device
        self._http = httpx.Client(base_url=server.url, timeout=300)
        self._publisher: Publisher | None = None
        self._head: Manifest | None = None

    def close(self) -> None:
        self._http.close()
        if self._publisher is not None:
            self._publisher.close()

    def anchor(self, scratch: Path, storage_options: Mapping[str, Any]) -> dict[str, Any]:
        """Publish and load version 0, all of the model; returns what that took."""
        self._answer()
        began = time.monotonic()
        self._publisher = Publisher(self._store, self._trainer.tensors, anchor_every=1_000_000)
        opened = time.monotonic()
        publication = self._publisher.publish_patch(0)
        self._head = publication.result()
        published = time.monotonic()
        self.server.init_weight_transfer(self._store.url, storage_options, scratch=str(scratch))
        ready = time.monotonic()
        self.server.apply(0)
        applied = time.monotonic()
        self._answer()
        status = self._status()
        spans = self.server.spans
        return {
            "num_elements": sum(spec.num_elements for spec in self._trainer.schema.tensors),
            "num_bytes": self._head.num_bytes,
            "open_s": opened - began,
            "publish_s": published - opened,
            "init_s": ready - published,
            "apply_s": applied - ready,
            "pause_s": spans["resume"][1] - spans["pause"][0],
            **{f"engine_{part}_s": seconds for part, seconds in status["timings"].items()},
        }

    def step(self, density: float) -> None:
        """Change the trainer's weights."""
        self._trainer.step(density)
        if self._device.type != "cpu":
            torch.cuda.synchronize(self._device)

    def update(self, density: float) -> Update:
        """Change the weights, publish them, and bring the server there."""
        self.step(density)
        return self.follow()

    def follow(self) -> Update:
        """Publish what changed, bring the server there, and return when it has answered.

        Raises:
            RuntimeError: it has answered, but does not hold that version.
        """
        assert self._publisher is not None and self._head is not None
        called = time.monotonic()
        publication = self._publisher.publish_patch(self._head.step + 1)
        compared = time.monotonic()
        while (found := history.following(self._store, self._head)) is None:
            if publication.done():
                # Or it failed, and this says why.
                publication.result()
            time.sleep(self._poll_s)
        noticed = time.monotonic()
        self.server.apply(found.version)
        applied = time.monotonic()
        self._answer()
        answered = time.monotonic()
        self._head = publication.result()
        assert self._head.version == found.version and self._head.delta is not None
        assert publication.publish_s is not None
        status, spans = self._status(), self.server.spans
        return Update(
            version=found.version,
            num_changed=self._head.delta.num_changed,
            payload_bytes=self._head.delta.num_bytes,
            called=called,
            compared=compared,
            # The driver may see the manifest before the publisher's clock has stopped.
            published=min(max(called + publication.publish_s, compared), noticed),
            noticed=noticed,
            prefetched=spans["prefetch"][1],
            pausing=spans["pause"][0],
            resumed=spans["resume"][1],
            applied=applied,
            answered=answered,
            calls={name: _length(spans[at]) for name, at in _CALLS.items()},
            timings=status["timings"],
        )

    def _answer(self) -> None:
        self._http.post("/v1/completions", json=self._question).raise_for_status()

    def _status(self) -> Mapping[str, Any]:
        """The first rank's, once all of them serve the head, whole."""
        assert self._head is not None
        status = self.server.status()
        if (status.serving, status.state_digest) != (self._head.version, self._head.state.total):
            raise RuntimeError(
                f"the server serves {status.serving} instead of {self._head.version}: {status.last_error}"
            )
        return status.ranks[0]


def _length(span: tuple[float, float]) -> float:
    return span[1] - span[0]


def path(updates: Sequence[Update]) -> dict[str, Any]:
    """Median seconds of each part, and of what the engine itself timed within `prefetch_s` and `pause_s`.

    Medians of parts do not add up to the median of the total.
    """
    totals = [update.answered - update.called for update in updates]
    pauses = [update.pause.seconds for update in updates]
    parts = [update.parts() for update in updates]
    return {
        "num_changed": int(statistics.median(update.num_changed for update in updates)),
        "payload_bytes": int(statistics.median(update.payload_bytes for update in updates)),
        "total_s": statistics.median(totals),
        "total_min_s": min(totals),
        "total_max_s": max(totals),
        **{name: statistics.median(part[name] for part in parts) for name in PARTS},
        "pause_min_s": min(pauses),
        "pause_max_s": max(pauses),
        **{
            f"engine_{part}_s": statistics.median(update.timings[part] for update in updates)
            for part in ("fetch", "stage", "apply")
        },
        **{f"{call}_s": statistics.median(update.calls[call] for update in updates) for call in _CALLS},
        "repeats": len(updates),
    }


# Updates under load.


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """Some updates of one density, with quiet before, between and after them."""

    density: float
    updates: Sequence[Update]
    quiet: Sequence[Span]

    def spans(self) -> list[Span]:
        return [*self.quiet, *(span for update in self.updates for span in update.spans())]


def _loaded(bench: Bench, shape: Shape, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of the server under load; they come when the load has ended."""
    questions = [question(shape, args, 1 + client) for client in range(args.concurrency)]
    with Load(bench.server.url, questions) as load:
        load.wait_until_steady()
        episodes = [_episode(bench, load, density, args) for density in args.densities]
        requests = load.stop()
    for episode in episodes:
        about = {"density": episode.density, "concurrency": args.concurrency}
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
        # Before the quiet, which it would disturb on a device that is shared.
        bench.step(density)
        rest()
        updates.append(bench.follow())
        rest()
    return Episode(density=density, updates=updates, quiet=quiet)


def analyse(episode: Episode, requests: Sequence[Request]) -> tuple[list[Gap], dict[str, Any]]:
    """Return the episode's gaps, and a row of what each window did to them.

    A stall is None where no answer was under way in any commit.
    """
    spans = episode.spans()
    began, ended = min(span.began for span in spans), max(span.ended for span in spans)
    found = [gap for gap in latency.gaps(requests) if gap.began < ended and began < gap.ended]
    windows = latency.sort_gaps(found, spans)
    each = [latency.longest(found, update.pause) for update in episode.updates]
    stalls = [stall for stall in each if stall is not None]
    pauses = [update.pause.seconds for update in episode.updates]
    row: dict[str, Any] = {
        "updates": len(episode.updates),
        "num_requests": len(requests),
        "in_flight": min(latency.num_clients(found, update.pause) for update in episode.updates),
        "quiet_tokens_per_s": latency.num_tokens(requests, episode.quiet)
        / sum(span.seconds for span in episode.quiet),
        "stall_s": statistics.median(stalls) if stalls else None,
        "stall_min_s": min(stalls, default=None),
        "stall_max_s": max(stalls, default=None),
        "pause_s": statistics.median(pauses),
        "engine_apply_s": statistics.median(update.timings["apply"] for update in episode.updates),
    }
    for window in get_args(Window):
        row[f"{window}_gaps"] = len(windows[window])
        row |= {f"{window}_{name}": value for name, value in latency.quantiles(windows[window]).items()}
    return found, row


def around(found: Sequence[Gap], episode: Episode, margin_s: float = 1.0) -> dict[str, Any]:
    """A row with the gaps around the update of the median stall; its times are relative to the pause."""
    stalls = [(latency.longest(found, update.pause) or 0.0, update) for update in episode.updates]
    stalls.sort(key=itemgetter(0))
    stall_s, update = stalls[(len(stalls) - 1) // 2]
    zero = update.pausing
    marks = {
        name: round(getattr(update, name) - zero, 5)
        for name in (
            "called",
            "compared",
            "published",
            "noticed",
            "prefetched",
            "pausing",
            "resumed",
            "answered",
        )
    }
    return {
        "version": update.version,
        "stall_s": stall_s,
        "marks": marks,
        "points": latency.series(
            found, zero=zero, began=update.called - margin_s, ended=update.resumed + margin_s
        ),
    }
