"""Make golden buckets and vectors: `python tests/golden/make.py FOLDER`.

Every clock, name and random number is replaced, so the same release makes the same bytes. A bucket
that was committed is never made again: this script refuses to write where something is, and a new
case is made into an empty folder and copied here. See README.md.
"""

import hashlib
import json
import math
import sys
import uuid
from collections.abc import Callable
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch

from patchstore.bucket import history
from patchstore.bucket.records import Part, TensorSpec
from patchstore.codec import ENCODINGS
from patchstore.codec.context import pack
from patchstore.errors import PublishFailed
from patchstore.publish import commit
from patchstore.publish.publisher import Publisher
from patchstore.publish.sources.adapter import PeftAdapter
from patchstore.read import replay
from patchstore.stores import tries
from patchstore.stores.folder import FolderStore
from patchstore.tensors import state_digest
from patchstore.tensors.bits import TORCH_DTYPES, TensorPatch, bits, raw_bytes, spec_of, unsigned
from patchstore.testing.faults import Fault, FaultyStore
from tests.support import sharded
from tests.support.coded import coded_of, encode
from tests.support.stated import encoded as encode_one
from tests.support.stated import with_bridges

State = dict[str, torch.Tensor]
MAKERS: dict[str, Callable[[Path], None]] = {}


def bucket(make: Callable[[Path], None]) -> Callable[[Path], None]:
    MAKERS[make.__name__.replace("_", "-")] = make
    return make


