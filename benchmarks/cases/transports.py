"""Measure from publish to served through each kind of store, part by part, with the same changes.

A real `Publisher` is in one process. A real `Replica` is in another, and looks at the store as `patchstore
follow` does. Both read the host's monotonic clock, so that the parts add up to the total. Servers are on the
same machine, so a transfer costs only what clients and servers compute. With `--round-trip-ms` there is a
link of that length in between.
"""

import argparse
import os
import random
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from benchmarks.support import child_process
from benchmarks.support.child_process import Child
from benchmarks.support.store_kinds import KINDS, S3_SERVERS, Place, place, versions
from benchmarks.support.work_folder import work_folder
from patchstore import Publisher, Replica, Store, open_store
from patchstore.bucket import history
from patchstore.bucket.state_sums import state_total
from patchstore.follow.desired import HeadWatcher
from patchstore.stores import layout
from patchstore.stores.base import Chunk
from patchstore.tensors import state_digest
from patchstore.tensors.bits import bits

PARTS: Mapping[str, str] = MappingProxyType(
    {
        "compare_s": "the trainer waits: what changed",
        "encode_s": "digest of the change, encoding, and the payload's own digest",
        "upload_s": "the payload, beside what encoding takes, and the question whether all is there",
        "commit_s": "the manifest's create-only put",
        "notice_s": "until the follower has seen the manifest",
        "fetch_s": "the payload to a local file, its digest checked",
        "stage_s": "decode, and prove the state that the tensors would have",
        "write_s": "into the tensors",
    }
)
"""All parts from `publish_patch` to the new weights, in order, without gaps."""

_BYTES_A_CHANGE = {"gap": 4, "raw": 6}
_MAX_ELEMENTS = 32 << 20
"""Elements of the largest tensor: 64 MiB of bfloat16."""
_MIN_INTERVAL_S = 0.1
"""The wait of `patchstore follow` after a new version. Each look that finds none doubles it."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--mb", type=int, nargs="+", default=[100, 1000], help="megabytes of each payload")
    parser.add_argument(
        "--encoding", choices=list(_BYTES_A_CHANGE), default="gap", help="4 or 6 bytes a change"
    )
    parser.add_argument(
        "--share",
        type=float,
        default=0.5,
        help="of the elements that a version changes: the fewer, the larger the model beside its payloads, "
        "which is in memory three times",
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed versions; one before is left out")
    parser.add_argument(
        "--poll-s", type=float, default=2.0, help="longest wait between looks, as of `patchstore follow`"
    )
    parser.add_argument(
        "--s3-server", choices=S3_SERVERS, default=S3_SERVERS[0], help="behind s3fs and obstore"
    )
    parser.add_argument(
        "--round-trip-ms", type=float, default=0, help="an S3 server that is so far away; 0: on this machine"
    )
    parser.add_argument("--mbit-s", type=float, default=1000, help="of that link, in each direction")
    parser.add_argument("--folder", type=Path, help="to work in, on the disk that is to be measured")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row per kind and size. Weights that differ end the run."""
    if args.repeats < 1 or not 0 < args.share <= 1:
        raise SystemExit("--repeats must be at least 1, and --share a share")
    for mb in args.mb:
        for kind in args.kinds:
            with (
                work_folder(args.folder, "transports") as folder,
                place(
                    kind,
                    folder / "place",
                    s3_server=args.s3_server,
                    round_trip_ms=args.round_trip_ms,
                    mbit_s=args.mbit_s,
                ) as where,
            ):
                yield measure(where, folder, mb, args)


