"""The kernels of a publication: comparing, encoding, and the copy to the host."""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from benchmarks.support import gaps as gaps_of
from benchmarks.support.kernel_bench import WIDTH, Bench, Row, Short, must_agree, sample_of
from patchstore.tensors import elements

if TYPE_CHECKING:
    from patchstore.kernels.compare import Tiles
    from patchstore.kernels.index_encode import Order


FLIP_ELEMENTS = 1 << 26
"""Elements changed at a time."""


class Trained:
    """The weights of a trainer in one block, and their snapshot in another."""

    def __init__(self, bench: Bench) -> None:
        from patchstore.kernels import compare, index_encode

        self.bench = bench
        self.sizes = [spec.num_bytes for spec in bench.specs]
        num = len(self.sizes)
        self.tiles = compare.cut(self.sizes, [WIDTH] * num, bench.device)
        self.weights = _noise(self.tiles.first_bytes[-1], bench.device)
        self.snapshot = torch.empty_like(self.weights)
        self._random = torch.Generator(bench.device)
        places = torch.arange(2 * num, device=bench.device)
        self.order: Order = index_encode.Order(
            tensors=places // 2,
            widths=torch.full_like(places, WIDTH),
            idx=places[::2].contiguous(),
            val=places[1::2].contiguous(),
            wide=torch.zeros(num, dtype=torch.int32, device=bench.device),
        )

    def flip(self, density: float) -> None:
        """Flip the lowest bit of random elements; the next call with this density flips them back."""
        self._random.manual_seed(0)
        for part in self.weights.view(torch.int16).split(FLIP_ELEMENTS):  # type: ignore[no-untyped-call]
            drawn = torch.rand(part.shape, device=part.device, generator=self._random)
            part.bitwise_xor_(drawn < density)

    def tensor(self, memory: torch.Tensor, index: int) -> torch.Tensor:
        """Return the elements of a tensor in the weights, or in a snapshot."""
        start = self.tiles.first_bytes[index]
        return memory[start : start + self.sizes[index]].view(torch.int16)

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for index in range(len(self.sizes)):
            yield self.tensor(self.weights, index), self.tensor(self.snapshot, index)


class Comparison:
    """A comparison of the first tensors of weights with a snapshot of them, in any memory."""

    def __init__(self, trained: Trained, tiles: "Tiles", snapshot: torch.Tensor, capacity: int) -> None:
        from patchstore.kernels import compare

        self._kernels, self._snapshot, self.tiles = compare, snapshot, tiles
        self.found = compare.Found(tiles, capacity)
        base = trained.weights.data_ptr()
        addresses = [base + start for start in tiles.first_bytes[:-1]]
        self._given = compare.Given(tiles, addresses)

    def compare(self) -> None:
        address = self._snapshot.data_ptr()
        self._kernels.compare(self.found, self._given, address, range(self.tiles.num_tiles))

    def count(self) -> list[int]:
        """Return the number of changed elements per element width; here there is one width.

        Raises:
            SystemExit: there are more changed words than room for them.
        """
        from patchstore.kernels import index_encode

        if int(self.found.cursor) > self.found.capacity:
            raise SystemExit(f"{int(self.found.cursor)} changed words, with room for {self.found.capacity}")
        nums: list[int] = index_encode.count(self.found).tolist()
        return nums

    def again(self) -> int:
        """Apply the changes found, and compare once more; return how many words then differ."""
        self._kernels.apply(self.found, self._snapshot.data_ptr())
        self.found.clear()
        self.compare()
        return int(self.found.cursor)


