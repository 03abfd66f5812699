"""The kernels of a publication against `tensors.elements`, and payloads against those made on the CPU."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from patchstore import Manifest, Publisher, verify
from patchstore.codec import encoding
from patchstore.codec.tensor_file import open_buffer
from patchstore.errors import SchemaMismatch
from patchstore.publish import snapshot
from patchstore.quantization import FORMS
from patchstore.stores.memory import MemoryStore
from patchstore.tensors import elements
from patchstore.tensors.bits import bits, index_dtype
from tests.support.interpreted import DEVICE, kernels
from tests.support.stated import with_bridges
from tests.support.weights import assert_same_bits, newest, random_bits, served, small_model

# A minute, where they are interpreted.
pytestmark = pytest.mark.timeout(1200)

compare = kernels("patchstore.kernels.compare")
index_encode = kernels("patchstore.kernels.index_encode")
snapshot_gpu = kernels("patchstore.publish.snapshot_gpu")
kernels("patchstore.publish.encode_gpu")

QUICK = "auto" if DEVICE.type == "cuda" else "gap"
"""Interpreted, `context` takes minutes for a thousand changes."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
TILE_BYTES = 1024
Shape = tuple[int, int]
"""Elements of a tensor, and bytes an element."""


def gaps_of(stated: torch.Tensor) -> torch.Tensor:
    return (torch.diff(stated, prepend=stated.new_full((1,), -1)) - 1).to(torch.uint16)