def measure(where: Place, folder: Path, mb: int, args: argparse.Namespace) -> dict[str, Any]:
    """Publish versions one after the other, each when the one before is served.

    Raises:
        RuntimeError: the follower's weights differ from the publisher's.
    """
    num_changed = mb * 1_000_000 // _BYTES_A_CHANGE[args.encoding]
    job = {
        "url": where.url,
        "options": dict(where.options),
        "num_elements": round(num_changed / args.share),
        "share": args.share,
        "encoding": args.encoding,
        "poll_s": args.poll_s,
        "scratch": str(folder),
    }
    # Random pauses, so that versions come at any moment between two looks of the follower.
    pause = random.Random(mb)
    updates = []
    publish, follow = (
        partial(Child, "benchmarks.cases.transports", role, job, where.environment(folder / role))
        for role in ("publish", "follow")
    )
    with publish() as publisher:
        publisher.hear()
        with follow() as follower:
            feed = follower.hear()["feed"]
            # The anchor, and one version that allocates buffers, are not timed.
            for number in range(args.repeats + 2):
                time.sleep(pause.uniform(0, args.poll_s) if number > 1 else 0)
                said = publisher.ask(do="publish")
                served = follower.hear()
                if served["version"] != said["version"]:
                    raise RuntimeError(f"version {said['version']} was published, but {served} came")
                if number > 1:
                    updates.append(said | served)
                # A server that keeps objects in memory would otherwise keep all versions.
                publisher.ask(do="forget")
            if (state := publisher.ask(do="digest")["state"]) != follower.ask(do="digest")["state"]:
                raise RuntimeError(f"the follower does not have the publisher's weights, {state}")
    return {
        "kind": where.kind,
        "server": where.server,
        "mb": mb,
        **summary(updates),
        "model_mib": 2 * job["num_elements"] / 2**20,
        "share": args.share,
        "encoding": args.encoding,
        "poll_s": args.poll_s,
        "round_trip_ms": args.round_trip_ms,
        "mbit_s": args.mbit_s if args.round_trip_ms else None,
        "has_feed": feed,
        "repeats": args.repeats,
        "state": state,
        "cores": os.cpu_count(),
        **versions(),
    }


