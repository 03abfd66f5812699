"""Time the kernels of encoding `context` alone: a version coded against its parent, and decoded again.

There is no store, server or transport. Random weights are on one GPU. A version changes small weights rather
than large ones, mostly by one unit in the last place, as AdamW does in bfloat16. Without a GPU only a few
small tensors are coded.

The decoded changes are compared with the drawn ones before a row has their time; a difference ends the run.
"""

import argparse
import gc
import importlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch

from benchmarks.context.versions import STEP_ELEMENTS, Version, Weights
from benchmarks.support.kernel_bench import WIDTH, Bench, Row, Short, Spent, device
from benchmarks.support.shapes import SHAPES
from patchstore.bucket.records import TensorSpec
from patchstore.codec.context import Coded, Cuts, RowSets, packed_table, tiling
from patchstore.codec.context.rows import Sets

if TYPE_CHECKING:
    from patchstore.kernels.context_decode import Decoded
    from patchstore.kernels.context_encode import Encoded
    from patchstore.kernels.context_tables import Segments, Tensors

Launch = tuple[str, torch.cuda.Event, torch.cuda.Event]

RANKS = 8
"""Ranks of tensor parallelism: each holds an eighth. The second rank is measured."""
INTERPRETED_TILES = 300
"""Tiles in all without a GPU, where each tile takes long."""
KERNELS = {
    "patchstore.kernels.context_encode": ("_locate", "_fill", "_measure", "_order", "_write"),
    "patchstore.kernels.context_classes": ("_count",),
    "patchstore.kernels.context_decode": ("_parse", "_place"),
}
"""Kernels whose launches are timed one by one, by module."""


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