def at_offset(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """A copy that begins so many elements into its storage."""
    room = torch.zeros(tensor.numel() + elements, dtype=tensor.dtype, device=DEVICE)
    return room[elements:].copy_(tensor)


class Comparison:
    """Tensors of `shapes` (wide elements first), their snapshot, and what a comparison found."""

    def __init__(
        self, shapes: Sequence[Shape], *, capacity: int = 4096, tile_bytes: int = TILE_BYTES
    ) -> None:
        self.shapes = shapes
        self.old = [
            random_bits(INTEGERS[width], (numel,), seed).to(DEVICE)
            for seed, (numel, width) in enumerate(shapes)
        ]
        self.new = [tensor.clone() for tensor in self.old]
        self.addresses: list[int] = []
        """What is compared, if not `new`; see `compare.Given`."""
        sizes, widths = [tensor.nbytes for tensor in self.old], [width for _, width in shapes]
        self.tiles = compare.cut(sizes, widths, DEVICE, tile_bytes=tile_bytes)
        self.snapshot = torch.zeros(self.tiles.first_bytes[-1], dtype=torch.uint8, device=DEVICE)
        for view, tensor in zip(self.views(), self.old, strict=True):
            view.copy_(tensor)
        self.found = compare.Found(self.tiles, capacity)

    def views(self) -> list[torch.Tensor]:
        return [
            self.snapshot[start : start + tensor.nbytes].view(tensor.dtype)
            for start, tensor in zip(self.tiles.first_bytes, self.old, strict=False)
        ]

    def launch(self) -> int:
        """Compare all tensors; return how many changed words were counted."""
        given = compare.Given(self.tiles, self.addresses or [tensor.data_ptr() for tensor in self.new])
        compare.compare(self.found, given, self.snapshot.data_ptr(), range(self.tiles.num_tiles))
        return int(self.found.cursor)

    def find(self) -> int:
        """Compare with as much room as that takes; return how often that was too little."""
        times = 0
        while (words := self.launch()) > self.found.capacity:
            self.found.resize(words)
            times += 1
        return times

    def check(self, *, gaps: bool) -> int:
        """Fail unless data, sums and the snapshot are what the reference makes; return how many changed."""
        for view, tensor in zip(self.views(), self.old, strict=True):
            assert torch.equal(view, tensor)
        nums = index_encode.count(self.found).tolist()
        num_tensors = len(self.shapes)
        size = index_encode.head_bytes(num_tensors) + self.tiles.max_data_bytes(nums, gaps=gaps)
        block = torch.full((size,), 0xAA, dtype=torch.uint8, device=DEVICE)
        entries, order = self._order(gaps=gaps)
        index_encode.encode(self.found, order, self.snapshot.data_ptr(), block, gaps=gaps)
        head = block[: index_encode.head_bytes(num_tensors)].view(torch.int64).tolist()
        expected, total = {}, 0
        for i, (new, old) in enumerate(zip(self.new, self.old, strict=True)):
            changed = torch.tensor(elements.differing([new], old)[0].tolist(), dtype=torch.int64)
            total += changed.numel()
            stated = with_bridges(encoding("gap" if gaps else "raw").index, changed).to(DEVICE)
            assert head[i] == stated.numel()
            before, after = (elements.sum_of(tensor[stated], stated) for tensor in (old, new))
            grown = head[num_tensors + 2 * i : num_tensors + 2 * i + 2]
            assert [x % 2**64 for x in grown] == [(a - b) % 2**64 for a, b in zip(after, before, strict=True)]
            expected[i, 0] = gaps_of(stated) if gaps else stated.to(index_dtype(self.shapes[i][0]))
            expected[i, 1] = new[stated]
        data = torch.cat([expected[i, part].contiguous().view(torch.uint8) for i, part, _ in entries])
        assert torch.equal(block[index_encode.head_bytes(num_tensors) :][: data.numel()], data)
        assert sum(nums) == total
        compare.apply(self.found, self.snapshot.data_ptr())
        for view, tensor in zip(self.views(), self.new, strict=True):
            assert torch.equal(view, tensor)
        return total

    def _order(self, *, gaps: bool) -> tuple[list[tuple[int, int, int]], Any]:
        entries = []
        for i, (numel, width) in enumerate(self.shapes):
            idx = 2 if gaps else 8 if index_dtype(numel) == torch.int64 else 4
            entries += [(i, 0, idx), (i, 1, width)]
        entries.sort(key=lambda entry: -entry[2])
        places = {(i, part): place for place, (i, part, _) in enumerate(entries)}
        count = range(len(self.shapes))
        order = index_encode.Order(
            tensors=torch.tensor([i for i, _, _ in entries], device=DEVICE),
            widths=torch.tensor([width for _, _, width in entries], device=DEVICE),
            idx=torch.tensor([places[i, 0] for i in count], device=DEVICE),
            val=torch.tensor([places[i, 1] for i in count], device=DEVICE),
            wide=torch.tensor([numel > 2**31 - 1 for numel, _ in self.shapes], device=DEVICE).to(torch.int32),
        )
        return entries, order


def numbers(count: int, seed: int) -> torch.Tensor:
    """Float32 of all magnitudes, in halves of bfloat16's steps too; finite, also as bfloat16."""
    found = random_bits(torch.float32, (count,), seed)
    found.view(torch.int32)[::3] &= ~0x7FFF
    return torch.where(found.bfloat16().isfinite(), found, torch.ones(()))


@pytest.mark.parametrize("offset", [0, 1, 2, 4])
def test_float32_is_compared_as_the_bfloat16_that_torch_makes_of_it(offset: int) -> None:
    shapes: list[Shape] = [(3 * 512, 2), (700, 2), (512, 2), (1, 2), (0, 2), (2000, 2)]
    comparison, held = Comparison(shapes), []
    for number, (count, _) in enumerate(shapes):
        given = at_offset(numbers(count, seed=number).to(DEVICE), offset)
        if number == 2:
            # Between others, a tensor that the trainer has in bfloat16.
            comparison.addresses.append(comparison.new[number].data_ptr())
            flip(comparison.new[number], 0.1)
            continue
        held.append(given)
        comparison.addresses.append(-given.data_ptr())
        comparison.new[number] = given.to(torch.bfloat16).view(torch.int16)
        # Most are as they were.
        is_old = torch.rand(given.shape, device=DEVICE) < 0.9
        comparison.views()[number][is_old] = comparison.old[number][is_old] = comparison.new[number][is_old]
    comparison.find()
    assert comparison.check(gaps=True) > 300
    comparison.found.clear()
    assert comparison.launch() == 0


def test_float32_that_is_not_finite_is_so_in_bfloat16() -> None:
    given = torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan, 3.4e38, -3.4e38, -0.0, 1e-45])
    given = torch.cat([given, numbers(506, 0)]).to(DEVICE)
    given[8:].view(torch.int32)[:2] = torch.tensor([0x7F800001, -1], dtype=torch.int32)
    for tensor in (given, given[:10].clone()):
        comparison = Comparison([(len(tensor), 2)])
        comparison.addresses = [-tensor.data_ptr()]
        comparison.find()
        compare.apply(comparison.found, comparison.snapshot.data_ptr())
        found = comparison.views()[0].view(torch.bfloat16).float().cpu()
        expected = tensor.to(torch.bfloat16).float().cpu()
        assert torch.equal(found.isnan(), tensor.isnan().cpu())
        assert torch.equal(
            found[~found.isnan()].view(torch.int32), expected[~found.isnan()].view(torch.int32)
        )