NEWER = ("F4", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0")
"""Dtypes that came after the first buckets."""


def small_tensors() -> State:
    """A few elements of every dtype but the newer; float tensors begin with -0.0, infinity and NaNs."""
    tensors = {}
    for name, dtype in TORCH_DTYPES.items():
        if name in NEWER:
            continue
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


def noise(num: int, salt: int) -> torch.Tensor:
    """Return int64 [num], 0 to 2**24 - 1: the same numbers wherever and whenever."""
    mixed = torch.arange(1, num + 1) * 0x9E3779B1 + salt * 0x85EBCA6B
    for _ in range(2):
        mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D % 2**32
    return mixed >> 8


def weights(dtype: torch.dtype, *shape: int, salt: int = 0) -> torch.Tensor:
    """Between -0.03 and 0.03, so of many exponents; 64 times that in 8 bits."""
    scale = 2.0 if dtype.itemsize == 1 else 0.03
    values = (noise(math.prod(shape), salt) - 2**23).double() / 2**23 * scale
    return values.to(dtype).reshape(shape)


def move(
    tensor: torch.Tensor, salt: int, share: float, sizes: tuple[int, ...] = (1,), up_to: float = math.inf
) -> None:
    """Move a share of the elements of magnitudes of at most `up_to` by some steps, up or down."""
    flat = bits(tensor)
    chosen = (noise(len(flat), salt) < share * 2**24) & (tensor.double().abs().reshape(-1) <= up_to)
    at = chosen.nonzero().reshape(-1)
    by = torch.tensor(sizes)[noise(len(at), salt + 1) % len(sizes)] * (noise(len(at), salt + 2) % 2 * 2 - 1)
    flat[at] = (flat[at].to(torch.int64) + by).to(flat.dtype)


def publish(store: Any, tensors: State, changes: list[Callable[[], Any]], **options: Any) -> None:
    with Publisher(store, tensors, **{"dtype": None, "encoding": "gap", **options}) as writer:
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
def v1_codes(folder: Path) -> None:
    """The dtypes that came later: every code and pair of codes, changed and listed beside coded bf16."""
    tensors = {
        f"{name.lower()}.weight": torch.arange(256).to(torch.uint8).view(TORCH_DTYPES[name]).reshape(8, 2, 16)
        for name in NEWER
    }
    tensors["bf16.weight"] = weights(torch.bfloat16, 16, 16)

    def some() -> None:
        for number, tensor in enumerate(tensors.values()):
            bits(tensor)[number::37] += 1

    def every() -> None:
        for tensor in tensors.values():
            bits(tensor).copy_(bits(tensor).flip(0))

    publish(FolderStore(folder), tensors, [nothing, some], encoding="gap")
    publish(FolderStore(folder), tensors, [every], encoding="raw", resume=1)
    publish(FolderStore(folder), tensors, [some], encoding="context", resume="auto")


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
    fault = Fault(verb="upload", key="deltas/00000001-*", effect="truncate", times=tries.ATTEMPTS)
    tensors = {"weight": torch.arange(6, dtype=torch.float16)}
    with Publisher(FaultyStore(inner, fault), tensors, dtype=None, encoding="gap") as writer:
        for step in range(4):
            tensors["weight"][step] = -1
            try:
                writer.publish_patch(step).result()
            except PublishFailed:
                for left_over in [*inner.list("deltas/00000001-"), *inner.list("states/00000001-")]:
                    inner.delete(left_over)


@bucket
def v1_context(folder: Path) -> None:
    """Small steps; special values and large steps; nothing; back again; float32 alone; a scalar alone."""
    tensors = {
        "bf16.classes": weights(torch.bfloat16, 16, 40),
        "bf16.dense": weights(torch.bfloat16, 30),
        "bf16.still": weights(torch.bfloat16, 5, 4),
        "f16.levels": weights(torch.float16, 3, 32, 5),
        "f32.listed": weights(torch.float32, 6, 7),
        "f8_e4m3.ragged": weights(torch.float8_e4m3fn, 257, 257),
        "f8_e5m2.swapped": weights(torch.float8_e5m2, 48),
        "i8.listed": torch.arange(9, dtype=torch.int8),
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
        "zero-size": torch.empty(0, 4, dtype=torch.bfloat16),
    }

    def small_steps() -> None:
        move(tensors["bf16.classes"], 10, 0.5, up_to=2**-7)
        move(tensors["bf16.dense"], 20, 0.9, (1, 2, 5, 9, 17))
        move(tensors["f16.levels"], 30, 0.1, (1, 1, 1, 2, 3))
        bits(tensors["f16.levels"])[100] ^= 0x2000  # so far that Rice code escapes
        move(tensors["f32.listed"], 40, 0.2)
        move(tensors["f8_e4m3.ragged"], 50, 0.002)
        move(tensors["f8_e5m2.swapped"], 60, 0.95, (1, 1, 1, 2, 3))

    def special_values() -> None:
        new = torch.tensor([-0x8000, 0x7F80, -0x80, 0x7FC1, -0x3F, 1, 0], dtype=torch.int16)
        bits(tensors["bf16.classes"])[:70:10] = new
        bits(tensors["f16.levels"])[:30:6] = torch.tensor([-0x8000, 0x7C00, -0x400, 0x7E01, -1])
        bits(tensors["f8_e4m3.ragged"])[-3:] = torch.tensor([0x80, 0x7F, 0xFF])
        bits(tensors["f8_e5m2.swapped"])[:4] = torch.tensor([0x80, 0x7C, 0xFD, 0x00])
        move(tensors["bf16.dense"], 70, 0.3, (1, 1, 1, 5000))
        bits(tensors["f32.listed"])[1] = 0x7F800001
        bits(tensors["scalar"])[0] = -0x8000

    def back_from_special_values() -> None:
        bits(tensors["bf16.classes"])[:70:10] = torch.tensor([0, -0x80, 0x7F80, -1, 0x7FC1, -0x7FFF, -0x8000])
        bits(tensors["f16.levels"])[:30:6] = torch.tensor([0, -0x400, 0x7C00, 0x3C00, 0x7FFF])
        bits(tensors["f8_e4m3.ragged"])[-3:] = torch.tensor([0x00, 0xFF, 0x38])
        bits(tensors["f8_e5m2.swapped"])[:4] = torch.tensor([0x00, 0xFC, 0x7D, 0x80])

    def float32_alone() -> None:
        move(tensors["f32.listed"], 80, 0.1)
        tensors["i8.listed"].add_(1)

    def scalar_alone() -> None:
        tensors["scalar"].fill_(-1)

    changes = [nothing, small_steps, special_values, nothing, back_from_special_values, float32_alone]
    publish(FolderStore(folder), tensors, [*changes, scalar_alone], encoding="context")


@bucket
def v1_parts(folder: Path) -> None:
    """Three processes with parts of each tensor: rows, then columns, then boxes and levels; then `gap`."""
    old = {
        "bf16.experts": weights(torch.bfloat16, 3, 32, 20),
        "bf16.matrix": weights(torch.bfloat16, 48, 64, salt=1),
        "bf16.norm": weights(torch.bfloat16, 64, salt=2),
        "bf16.pairs": weights(torch.bfloat16, 2, 3, 6, 5, salt=3),
        "f32.listed": weights(torch.float32, 9, 7),
        "f8_e4m3.odd": weights(torch.float8_e4m3fn, 33, 50),
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
    }
    store = FolderStore(folder)
    publish(store, old, [nothing], encoding="context")
    specs = [spec_of(name, tensor) for name, tensor in sorted(old.items())]

    def step(ranks: list[list[Part]], encoding: str, salt: int) -> None:
        nonlocal old
        new = {name: tensor.clone() for name, tensor in old.items()}
        for number, tensor in enumerate(new.values()):
            move(tensor, salt + 10 * number, 0.1, (1, 1, 1, 2, 7), up_to=0.02)
        sharded.publish(store, ranks, old, new, encoding)
        old = new

    def cut(spec: TensorSpec, dim: int) -> list[Part]:
        if not spec.shape:
            return [Part.whole(spec)]
        side = spec.shape[dim % len(spec.shape)]
        return sharded.cut(spec, dim % len(spec.shape), [0, side // 5, side // 5 + side // 2, side])

    def ranks(dims: dict[str, int]) -> list[list[Part]]:
        found: list[list[Part]] = [[], [], []]
        for spec in specs:
            for rank, part in enumerate(cut(spec, dims.get(spec.name, dims[""]))):
                found[rank].append(part)
        return found

    step(ranks({"": 0}), "context", 100)
    step(ranks({"": -1}), "context", 200)
    # Two parts of one tensor in a payload; a part that is no box, and is listed beside coded ones.
    pairs = next(spec for spec in specs if spec.name == "bf16.pairs")
    mixed = ranks({"": -2, "bf16.pairs": 0})
    for held in mixed:
        held[:] = [part for part in held if part.spec is not pairs]
    mixed[0] += [Part(pairs, (0, 1, 0, 0), (2, 2, 6, 5))]
    mixed[1] += [Part(pairs, (0, 0, 0, 0), (1, 1, 6, 5)), Part(pairs, (1, 0, 0, 0), (1, 1, 6, 2))]
    mixed[2] += [Part(pairs, (1, 0, 0, 2), (1, 1, 6, 3))]
    step(mixed, "context", 300)
    step(ranks({"": 0, "bf16.matrix": 1}), "gap", 400)


@bucket
def v1_adapter(folder: Path) -> None:
    """An adapter of a base that is version 0 of a run: all of it changes, a little of it, nothing."""
    module = "base_model.model.layers.0"
    tensors = {
        f"{module}.q_proj.lora_A.weight": weights(torch.float32, 4, 48),
        f"{module}.q_proj.lora_B.weight": torch.zeros(48, 4),
        f"{module}.embed.lora_embedding_A": weights(torch.bfloat16, 4, 31),
        "base_model.model.lm_head.weight": weights(torch.bfloat16, 31, 16, salt=1),
    }
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj"]}
    config |= {"base_model_name_or_path": "golden/base", "revision": "main"}
    bits(tensors[f"{module}.q_proj.lora_B.weight"])[:3] = torch.tensor([-0x80000000, 0x7F800001, 0x7FC00001])

    def change(salt: int, share: float) -> None:
        for number, tensor in enumerate(tensors.values()):
            move(tensor, salt + 10 * number, share, (1, 2, 5000))

    with TemporaryDirectory() as place:
        base, files = Path(place) / "base", Path(place) / "files"
        publish(FolderStore(base), {"weight": weights(torch.bfloat16, 5)}, [nothing])
        files.mkdir()
        (files / "adapter_config.json").write_text(json.dumps(config))
        (files / "config.json").write_text("{}")  # of the base, which is left out
        adapter = PeftAdapter(base=f"{base}@0", base_may_change=True)
        changes = [nothing, lambda: change(100, 1.0), lambda: change(200, 0.02), nothing]
        publish(FolderStore(folder), tensors, changes, encoding="auto", adapter=adapter, files=files)


def expected(folder: Path) -> dict[str, Any]:
    """Per version the SHA-256 of each tensor's bytes and of each file that is not weights."""
    store = FolderStore(folder)
    newest = history.head(store)
    assert newest is not None
    versions = {}
    for version in range(newest.version + 1):
        with TemporaryDirectory() as out:
            replay.replay(store, version, out=Path(out) / "v")
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
                    "shape": list(spec.listed_shape),
                    "sha256": sha,
                }
    return {"files": files, "tensors": tensors}


def vectors() -> dict[str, Any]:
    """Digest sums and encoded positions, as numbers."""
    digests = []
    for name, dtype in TORCH_DTYPES.items():
        for size in () if name in NEWER else (0, 1, 5):
            data = ((torch.arange(size * dtype.itemsize) * 89 + 3) % 256).to(torch.uint8)
            tensor = (data % 2).bool() if name == "BOOL" else data.view(dtype)
            digests.append(
                {
                    "dtype": name,
                    "bytes": bytes(raw_bytes(tensor)).hex(),
                    "sums": state_digest.of_tensor(tensor).hex(),
                }
            )
    for position in (0, 65_535, 2**31 - 1, 2**31, 2**40):
        sums = state_digest.of_elements(torch.tensor([position]), torch.tensor([0x1234], dtype=torch.int16))
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
        for name, encoding in ((name, ENCODINGS[name].index) for name in ("raw", "gap")):
            if name == "gap" and num_elements > 10**6:
                continue
            spec = spec_of("t", torch.empty(num_elements, dtype=torch.int8, device="meta"))
            stated = with_bridges(encoding, torch.tensor(changed, dtype=torch.int64))
            patch = TensorPatch(name="t", indices=stated, values=torch.zeros(len(stated), dtype=torch.int8))
            idx = encode_one(encoding, patch, spec).idx
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
    return {"coded": coded(), "digests": digests, "encoded": encoded}


def coded() -> list[dict[str, Any]]:
    """Changes of small tensors and the bytes that encoding `context` makes of them."""
    found: list[dict[str, Any]] = []

    def add(
        name: str,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        share: float,
        sizes: tuple[int, ...] = (1,),
        up_to: float = math.inf,
        far: int = 0,
    ) -> None:
        old = weights(dtype, *shape, salt=len(found))
        new = old.clone()
        move(new, len(found), share, sizes, up_to)
        bits(new)[new.numel() // 2] ^= far
        found.append(coded_vector(name, old, new))

    add("sparse", torch.bfloat16, (60,), 0.05)
    add("sparse, larger steps", torch.bfloat16, (16, 6), 0.2, (1, 1, 1, 2, 3))
    add("sparse, an escape", torch.bfloat16, (160,), 0.15, (1, 2, 3), far=0x2000)
    add("several classes", torch.bfloat16, (16, 20), 0.7, up_to=2**-7)
    add("levels", torch.float16, (2, 1, 16, 3), 0.2, (1, 2))
    add("dense", torch.float16, (20,), 0.8, (1, 2, 5, 9, 17))
    add("dense, an escape", torch.float16, (40,), 1.0, (4, 5, 6, 9), far=0x2000)
    add("dense, swapped", torch.float8_e4m3fn, (16, 2), 0.95, (1, 1, 1, 2, 3))
    add("8 bits, an escape", torch.float8_e5m2, (70,), 0.5, (1, 2, 3), far=0x40)
    add("a scalar", torch.bfloat16, (), 1.0, (3,))
    old = weights(torch.bfloat16, 8)
    special = torch.tensor([-0x8000, 0, 0x7F80, -0x80, 0x7FC1, -0x3F, 1, -1], dtype=torch.int16)
    bits(old)[:] = special
    new = old.clone()
    bits(new)[:] = special.flip(0)
    found.append(coded_vector("special values", old, new))
    return found


def coded_vector(name: str, old: torch.Tensor, new: torch.Tensor) -> dict[str, Any]:
    spec = spec_of("t", old)
    positions = (bits(old) != bits(new)).nonzero().reshape(-1)
    stored = encode(spec, unsigned(old), positions.numpy(), unsigned(new)[positions.numpy()])
    table = pack(coded_of([stored]))
    return {
        "name": name,
        "dtype": spec.dtype,
        "shape": list(spec.shape),
        "old": bytes(raw_bytes(old)).hex(),
        "positions": positions.tolist(),
        "new": bytes(raw_bytes(bits(new)[positions])).hex(),
        "lo": stored.lo,
        "rows": stored.rows.tolist(),
        "lengths": stored.lengths.tolist(),
        "data": stored.data.tobytes().hex(),
        "table": table.hex(),
    }


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
            mock.patch("patchstore.publish.open.check_create_only"),
            mock.patch("patchstore.publish.open.now", return_value="2026-01-31T12:00:00.000Z"),
            mock.patch.object(commit, "now", return_value="2026-01-31T12:00:01.000Z"),
            mock.patch.object(commit, "writer_id", return_value="golden"),
            mock.patch.object(tries, "FIRST_PAUSE_S", 0.0),
        ):
            maker(path)
        (path / ".tmp").rmdir()
        sums[name] = expected(path)
    write("expected.json", sums)
    write("vectors.json", vectors())


if __name__ == "__main__":
    make(Path(sys.argv[1]))
