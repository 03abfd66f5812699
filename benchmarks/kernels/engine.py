"""The kernels of an update: staging, committing and digesting."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.support.gaps import from_gaps
from benchmarks.support.kernel_bench import WIDTH, Bench, Row, Short, must_agree, sample_of
from benchmarks.support.shapes import Shape
from patchstore.bucket.records import Schema, TensorSpec
from patchstore.codec.context import Coded
from patchstore.codec.delta_file import Content
from patchstore.codec.index import Listed
from patchstore.read.deltas import Deltas
from patchstore.tensors import elements
from patchstore.tensors.bits import TensorPatch, bits

if TYPE_CHECKING:
    from vllm_plugin.gpu.weights import DeviceWeights, Exchanges


MIN_DENSITY = 0.0005
"""The least density at which no drawn gap exceeds 65,535, so that none needs a bridge."""


_FUSED = (
    (re.compile(r"\.experts\.\d+\.(gate|up)_proj\b"), ".experts.w13"),
    (re.compile(r"\.experts\.\d+\.down_proj\b"), ".experts.w2"),
    (re.compile(r"\.(q|k|v)_proj\b"), ".qkv_proj"),
    (re.compile(r"\.(gate|up)_proj\b"), ".gate_up_proj"),
)
"""Names that share a parameter in vLLM, one after the other, and that parameter's name."""


