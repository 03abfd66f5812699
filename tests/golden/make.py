"""Make golden buckets and vectors: `python tests/golden/make.py FOLDER`.

Every clock, name and random number is replaced, so the same release makes the same bytes. A bucket
that was committed is never made again: this script refuses to write where something is, and a new
case is made into an empty folder and copied here. See README.md.
"""

import hashlib
import json
import sys
import uuid
from collections.abc import Callable
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch

from patchstore import committer, digest, log, publisher, rebuild
from patchstore.encodings import ENCODINGS
from patchstore.errors import PublishFailed
from patchstore.publisher import Publisher
from patchstore.stores.folder import FolderStore
from patchstore.tensors import TORCH_DTYPES, TensorPatch, bits, raw_bytes, spec_of
from patchstore.testing.faults import Fault, FaultyStore

State = dict[str, torch.Tensor]
MAKERS: dict[str, Callable[[Path], None]] = {}


def bucket(make: Callable[[Path], None]) -> Callable[[Path], None]:
    MAKERS[make.__name__.replace("_", "-")] = make
    return make


def small_tensors() -> State:
    """A few elements of every dtype; the float tensors begin with -0.0, infinity and NaNs with payloads."""
    tensors = {}
    for name, dtype in TORCH_DTYPES.items():
        size = dtype.itemsize
        data = (torch.arange(6 * size) * 37 % 251).to(torch.uint8)
        tensors[f"{name.lower()}.weight"] = (
            (data % 2).bool() if name == "BOOL" else data.view(dtype).reshape(2, 3)
        )
    bits(tensors["bf16.weight"])[:4] = torch.tensor([-0x8000, 0x7F80, 0x7FC1, -0x3F], dtype=torch.int16)
    bits(tensors["f32.weight"])[:3] = torch.tensor([-0x80000000, 0x7F800001, 0x7FC00001], dtype=torch.int32)
    tensors["scalar"] = torch.tensor(1.5, dtype=torch.bfloat16)
    tensors["zero-size"] = torch.empty(0, 4)
    return tensors


def publish(store: Any, tensors: State, changes: list[Callable[[], Any]], **options: Any) -> None:
    with Publisher(store, tensors, **{"dtype": None, **options}) as writer:
        for step, change in enumerate(changes):
            change()
            writer.publish_patch(step=100 * step).result()


def nothing() -> None:
    """A step that changes no weight."""


@bucket
def v1_gap(folder: Path) -> None:
    big = torch.zeros(140_000, dtype=torch.int8)
    tensors = {**small_tensors(), "big": big, "tied-to-big": big}

    def far_apart() -> None:
        big[torch.tensor([3, 65_539, 139_999])] = torch.tensor([1, 2, 3], dtype=torch.int8)

    def every_dtype() -> None:
        for name, tensor in tensors.items():
            if name.endswith(".weight"):
                bits(tensor)[-2:] = bits(tensor)[:2]

    publish(FolderStore(folder), tensors, [nothing, far_apart, nothing, every_dtype])


@bucket
def v1_raw(folder: Path) -> None:
    tensors = small_tensors()

    def every_dtype() -> None:
        for name, tensor in tensors.items():
            if name.endswith(".weight"):
                bits(tensor)[-2:] = bits(tensor)[:2]

    def special_values() -> None:
        bits(tensors["scalar"])[0] = -0x8000
        bits(tensors["f64.weight"])[1] = (0x7FF << 52) + 1

    publish(FolderStore(folder), tensors, [nothing, every_dtype, special_values, nothing], encoding="raw")


@bucket
def v1_resumed(folder: Path) -> None:
    """Versions 0 to 2; 3 goes back to 1; 4; 5 fences, 6 is an anchor of whatever weights; 7."""
    store = FolderStore(folder)
    tensors = {"norm": torch.ones(4), "weight": torch.arange(12, dtype=torch.float32).reshape(3, 4)}
    options = {"dtype": torch.bfloat16}
    publish(
        store,
        tensors,
        [nothing, tensors["weight"][0].neg_, lambda: tensors["norm"].mul_(3)],
        **options,
    )
    tensors["norm"].div_(3)
    publish(store, tensors, [tensors["weight"][1].neg_], resume=1, **options)
    tensors["weight"].mul_(1.5)
    publish(store, tensors, [nothing, tensors["norm"][0].neg_], resume="anchor", **options)


@bucket
def v1_sharded(folder: Path) -> None:
    """Anchors of two files, with config and index; every second version has anchor and delta."""
    tensors = {"a": torch.arange(6, dtype=torch.bfloat16), "b": torch.arange(20, dtype=torch.bfloat16)}
    with TemporaryDirectory() as checkpoint:
        (Path(checkpoint) / "config.json").write_text('{"model_type": "golden"}\n')
        options = {"files": checkpoint, "anchor_every": 2, "max_shard_bytes": 40}
        changes = [nothing, *(lambda: tensors["b"][3:5].add_(1) for _ in range(3))]
        publish(FolderStore(folder), tensors, changes, **options)


