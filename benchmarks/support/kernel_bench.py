"""The measures of kernels, and the clock: calls on one device, beside floors of the same run."""

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

import torch

from benchmarks.support.shapes import Shape
from patchstore.bucket.records import TensorSpec

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:
    # Other cases need no Triton; `device` reports that it is missing.
    triton = tl = None
    constexpr = Any

Row = dict[str, Any]
Role = Literal["ours", "peer", "floor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One thing that is timed."""

    role: Role
    about: str
    beside: str | None = None
    """The measure of the same run by which this one is divided."""


PUBLISHER: Mapping[str, Measure] = MappingProxyType(
    {
        "read_both": Measure(role="floor", about="a kernel that reads the weights and the snapshot"),
        "copy_payload": Measure(role="floor", about="a pinned copy of the payload's size to the device"),
        "copy_back": Measure(role="floor", about="the payload to pinned memory, as it is published"),
        "copy_snapshot": Measure(role="floor", about="a pinned copy of the host snapshot to the device"),
        "torch_nonzero": Measure(role="peer", about="(a != b).nonzero() per tensor", beside="read_both"),
        "torch_gaps": Measure(role="peer", about="gaps, values and digests per tensor in torch"),
        "compare": Measure(role="ours", about="compare, and list what differs", beside="read_both"),
        "count": Measure(role="ours", about="count what changed"),
        "encode": Measure(role="ours", about="encode as gaps, and digest", beside="torch_gaps"),
        "apply": Measure(role="ours", about="write the changes into the snapshot"),
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
CONTEXT: Mapping[str, Measure] = MappingProxyType(
    {
        "read_weights": ENGINE["read_weights"],
        "encode": Measure(role="ours", about="code a version against its parent", beside="read_weights"),
        "decode": Measure(role="ours", about="positions and new bits again", beside="read_weights"),
        "decode_columns": Measure(
            role="ours", about="an eighth of the columns of every matrix", beside="decode"
        ),
        "decode_rows": Measure(role="ours", about="an eighth of the rows of every matrix", beside="decode"),
    }
)
MEASURES: Mapping[str, Mapping[str, Measure]] = MappingProxyType(
    {"publisher": PUBLISHER, "engine": ENGINE, "context": CONTEXT}
)
"""Measures by part."""

WIDTH = 2
"""Bytes of an element: bfloat16."""
READ_WORDS = 2048
"""Words that one program of a floor reads: 16 KiB."""
COPY_BYTES = 1 << 30
"""The largest copy for a floor of the bus. Floors of more bytes are scaled: the rate stays the same."""
FLUSH_BYTES = 256 << 20
"""Bytes written before every timed call: this empties the L2 cache, and the host queues the call."""
SLOW_MS = 2000.0
"""Slow measures (peers, and those that include the host) are repeated until they took this long."""
SPARE_BYTES = 3 << 30
"""Device memory for temporaries, in addition to what is counted."""


def device() -> torch.device:
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
    """Some measures are not possible: memory is too short, or a package is missing."""


@dataclass(frozen=True, slots=True)
class Spent:
    """The milliseconds of each timed call."""

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
        """Return a row, with its ratio to the measure beside it if that was measured before.

        Args:
            num_tensors: of the measured tensors, with `num_elements`; all, if not given.
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
        """Time calls, after one call that is not counted.

        Args:
            before: prepares each call, untimed.
            is_wall: use the host's clock, until the device has finished; otherwise the device's clock.
            is_slow: stop when the calls together took `SLOW_MS`, even after the first.
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
        """Raise Short if the device has less memory free than this and `SPARE_BYTES`."""
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
        """Time a kernel that reads all whole blocks of tensors, and of others of the same sizes.

        Returns that and the number of bytes.
        """
        kernel, first, second = _reader(), self._blocks(tensors), self._blocks(others)
        result = torch.zeros(1, dtype=torch.int64, device=self.device)

        def call() -> None:
            kernel[len(first),](
                first, second, result, words=READ_WORDS, has_second=len(second) > 0, num_warps=8
            )

        return self.time(call), (len(first) + len(second)) * READ_WORDS * 8

    def _blocks(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the addresses of all whole blocks."""
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
    # Never true of random weights, but without a use the compiler would drop the loads.
    if total == 0x123456789ABCDEF:
        tl.store(result, total)


@cache
def _reader() -> Any:
    return triton.jit(_read)


def sample_of(num: int, sizes: Sequence[int]) -> list[int]:
    """Return the indices of a few of `num` tensors, the largest among them."""
    return sorted({0, num // 4, num // 2, 3 * num // 4, num - 1, max(range(num), key=sizes.__getitem__)})


def must_agree(is_right: bool, what: str) -> None:
    """Raise SystemExit if kernels and plain torch differ, because times then mean nothing."""
    if not is_right:
        raise SystemExit(f"{what}: the kernels differ from plain torch")
