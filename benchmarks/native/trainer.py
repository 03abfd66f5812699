"""The trainer of case `native`, in a process of its own: it publishes, and sends through vLLM's own backends.

Every way makes the same changes, and the server must prove that it has them. patchstore goes first, and its
last version stays. Then the other ways flip the bits that a version of each density had flipped, back and
forth: after an odd number of transfers the server must not have the last version's bits, and after an even
number it must.
"""

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Literal

import httpx
import torch

from benchmarks.native.changes import Changes
from benchmarks.serving.updates import Bench, path
from benchmarks.support.child_process import arguments, messages, say
from benchmarks.support.shapes import SHAPES
from benchmarks.support.trainer import Trainer
from benchmarks.support.vllm_server import TimedServer
from patchstore import Store, open_store
from patchstore.errors import PatchstoreError, StateMismatch
from patchstore.follow.verify import verify_server
from patchstore.tensors.bits import bits

_VERIFIED_AT_ONCE = 1_000_000_000
"""Elements that the server digests in one call."""

Positions = Mapping[str, torch.Tensor]
"""Where a version changed each tensor, int32."""


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """Of one update, in seconds."""

    pause_s: float
    """From the call that pauses to the end of the one that resumes."""
    answer_s: float
    """From the first call to an answer of the new weights."""


def note(began: float, text: str) -> None:
    """Tell a person how far the run is."""
    print(f"[{time.monotonic() - began:6.1f} s] {text}", file=sys.stderr, flush=True)


