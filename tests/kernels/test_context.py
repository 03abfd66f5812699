"""The kernels of the encoding `context` against its CPU form: the same bytes, and the same changes."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from patchstore.bucket.records import Box, TensorSpec
from patchstore.codec.context import Cuts, RowSets, encode_all, tiling
from patchstore.codec.context.classes import moved
from patchstore.codec.context.rows import Sets
from patchstore.errors import CorruptObject
from tests.support.coded import CodedPart, decode, parts_of
from tests.support.interpreted import DEVICE, kernels

# Some minutes, where they are interpreted: a tile takes a tenth of a second, and so do a few changes.
pytestmark = pytest.mark.timeout(1200)

tables = kernels("patchstore.kernels.context_tables")
classes = kernels("patchstore.kernels.context_classes")
decoding = kernels("patchstore.kernels.context_decode")
encoding = kernels("patchstore.kernels.context_encode")

Array = np.ndarray[Any, Any]
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
STRANGE = {
    2: [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7C00, 0x0001, 0x8001],
    1: [0, 0x80, 0x7F, 0xFF, 0x7C],
}


class Change:
    """A tensor, or a part of one, and a change of it as the CPU codes it."""

    def __init__(
        self,
        dtype: str,
        shape: tuple[int, ...],
        old: Array,
        at: Array,
        new: Array,
        box: Box | None = None,
        slices: tuple[int, int] | None = None,
    ) -> None:
        """Code a change; all but `shape` is of the part."""
        self.spec = TensorSpec(name="w", dtype=dtype, shape=shape)
        self.old, self.at, self.new = old, at, new
        self.tiling = tiling(shape, box, slices)
        self.coded: CodedPart = encoded_together(dtype, [self])[0]
        self.memory = on_device(old)


def encoded_together(dtype: str, changes: Sequence[Change]) -> list[CodedPart]:
    coded = encode_all(
        dtype,
        np.arange(len(changes)),
        Cuts.of(each.tiling for each in changes),
        np.concatenate([each.old for each in changes]),
        np.array([len(each.at) for each in changes]),
        np.concatenate([each.at for each in changes]),
        np.concatenate([each.new for each in changes]),
        RowSets(),
    )
    return parts_of(coded)


def on_device(bits: Array) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16) if bits.itemsize == 2 else bits).to(DEVICE)


def change(dtype: str, shape: tuple[int, ...], num: int, *, wild: bool = False, seed: int = 0) -> Change:
    """Change `num` elements, small ones rather than large ones; `wild` ones are and become anything."""
    rng = np.random.default_rng(seed)
    numel = int(np.prod(shape, dtype=np.int64))
    width = tables.FORMATS[dtype][0]
    unsigned = np.uint16 if width == 2 else np.uint8
    if wild:
        old = rng.integers(0, 1 << (8 * width), numel).astype(unsigned)
        old[: len(STRANGE[width])] = STRANGE[width][:numel]
        at = np.sort(rng.choice(numel, num, replace=False))
        step = rng.integers(1, 1 << (8 * width), num)
    else:
        exact = torch.from_numpy(rng.normal(0, 0.02, numel)).to(DTYPES[dtype])
        old = exact.view(torch.int16 if width == 2 else torch.uint8).numpy().view(unsigned).copy()
        at = np.sort(np.argsort(np.abs(exact.double().numpy()))[:num])
        step = np.where(rng.random(num) < 0.8, 1, rng.integers(2, 30, num)) * rng.choice([-1, 1], num)
    return Change(dtype, shape, old, at, moved(old[at], step))


def tensors_of(changes: Sequence[Change]) -> Any:
    return tables.tensors(
        tables.geometry(Cuts.of(each.tiling for each in changes)),
        np.array([tables.FORMATS[each.spec.dtype] for each in changes]),
        np.array([each.coded.lo for each in changes]),
        np.array([len(each.coded.rows) for each in changes]),
        DEVICE,
    )


def streams_of(changes: Sequence[Change]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = np.concatenate([each.coded.rows for each in changes]).astype(np.int64) @ [1, 1 << 8, 1 << 16]
    ends = np.concatenate([[0], *[each.coded.lengths for each in changes]]).cumsum()
    data = np.concatenate([each.coded.data for each in changes])
    return (
        torch.from_numpy(rows).to(DEVICE, torch.int32),
        torch.from_numpy(ends).to(DEVICE),
        torch.from_numpy(data).to(DEVICE),
    )


def listed(decoded: Any, segment: int, unsigned: Any) -> tuple[Array, Array]:
    begin, end = decoded.bounds[segment : segment + 2]
    positions, order = decoded.positions[begin:end].cpu().sort()
    return positions.numpy(), decoded.values[begin:end].cpu()[order].numpy().view(np.uint16).astype(unsigned)


def assert_decoded(changes: Sequence[Change]) -> None:
    cut = tensors_of(changes)
    held = tables.whole(cut, np.array([each.memory.data_ptr() for each in changes]))
    decoded = decoding.decode(cut, held, *streams_of(changes))
    assert decoded.first_wrong is None
    for i, each in enumerate(changes):
        positions, values = listed(decoded, i, each.old.dtype)
        assert np.array_equal(positions, each.tiling.positions(each.at))
        assert np.array_equal(values, each.new)


def encoded(
    changes: Sequence[Change],
    index: torch.dtype = torch.int32,
    *,
    together: bool = False,
    shift: int = 0,
) -> tuple[Any, Sets]:
    at = np.concatenate([np.zeros(shift, dtype=np.int64), *(each.at for each in changes)])
    new = np.concatenate(
        [np.zeros(shift, dtype=np.uint16), *(each.new.astype(np.uint16) for each in changes)]
    )
    every, row_sets = np.arange(len(changes)), RowSets()
    choosing = ThreadPoolExecutor(1)
    encoder = encoding.Encoder(
        tables.geometry(Cuts.of(each.tiling for each in changes)),
        np.array([tables.FORMATS[each.spec.dtype] for each in changes]),
        np.array([each.memory.data_ptr() for each in changes]),
        torch.from_numpy(at).to(DEVICE, index)[shift:],
        on_device(new)[shift:],
        np.concatenate([[0], np.cumsum([len(each.at) for each in changes])]),
        (every, np.array([0, len(every)]) if together else np.arange(len(every) + 1)),
        row_sets,
        choosing,
    )
    encoder.order()
    choosing.shutdown()
    return encoder.finish(), row_sets.sets


def assert_same(found: tuple[Any, Sets], coded: Sequence[CodedPart]) -> None:
    encoded, every_set = found
    sets = every_set.at(encoded.row_sets)
    assert sets.lo.tolist() == [each.lo for each in coded]
    assert sets.nums.tolist() == [len(each.rows) for each in coded]
    assert np.array_equal(sets.listed, np.concatenate([each.rows for each in coded]))
    assert np.array_equal(encoded.lengths, np.concatenate([each.lengths for each in coded]))
    assert np.array_equal(encoded.streams.cpu().numpy(), np.concatenate([each.data for each in coded]))


def assert_encoded(changes: Sequence[Change], index: torch.dtype = torch.int32) -> None:
    # Each alone, as the reference is: parts of one payload would share rows.
    for each in changes:
        assert_same(encoded([each], index), [each.coded])


def assert_encoded_together(changes: Sequence[Change]) -> None:
    """Parts of one dtype in one payload, which share row sets."""
    coded = encoded_together(changes[0].spec.dtype, changes)
    found = encoded(changes, together=True)
    assert_same(found, coded)
    for change, each in zip(changes, coded, strict=True):
        change.coded = each
    assert_decoded(changes)


def part(
    dtype: str,
    shape: tuple[int, ...],
    box: Box,
    num: int,
    seed: int = 0,
    slices: tuple[int, int] | None = None,
) -> Change:
    """A change of `num` elements of a part of a tensor."""
    local = change(dtype, (box.levels, box.rows, box.cols), num, seed=seed)
    return Change(dtype, shape, local.old, local.at, local.new, box, slices)


CASES = {
    "any bits": lambda: [change("BF16", (5, 33), 60, wild=True), change("F8_E4M3", (101,), 50, wild=True)],
    "awkward shapes": lambda: [
        change("BF16", (), 1),
        change("BF16", (7,), 3, wild=True),
        change("F16", (33, 50), 60),
        change("BF16", (3, 11, 16), 40),
        change("F8_E4M3", (9, 128), 50),
        change("F8_E5M2", (1024,), 70),
    ],
    "many classes": lambda: [change("BF16", (29, 40), 100)],
    "tiles of whole vectors": lambda: [change("BF16", (20, 256), 120)],
    "most or all change": lambda: [
        change("BF16", (60,), 60, wild=True),
        change("BF16", (60,), 60),
        change("BF16", (60,), 52),
    ],
    "one change": lambda: [change("BF16", (130, 33), 1)],
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES)
def test_a_change_is_encoded_and_decoded_as_on_the_cpu(case: str) -> None:
    changes = CASES[case]()
    assert_decoded(changes)
    assert_encoded(changes)


PARTS = {
    "fewer slices": lambda: [part("F8_E4M3", (64, 64), Box(0, 1, 5, 30, 0, 64), 50, slices=(4, 2))],
    "exponents that others lack": lambda: [
        change("BF16", (40,), 12, wild=True),
        part("BF16", (64, 40), Box(0, 1, 3, 9, 0, 40), 40, 1),
        change("BF16", (20, 3), 9, wild=True, seed=5),
    ],
    "rows of a grid": lambda: [
        part("BF16", (48, 32), Box(0, 1, *rows, 0, 32), 30, rows[0]) for rows in ((0, 7), (7, 40), (47, 1))
    ],
    "columns of a grid": lambda: [
        part("BF16", (32, 48), Box(0, 1, 0, 32, *cols), 20, cols[0]) for cols in ((0, 5), (5, 43))
    ],
    "boxes of experts": lambda: [
        part("F16", (5, 33, 50), Box(1, 3, 4, 20, 7, 11), 40),
        part("F16", (5, 33, 50), Box(0, 1, 0, 33, 0, 50), 30, 1),
    ],
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", PARTS)
def test_parts_are_encoded_and_decoded_as_on_the_cpu(case: str) -> None:
    assert_encoded_together(PARTS[case]())


# 2**31 and more; of those that 16 does not divide a slice is as long.
LONG = 2**31 + 70_001


@pytest.mark.parametrize(
    ("dtype", "shape", "box"),
    [
        ("BF16", (LONG,), Box(0, 1, 0, 1, LONG - 6000, 5000)),
        pytest.param("BF16", (2**32,), Box(0, 1, 0, 1, 2**32 - 6000, 5000), marks=pytest.mark.exhaustive),
        ("F8_E5M2", (LONG, 3), Box(0, 1, LONG - 900, 700, 0, 3)),
    ],
)
def test_a_side_may_be_longer_than_int32_counts(dtype: str, shape: tuple[int, ...], box: Box) -> None:
    changed = part(dtype, shape, box, 20)
    assert_decoded([changed])
    assert_encoded([changed])


def test_some_case_has_many_classes_and_runs_of_small_steps() -> None:
    rows = CASES["many classes"]()[0].coded.rows
    assert len(rows) > 4
    assert (rows[:, 1] > 0).any()
    assert (rows[:, 0] == 0x80).any()


def test_a_full_tile_may_have_one_class() -> None:
    old = np.full(1 << 20, 0x3C12, dtype=np.uint16)
    at = np.array([70_000, 131_071])
    tensor = Change("BF16", (1 << 20,), old, at, moved(old[at], np.array([1, 25_536])))
    assert_decoded([tensor])
    assert_encoded([tensor])


def test_positions_may_be_int64() -> None:
    assert_encoded([change("BF16", (13, 9), 12)], torch.int64)


def test_elements_may_lie_anywhere() -> None:
    tensor = change("BF16", (9, 128), 90)
    old = torch.from_numpy(tensor.old.view(np.int16)).view(9, 128)
    wider = torch.zeros(9, 200, dtype=torch.int16)
    wider[:, 40:72] = old[:, 32:64]
    turned = old[:, 64:].t().contiguous()
    widened = old[:, :32].to(torch.int32) << 16
    places = [each.to(DEVICE) for each in (widened, wider, turned)]
    cut = tensors_of([tensor])
    held = tables.segments(
        cut,
        np.zeros(3, dtype=np.int64),
        np.array([[0, 0, 0, 1, 1, 4], [0, 0, 4, 1, 1, 4], [0, 0, 8, 1, 1, 8]]),
        np.array(
            [
                places[0].data_ptr(),
                places[1].data_ptr() + 2 * (40 - 32),
                places[2].data_ptr() - 2 * 64 * 9,
            ]
        ),
        np.array([[0, 32, 1], [0, 200, 1], [0, 1, 9]]),
        np.array([4, 2, 2]),
    )
    decoded = decoding.decode(cut, held, *streams_of([tensor]))
    for i, (first, end) in enumerate([(0, 32), (32, 64), (64, 128)]):
        positions, values = listed(decoded, i, np.uint16)
        mine = (tensor.at % 128 >= first) & (tensor.at % 128 < end)
        assert np.array_equal(positions, tensor.at[mine])
        assert np.array_equal(values, tensor.new[mine])


@pytest.mark.exhaustive
def test_streams_that_mean_nothing_are_refused_as_on_the_cpu() -> None:
    rng = np.random.default_rng(1)
    tensor = change("BF16", (40, 33), 30)
    good = tensor.coded
    cut = tensors_of([tensor])
    held = tables.whole(cut, np.array([tensor.memory.data_ptr()]))
    memory = tensor.memory.clone()
    refused = 0
    for trial in range(8):
        data = good.data.copy()
        if trial % 3:
            data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        else:
            data = data[: rng.integers(1, len(data))]
        if trial % 4 == 3:
            data = np.append(data, rng.integers(0, 255, 3).astype(np.uint8))
        tensor.coded = replace(good, lengths=np.array([len(data)]), data=data)
        decoded = decoding.decode(cut, held, *streams_of([tensor]))
        try:
            positions, new = decode(tensor.spec, tensor.coded, tensor.old)
        except CorruptObject:
            refused += 1
            assert decoded.first_wrong == 0
            assert len(decoded.positions) == 0
            continue
        assert decoded.first_wrong is None
        found = listed(decoded, 0, np.uint16)
        assert np.array_equal(found[0], positions)
        assert np.array_equal(found[1], new)
    assert 0 < refused < 8
    assert torch.equal(tensor.memory, memory)


def test_the_number_of_launches_does_not_depend_on_that_of_the_tensors(
    launches: list[int],
) -> None:
    def num_launches(num: int) -> int:
        changes = [change("BF16", (5,), 1, seed=i) for i in range(num)]
        launches.clear()
        assert_decoded(changes)
        encoded(changes)
        return len(launches)

    assert 0 < num_launches(1) == num_launches(3)


def test_triton_compiles_no_kernel_again_for_lists_that_begin_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = [Watched(getattr(encoding, name)) for name in ("_locate", "_measure", "_fill", "_order")]
    for each in watched:
        monkeypatch.setattr(encoding, each.name, each)
    for num in (1, 2):
        changes = [change("BF16", (40,), 9, seed=i) for i in range(num)]
        assert torch.equal(encoded(changes, shift=1)[0].streams, encoded(changes)[0].streams)
    for each in watched:
        varied = {argument for argument, found in each.is_aligned.items() if len(found) > 1}
        assert varied <= each.unaligned
    assert any(len(found) > 1 for found in watched[0].is_aligned.values())


class Watched:
    """A kernel, and whether the tensors that it is given begin at multiples of 16 bytes."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.name = kernel, kernel.fn.__name__
        options = kernel.kwargs if hasattr(kernel, "kwargs") else vars(kernel)
        self.unaligned = set(options["do_not_specialize_on_alignment"] or ())
        self.is_aligned: dict[str, set[bool]] = {}

    def __getitem__(self, grid: tuple[int]) -> Any:
        def run(*arguments: Any, **options: Any) -> None:
            for name, value in zip(self.kernel.arg_names, arguments, strict=False):
                if isinstance(value, torch.Tensor):
                    self.is_aligned.setdefault(name, set()).add(value.data_ptr() % 16 == 0)
            self.kernel[grid](*arguments, **options)

        return run