def _noise(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(num_bytes // 8, dtype=torch.int64, device=device).random_().view(torch.uint8)


def publisher(bench: Bench, densities: Sequence[float], host_bytes: int) -> Iterator[Row]:
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
    """Return the expected number of changed words, and some spare."""
    return int(1.02 * tiles.first_bytes[-1] / 8 * (1 - (1 - density) ** (8 // WIDTH))) + 4096


def _host_snapshot(trained: Trained, host_bytes: int) -> torch.Tensor | None:
    """Return pinned memory for a snapshot of as many of the first tensors as fit; None if none does."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Half, because pinned memory is rounded up to a power of 2.
    fits = [size for size in trained.tiles.first_bytes[1:] if size <= min(host_bytes, free // 2)]
    return trained.bench.pinned(fits[-1]) if fits else None


def _publication(trained: Trained, density: float, *, is_first: bool) -> Iterator[Row]:
    """Measure one version."""
    from patchstore.kernels import compare, index_encode

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

    # The snapshot is now up to date, so that every call finds the same changes.
    comparison.compare()
    num_changed = sum(comparison.count())
    if changed:
        must_agree(sum(map(len, changed)) == num_changed, f"{num_changed} changed elements")
    block = _encoded(trained, comparison)
    for index, wanted in expected.items():
        must_agree(_same(trained, block, index, wanted), bench.specs[index].name)
    spent = bench.time(comparison.compare, before=change)
    row = partial(bench.row, density=density, num_changed=num_changed)
    for name, peer in peers:
        yield row(name, peer, num_bytes=2 * bench.num_bytes)
    yield row("compare", spent, num_bytes=2 * bench.num_bytes)
    yield row("count", bench.time(lambda: index_encode.count(comparison.found)))
    must_agree([num_changed] == comparison.count(), "changed elements, compared again")
    if changed:
        spent = bench.time(lambda: _torch_gaps(trained, changed), is_slow=True)
        yield row("torch_gaps", spent, num_bytes=block.numel())
        changed.clear()
    address = trained.snapshot.data_ptr()
    spent = bench.time(
        lambda: index_encode.encode(comparison.found, trained.order, address, block, gaps=True)
    )
    yield row("encode", spent, num_bytes=block.numel())
    yield row("apply", bench.time(lambda: compare.apply(comparison.found, address)))
    yield row("copy_payload", bench.copy(block.numel()), num_bytes=block.numel())
    pinned = bench.pinned(block.numel())
    spent = bench.time(lambda: pinned.copy_(block, non_blocking=True))
    yield row("copy_back", spent, num_bytes=block.numel())
    must_agree(comparison.again() == 0, "the snapshot")


def _expected(trained: Trained) -> dict[int, tuple[torch.Tensor, torch.Tensor, list[int]]]:
    """Return the expected gaps, values and growth of the sums of a few tensors."""
    found = {}
    for index in sample_of(len(trained.sizes), trained.sizes):
        new, old = (trained.tensor(memory, index) for memory in (trained.weights, trained.snapshot))
        stated = gaps_of.bridge(torch.tensor(elements.differing([new], old)[0], device=new.device))
        after, before = elements.sum_of(new[stated], stated), elements.sum_of(old[stated], stated)
        grown = [(a - b) % 2**64 for a, b in zip(after, before, strict=True)]
        found[index] = gaps_of.to_gaps(stated).view(torch.int16), new[stated], grown
    return found


def _encoded(trained: Trained, comparison: Comparison) -> torch.Tensor:
    from patchstore.kernels import index_encode

    room = comparison.tiles.max_data_bytes(comparison.count(), gaps=True)
    block = torch.empty(
        index_encode.head_bytes(len(trained.sizes)) + room, dtype=torch.uint8, device=trained.bench.device
    )
    index_encode.encode(comparison.found, trained.order, trained.snapshot.data_ptr(), block, gaps=True)
    return block


def _same(
    trained: Trained, block: torch.Tensor, index: int, wanted: tuple[torch.Tensor, torch.Tensor, list[int]]
) -> bool:
    """Return whether a payload's block has the expected gaps, values and sums of a tensor."""
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
        stated = gaps_of.bridge(indices)
        gaps_of.to_gaps(stated)
        elements.sum_of(new[stated], stated)
        elements.sum_of(old[stated], stated)


def _over_the_bus(trained: Trained, density: float, host: torch.Tensor) -> Row:
    """Measure a comparison with a snapshot in pinned memory. It updates the device's snapshot too."""
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
    for index in sample_of(num, trained.sizes[:num]):
        new, old = (trained.tensor(memory, index) for memory in (trained.weights, trained.snapshot))
        must_agree(torch.equal(new, old), f"{bench.specs[index].name} in host memory")
    return bench.row(
        "compare_host",
        spent,
        density=density,
        num_bytes=len(host),
        num_changed=num_changed,
        num_tensors=num,
        num_elements=sum(spec.num_elements for spec in bench.specs[:num]),
    )