def run(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row about each shape, then one per measure and density."""
    where = device()
    if any(not 0 < density <= 0.5 for density in args.densities):
        raise SystemExit("densities must be above 0, and 0.5 at most")
    for name in args.shape:
        bench = Bench(SHAPES[name], where, args.repeats)
        bench.part = "context"
        if not bench.is_gpu:
            bench.specs = _small(bench.specs)
        yield bench.about()
        try:
            bench.need(bench.num_bytes, "weights")
            weights = Weights(bench)
            spent, num_bytes = bench.read(weights.tensors)
            yield bench.row("read_weights", spent, num_bytes=num_bytes) | _more()
            for density in args.densities:
                try:
                    yield from _version(weights, density)
                except Short as exc:
                    yield bench.skipped(str(exc), density)
            del weights
        except Short as exc:
            yield bench.skipped(str(exc))
        gc.collect()


def _small(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return one tensor of each of the smallest shapes."""
    by_size = sorted({spec.shape: spec for spec in specs}.values(), key=lambda spec: spec.num_elements)
    ends = list(accumulate(tiling(spec.shape).num_tiles for spec in by_size))
    return tuple(by_size[: max(1, sum(end <= INTERPRETED_TILES for end in ends))])


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The part of the weights that a rank holds: its memory, and its elements of each tensor."""

    segments: "Segments"
    windows: Sequence[tuple[int, int, int, int]]
    """Of each tensor: the first row held, the row after the last, and columns likewise."""
    cols: Sequence[int]
    """Columns of each whole tensor."""
    copies: Sequence[torch.Tensor]
    """The memory of parts that are not in the weights themselves."""

    @property
    def num_elements(self) -> int:
        return sum((bottom - top) * (right - left) for top, bottom, left, right in self.windows)

    def has(self, index: int, positions: torch.Tensor) -> torch.Tensor:
        """Return which positions of a tensor are held."""
        top, bottom, left, right = self.windows[index]
        row, col = positions // self.cols[index], positions % self.cols[index]
        return (row >= top) & (row < bottom) & (col >= left) & (col < right)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The result of a call, and its cost."""

    result: Any
    spent: Spent
    peak_bytes: int | None
    """Peak device memory, less what was allocated before."""
    kernels_ms: dict[str, list[float]] | None
    """Milliseconds of each launch, in one more call."""

    def row(
        self, bench: Bench, measure: str, held: Held, density: float, num_changed: int, per_change: float
    ) -> Row:
        num_bytes = WIDTH * held.num_elements
        row = bench.row(
            measure,
            self.spent,
            density=density,
            num_bytes=num_bytes,
            num_changed=num_changed,
            num_elements=held.num_elements,
        )
        return row | _more(per_change, self.peak_bytes, self.kernels_ms)


def _more(
    per_change: float | None = None,
    peak_bytes: int | None = None,
    kernels_ms: dict[str, list[float]] | None = None,
) -> Row:
    return {"bytes_per_change": per_change, "peak_bytes": peak_bytes, "kernels_ms": kernels_ms}


def _version(weights: Weights, density: float) -> Iterator[Row]:
    from patchstore.kernels import context_decode, context_encode, context_tables

    bench, specs = weights.bench, weights.bench.specs
    num_elements = bench.num_bytes // WIDTH
    bench.need(int(40 * (density * num_elements + min(num_elements, STEP_ELEMENTS))), f"changing {density:g}")
    version = weights.change(density)
    geometry = context_tables.geometry(Cuts.of(tiling(spec.shape) for spec in specs))
    formats = np.array([context_tables.FORMATS[spec.dtype] for spec in specs], dtype=np.int64)
    given = version.positions, version.values, version.bounds

    def encode() -> "tuple[Encoded, Sets]":
        every, row_sets = np.arange(len(specs) + 1), RowSets()
        with ThreadPoolExecutor(1) as choosing:
            encoder = context_encode.Encoder(
                geometry, formats, weights.addresses, *given, (every[:-1], every), row_sets, choosing
            )
            encoder.order()
            return encoder.finish(), row_sets.sets

    encoding = _observe(bench, encode)
    encoded, every_set = encoding.result
    per_change = _num_bytes(specs, encoded, every_set) / len(version.positions)
    sets = every_set.at(encoded.row_sets)
    cut = context_tables.tensors(geometry, formats, sets.lo, sets.nums, bench.device)
    rows = sets.listed
    codes = torch.from_numpy(rows.astype(np.int64) @ [1, 1 << 8, 1 << 16])
    starts = torch.from_numpy(np.concatenate([[0], encoded.lengths.cumsum()]))
    coded = codes.to(bench.device, torch.int32), starts.to(bench.device), encoded.streams
    for measure in ("decode", "decode_columns", "decode_rows"):
        try:
            held = _held(weights, cut, measure)
        except Short as exc:
            yield bench.skipped(str(exc), density)
            continue
        decoding = _observe(bench, partial(context_decode.decode, cut, held.segments, *coded))
        num_changed = _check(version, held, decoding.result, f"{measure} of {density:g}")
        if measure == "decode":
            # The check above proved the encoding too.
            yield encoding.row(bench, "encode", held, density, num_changed, per_change)
        yield decoding.row(bench, measure, held, density, num_changed, per_change)


def _held(weights: Weights, cut: "Tensors", measure: str) -> Held:
    """Return what a measure decodes: an eighth of every matrix with a multiple of 16 columns, or rows."""
    from patchstore.kernels import context_tables

    bench = weights.bench
    if measure == "decode_columns":
        bench.need(bench.num_bytes // RANKS, measure)
    boxes, addresses, strides, windows, copies = [], [], [], [], []
    for spec, tensor, tiles in zip(bench.specs, weights.tensors, cut.tiles.tolist(), strict=True):
        cols = spec.shape[-1]
        num_rows = tensor.numel() // cols
        box, address = [0, 0, 0, *tiles], tensor.data_ptr()
        window, stride = (0, num_rows, 0, cols), cols
        if measure == "decode_columns" and len(spec.shape) == 2 and cols % 16 == 0:
            stride = cols // RANKS
            copies.append(tensor[:, stride : 2 * stride].contiguous())
            box[2] = box[5] = tiles[2] // RANKS
            # The address that the first element of the tensor would have.
            address = copies[-1].data_ptr() - WIDTH * stride
            window = (0, num_rows, stride, 2 * stride)
        elif measure == "decode_rows" and len(spec.shape) == 2 and num_rows % 16 == 0:
            box[1] = box[4] = tiles[1] // RANKS
            window = (num_rows // RANKS, 2 * num_rows // RANKS, 0, cols)
        boxes.append(box)
        addresses.append(address)
        strides.append((num_rows * stride, stride, 1))
        windows.append(window)
    segments = context_tables.segments(
        cut,
        np.arange(len(boxes)),
        np.array(boxes),
        np.array(addresses),
        np.array(strides),
        np.full(len(boxes), WIDTH),
    )
    return Held(
        segments=segments,
        windows=windows,
        cols=[spec.shape[-1] for spec in bench.specs],
        copies=copies,
    )


def _check(version: Version, held: Held, decoded: "Decoded", what: str) -> int:
    """Compare the decoded changes with the drawn ones, and return the number of changes held.

    Raises:
        SystemExit: they differ.
    """
    is_right = decoded.first_wrong is None
    total = 0
    for index in range(len(held.windows)):
        begin, end = decoded.bounds[index : index + 2].tolist()
        found, order = decoded.positions[begin:end].sort()
        wanted, values = version.of(index)
        mine = held.has(index, wanted)
        is_right = is_right and torch.equal(found, wanted[mine])
        is_right = is_right and torch.equal(decoded.values[begin:end][order], values[mine])
        total += len(found)
    if not is_right:
        raise SystemExit(f"{what}: what was decoded is not what was changed")
    return total


def _num_bytes(specs: Sequence[TensorSpec], encoded: "Encoded", sets: Sets) -> int:
    """Return the size of the payload's entries: streams, and the table of tensors, classes and lengths."""
    cuts, nothing = Cuts.of(tiling(spec.shape) for spec in specs), np.zeros(0, dtype=np.uint8)
    numbers = np.arange(len(specs))
    coded = Coded(numbers, cuts, sets, encoded.row_sets, encoded.lengths, nothing)
    return len(encoded.streams) + len(packed_table(coded))


def _observe(bench: Bench, call: Callable[[], Any]) -> Observed:
    """Time a call. In one more call, time each kernel and measure the memory that the call takes."""
    if not bench.is_gpu:
        results: list[Any] = []
        spent = bench.time(lambda: results.append(call()), is_slow=True)
        return Observed(result=results[-1], spent=spent, peak_bytes=None, kernels_ms=None)
    spent = bench.time(call)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with _timed_kernels() as launches:
        result = call()
    torch.cuda.synchronize()
    kernels_ms: dict[str, list[float]] = {}
    for name, began, ended in launches:
        kernels_ms.setdefault(name.strip("_"), []).append(began.elapsed_time(ended))
    peak_bytes = torch.cuda.max_memory_allocated() - before
    return Observed(result=result, spent=spent, peak_bytes=peak_bytes, kernels_ms=kernels_ms)


@contextmanager
def _timed_kernels() -> Iterator[list[Launch]]:
    """Yield a list that takes the launches of `KERNELS` within the block."""
    launches: list[Launch] = []
    with ExitStack() as stack:
        for path, names in KERNELS.items():
            module = importlib.import_module(path)
            for name in names:
                timed = _Timed(name, getattr(module, name), launches)
                stack.enter_context(mock.patch.object(module, name, timed))
        yield launches


class _Timed:
    """A kernel with an event before and after each launch."""

    def __init__(self, name: str, kernel: Any, launches: list[Launch]) -> None:
        self._name, self._kernel, self._launches = name, kernel, launches

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: Any, *args: Any, **kwargs: Any) -> None:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        self._kernel[grid](*args, **kwargs)
        ended.record()
        self._launches.append((self._name, began, ended))