def flip(tensor: torch.Tensor, fraction: float) -> None:
    """Change the lowest bit of about so many elements."""
    chosen = torch.rand(tensor.shape, device=DEVICE) < fraction
    tensor ^= chosen.to(tensor.dtype)


def awkward(width: int) -> list[Shape]:
    tile = TILE_BYTES // width
    return [(numel, width) for numel in (0, 1, tile - 1, tile, tile + 1, 5 * tile + 3, 2, 3 * tile, 0)]


@pytest.mark.sample(5)
@pytest.mark.parametrize("gaps", [True, False])
@pytest.mark.parametrize("fraction", [0.0, 0.02, 1.0])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_tensors_of_all_sizes_give_what_the_reference_gives(width: int, fraction: float, gaps: bool) -> None:
    comparison = Comparison(awkward(width))
    for tensor in comparison.new:
        flip(tensor, fraction)
    assert comparison.find() == 0
    assert (comparison.check(gaps=gaps) > 0) == (fraction > 0)


@pytest.mark.parametrize("gaps", [True, False])
def test_widths_may_be_mixed(gaps: bool) -> None:
    comparison = Comparison([(700, 8), (3, 8), (700, 4), (0, 2), (1500, 2), (5, 2), (3000, 1), (1, 1)])
    for tensor in comparison.new:
        flip(tensor, 0.05)
    comparison.find()
    comparison.check(gaps=gaps)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_tensor_may_begin_anywhere_in_its_storage(width: int) -> None:
    shapes = [(numel, width) for numel in (2000, 2001, 1, 511)]
    comparison = Comparison(shapes)
    for i, tensor in enumerate(comparison.new):
        comparison.new[i] = at_offset(tensor, 1 + i % 3)
        flip(comparison.new[i], 0.05)
    comparison.find()
    assert comparison.check(gaps=True)


@pytest.mark.parametrize("capacity", [0, 1, 100, 1000])
def test_room_that_is_short_loses_no_change(capacity: int) -> None:
    comparison = Comparison([(5000, 2), (300, 2), (2000, 1)], capacity=capacity)
    for tensor in comparison.new:
        flip(tensor, 0.3)
    assert comparison.find() == 1
    assert comparison.check(gaps=True) > 1000


def test_tiles_that_find_no_room_leave_the_snapshot_alone() -> None:
    comparison = Comparison([(5000, 2)], capacity=1)
    flip(comparison.new[0], 0.3)
    assert comparison.launch() > comparison.found.capacity
    assert torch.equal(comparison.views()[0], comparison.old[0])


def test_what_was_found_before_is_forgotten() -> None:
    comparison = Comparison([(5000, 2)])
    flip(comparison.new[0], 0.01)
    comparison.find()
    compare.apply(comparison.found, comparison.snapshot.data_ptr())
    comparison.old = [tensor.clone() for tensor in comparison.new]
    comparison.new[0][4321] ^= 1
    comparison.found.clear()
    comparison.find()
    assert comparison.check(gaps=True) == 1


def test_bits_are_compared_and_not_values() -> None:
    comparison = Comparison([(600, 2)])
    for tensors in (comparison.old, comparison.new):
        tensors[0].view(torch.bfloat16)[:4] = torch.tensor([0.0, float("nan"), float("nan"), 1.0])
    comparison.views()[0].copy_(comparison.old[0])
    comparison.new[0].view(torch.bfloat16)[0] = -0.0
    comparison.new[0][1] ^= 1  # another NaN
    comparison.find()
    assert comparison.check(gaps=True) == 2


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "positions",
    [
        [65535],
        [65536],
        [0, 65536, 131072],
        [0, 65537],
        [65535, 131071, 131072],
        [299_999],
        [70_000, 299_999],
        [0, 1, 2, 250_000],
    ],
)
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_long_gaps_are_bridged_with_the_values_there(width: int, positions: list[int]) -> None:
    comparison = Comparison([(300_000, width), (300_000, width)], tile_bytes=32768)
    for tensor in comparison.new:
        tensor[positions] ^= 1
    comparison.find()
    assert comparison.check(gaps=True) == 2 * len(positions)