class _Run:
    """A trainer, and a server that is brought to its weights."""

    def __init__(self, job: Mapping[str, Any], store: Store) -> None:
        self._job, self._store = job, store
        shape = SHAPES[job["shape"]]
        if job["layers"] is not None:
            shape = dataclasses.replace(shape, layers=job["layers"])
        self._device = torch.device(job["device"])
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._trainer = Trainer(shape, self._device, None)
        self._num_bytes = sum(tensor.nbytes for tensor in self._trainer.tensors.values())
        self._note(
            f"{len(self._trainer.tensors):,} tensors, {self._num_bytes / 1e9:.1f} GB on {self._device}"
        )
        self._http = httpx.Client(base_url=job["url"], timeout=job["patience_s"])
        self._version = 0
        self._changed: dict[float, Positions] = {}
        """Of the last version of each density."""

    def _note(self, text: str) -> None:
        note(self._job["began"], text)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each way and density, as soon as it is known."""
        with TimedServer(self._job["url"]) as server:
            yield from self._patchstore(server)
            # The publisher's memory becomes the other ways'.
            torch.cuda.empty_cache()
            for way in self._job["ways"]:
                if way != "patchstore":
                    yield from self._native(way, server)

    def _patchstore(self, server: TimedServer) -> Iterator[dict[str, Any]]:
        job = self._job
        snapshot = job["snapshot"] or self._where_it_fits()
        bench = Bench(self._trainer, self._store, server, job["question"], job["poll_s"], None, snapshot)
        with closing(bench):
            row = bench.publish_anchor()
            self._note(f"version 0 is stored, {row['publish_s']:.1f} s, snapshot on the {snapshot}")
            if set(job["ways"]) != {"patchstore"}:
                # Takes seconds, while the server starts.
                import benchmarks.native.senders  # noqa: F401
            next(messages())
            row |= bench.load_anchor(Path(job["scratch"]), {})
            self._note(f"the server has version 0, {row['init_s'] + row['apply_s']:.1f} s")
            yield {"row": "anchor", "snapshot": snapshot, **row}
            # The first update compiles and allocates, so it is not counted.
            bench.update(max(job["densities"]))
            self._note("patchstore: an update that is not counted")
            for density in job["densities"]:
                updates, times = [], []
                for _ in range(job["rounds"]):
                    step = bench.step(density)
                    update = bench.follow()
                    updates.append(update)
                    times.append(Times(update.pause.seconds, update.answered - update.called))
                    self._tell("patchstore", density, times[-1])
                self._version = update.version
                self._changed[density] = {patch.name: patch.indices for patch in step.patches}
                found = path(updates)
                yield {
                    **self._row("patchstore", density, times),
                    "num_changed": found["num_changed"],
                    "num_bytes": found["payload_bytes"],
                    "parts": {
                        name: each
                        for name, each in found.items()
                        if name in update.parts() or name.startswith("engine_")
                    },
                    **_judged({"at the end": (self._compare(server), "equal")}),
                }

    def _where_it_fits(self) -> Literal["device", "host"]:
        """Return where the publisher can keep a copy of the weights, beside a quarter for its work."""
        if self._device.type == "cuda":
            copies = 2.25 if torch.cuda.device_count() > 1 else 3.5
            if copies * self._num_bytes > torch.cuda.get_device_properties(self._device).total_memory:
                return "host"
        return "device"

    def _native(self, way: str, server: TimedServer) -> Iterator[dict[str, Any]]:
        from benchmarks.native.senders import open_sender

        self._use(way)
        send = open_sender(way, self._trainer.tensors, self._job["url"], self._job["patience_s"])
        self._note(f"{way}: connected")
        for density, changed in self._changed.items():
            num_changed = sum(at.numel() for at in changed.values())
            times: list[Times] = []
            first = ""
            # The first is not counted, and their number is even.
            for number in range(self._job["rounds"] // 2 * 2 + 2):
                self._flip(changed)
                patches = self._patches(changed) if way == "sparse_nccl" else ()
                if self._device.type == "cuda":
                    torch.cuda.synchronize()
                times.append(self._update(partial(send, patches)))
                self._tell(way, density, times[-1])
                if number == 0:
                    first = self._compare(server)
                    self._use(way)
            last = self._compare(server)
            self._use(way)
            yield {
                **self._row(way, density, times[1:]),
                "num_changed": num_changed,
                "num_bytes": 6 * num_changed if way == "sparse_nccl" else self._num_bytes,
                **_judged({"after one": (first, "changed"), "at the end": (last, "equal")}),
            }

    def _flip(self, changed: Positions) -> None:
        for name, at in changed.items():
            bits(self._trainer.tensors[name]).view(-1)[at.long()] ^= 1

    def _patches(self, changed: Positions) -> Sequence[Any]:
        from benchmarks.native.senders import as_patches

        found = []
        for name, at in changed.items():
            tensor = self._trainer.tensors[name]
            values = tensor.view(-1)[at.long()]
            found.append(Changes(name=name, shape=tuple(tensor.shape), indices=at, values=values))
        return as_patches(found)

    def _update(self, send: Callable[[], None]) -> Times:
        called = time.monotonic()
        self._post("/pause?mode=keep")
        send()
        self._post("/resume")
        resumed = time.monotonic()
        self._post("/v1/completions", self._job["question"])
        return Times(resumed - called, time.monotonic() - called)

    def _use(self, backend: str) -> None:
        self._post("/collective_rpc", {"method": "use_transfer", "args": [backend]})

    def _post(self, route: str, body: Mapping[str, Any] | None = None) -> None:
        self._http.post(route, json=body).raise_for_status()

    def _compare(self, server: TimedServer) -> str:
        """Return `equal` if the server has the bits of the last version, `changed` if not, or what failed."""
        try:
            self._use("delta")
            verify_server(self._store, server, self._version, num_elements=_VERIFIED_AT_ONCE)
        except StateMismatch:
            return "changed"
        except (PatchstoreError, httpx.HTTPError) as exc:
            return f"{type(exc).__name__}: {exc}"
        return "equal"

    def _tell(self, way: str, density: float, times: Times) -> None:
        self._note(f"{way}, {density:.2%}: pause {times.pause_s:.3f} s, answer after {times.answer_s:.3f} s")

    def _row(self, way: str, density: float, times: Sequence[Times]) -> dict[str, Any]:
        row: dict[str, Any] = {"row": "way", "way": way, "density": density, "rounds": len(times)}
        for name in ("pause", "answer"):
            seconds = [getattr(each, f"{name}_s") for each in times]
            row |= {
                f"{name}_s": statistics.median(seconds),
                f"{name}_min_s": min(seconds),
                f"{name}_max_s": max(seconds),
            }
        return row


def _judged(found: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """Return whether comparisons found what they had to, and what they found if not."""
    if all(said == due for said, due in found.values()):
        return {"is_exact": True}
    return {"is_exact": False, "found": {when: said for when, (said, _) in found.items()}}


def main() -> None:
    _, job = arguments()
    with closing(open_store(job["store"])) as store:
        for row in _Run(job, store).rows():
            say(**row)
    say(row="end")


if __name__ == "__main__":
    main()