@bucket
def v1_recovered(folder: Path) -> None:
    """The delta of step 1 was never stored, so version 1 is step 2, as an anchor without a delta."""
    inner = FolderStore(folder)
    fault = Fault(verb="upload", key="deltas/00000001-*", effect="truncate", times=committer.ATTEMPTS)
    tensors = {"weight": torch.arange(6, dtype=torch.float16)}
    with Publisher(FaultyStore(inner, fault), tensors, dtype=None) as writer:
        for step in range(4):
            tensors["weight"][step] = -1
            try:
                writer.publish_patch(step).result()
            except PublishFailed:
                for left_over in [*inner.list("deltas/00000001-")]:
                    inner.delete(left_over)


def expected(folder: Path) -> dict[str, Any]:
    """Per version the SHA-256 of each tensor's bytes and of each file that is not weights."""
    store = FolderStore(folder)
    newest = log.head(store)
    assert newest is not None
    versions = {}
    for version in range(newest.version + 1):
        with TemporaryDirectory() as out:
            rebuild.replay(store, version, out=Path(out) / "v")
            versions[str(version)] = replayed(Path(out) / "v")
    return versions


def replayed(folder: Path) -> dict[str, Any]:
    from safetensors import safe_open

    tensors, files = {}, {}
    for path in sorted(folder.iterdir()):
        if path.suffix != ".safetensors":
            files[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
            continue
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                tensor = file.get_tensor(name)
                spec = spec_of(name, tensor)
                sha = hashlib.sha256(raw_bytes(tensor)).hexdigest()
                tensors[name] = {
                    "file": path.name,
                    "dtype": spec.dtype,
                    "shape": list(spec.shape),
                    "sha256": sha,
                }
    return {"files": files, "tensors": tensors}


def vectors() -> dict[str, Any]:
    """Digest sums and encoded positions, as numbers."""
    digests = []
    for name, dtype in TORCH_DTYPES.items():
        for size in (0, 1, 5):
            data = ((torch.arange(size * dtype.itemsize) * 89 + 3) % 256).to(torch.uint8)
            tensor = (data % 2).bool() if name == "BOOL" else data.view(dtype)
            digests.append(
                {
                    "dtype": name,
                    "bytes": bytes(raw_bytes(tensor)).hex(),
                    "sums": digest.of_tensor(tensor).hex(),
                }
            )
    for position in (0, 65_535, 2**31 - 1, 2**31, 2**40):
        sums = digest.of_elements(torch.tensor([position]), torch.tensor([0x1234], dtype=torch.int16))
        digests.append({"dtype": "I16", "bytes": "3412", "position": position, "sums": sums.hex()})
    encoded = []
    for num_elements, changed in (
        (1, []),
        (1, [0]),
        (10, [3, 4, 9]),
        (65_537, [65_535]),
        (65_537, [65_536]),
        (200_001, [3, 65_539, 200_000]),
        (200_001, [0, 65_536, 131_073, 196_608]),
        (2**31 - 1, [2**31 - 2]),
        (2**31, [5, 2**31 - 1]),
    ):
        for name, encoding in ENCODINGS.items():
            if name == "gap" and num_elements > 10**6:
                continue
            spec = spec_of("t", torch.empty(num_elements, dtype=torch.int8, device="meta"))
            stated = encoding.stated(torch.tensor(changed, dtype=torch.int64))
            patch = TensorPatch(name="t", indices=stated, values=torch.zeros(len(stated), dtype=torch.int8))
            idx = encoding.encode(patch, spec).idx
            encoded.append(
                {
                    "encoding": name,
                    "num_elements": num_elements,
                    "changed": changed,
                    "stated": stated.tolist(),
                    "dtype": spec_of("t", idx).dtype,
                    "idx": idx.tolist(),
                }
            )
    return {"digests": digests, "encoded": encoded}


def make(folder: Path) -> None:
    numbers = count(1)

    def pinned() -> uuid.UUID:
        return uuid.UUID(hashlib.sha256(b"golden %d" % next(numbers)).hexdigest()[:32])

    def write(name: str, record: Any) -> None:
        with (folder / name).open("x") as file:
            file.write(json.dumps(record, indent=1, sort_keys=True) + "\n")

    sums = {}
    for name, maker in MAKERS.items():
        path = folder / name
        path.mkdir(parents=True)  # raises where there is one already
        numbers = count(1)
        with (
            mock.patch.object(uuid, "uuid4", pinned),
            mock.patch.object(publisher, "prove_create_only"),
            mock.patch.object(publisher, "now", return_value="2026-01-31T12:00:00.000Z"),
            mock.patch.object(committer, "now", return_value="2026-01-31T12:00:01.000Z"),
            mock.patch.object(committer, "writer_id", return_value="golden"),
            mock.patch.object(committer, "FIRST_PAUSE_S", 0.0),
        ):
            maker(path)
        (path / ".tmp").rmdir()
        sums[name] = expected(path)
    write("expected.json", sums)
    write("vectors.json", vectors())


if __name__ == "__main__":
    make(Path(sys.argv[1]))