def test_the_number_of_launches_does_not_depend_on_that_of_the_tensors(
    launches: list[int],
) -> None:
    comparisons = [Comparison([(700, 2)] * count) for count in (1, 50)]
    for comparison in comparisons:
        comparison.launch()
    assert launches == [2, 1, 100, 50]


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU with 20 GB")
@pytest.mark.parametrize("gaps", [True, False])
def test_positions_past_2_to_the_31(gaps: bool) -> None:
    comparison = Comparison(
        [(2**31 + 70_001, 2), (2**31 - 1, 1)], capacity=1 << 16, tile_bytes=compare.TILE_BYTES
    )
    for tensor in comparison.new:
        at = torch.randint(tensor.numel(), (10_000,), device=DEVICE).unique()
        tensor[at] ^= 1
        tensor[-1] ^= 2
    comparison.find()
    assert comparison.check(gaps=gaps) > 10_000


def model() -> dict[str, torch.Tensor]:
    """The small model, and tensors not contiguous, not aligned, of one byte or two codes, with a long gap."""
    tensors = small_model()
    tensors["turned"] = torch.randn(70, 50).to(torch.bfloat16).t()
    tensors["odd"] = torch.randn(3001).to(torch.bfloat16)[1:]
    tensors["eight"] = torch.randn(777).to(torch.float8_e4m3fn)
    tensors["pairs"] = torch.arange(777).to(torch.uint8).view(torch.float4_e2m1fn_x2).view(7, 111)
    tensors["scales"] = torch.arange(777).to(torch.uint8).view(torch.float8_e8m0fnu)
    tensors["long"] = torch.zeros(200_000, dtype=torch.bfloat16)
    embedding = tensors["embed.weight"].to(DEVICE)
    moved = {name: tensor.to(DEVICE) for name, tensor in tensors.items()}
    return moved | {"embed.weight": embedding, "head.weight": embedding}


def train(tensors: dict[str, torch.Tensor], step: int) -> None:
    for name, tensor in tensors.items():
        if name in {"turned", "odd", "layers.0.norm.weight"} and step != 2:
            tensor[step::7] *= 1.5
        if name in {"embed.weight", "layers.0.proj.weight"}:
            tensor[:, step::30] += 0.1
    for name in ("eight", "pairs", "scales"):
        tensors[name].view(torch.uint8).view(-1)[step * 100 : step * 100 + 3] ^= 1
    tensors["long"][[150_000 - step, 199_999]] += 1
    tensors["position_ids"][step] += 2**40


def published(
    encoding: str, dtype: torch.dtype | None, place: snapshot.Place
) -> tuple[list[Manifest], dict[str, bytes], list[dict[str, torch.Tensor]]]:
    """Publish four steps; return the manifests, the data of the deltas, and what a follower has at each."""
    torch.manual_seed(0)
    store, tensors, history = MemoryStore(), model(), []
    # Without a pattern what is in float32 would stay so: most of the model is in bfloat16.
    asked = None if dtype is None else {"*": dtype}
    options = {"dtype": asked, "encoding": encoding, "snapshot": place, "anchor_every": 3}
    with Publisher(store, tensors, **options) as publisher:  # type: ignore[arg-type]
        manifests = []
        for step in range(5):
            manifests.append(publisher.publish_patch(step).result())
            held = newest(store)
            assert_same_bits(held, {name: each.cpu() for name, each in served(tensors, dtype).items()})
            history.append(held)
            train(tensors, step)
    data = {}
    for key in store.list("deltas/"):
        _, stored = open_buffer(key, bytearray(store.get(key)))
        folder, name = key.removeprefix("deltas/").split("/")
        data[f"{folder.split('-')[0]}/{name}"] = b"".join(
            f"{entry} {tensor.dtype}".encode() + bits(tensor).view(torch.uint8).numpy().tobytes()
            for entry, tensor in stored.items()
        )
    return manifests, data, history


@pytest.fixture
def _in_parts(monkeypatch: pytest.MonkeyPatch, _kernels: None) -> None:
    """Publish in many small parts."""
    monkeypatch.setattr(compare, "cut", partial(compare.cut, tile_bytes=32 << 10))
    monkeypatch.setattr(snapshot_gpu, "CONVERTED_BYTES", 4 << 10)


