"""One version on its way from the trainer to an answer of the server, part by part."""

import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import httpx
import torch
from safetensors.torch import save_file

from benchmarks.serving.latency import Span
from benchmarks.support.trainer import Step, Trainer
from benchmarks.support.vllm_server import TimedServer
from patchstore import Manifest, Publication, Publisher, Store
from patchstore.bucket import history

PARTS: Mapping[str, str] = {
    "compare_s": "the trainer waits: what changed",
    "store_s": "encode, upload, commit",
    "notice_s": "until the driver sees the version",
    "prefetch_s": "fetch, decode, translate, digest",
    "prove_s": "delta_prove",
    "pause_s": "pause and reset the prefix cache, write, resume",
    "end_s": "the driver's last mark, where the pause's end did not remove it",
    "answer_s": "a request of one token",
}
"""All parts from `publish_patch` to the first answer of the new weights, in order, without gaps."""

CALLS = {"hold": "pause", "finish": "finish", "resume": "resume"}
"""Calls within the pause: name in a row -> name in `TimedServer.spans`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One version and its times, by `time.monotonic`."""

    version: int
    num_changed: int
    payload_bytes: int
    called: float
    """`publish_patch` was called."""
    compared: float
    """`publish_patch` returned."""
    published: float
    """The manifest was committed."""
    noticed: float
    prefetched: float
    pausing: float
    """`pause` was called; without a pause, the call that writes."""
    resumed: float
    """`resume` returned; without a pause, the call that writes."""
    applied: float
    answered: float
    calls: Mapping[str, float]
    """Seconds of each of `CALLS`."""
    staging_bytes: int
    """Of device memory, at its peak, that the server's first rank took beside the weights."""
    timings: Mapping[str, float]
    """Seconds that the server's first rank measured: `fetch`, `stage`, `apply`."""

    @property
    def pause(self) -> Span:
        return Span(window="commit", began=self.pausing, ended=self.resumed)

    def parts(self) -> dict[str, float]:
        """Return the seconds of each of `PARTS`; their sum is the whole path."""
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
        """Return when the version was published, staged and committed."""
        return [
            Span(window="publishing", began=self.called, ended=self.noticed),
            Span(window="staging", began=self.noticed, ended=self.pausing),
            self.pause,
        ]


class Bench:
    """A trainer, its publisher, and a server that is brought to each version."""

    def __init__(
        self,
        trainer: Trainer,
        store: Store,
        server: TimedServer,
        question: Mapping[str, Any],
        poll_s: float,
        form: str | None,
        snapshot: Literal["device", "host"],
    ) -> None:
        """Prepare; nothing is published yet.

        Args:
            question: the request whose answer ends an update.
            poll_s: how often the driver looks for a version; 0: the trainer drives, and need not look.
            form: of FP8 in which versions are published; None for bf16.
            snapshot: as of `Publisher`.
        """
        self.server = server
        self._trainer, self._store, self._question, self._poll_s = trainer, store, question, poll_s
        self._form, self._snapshot = form, snapshot
        self._device = next(iter(trainer.tensors.values())).device
        self._http = httpx.Client(base_url=server.url, timeout=300)
        self._publisher: Publisher | None = None
        self._head: Manifest | None = None

    def close(self) -> None:
        self._http.close()
        if self._publisher is not None:
            self._publisher.close()

    def anchor(self, scratch: Path, storage_options: Mapping[str, Any]) -> dict[str, Any]:
        """Publish and load version 0, all of the model; return the times."""
        self._answer()
        return self.publish_anchor() | self.load_anchor(scratch, storage_options)

    def publish_anchor(self) -> dict[str, Any]:
        """Publish version 0, for which no server need run; return the times."""
        before = self._device_bytes()
        began = time.monotonic()
        self._publisher = Publisher(
            self._store,
            self._trainer.tensors,
            anchor_every=1_000_000,
            quantization=self._form,
            snapshot=self._snapshot,
        )
        opened = time.monotonic()
        publication = self._publisher.publish_patch(0)
        self._head = publication.result()
        return {
            "num_elements": sum(spec.num_elements for spec in self._trainer.schema.tensors),
            "num_bytes": self._head.num_bytes,
            "publisher_device_bytes": self._device_bytes() - before,
            "open_s": opened - began,
            "publish_s": time.monotonic() - opened,
        }

    def load_anchor(self, scratch: Path, storage_options: Mapping[str, Any]) -> dict[str, Any]:
        """Bring the server to version 0; return the times."""
        began = time.monotonic()
        # The first answer takes a second or two, as vLLM looks at its machine.
        self.server.status()
        asked = time.monotonic()
        self.server.init_weight_transfer(self._store.url, storage_options, scratch=str(scratch))
        ready = time.monotonic()
        self.server.apply(0)
        applied = time.monotonic()
        self._answer()
        status = self._status()
        spans = self.server.spans
        return {
            "first_status_s": asked - began,
            "init_s": ready - asked,
            "apply_s": applied - ready,
            "pause_s": spans["resume"][1] - spans["pause"][0],
            **{f"engine_{part}_s": seconds for part, seconds in status["timings"].items()},
        }

    def reload(self, model: Path, weights: dict[str, torch.Tensor]) -> float:
        """Have vLLM load weights from a folder by itself; return the seconds that takes.

        Args:
            model: the folder that the server was started from.
        """
        folder = model.with_name("newest")
        shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file(weights, folder / "model.safetensors")
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        began = time.monotonic()
        self._http.post("/collective_rpc", json=call).raise_for_status()
        return time.monotonic() - began

    def _device_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0

    def step(self, density: float) -> Step:
        """Change the trainer's weights."""
        step = self._trainer.step(density)
        if self._device.type != "cpu":
            torch.cuda.synchronize(self._device)
        return step

    def update(self, density: float) -> Update:
        """Change the weights, publish them, and bring the server to them."""
        self.step(density)
        return self.follow()

    def follow(self) -> Update:
        """Publish the changes, bring the server to them, and return when it has answered.

        Raises:
            RuntimeError: the server has answered, but does not serve that version.
        """
        assert self._publisher is not None and self._head is not None
        called = time.monotonic()
        publication = self._publisher.publish_patch(self._head.step + 1)
        compared = time.monotonic()
        version = self._seen(publication)
        noticed = time.monotonic()
        self.server.apply(version)
        applied = time.monotonic()
        self._answer()
        answered = time.monotonic()
        self._head = publication.result()
        assert self._head.version == version and self._head.delta is not None
        assert publication.publish_s is not None
        status, spans = self._status(), self.server.spans
        return Update(
            version=version,
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
            calls={name: _length(spans[at]) for name, at in CALLS.items()},
            staging_bytes=status["staging_bytes"],
            timings=status["timings"],
        )

    def _seen(self, publication: Publication) -> int:
        """Return the number of a version that is being published, once the driver knows that it exists."""
        assert self._head is not None
        if not self._poll_s:
            return publication.result().version
        while (found := history.following(self._store, self._head)) is None:
            if publication.done():
                # Raises if the publication failed.
                publication.result()
            time.sleep(self._poll_s)
        return found.version

    def _answer(self) -> None:
        self._http.post("/v1/completions", json=self._question).raise_for_status()

    def _status(self) -> Mapping[str, Any]:
        """Return the first rank's status, after checking that the server serves the head."""
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
    """Return median seconds of each part, and of the engine's own times within `prefetch_s` and `pause_s`.

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
        **{f"{call}_s": statistics.median(update.calls[call] for update in updates) for call in CALLS},
        "staging_bytes": int(statistics.median(update.staging_bytes for update in updates)),
        "repeats": len(updates),
    }
