"""One program of a soak. It prints JSON objects, one a line.

    python -m benchmarks.soak.part trainer '{"url": ..., "versions": 2000, ...}'

The grace period of collected payloads is shortened here, or nothing would be collected within a soak.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from patchstore.bucket import notes

notes.GRACE, notes.CLOCK_MARGIN = timedelta(seconds=20), timedelta(seconds=1)

import torch  # noqa: E402 -- after the grace period, which the modules below copy

from patchstore import Publisher, Replica, Store, open_store  # noqa: E402
from patchstore.bucket import digests, history  # noqa: E402
from patchstore.errors import PatchstoreError  # noqa: E402
from patchstore.ops.compact.service import Compactor  # noqa: E402
from patchstore.ops.retention import Retention, collect, retire  # noqa: E402
from patchstore.stores import tries  # noqa: E402
from patchstore.tensors.bits import raw_bytes  # noqa: E402
from patchstore.testing.faults import Fault, FaultyStore  # noqa: E402

tries.FIRST_PAUSE_S = 0.01
_RETRY_S = 0.02
_SHAPES = {"embed.weight": (256, 64), "layer.weight": (128, 128), "layer.bias": (128,), "norm.weight": (64,)}


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return a digest of all bits."""
    hasher = digests.Hasher()
    for name in sorted(tensors):
        hasher.update(name.encode())
        hasher.update(raw_bytes(tensors[name]))
    return hasher.digest()


def faulty(job: dict[str, Any]) -> FaultyStore:
    """Open the store with requests that fail, lose their answers, hang, or leave things out of a listing."""
    chance = job["chance"]

    def fault(verb: Any, effect: Any, share: float = 1.0) -> Fault:
        return Fault(verb=verb, effect=effect, times=None, chance=chance * share, delay_s=3.0)

    return FaultyStore(
        open_store(job["url"]),
        *(fault(verb, "fail-before") for verb in ("get", "size", "put", "list", "upload")),
        *(fault(verb, "fail-after") for verb in ("put", "upload", "delete")),
        fault("put", "exists"),
        fault("upload", "truncate"),
        fault("list", "stale"),
        fault("*", "delay", 0.2),
        seed=os.getpid(),
    )


def patiently(work: Callable[[], Any], failures: dict[str, int]) -> Any:
    """Do something until it succeeds."""
    while True:
        try:
            return work()
        except PatchstoreError as exc:
            failures[exc.kind] = failures.get(exc.kind, 0) + 1
            time.sleep(_RETRY_S)


def train(job: dict[str, Any]) -> None:
    """Publish until there are so many versions; what was trained last is read back from the store."""
    store, failures = faulty(job), dict[str, int]()
    while patiently(lambda: _published(store, job), failures) < job["versions"]:
        pass
    say(done=True, failures=failures)


def _published(store: Store, job: dict[str, Any]) -> int:
    tensors: dict[str, torch.Tensor] = {}
    if history.read_header(store) is None:
        torch.manual_seed(0)
        tensors = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in _SHAPES.items()}
    else:
        Replica(store, tensors).update()
    version = -1
    with Publisher(store, tensors, resume="auto", anchor_every=job["anchor_every"]) as publisher:
        while version < job["versions"]:
            time.sleep(job["step_s"])
            for tensor in tensors.values():
                flat = tensor.view(torch.int16).view(-1)
                flat[torch.randint(0, flat.numel(), (max(1, flat.numel() // 100),))] ^= 1
            manifest = publisher.publish_patch(version + 1).result()
            version = manifest.version
            say(version=version, total=manifest.state.total)
    return version


def follow(job: dict[str, Any]) -> None:
    """Keep tensors at the newest version, and tell memory and descriptors; at the end, the digest."""
    store, failures = faulty(job), dict[str, int]()
    replica = patiently(lambda: Replica(store, {}), failures)
    told = 0.0
    while True:
        update = patiently(replica.update, failures)
        if time.monotonic() - told > 1:
            told = time.monotonic()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            say(
                held=update.version,
                mib=pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
                descriptors=len(list(Path("/proc/self/fd").iterdir())),
            )
        if update.version >= job["versions"]:
            say(held=update.version, digest=digest(dict(replica.tensors)), failures=failures)
            return
        time.sleep(job["pause_s"])


def compact(job: dict[str, Any]) -> None:
    """Add anchors and rollups for ever."""
    store, failures = faulty(job), dict[str, int]()
    compactor = Compactor(store, anchor_every=job["anchor_every"])
    while True:
        patiently(lambda: list(compactor.compact()), failures)
        time.sleep(1)


def keep(job: dict[str, Any]) -> None:
    """Retire old versions and delete their payloads for ever."""
    store, failures = faulty(job), dict[str, int]()
    policy = Retention(keep_last=job["keep_last"], keep_every=job["keep_every"])

    def once() -> None:
        retire(store, policy, dry_run=False)
        collect(store, dry_run=False)

    while True:
        patiently(once, failures)
        time.sleep(2)


def prove(job: dict[str, Any]) -> None:
    """Tell what the store has, then verify all versions with the command; exits as it does."""
    from patchstore.cli import main as cli

    store = open_store(job["url"])
    replica = Replica(store, {})
    newest = replica.update().version
    totals = {number: history.read_manifest(store, number).state.total for number in range(newest + 1)}
    say(head=digest(dict(replica.tensors)), totals=totals)
    sys.argv = ["patchstore", "verify", job["url"], "--all"]
    cli.main()


def main() -> None:
    role, job = sys.argv[1], json.loads(sys.argv[2])
    roles = {
        "trainer": train,
        "follower": follow,
        "compactor": compact,
        "collector": keep,
        "prover": prove,
    }
    roles[role](job)


if __name__ == "__main__":
    main()