@pytest.mark.sample(2)
@pytest.mark.usefixtures("_in_parts")
@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
@pytest.mark.parametrize("encoding", ["gap", "raw", "context"])
def test_kernels_publish_what_the_reference_publishes(
    monkeypatch: pytest.MonkeyPatch, place: snapshot.Place, encoding: str, dtype: torch.dtype | None
) -> None:
    if encoding == "context" and DEVICE.type == "cpu" and (dtype is not None or place == "host"):
        pytest.skip("takes minutes where kernels are interpreted, and says no more than the others")
    found = published(encoding, dtype, place)
    with monkeypatch.context() as patched:
        patched.setattr(snapshot, "have_kernels", lambda devices: False)
        expected = published(encoding, dtype, "device")
    assert found[1].keys() == expected[1].keys()
    assert found[1] == expected[1]
    for ours, theirs in zip(found[0], expected[0], strict=True):
        # The key of the sums has the attempt's name.
        assert (ours.state.total, ours.state.sums.digest) == (theirs.state.total, theirs.state.sums.digest)
        assert (ours.kind, ours.delta and ours.delta.num_changed) == (
            theirs.kind,
            theirs.delta and theirs.delta.num_changed,
        )


@pytest.mark.usefixtures("_kernels")
def test_weights_in_float32_are_rounded_without_a_copy(
    monkeypatch: pytest.MonkeyPatch, place: snapshot.Place
) -> None:
    store, converted = MemoryStore(), []
    tensors = {f"{i}.weight": torch.randn(40, 9 + i, device=DEVICE) for i in range(5)}
    tensors["turned"] = torch.randn(9, 40, device=DEVICE).t()
    tensors["same"] = torch.randn(50, device=DEVICE).to(torch.bfloat16)

    def convert(tensor: torch.Tensor, spec: Any, *more: Any) -> torch.Tensor:
        converted.append(spec.name)
        return real(tensor, spec, *more)

    real = snapshot_gpu.served
    with Publisher(store, tensors, dtype={"*": "bfloat16"}, snapshot=place, encoding=QUICK) as publisher:
        publisher.publish_patch(0).result()
        monkeypatch.setattr(snapshot_gpu, "served", convert)
        for step in range(1, 4):
            for tensor in tensors.values():
                tensor[step::11] *= 1.5
            assert publisher.publish_patch(step).result().kind == "delta"
            assert_same_bits(newest(store), {name: each.bfloat16().cpu() for name, each in tensors.items()})
    assert set(converted) == {"turned"}


@pytest.mark.usefixtures("_in_parts")
def test_a_run_goes_on_from_any_snapshot(place: snapshot.Place) -> None:
    store, tensors = (
        MemoryStore(),
        {"w": torch.randn(5000, device=DEVICE), "none": torch.empty(0, device=DEVICE)},
    )
    with Publisher(store, tensors, snapshot=place, encoding=QUICK) as publisher:
        publisher.publish_patch(0).result()
    with Publisher(store, tensors, snapshot=place, encoding=QUICK, resume=True) as publisher:
        tensors["w"][77] += 1
        manifest = publisher.publish_patch(1).result()
    assert manifest.delta is not None and manifest.delta.num_changed == 1
    assert_same_bits(
        newest(store), {name: tensor.to(torch.bfloat16).cpu() for name, tensor in tensors.items()}
    )


@pytest.mark.usefixtures("_kernels")
def test_to_compile_kernels_changes_nothing_also_where_a_number_is_none(place: snapshot.Place) -> None:
    store, options = MemoryStore(), {"snapshot": place, "encoding": QUICK, "quantization": "fp8-channel"}
    # The matrix is rounded, and so kernels for float32 are compiled, of which each NaN has one pattern.
    tensors = {
        "up_proj.weight": torch.randn(16, 16, device=DEVICE),
        "norm.weight": torch.ones(500, dtype=torch.bfloat16, device=DEVICE),
        "unused.weight": torch.ones(0, dtype=torch.bfloat16, device=DEVICE),
    }
    bits(tensors["norm.weight"])[:400] = 0x7FC1
    with Publisher(store, tensors, **options) as publisher:
        publisher.publish_patch(0).result()
    with Publisher(store, tensors, resume=True, **options) as publisher:
        tensors["norm.weight"][450] = 2
        manifest = publisher.publish_patch(1).result()
    assert manifest.delta is not None and manifest.delta.num_changed == 1
    assert_same_bits(
        {"norm.weight": newest(store)["norm.weight"]}, {"norm.weight": tensors["norm.weight"].cpu()}
    )