class Served(torch.nn.Module):
    """Random weights in the parameters that vLLM has on one rank, with a loader that copies."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__()
        tensors = shape.tensors()
        groups: dict[str, list[str]] = {}
        for name in tensors:
            fused = next((p.sub(by, name) for p, by in _FUSED if p.search(name)), name)
            groups.setdefault(fused, []).append(name)
        self.places: dict[str, tuple[torch.nn.Parameter, int]] = {}
        """Name -> its parameter, and the position of its first element in that."""
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
    """The changes of a version, of the tensors that have any."""

    names: Sequence[str]
    positions: Sequence[torch.Tensor]
    """int64 [num] per tensor."""
    block: torch.Tensor
    """int16, on the device: the gaps of all tensors, then their new values, as in a payload."""

    @property
    def num_changed(self) -> int:
        return sum(map(len, self.positions))

    def gaps(self) -> Sequence[torch.Tensor]:
        """Return the gaps of each tensor."""
        return _split(self.block[: self.num_changed], [*map(len, self.positions)])

    def values(self) -> Sequence[torch.Tensor]:
        """Return the new values of each tensor."""
        return _split(self.block[self.num_changed :], [*map(len, self.positions)])

    def patch(self, at: int) -> TensorPatch:
        values = self.values()[at].view(torch.bfloat16)
        return TensorPatch(name=self.names[at], indices=self.positions[at].to(torch.int32), values=values)


class Stored(Deltas):
    """The delta of one version in memory, encoded as `gap`."""

    def __init__(self, schema: Schema, drawn: Drawn, block: torch.Tensor) -> None:
        super().__init__([], schema)
        numbers = np.array([schema.places[name] for name in drawn.names], dtype=np.int64)
        counts = np.array([*map(len, drawn.positions)], dtype=np.int64)
        gaps, values = block.split(drawn.num_changed)  # type: ignore[no-untyped-call]
        starts = counts.cumsum() - counts
        order = numbers.argsort()
        listed = Listed(
            where="in memory",
            numbers=numbers[order],
            counts=counts[order],
            firsts=np.zeros_like(counts),
            starts=starts[order],
            idx=gaps.view(torch.uint16),
            val=values.view(torch.bfloat16),
        )
        self._content = Content([listed], Coded.none())

    def contents(self) -> list[Content]:
        return [self._content]


def _draw(specs: Sequence[TensorSpec], density: float, device: torch.device) -> Drawn:
    """Draw independent changes. Their distances follow a geometric distribution."""
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
    assert int(distances.max()) <= elements.MAX_GAP
    values = torch.randint(-(2**15), 2**15, at.shape, dtype=torch.int16, device=device, generator=random)
    nums = [num for num in counts.tolist() if num]
    gaps = distances.to(torch.uint16).view(torch.int16)
    return Drawn(
        names=[spec.name for spec, num in zip(specs, counts.tolist(), strict=True) if num],
        positions=_split(at, nums),
        block=torch.cat([gaps, values]),
    )


def _split(flat: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    return list(flat.split(sizes))  # type: ignore[no-untyped-call]


def engine(bench: Bench, densities: Sequence[float]) -> Iterator[Row]:
    try:
        from vllm_plugin.gpu.weights import DeviceWeights, Exchanges
        from vllm_plugin.live.derived import Derived
        from vllm_plugin.live.models import ServedModels
        from vllm_plugin.live.weights import LiveWeights
        from vllm_plugin.map.mapping import WeightMap, share
    except ImportError as exc:
        raise Short(str(exc)) from exc
    bench.need(bench.num_bytes, "live weights")
    model = Served(bench.shape, bench.device)
    schema = Schema(tensors=bench.specs, tied={})
    models = ServedModels([model], _load, Derived([], lambda _: None))
    live, plain = DeviceWeights(models), LiveWeights(models)
    traced = models.trace(schema)
    mapped = WeightMap(schema, traced, [share(traced)])
    live.follow(mapped)
    plain.follow(mapped)
    names = [spec.name for spec in bench.specs]
    every, is_told = mapped.total([live.slice_sums(names)])
    sample = [names[i] for i in sample_of(len(names), [spec.num_elements for spec in bench.specs])]
    total, is_some = mapped.total([plain.slice_sums(sample)])
    must_agree(bool(is_told.all()) and (every == total)[is_some].all(), "digests of live weights")
    spent, num_bytes = bench.read([parameter.data for parameter in model.parameters()])
    yield bench.row("read_weights", spent, num_bytes=num_bytes)
    spent = bench.time(lambda: _digest(live))
    yield bench.row("digest", spent, num_bytes=bench.num_bytes)
    is_first = True
    for density in densities:
        # Bytes per change: 8 as drawn and 20 more while drawing, 4 stored and 4 sent, twice 8 staged, 10 of
        # the peer.
        try:
            bench.need(50 * int(density * bench.num_bytes / WIDTH), f"changing {density:g}")
        except Short as exc:
            yield bench.skipped(str(exc), density)
            continue
        drawn = _draw(bench.specs, density, bench.device)
        stored = Stored(schema, drawn, drawn.block.cpu())
        change = live.stage_deltas(stored, drawn.names, {}, keep_old=True)
        assert isinstance(change, Exchanges)
        if is_first:
            is_first = False
            patches = [drawn.patch(at) for at in sample_of(len(drawn.names), list(map(len, drawn.positions)))]
            wanted = plain.stage(patches, keep_old=True)
            growth = change.staged_sums
            rows = zip(growth.slices.tolist(), growth.before.tolist(), growth.after.tolist(), strict=True)
            sums = {number: (*before, *after) for number, before, after in rows}
            growth = wanted.staged_sums
            for i, number in enumerate(growth.slices.tolist()):
                right = (*growth.before[i].tolist(), *growth.after[i].tolist())
                must_agree(sums[number] == right, patches[i].name)
        yield from _staging(bench, live, drawn, density)
        yield from _device_part(bench, drawn, change, density)
        yield from _writing(bench, live, model, drawn, change, density)
        del drawn, stored, change


def _digest(live: "DeviceWeights") -> None:
    from patchstore.kernels import digest

    # `slice_sums` sets it.
    assert live._all is not None
    for _, kind, table, jobs in live._all:
        digest.digest(kind, table, jobs)


def _staging(bench: Bench, live: "DeviceWeights", drawn: Drawn, density: float) -> Iterator[Row]:
    """Measure the steps that begin in host memory."""
    from vllm_plugin.gpu.upload import send

    stored = Stored(live.map.schema, drawn, drawn.block.cpu())
    row = partial(bench.row, density=density, num_changed=drawn.num_changed, num_bytes=drawn.block.nbytes)
    yield row("copy_payload", bench.copy(drawn.block.nbytes))
    lists = [drawn.block.cpu()]
    yield row("upload", bench.time(lambda: send(lists, bench.device), is_wall=True, is_slow=True))
    sent = send(lists, bench.device)
    must_agree(torch.equal(torch.cat([bits(each) for each in sent]), drawn.block), "a payload on the device")
    del sent
    spent = bench.time(
        lambda: live.stage_deltas(stored, drawn.names, {}, keep_old=True), is_wall=True, is_slow=True
    )
    yield row("stage", spent)


def _device_part(bench: Bench, drawn: Drawn, change: "Exchanges", density: float) -> Iterator[Row]:
    """Measure the kernels of staging, one by one and together. `change` is staged from the drawn changes."""
    from patchstore.kernels import gap_decode, patch

    row = partial(bench.row, density=density, num_changed=drawn.num_changed)
    gaps = drawn.gaps()
    unsigned = [each.view(torch.uint16) for each in gaps]
    spent = bench.time(lambda: [from_gaps(each) for each in unsigned], is_slow=True)
    yield row("torch_from_gaps", spent)
    others = [0] * (len(gap_decode.Stream) - 2)
    streams = torch.tensor([[each.data_ptr(), len(each), *others] for each in gaps], device=bench.device)
    jobs = _jobs([len(each) for each in gaps], gap_decode.TILE).to(bench.device)
    exchanges = [exchange for _, exchange in change.parts]

    def sum_gaps() -> None:
        sums = gap_decode.sum_gaps(streams, jobs)
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
    """Return the list and the part of each job, of at most `size` elements: int32 [num_jobs, 2]."""
    counts = -(-torch.tensor(nums) // size)
    owners = torch.repeat_interleave(torch.arange(len(counts)), counts)
    parts = torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]
    return torch.stack([owners, parts], dim=1).to(torch.int32)


def _writing(
    bench: Bench, live: "DeviceWeights", model: Served, drawn: Drawn, change: "Exchanges", density: float
) -> Iterator[Row]:
    """Measure the commit. The weights are afterwards as before."""
    from patchstore.kernels import patch

    row = partial(bench.row, density=density, num_changed=drawn.num_changed)
    values = drawn.values()
    live.scatter(change)
    for at in sample_of(len(drawn.names), list(map(len, drawn.positions))):
        name, positions = drawn.names[at], drawn.positions[at]
        held = bits(model.held(name, int(positions[-1]) + 1))[positions]
        must_agree(torch.equal(held, values[at]), f"{name} as written")
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
    # Calls alternate between new and old values, so that each finds the values that it expects.
    there = [exchange for _, exchange in change.parts]
    turns = [there, [replace(each, new=each.old, old=each.new) for each in there]]
    flags: list[torch.Tensor] = []

    def exchange() -> None:
        flags.extend(patch.exchange(each) for each in turns[0])
        turns.reverse()

    spent = bench.time(exchange)
    if turns[0] is not there:
        exchange()
    must_agree(bool((torch.cat(flags) == patch.NONE).all()), "what an exchange found")
    yield row("exchange", spent)
    is_written = False

    def undo() -> None:
        nonlocal is_written
        if is_written:
            live.gather_back(change)
        is_written = True

    yield row("commit", bench.time(lambda: live.scatter(change), before=undo, is_wall=True))
    live.gather_back(change)
