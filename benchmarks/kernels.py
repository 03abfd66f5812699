"""Time the kernels of a publication and of an update alone, each beside a floor or what plain torch does.

No store, no server and no transport: weights and changes are random, on one GPU. A floor is what the memory
or the bus takes for the same bytes, measured by the same run; nothing is set against a data sheet.

Before a shape's first figure, what the kernels find is compared with what plain torch does; a difference ends
the run.
"""

import argparse
import gc
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch

from benchmarks.shapes import SHAPES, Shape
from patchstore.encodings import EncodedTensor
from patchstore.fetch import Deltas
from patchstore.kernels import reference
from patchstore.model import Schema, TensorSpec
from patchstore.tensors import TensorPatch, bits

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:
    # Other cases do without; this one says so when it runs.
    triton = tl = None
    constexpr = Any

if TYPE_CHECKING:
    from patchstore.kernels.compare import Order, Tiles
    from vllm_plugin.device import DeviceWeights, Exchanges

Row = dict[str, Any]
Role = Literal["ours", "peer", "floor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One thing that is timed."""

    role: Role
    about: str
    beside: str | None = None
    """The measure of the same run that it is divided by."""


PUBLISHER: Mapping[str, Measure] = MappingProxyType(
    {
        "read_both": Measure(role="floor", about="a kernel that reads the weights and the snapshot"),
        "copy_payload": Measure(role="floor", about="a pinned copy of the payload's size to the device"),
        "copy_back": Measure(role="floor", about="the payload to pinned memory, as it is published"),
        "copy_snapshot": Measure(role="floor", about="a pinned copy of the host snapshot to the device"),
        "torch_nonzero": Measure(role="peer", about="(a != b).nonzero() per tensor", beside="read_both"),
        "torch_gaps": Measure(role="peer", about="gaps, values and digests per tensor in torch"),
        "compare": Measure(role="ours", about="compare, compact, update the snapshot", beside="read_both"),
        "count": Measure(role="ours", about="count what changed"),
        "encode": Measure(role="ours", about="encode as gaps, and digest", beside="torch_gaps"),
        "compare_host": Measure(
            role="ours", about="compare with a snapshot in host memory", beside="copy_snapshot"
        ),
    }
)
ENGINE: Mapping[str, Measure] = MappingProxyType(
    {
        "read_weights": Measure(role="floor", about="a kernel that reads the live weights"),
        "copy_payload": PUBLISHER["copy_payload"],
        "torch_from_gaps": Measure(role="peer", about="positions from gaps per tensor in torch"),
        "torch_scatter": Measure(role="peer", about="scatter_ per parameter, of decoded positions"),
        "upload": Measure(role="ours", about="a payload from pageable memory", beside="copy_payload"),
        "stage": Measure(role="ours", about="stage it: upload, decode, translate", beside="copy_payload"),
        "sum_gaps": Measure(role="ours", about="how far each tile of gaps advances"),
        "count_held": Measure(role="ours", about="how many changes each tile has for this rank"),
        "translate": Measure(role="ours", about="find targets, read old values, digest both"),
        "stage_device": Measure(
            role="ours", about="stage, without upload and tables", beside="torch_from_gaps"
        ),
        "exchange": Measure(role="ours", about="write new values, keep old ones", beside="torch_scatter"),
        "commit": Measure(role="ours", about="exchange, and wait for its verdict", beside="torch_scatter"),
        "digest": Measure(role="ours", about="digest all live weights", beside="read_weights"),
    }
)
MEASURES: Mapping[str, Mapping[str, Measure]] = MappingProxyType({"publisher": PUBLISHER, "engine": ENGINE})
"""By part."""

WIDTH = 2
"""Bytes of an element: bfloat16."""
MIN_DENSITY = 0.0005
"""From here on the gaps that are drawn need no bridges: a longer one than 65,535 is not drawn."""
READ_WORDS = 2048
"""Words that one program of a floor reads: 16 KiB."""
COPY_BYTES = 1 << 30
"""A floor of the bus is measured on at most so much, and scaled: its rate does not change from there on."""
FLUSH_BYTES = 256 << 20
"""Written before every timed call, so that nothing is in the L2 cache, and the host gets ahead."""
FLIP_ELEMENTS = 1 << 26
"""Changed at a time."""
SLOW_MS = 2000.0
"""Peers, and what the host has a part in, are not repeated beyond so much."""
SPARE_BYTES = 3 << 30
"""Of temporaries, beside what is counted."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape", choices=list(SHAPES), nargs="+", default=["qwen3-8b"], help="of the models"
    )
    parser.add_argument(
        "--densities",
        type=float,
        nargs="+",
        default=[0.003, 0.01, 0.03],
        help="share of elements that a version changes",
    )
    parser.add_argument("--repeats", type=int, default=7, help="timed calls of each; interpreted: 1")
    parser.add_argument(
        "--parts", choices=list(MEASURES), nargs="+", default=list(MEASURES), help="`engine` needs vLLM"
    )
    parser.add_argument("--host-gib", type=float, default=8.0, help="of the snapshot in host memory, at most")


def run(args: argparse.Namespace) -> Iterator[Row]:
    """A row about each shape, then one for each measure and density."""
    device = _device()
    if any(not MIN_DENSITY <= density <= 0.5 for density in args.densities):
        raise SystemExit(f"densities must be from {MIN_DENSITY} to 0.5")
    for name in args.shape:
        bench = Bench(SHAPES[name], device, args.repeats)
        yield bench.about()
        for part in args.parts:
            bench.part = part
            try:
                if part == "publisher":
                    yield from _publisher(bench, args.densities, int(args.host_gib * 2**30))
                else:
                    yield from _engine(bench, args.densities)
            except Short as exc:
                yield bench.skipped(str(exc))
            gc.collect()


def _device() -> torch.device:
    if triton is None:
        raise SystemExit("this case times Triton kernels, and Triton is not installed here")
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit(
            "this case times kernels on a GPU, and there is none; TRITON_INTERPRET=1 and --shape tiny show "
            "that it works"
        )
    return torch.device("cpu")


class Short(Exception):
    """There is not enough memory, or something else is not there, for some measures."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What each timed call took."""

    ms: Sequence[float]

    def scaled(self, factor: float) -> "Spent":
        return Spent([each * factor for each in self.ms])


class Bench:
    """The clock and the rows of one shape."""

    part = ""

    def __init__(self, shape: Shape, device: torch.device, repeats: int) -> None:
        self.shape, self.device = shape, device
        self.specs = tuple(
            TensorSpec(name=name, dtype="BF16", shape=size) for name, size in sorted(shape.tensors().items())
        )
        self.is_gpu = device.type == "cuda"
        self._repeats = repeats if self.is_gpu else 1
        self._flush = torch.empty(FLUSH_BYTES if self.is_gpu else 0, dtype=torch.uint8, device=device)
        self._medians: dict[tuple[str, str, float | None], float] = {}

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs)

    def about(self) -> Row:
        return {
            "shape": self.shape.name,
            "device": self._place(),
            "triton": triton.__version__,
            "num_tensors": len(self.specs),
            "num_elements": sum(spec.num_elements for spec in self.specs),
            "num_bytes": self.num_bytes,
            "repeats": self._repeats,
        }

    def _place(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.is_gpu else "Triton's interpreter"

    def skipped(self, reason: str, density: float | None = None) -> Row:
        print(f"skipped: {self.part} of {self.shape.name}: {reason}", file=sys.stderr)
        return {
            "part": self.part,
            "skipped": reason,
            "shape": self.shape.name,
            "density": density,
            "device": self._place(),
        }

    def row(
        self,
        measure: str,
        spent: Spent,
        *,
        density: float | None = None,
        num_bytes: int | None = None,
        num_changed: int | None = None,
        num_tensors: int | None = None,
        num_elements: int | None = None,
    ) -> Row:
        """Return a row, beside what was measured before.

        Args:
            num_tensors: if not all of them, with `num_elements`.
        """
        ms = statistics.median(spent.ms)
        self._medians[self.part, measure, density] = ms
        beside = MEASURES[self.part][measure].beside
        other = None
        if beside is not None:
            keys = ((self.part, beside, density), (self.part, beside, None))
            other = next((self._medians[key] for key in keys if key in self._medians), None)
        return {
            "part": self.part,
            "measure": measure,
            "shape": self.shape.name,
            "density": density,
            "ms": ms,
            "min_ms": min(spent.ms),
            "max_ms": max(spent.ms),
            "repeats": len(spent.ms),
            "bytes": num_bytes,
            "gb_s": None if num_bytes is None else num_bytes / ms / 1e6,
            "beside": None if other is None else beside,
            "ratio": None if other is None else ms / other,
            "num_tensors": len(self.specs) if num_tensors is None else num_tensors,
            "num_elements": (
                sum(spec.num_elements for spec in self.specs) if num_elements is None else num_elements
            ),
            "num_changed": num_changed,
            "device": self._place(),
        }

    def time(
        self,
        call: Callable[[], object],
        *,
        before: Callable[[], object] | None = None,
        is_wall: bool = False,
        is_slow: bool = False,
    ) -> Spent:
        """Time calls, after one that is left out.

        Args:
            before: what each call needs, untimed.
            is_wall: by the host's clock, until the device is done; otherwise by the device's.
            is_slow: stop when all took `SLOW_MS`, even after the first.
        """
        spent: list[float] = []
        while len(spent) <= self._repeats and not (is_slow and sum(spent) > SLOW_MS):
            if before is not None:
                before()
            self._flush.zero_()
            spent.append(self._wall(call) if is_wall or not self.is_gpu else self._events(call))
        return Spent(spent[1:] or spent)

    def _events(self, call: Callable[[], object]) -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        call()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended))

    def _wall(self, call: Callable[[], object]) -> float:
        self._settle()
        began = time.perf_counter()
        call()
        self._settle()
        return 1000 * (time.perf_counter() - began)

    def _settle(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def need(self, num_bytes: int, what: str) -> None:
        """Raises Short where the device has not so much free, and some spare."""
        if not self.is_gpu:
            return
        gc.collect()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        if free < num_bytes + SPARE_BYTES:
            raise Short(
                f"{what} needs {(num_bytes + SPARE_BYTES) / 1e9:.1f} GB, and {free / 1e9:.1f} are free"
            )

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.is_gpu)

    def read(self, tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor] = ()) -> tuple[Spent, int]:
        """Time reading whole blocks of memory, and of others of the same sizes; also returns the bytes."""
        kernel, first, second = _reader(), self._blocks(tensors), self._blocks(others)
        result = torch.zeros(1, dtype=torch.int64, device=self.device)

        def call() -> None:
            kernel[len(first),](
                first, second, result, words=READ_WORDS, has_second=len(second) > 0, num_warps=8
            )

        return self.time(call), (len(first) + len(second)) * READ_WORDS * 8

    def _blocks(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Addresses of all whole blocks."""
        size = READ_WORDS * 8
        parts = [
            torch.arange(tensor.nbytes // size) * size + tensor.data_ptr()
            for tensor in tensors
            if tensor.data_ptr() % 16 == 0
        ]
        return torch.cat([torch.zeros(0, dtype=torch.int64), *parts]).to(self.device)

    def copy(self, num_bytes: int) -> Spent:
        """Time a copy from pinned memory to the device."""
        size = max(1, min(num_bytes, COPY_BYTES))
        host, there = self.pinned(size), torch.empty(size, dtype=torch.uint8, device=self.device)
        return self.time(lambda: there.copy_(host, non_blocking=True)).scaled(num_bytes / size)


def _read(first, second, result, words: constexpr, has_second: constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0)
    lanes = tl.arange(0, words)
    found = tl.load(tl.multiple_of(tl.load(first + place).to(tl.pointer_type(tl.int64)), 16) + lanes)
    if has_second:
        found ^= tl.load(tl.multiple_of(tl.load(second + place).to(tl.pointer_type(tl.int64)), 16) + lanes)
    total = tl.sum(found)
    # Never, in random weights; but what is loaded has to be of use.
    if total == 0x123456789ABCDEF:
        tl.store(result, total)


@cache
def _reader() -> Any:
    return triton.jit(_read)


def _sample(num: int, sizes: Sequence[int]) -> list[int]:
    """A few of so many tensors, the largest among them."""
    return sorted({0, num // 4, num // 2, 3 * num // 4, num - 1, max(range(num), key=sizes.__getitem__)})


def _right(is_right: bool, what: str) -> None:
    """Raises SystemExit where kernels and plain torch differ, so that times mean nothing."""
    if not is_right:
        raise SystemExit(f"{what}: the kernels differ from plain torch")


# Publisher.


class Trained:
    """Weights of a trainer, side by side in one block, and their snapshot in another."""

    def __init__(self, bench: Bench) -> None:
        from patchstore.kernels import compare

        self.bench = bench
        self.sizes = [spec.num_bytes for spec in bench.specs]
        num = len(self.sizes)
        self.tiles = compare.cut(self.sizes, [WIDTH] * num, bench.device)
        self.weights = _noise(self.tiles.first_bytes[-1], bench.device)
        self.snapshot = torch.empty_like(self.weights)
        self._random = torch.Generator(bench.device)
        places = torch.arange(2 * num, device=bench.device)
        self.order: Order = compare.Order(
            tensors=places // 2,
            widths=torch.full_like(places, WIDTH),
            idx=places[::2].contiguous(),
            val=places[1::2].contiguous(),
            wide=torch.zeros(num, dtype=torch.int32, device=bench.device),
        )

    def flip(self, density: float) -> None:
        """Change the lowest bit of random elements; the next call with this density changes them back."""
        self._random.manual_seed(0)
        for part in self.weights.view(torch.int16).split(FLIP_ELEMENTS):  # type: ignore[no-untyped-call]
            drawn = torch.rand(part.shape, device=part.device, generator=self._random)
            part.bitwise_xor_(drawn < density)

    def tensor(self, memory: torch.Tensor, index: int) -> torch.Tensor:
        """The elements of a tensor in the weights, or in a snapshot."""
        start = self.tiles.first_bytes[index]
        return memory[start : start + self.sizes[index]].view(torch.int16)

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for index in range(len(self.sizes)):
            yield self.tensor(self.weights, index), self.tensor(self.snapshot, index)


class Comparison:
    """The first tensors of some weights against a snapshot of them, in any memory."""

    def __init__(self, trained: Trained, tiles: "Tiles", snapshot: torch.Tensor, capacity: int) -> None:
        from patchstore.kernels import compare

        self._kernels, self._snapshot, self.tiles = compare, snapshot, tiles
        self.found = compare.Found(tiles, capacity)
        base = trained.weights.data_ptr()
        addresses = [base + start for start in tiles.first_bytes[:-1]]
        device, slow = trained.bench.device, tiles.slow(addresses)
        self._addresses = torch.tensor(addresses, device=device)
        self._picked = torch.tensor(slow, dtype=torch.int32, device=device)

    def compare(self) -> None:
        address = self._snapshot.data_ptr()
        everything, slow = range(self.tiles.num_tiles), range(len(self._picked))
        self._kernels.compare(self.found, self._addresses, self._picked, address, address, everything, slow)

    def count(self) -> list[int]:
        """Return the changed elements of each element width, here of one.

        Raises:
            SystemExit: room was short, and what came of it would be no comparison.
        """
        if int(self.found.cursor) > self.found.capacity:
            raise SystemExit(f"{int(self.found.cursor)} changed words, with room for {self.found.capacity}")
        nums: list[int] = self._kernels.count(self.found).tolist()
        return nums

    def again(self) -> int:
        """Compare once more; returns how many words then differ."""
        self.found.clear()
        self.compare()
        return int(self.found.cursor)


def _noise(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(num_bytes // 8, dtype=torch.int64, device=device).random_().view(torch.uint8)


def _publisher(bench: Bench, densities: Sequence[float], host_bytes: int) -> Iterator[Row]:
    bench.need(2 * bench.num_bytes + bench.num_bytes // 64, "weights and their snapshot")
    trained = Trained(bench)
    spent, num_bytes = bench.read([trained.weights], [trained.snapshot])
    yield bench.row("read_both", spent, num_bytes=num_bytes)
    host = _host_snapshot(trained, host_bytes)
    if host is not None:
        there = trained.snapshot[: len(host)]
        spent = bench.time(lambda: there.copy_(host, non_blocking=True))
        yield bench.row("copy_snapshot", spent, num_bytes=len(host))
    is_first = True
    for density in densities:
        try:
            yield from _publication(trained, density, is_first=is_first)
            is_first = False
            if host is not None:
                yield _over_the_bus(trained, density, host)
        except Short as exc:
            yield bench.skipped(str(exc), density)


def _room(tiles: "Tiles", density: float) -> int:
    """How many words change, and some more."""
    return int(1.02 * tiles.first_bytes[-1] / 8 * (1 - (1 - density) ** (8 // WIDTH))) + 4096


def _host_snapshot(trained: Trained, host_bytes: int) -> torch.Tensor | None:
    """Pinned memory for a snapshot of as many of the first tensors as fit there; None if none does."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Half, as what is pinned is rounded up to a power of 2.
    fits = [size for size in trained.tiles.first_bytes[1:] if size <= min(host_bytes, free // 2)]
    return trained.bench.pinned(fits[-1]) if fits else None


def _publication(trained: Trained, density: float, *, is_first: bool) -> Iterator[Row]:
    """Measure one version."""
    from patchstore.kernels import compare

    bench, tiles = trained.bench, trained.tiles
    capacity = _room(tiles, density)
    payload_bytes = int(1.02 * 2 * WIDTH * density * bench.num_bytes / WIDTH) + bench.num_bytes // 65536
    bench.need(18 * capacity + payload_bytes + 150 * tiles.num_tiles, f"changing {density:g}")
    trained.snapshot.copy_(trained.weights)
    trained.flip(density)
    comparison = Comparison(trained, tiles, trained.snapshot, capacity)
    expected = _expected(trained) if is_first else {}
    changed: list[torch.Tensor] = []
    peers = []
    try:
        bench.need(2 * 8 * int(density * bench.num_bytes / WIDTH) + max(trained.sizes), "torch_nonzero")
        peers = [("torch_nonzero", bench.time(lambda: _nonzero(trained, changed), is_slow=True))]
    except Short as exc:
        yield bench.skipped(str(exc), density)

    def change() -> None:
        comparison.found.clear()
        trained.flip(density)

    # From where the snapshot is up to date, so that every call has the same changes before it.
    comparison.compare()
    num_changed = sum(comparison.count())
    if changed:
        _right(sum(map(len, changed)) == num_changed, f"{num_changed} changed elements")
    block = _encoded(trained, comparison)
    for index, wanted in expected.items():
        _right(_same(trained, block, index, wanted), bench.specs[index].name)
    spent = bench.time(comparison.compare, before=change)
    row = partial(bench.row, density=density, num_changed=num_changed)
    for name, peer in peers:
        yield row(name, peer, num_bytes=2 * bench.num_bytes)
    yield row("compare", spent, num_bytes=2 * bench.num_bytes)
    yield row("count", bench.time(lambda: compare.count(comparison.found)))
    _right([num_changed] == comparison.count(), "changed elements, compared again")
    if changed:
        spent = bench.time(lambda: _torch_gaps(trained, changed), is_slow=True)
        yield row("torch_gaps", spent, num_bytes=block.numel())
        changed.clear()
    address = trained.snapshot.data_ptr()
    spent = bench.time(lambda: compare.encode(comparison.found, trained.order, address, block, gaps=True))
    yield row("encode", spent, num_bytes=block.numel())
    yield row("copy_payload", bench.copy(block.numel()), num_bytes=block.numel())
    pinned = bench.pinned(block.numel())
    spent = bench.time(lambda: pinned.copy_(block, non_blocking=True))
    yield row("copy_back", spent, num_bytes=block.numel())
    _right(comparison.again() == 0, "the snapshot")


def _expected(trained: Trained) -> dict[int, tuple[torch.Tensor, torch.Tensor, list[int]]]:
    """What a few tensors come to in a payload: gaps, values, and by how much their sums grow."""
    found = {}
    for index in _sample(len(trained.sizes), trained.sizes):
        new, old = (trained.tensor(memory, index) for memory in (trained.weights, trained.snapshot))
        stated = reference.bridge(reference.differing(new, old))
        after, before = reference.sum_at(stated, new[stated]), reference.sum_at(stated, old[stated])
        grown = [(a - b) % 2**64 for a, b in zip(after, before, strict=True)]
        found[index] = reference.to_gaps(stated).view(torch.int16), new[stated], grown
    return found


def _encoded(trained: Trained, comparison: Comparison) -> torch.Tensor:
    from patchstore.kernels import compare

    room = comparison.tiles.max_data_bytes(comparison.count(), gaps=True)
    block = torch.empty(
        compare.head_bytes(len(trained.sizes)) + room, dtype=torch.uint8, device=trained.bench.device
    )
    compare.encode(comparison.found, trained.order, trained.snapshot.data_ptr(), block, gaps=True)
    return block


def _same(
    trained: Trained, block: torch.Tensor, index: int, wanted: tuple[torch.Tensor, torch.Tensor, list[int]]
) -> bool:
    """Whether a payload's block has this of a tensor."""
    num_tensors = len(trained.sizes)
    head = block[: 24 * num_tensors].view(torch.int64)
    nums = head[:num_tensors]
    gaps, values, grown = wanted
    sums = head[num_tensors:].view(num_tensors, 2)[index].tolist()
    if int(nums[index]) != len(gaps) or [each % 2**64 for each in sums] != grown:
        return False
    first = 2 * int(nums[:index].sum())
    held = block[24 * num_tensors :].view(torch.int16)[first : first + 2 * len(gaps)]
    return torch.equal(held, torch.cat([gaps, values]))


def _nonzero(trained: Trained, changed: list[torch.Tensor]) -> None:
    changed.clear()
    changed.extend((new != old).nonzero()[:, 0] for new, old in trained.pairs())


def _torch_gaps(trained: Trained, changed: Sequence[torch.Tensor]) -> None:
    for (new, old), indices in zip(trained.pairs(), changed, strict=True):
        stated = reference.bridge(indices)
        reference.to_gaps(stated)
        reference.sum_at(stated, new[stated])
        reference.sum_at(stated, old[stated])


def _over_the_bus(trained: Trained, density: float, host: torch.Tensor) -> Row:
    """Measure a comparison with a snapshot in pinned memory. It moves the device's snapshot, too."""
    from patchstore.kernels import compare

    bench = trained.bench
    num = trained.tiles.first_bytes.index(len(host))
    tiles = compare.cut(trained.sizes[:num], [WIDTH] * num, bench.device)
    comparison = Comparison(trained, tiles, host, _room(tiles, density))
    host.copy_(trained.weights[: len(host)])

    def change() -> None:
        comparison.found.clear()
        trained.flip(density)

    spent = bench.time(comparison.compare, before=change, is_slow=True)
    num_changed = sum(comparison.count())
    trained.snapshot[: len(host)].copy_(host)
    for index in _sample(num, trained.sizes[:num]):
        new, old = (trained.tensor(memory, index) for memory in (trained.weights, trained.snapshot))
        _right(torch.equal(new, old), f"{bench.specs[index].name} in host memory")
    return bench.row(
        "compare_host",
        spent,
        density=density,
        num_bytes=len(host),
        num_changed=num_changed,
        num_tensors=num,
        num_elements=sum(spec.num_elements for spec in bench.specs[:num]),
    )


# Engine.

_FUSED = (
    (re.compile(r"\.experts\.\d+\.(gate|up)_proj\b"), ".experts.w13"),
    (re.compile(r"\.experts\.\d+\.down_proj\b"), ".experts.w2"),
    (re.compile(r"\.(q|k|v)_proj\b"), ".qkv_proj"),
    (re.compile(r"\.(gate|up)_proj\b"), ".gate_up_proj"),
)
"""Which names share a parameter, as in vLLM, one after the other."""


class Served(torch.nn.Module):
    """Random weights in the parameters that vLLM has for them on one rank, with a loader that copies."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__()
        tensors = shape.tensors()
        groups: dict[str, list[str]] = {}
        for name in tensors:
            fused = next((p.sub(by, name) for p, by in _FUSED if p.search(name)), name)
            groups.setdefault(fused, []).append(name)
        self.places: dict[str, tuple[torch.nn.Parameter, int]] = {}
        """Of each name its parameter, and the place there of its first element."""
        for fused, names in groups.items():
            sizes = [prod(tensors[name]) for name in names]
            memory = torch.empty(sum(sizes), dtype=torch.bfloat16, device=device).normal_(0, 0.02)
            rest = tensors[names[0]][1:]
            size = (shape.experts, -1, *rest) if ".experts." in fused else (-1, *rest)
            parameter = torch.nn.Parameter(memory.view(size), requires_grad=False)
            self.register_parameter(fused.replace(".", "_"), parameter)
            for name, first in zip(names, accumulate(sizes, initial=0), strict=False):
                self.places[name] = parameter, first

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.held(name, tensor.numel()).copy_(tensor.reshape(-1))

    def held(self, name: str, num_elements: int) -> torch.Tensor:
        parameter, first = self.places[name]
        return parameter.data.view(-1)[first : first + num_elements]


def _load(model: torch.nn.Module, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    assert isinstance(model, Served)
    model.load_weights(weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A version's changes, of the tensors that have any."""

    names: Sequence[str]
    positions: Sequence[torch.Tensor]
    """int64 [num] of each."""
    block: torch.Tensor
    """int16, on the device: gaps and new values of each in turn, as a payload has them."""

    @property
    def num_changed(self) -> int:
        return sum(map(len, self.positions))

    def pieces(self, block: torch.Tensor) -> Sequence[torch.Tensor]:
        """Gaps and values of each in turn, of a copy of the block."""
        return _split(block, [len(each) for each in self.positions for _ in range(2)])

    def values(self) -> Sequence[torch.Tensor]:
        return self.pieces(self.block)[1::2]

    def patch(self, at: int) -> TensorPatch:
        values = self.values()[at].view(torch.bfloat16)
        return TensorPatch(name=self.names[at], indices=self.positions[at].to(torch.int32), values=values)


class Stored(Deltas):
    """The delta of one version in memory, encoded as `gap`."""

    def __init__(self, drawn: Drawn, block: torch.Tensor) -> None:
        super().__init__([])
        pieces = drawn.pieces(block)
        self.entries = {
            name: ("in memory", EncodedTensor(idx=gaps.view(torch.uint16), val=values.view(torch.bfloat16)))
            for name, gaps, values in zip(drawn.names, pieces[::2], pieces[1::2], strict=True)
        }

    def stored(self, encoding: str) -> list[Mapping[str, tuple[str, EncodedTensor]]] | None:
        return [self.entries] if encoding == "gap" else None


def _draw(specs: Sequence[TensorSpec], density: float, device: torch.device) -> Drawn:
    """Draw independent changes: their distances follow a geometric distribution."""
    random = torch.Generator(device).manual_seed(0)
    starts = torch.tensor(list(accumulate((s.num_elements for s in specs), initial=0)), device=device)
    expected = int(starts[-1]) * density
    gaps = torch.empty(int(expected + 6 * expected**0.5 + 8), dtype=torch.float32, device=device)
    at = gaps.geometric_(density, generator=random).clamp_(min=1).cumsum(0, dtype=torch.int64) - 1
    at = at[: int(torch.searchsorted(at, starts[-1]))]
    bounds = torch.searchsorted(at, starts)
    counts = bounds.diff()
    at -= torch.repeat_interleave(starts[:-1], counts)
    distances = at.clone()
    distances[1:] -= at[:-1] + 1
    firsts = bounds[:-1][counts > 0]
    distances[firsts] = at[firsts]
    assert int(distances.max()) <= reference.MAX_GAP
    values = torch.randint(-(2**15), 2**15, at.shape, dtype=torch.int16, device=device, generator=random)
    nums = [num for num in counts.tolist() if num]
    gaps = distances.to(torch.uint16).view(torch.int16)
    both = zip(_split(gaps, nums), _split(values, nums), strict=True)
    return Drawn(
        names=[spec.name for spec, num in zip(specs, counts.tolist(), strict=True) if num],
        positions=_split(at, nums),
        block=torch.cat([part for pair in both for part in pair]),
    )


def _split(flat: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    return list(flat.split(sizes))  # type: ignore[no-untyped-call]


def _engine(bench: Bench, densities: Sequence[float]) -> Iterator[Row]:
    try:
        from vllm_plugin.derived import Derived
        from vllm_plugin.device import DeviceWeights, Exchanges
        from vllm_plugin.live import LiveWeights
        from vllm_plugin.mapping import WeightMap
    except ImportError as exc:
        raise Short(str(exc)) from exc
    bench.need(bench.num_bytes, "live weights")
    model = Served(bench.shape, bench.device)
    schema = Schema(tensors=bench.specs, tied={})
    live, plain = (kind([model], _load, Derived([], lambda _: None)) for kind in (DeviceWeights, LiveWeights))
    assert isinstance(live, DeviceWeights)
    traced = live.trace(schema)
    mapped = WeightMap(schema, traced, [live.share(traced)])
    live.follow(mapped)
    plain.follow(mapped)
    names = [spec.name for spec in bench.specs]
    claims = live.claims(names)
    sample = [names[i] for i in _sample(len(names), [spec.num_elements for spec in bench.specs])]
    _right({name: claims[name] for name in sample} == plain.claims(sample), "digests of live weights")
    spent, num_bytes = bench.read([parameter.data for parameter in model.parameters()])
    yield bench.row("read_weights", spent, num_bytes=num_bytes)
    spent = bench.time(lambda: _digest(live))
    yield bench.row("digest", spent, num_bytes=bench.num_bytes)
    is_first = True
    for density in densities:
        # Bytes a change: 8 as drawn and 20 more while it is, 4 stored and sent again, 8 staged and staged
        # again, 10 of the peer.
        try:
            bench.need(50 * int(density * bench.num_bytes / WIDTH), f"changing {density:g}")
        except Short as exc:
            yield bench.skipped(str(exc), density)
            continue
        drawn = _draw(bench.specs, density, bench.device)
        stored = Stored(drawn, drawn.block)
        change = live.stage_deltas(stored, drawn.names, keep_old=True)
        assert isinstance(change, Exchanges)
        if is_first:
            is_first = False
            patches = [drawn.patch(at) for at in _sample(len(drawn.names), list(map(len, drawn.positions)))]
            wanted = plain.stage(patches, keep_old=True)
            growth = change.growth
            rows = zip(growth.slices.tolist(), growth.before.tolist(), growth.after.tolist(), strict=True)
            sums = {number: (*before, *after) for number, before, after in rows}
            growth = wanted.growth
            for i, number in enumerate(growth.slices.tolist()):
                right = (*growth.before[i].tolist(), *growth.after[i].tolist())
                _right(sums[number] == right, patches[i].name)
        yield from _staging(bench, live, drawn, density)
        yield from _device_part(bench, drawn, change, density)
        yield from _writing(bench, live, model, drawn, change, density)
        del drawn, stored, change


def _digest(live: "DeviceWeights") -> None:
    from patchstore.kernels import patch

    # Made by `claims`.
    assert live._all is not None
    for _, kind, table, jobs in live._all:
        patch.digest(kind, table, jobs)


def _staging(bench: Bench, live: "DeviceWeights", drawn: Drawn, density: float) -> Iterator[Row]:
    """Measure what begins in host memory."""
    stored = Stored(drawn, drawn.block.cpu())
    row = partial(bench.row, density=density, num_changed=drawn.num_changed, num_bytes=drawn.block.nbytes)
    yield row("copy_payload", bench.copy(drawn.block.nbytes))
    lists = [each for _, one in stored.entries.values() for each in (one.idx, bits(one.val))]
    yield row("upload", bench.time(lambda: live._sent(lists), is_wall=True, is_slow=True))
    sent = live._sent(lists)
    _right(torch.equal(torch.cat([bits(each) for each in sent]), drawn.block), "a payload on the device")
    del sent
    spent = bench.time(
        lambda: live.stage_deltas(stored, drawn.names, keep_old=True), is_wall=True, is_slow=True
    )
    yield row("stage", spent)


def _device_part(bench: Bench, drawn: Drawn, change: "Exchanges", density: float) -> Iterator[Row]:
    """Measure the kernels of staging, one by one and together. `change` was staged from the drawn block."""
    from patchstore.kernels import patch

    row = partial(bench.row, density=density, num_changed=drawn.num_changed)
    gaps = drawn.pieces(drawn.block)[::2]
    unsigned = [each.view(torch.uint16) for each in gaps]
    spent = bench.time(lambda: [reference.from_gaps(each) for each in unsigned], is_slow=True)
    yield row("torch_from_gaps", spent)
    others = [0] * (len(patch.Stream) - 2)
    streams = torch.tensor([[each.data_ptr(), len(each), *others] for each in gaps], device=bench.device)
    jobs = _jobs([len(each) for each in gaps], patch.TILE).to(bench.device)
    exchanges = [exchange for _, exchange in change.parts]

    def sum_gaps() -> None:
        sums = patch.sum_gaps(streams, jobs)
        torch.cat([sums.new_zeros(1), sums.cumsum(0)])

    def count() -> None:
        for each in exchanges:
            patch.count(each.stated)

    def translate() -> None:
        for each in exchanges:
            num, target = each.targets.numel(), each.targets.dtype
            patch.translate(each.stated, each.counts, num, target, is_digested=True)

    steps = {"sum_gaps": sum_gaps, "count_held": count, "translate": translate}
    for name, step in steps.items():
        yield row(name, bench.time(step))
    spent = bench.time(lambda: [step() for step in steps.values()])
    yield row("stage_device", spent, num_bytes=drawn.block.nbytes)


def _jobs(nums: Sequence[int], size: int) -> torch.Tensor:
    """Which list, and which part of it, for all parts of at most `size`: int32 [num_jobs, 2]."""
    counts = -(-torch.tensor(nums) // size)
    owners = torch.repeat_interleave(torch.arange(len(counts)), counts)
    parts = torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]
    return torch.stack([owners, parts], dim=1).to(torch.int32)


def _writing(
    bench: Bench, live: "DeviceWeights", model: Served, drawn: Drawn, change: "Exchanges", density: float
) -> Iterator[Row]:
    """Measure the commit. Leaves the weights as they were."""
    from patchstore.kernels import patch

    row = partial(bench.row, density=density, num_changed=drawn.num_changed)
    values = drawn.values()
    live.scatter(change)
    for at in _sample(len(drawn.names), list(map(len, drawn.positions))):
        name, positions = drawn.names[at], drawn.positions[at]
        held = bits(model.held(name, int(positions[-1]) + 1))[positions]
        _right(torch.equal(held, values[at]), f"{name} as written")
    live.gather_back(change)
    lists: dict[torch.nn.Parameter, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for name, positions, new in zip(drawn.names, drawn.positions, values, strict=True):
        parameter, first = model.places[name]
        where, what = lists.setdefault(parameter, ([], []))
        where.append(positions + first)
        what.append(new)
    scatters = [(bits(p), torch.cat(where), torch.cat(what)) for p, (where, what) in lists.items()]
    lists.clear()

    def scatter() -> None:
        for flat, where, what in scatters:
            flat.scatter_(0, where, what)

    spent = bench.time(scatter, is_slow=True)
    yield row("torch_scatter", spent)
    live.gather_back(change)
    scatters.clear()
    # To and fro, so that it always finds what it expects.
    there = [exchange for _, exchange in change.parts]
    turns = [there, [replace(each, new=each.old, old=each.new) for each in there]]
    flags: list[torch.Tensor] = []

    def exchange() -> None:
        flags.extend(patch.exchange(each) for each in turns[0])
        turns.reverse()

    spent = bench.time(exchange)
    if turns[0] is not there:
        exchange()
    _right(bool((torch.cat(flags) == patch.NONE).all()), "what an exchange found")
    yield row("exchange", spent)
    is_written = False

    def undo() -> None:
        nonlocal is_written
        if is_written:
            live.gather_back(change)
        is_written = True

    yield row("commit", bench.time(lambda: live.scatter(change), before=undo, is_wall=True))
    live.gather_back(change)