@pytest.mark.usefixtures("_kernels")
def test_a_view_with_opposite_signs_is_compared_as_it_reads(place: snapshot.Place) -> None:
    store, numbers = MemoryStore(), torch.randn(16, 20, dtype=torch.complex64).to(DEVICE)
    tensors = {"up_proj.weight": numbers.conj().imag}
    assert tensors["up_proj.weight"].is_neg()
    form = FORMS["fp8-channel"]
    options = {"dtype": "bfloat16", "quantization": form.name, "snapshot": place, "encoding": QUICK}
    with Publisher(store, tensors, **options) as publisher:
        for step in range(3):
            publisher.publish_patch(step).result()
            codes, scales = form.quantize(-numbers.imag.bfloat16())
            expected = {"up_proj.weight": codes, form.scale_name("up_proj.weight"): scales}
            assert_same_bits(newest(store), {name: each.cpu() for name, each in expected.items()})
            numbers[step] *= 1.5


@pytest.mark.usefixtures("_kernels")
def test_an_anchor_is_digested_on_the_cpu_where_the_device_has_no_memory(
    monkeypatch: pytest.MonkeyPatch, place: snapshot.Place
) -> None:
    full = Mock(side_effect=torch.OutOfMemoryError("no memory for tables"))
    monkeypatch.setattr("patchstore.publish.encode_gpu.digested", full)
    store, tensors = (
        MemoryStore(),
        {"w": torch.randn(50, 9, device=DEVICE), "b": torch.ones(7, device=DEVICE)},
    )
    with Publisher(store, tensors, snapshot=place, encoding=QUICK) as publisher:
        publisher.publish_patch(0).result()
    assert full.called
    verify(store)
    assert_same_bits(
        newest(store), {name: tensor.to(torch.bfloat16).cpu() for name, tensor in tensors.items()}
    )


@pytest.mark.usefixtures("_in_parts")
def test_a_stream_is_compared_once_however_much_has_changed(
    monkeypatch: pytest.MonkeyPatch, place: snapshot.Place
) -> None:
    monkeypatch.setattr(snapshot_gpu, "STREAMED_BYTES", 4 << 10)
    torch.manual_seed(0)
    weights = {f"{i % 3}.{i}": torch.randn(501 + 700 * i).to(torch.bfloat16) for i in range(6)}
    weights |= {"1.scale": torch.randn(300), "none": torch.empty(0)}
    passes = 0

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal passes
        passes += 1
        for name in sorted(weights, key=lambda name: name[::-1], reverse=bool(passes % 2)):
            yield name, weights[name].to(DEVICE, copy=True)

    store = MemoryStore()
    with Publisher(store, source, dtype=None, snapshot=place, encoding=QUICK) as publisher:
        publisher.publish_patch(0).result()
        for step, share in enumerate((1, 1000, 1, 3), 1):
            for tensor in weights.values():
                tensor[::share] += 1
            before = passes
            manifest = publisher.publish_patch(step).result()
            assert passes == before + 1
            assert manifest.delta is not None and manifest.kind == "delta"
            assert_same_bits(newest(store), weights)