def parts(update: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of each of `PARTS`; their sum is the total."""
    # The follower may see the manifest before the publisher has its answer.
    committed = min(update["committed"], update["noticed"])
    found = {
        "compare_s": update["compared"] - update["called"],
        "encode_s": update["upload"] - update["compared"] + update["produced_s"],
        "upload_s": update["commit"] - update["upload"] - update["produced_s"],
        "commit_s": committed - update["commit"],
        "notice_s": update["noticed"] - committed,
        "fetch_s": update["fetched_s"],
        "stage_s": update["staged"] - update["noticed"] - update["fetched_s"],
        "write_s": update["written"] - update["staged"],
    }
    assert found.keys() == PARTS.keys()
    return found


def summary(updates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the median of each part. Medians do not add up to the median of the total."""
    totals = [update["written"] - update["called"] for update in updates]
    each = [parts(update) for update in updates]
    return {
        "payload_bytes": int(statistics.median(update["payload_bytes"] for update in updates)),
        "num_changed": int(statistics.median(update["num_changed"] for update in updates)),
        "total_s": statistics.median(totals),
        "total_min_s": min(totals),
        "total_max_s": max(totals),
        **{name: statistics.median(part[name] for part in each) for name in PARTS},
        "notice_max_s": max(part["notice_s"] for part in each),
    }


# The publisher's process.


class TimedStore(Store):
    """Wraps a store, and keeps when the last payload and the last manifest were sent."""

    def __init__(self, inner: Store) -> None:
        self.url, self.single_writer = inner.url, inner.single_writer
        self._inner = inner
        self.marks: dict[str, float] = {}
        """By the monotonic clock: the start of `upload` and `commit`, the end of the commit (`committed`).
        `produced_s` is how long the upload waited for its chunks."""

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return self._inner.get(key, start, end)

    def size(self, key: str) -> int:
        return self._inner.size(key)

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        began = time.monotonic()
        self._inner.put(key, data, if_absent=if_absent)
        if layout.manifest_version(key) is not None:
            self.marks |= {"commit": began, "committed": time.monotonic()}

    def list(self, prefix: str = "") -> Iterator[str]:
        return self._inner.list(prefix)

    def delete(self, key: str) -> None:
        self._inner.delete(key)

    def upload(self, key: str, chunks: Iterable[Chunk]) -> None:
        self.marks |= {"upload": time.monotonic(), "produced_s": 0.0}
        self._inner.upload(key, self._timed(chunks))

    def _timed(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        began = time.monotonic()
        for chunk in chunks:
            self.marks["produced_s"] += time.monotonic() - began
            yield chunk
            began = time.monotonic()
        self.marks["produced_s"] += time.monotonic() - began


def _publish(job: Mapping[str, Any]) -> None:
    store = TimedStore(open_store(job["url"], **job["options"]))
    generator = torch.Generator().manual_seed(0)
    weights = _weights(job["num_elements"], generator)
    with Publisher(store, weights, encoding=job["encoding"], anchor_every=1_000_000) as publisher:
        child_process.say(ready=True)
        manifest = None
        for message in child_process.messages():
            if message["do"] == "publish":
                if manifest is not None:
                    _step(weights, job["share"], generator)
                called = time.monotonic()
                publication = publisher.publish_patch(0 if manifest is None else manifest.step + 1)
                compared = time.monotonic()
                manifest = publication.result()
                size = manifest.num_bytes if manifest.delta is None else manifest.delta.num_bytes
                changed = 0 if manifest.delta is None else manifest.delta.num_changed
                child_process.say(
                    version=manifest.version,
                    payload_bytes=size,
                    num_changed=changed,
                    called=called,
                    compared=compared,
                    **store.marks,
                )
            elif message["do"] == "forget":
                assert manifest is not None
                for part in (manifest.delta, manifest.anchor):
                    for payload in () if part is None else part.payloads:
                        store.delete(payload.key)
                child_process.say(forgot=True)
            else:
                child_process.say(state=_state(store, weights))


def _weights(num_elements: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    num = -(-num_elements // _MAX_ELEMENTS)
    sizes = [num_elements // num + (number < num_elements % num) for number in range(num)]
    return {
        f"layers.{number}.weight": torch.empty(size, dtype=torch.bfloat16).normal_(
            0, 0.02, generator=generator
        )
        for number, size in enumerate(sizes)
    }


def _step(weights: Mapping[str, torch.Tensor], share: float, generator: torch.Generator) -> None:
    """Flip the lowest bit of random elements."""
    for tensor in weights.values():
        chosen = torch.empty(tensor.shape, dtype=torch.int16).bernoulli_(share, generator=generator)
        bits(tensor).bitwise_xor_(chosen)


def _state(store: Store, weights: Mapping[str, torch.Tensor]) -> str:
    header = history.read_header(store)
    assert header is not None
    return state_total(header.schema, state_digest.of_tensors(header.schema, weights.items()))


# The follower's process.


def _follow(job: Mapping[str, Any]) -> None:
    store = open_store(job["url"], **job["options"])
    tensors: dict[str, torch.Tensor] = {}
    follower = Replica(store, tensors, scratch=Path(job["scratch"]))
    watcher, woken, asked = HeadWatcher(store), threading.Event(), threading.Event()
    threading.Thread(target=_listen, args=(woken, asked), daemon=True).start()
    child_process.say(feed=store.subscribe(woken.set) is not None)
    interval_s = _MIN_INTERVAL_S
    while True:
        woken.clear()
        if asked.is_set():
            asked.clear()
            child_process.say(state=_state(store, tensors))
        found = watcher.refresh()
        if found is None or found.version == follower.held:
            woken.wait(interval_s)
            interval_s = min(2 * interval_s, job["poll_s"])
            continue
        noticed = time.monotonic()
        staged = follower.stage(found.version)
        ready = time.monotonic()
        follower.apply(staged)
        written = time.monotonic()
        child_process.say(
            version=found.version,
            noticed=noticed,
            fetched_s=staged.timings["fetch"],
            staged=ready,
            written=written,
        )
        del staged
        interval_s = _MIN_INTERVAL_S


def _listen(woken: threading.Event, asked: threading.Event) -> None:
    for _ in child_process.messages():
        asked.set()
        woken.set()
    os._exit(1)


if __name__ == "__main__":
    role, given = child_process.arguments()
    {"publish": _publish, "follow": _follow}[role](given)