@pytest.mark.usefixtures("_in_parts")
def test_what_changed_of_a_stream_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many groups of tensors it has, and whatever dtype they are converted from."""
    monkeypatch.setattr(snapshot_gpu, "STREAMED_BYTES", 4 << 10)
    tensors = {str(i): torch.randn(900, device=DEVICE) for i in range(8)}
    counts = 0

    def count(found: compare.Found) -> torch.Tensor:
        nonlocal counts
        counts += 1
        return counted(found)

    counted = index_encode.count
    with Publisher(
        MemoryStore(), lambda: iter(tensors.items()), dtype="float16", encoding=QUICK
    ) as publisher:
        publisher.publish_patch(0).result()
        for tensor in tensors.values():
            tensor.add_(1)
        monkeypatch.setattr(index_encode, "count", count)
        delta = publisher.publish_patch(1).result().delta
    assert delta is not None and delta.num_changed > 7000
    assert counts == 1


@pytest.mark.usefixtures("_in_parts")
def test_a_comparison_that_fails_loses_no_change(
    monkeypatch: pytest.MonkeyPatch, place: snapshot.Place
) -> None:
    store, tensors = MemoryStore(), {"w": torch.randn(5000, device=DEVICE)}

    def broken(*args: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with Publisher(store, tensors, snapshot=place, encoding=QUICK) as publisher:
        publisher.publish_patch(0).result()
        tensors["w"][:100] += 1
        with monkeypatch.context() as patched:
            patched.setattr(index_encode, "count", broken)
            with pytest.raises(RuntimeError, match="out of memory"):
                publisher.publish_patch(1)
        manifest = publisher.publish_patch(2).result()
        assert manifest.delta is not None and (manifest.kind, manifest.delta.num_changed) == ("delta", 100)
        tensors["w"][9] += 1
        assert publisher.publish_patch(3).result().kind == "delta"
    assert_same_bits(newest(store), {"w": tensors["w"].to(torch.bfloat16).cpu()})


@pytest.mark.usefixtures("_in_parts")
def test_everything_may_change_at_once_and_room_is_given_back_later(
    monkeypatch: pytest.MonkeyPatch, place: snapshot.Place
) -> None:
    store, tensors = MemoryStore(), {"w": torch.zeros(40_000, device=DEVICE)}
    made: list[Any] = []

    class Found(compare.Found):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(compare, "Found", Found)
    with Publisher(store, tensors, snapshot=place, encoding=QUICK) as publisher:
        publisher.publish_patch(0).result()
        (found,) = made
        least = found.capacity
        for step, changed in enumerate((40_000, 100, 100), 1):
            tensors["w"][:changed] += torch.arange(step, changed + step, device=DEVICE)
            manifest = publisher.publish_patch(step).result()
            assert manifest.delta is not None and manifest.delta.num_changed == changed
            assert (found.capacity > 10 * least) == (step < 3)
            assert_same_bits(newest(store), {"w": tensors["w"].to(torch.bfloat16).cpu()})


@pytest.mark.usefixtures("_in_parts")
@pytest.mark.parametrize("source", ["mapping", "function"])
@pytest.mark.parametrize(
    ("dtype", "infinity", "large", "number"),
    [
        (torch.float16, 0x7C00, 7e4, "70000.0"),
        # This one the kernels round.
        (torch.bfloat16, 0x7F80, 3.4e38, "3.39"),
    ],
)
def test_kernels_refuse_a_number_beyond_the_range_also_in_the_place_of_an_infinity(
    place: snapshot.Place, source: str, dtype: torch.dtype, infinity: int, large: float, number: str
) -> None:
    torch.manual_seed(0)
    model = {
        "flags": torch.arange(40, dtype=torch.int16, device=DEVICE),
        "half": torch.randn(60, 50, device=DEVICE).half(),
        "w": torch.randn(5000, device=DEVICE),
        "x": torch.ones(7, device=DEVICE),
    }
    trainer: Any = model if source == "mapping" else lambda: iter(model.items())
    store, inf = MemoryStore(), float("inf")
    with Publisher(store, trainer, dtype={"*": dtype}, snapshot=place, encoding=QUICK) as publisher:

        def refused(name: str, number: str) -> None:
            said = rf"'{name}' has 1 number beyond the range of {dtype}, such as {number}"
            with pytest.raises(SchemaMismatch, match=said):
                publisher.publish_patch(2)

        publisher.publish_patch(0).result()
        # These are the trainer's own, and integers with the bits of an infinity are none.
        model["w"][:2] = torch.tensor([inf, float("nan")])
        model["half"][3, 3] = -inf
        model["flags"][1] = infinity
        model["x"][3] = -inf
        publisher.publish_patch(1).result()
        model["w"][[9, 4000]] = torch.tensor([3.0, -large], device=DEVICE)
        refused("w", f"-{number}")
        model["w"][4000] = -1
        # What is published as an infinity has the same bits as before.
        model["w"][0] = large
        for _ in range(2):
            refused("w", number)
        model["w"][0] = inf
        model["x"][3] = -large
        refused("x", f"-{number}")
        model["x"][3] = -inf
        manifest = publisher.publish_patch(3).result()
    assert manifest.delta is not None and manifest.delta.num_changed == 2
    # Converted where they are: a NaN has other bits on another device, and where kernels are interpreted.
    held, expected = newest(store), {name: each.cpu() for name, each in served(model, dtype).items()}
    assert held["w"][1].isnan()
    expected["w"][1] = held["w"][1]
    assert_same_bits(held, expected)
