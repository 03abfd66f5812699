"""Runs in FP8: every version has the codes and scales of the weights at that step."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from threading import Barrier

import pytest
import torch

from patchstore import LocalPart, Publisher, mapped
from patchstore.errors import SchemaMismatch, UsageError
from patchstore.publish.snapshot.rounded import Given, Rounded
from patchstore.publish.sources import Quantized, Weights
from patchstore.publish.sources.cuts import Cuts, Values, joined
from patchstore.publish.sources.dtypes import Choice
from patchstore.quantization import FORMS, Quantization
from patchstore.stores.memory import MemoryStore
from patchstore.tensors.bits import bits
from tests.support.quantized import UP, assert_served, weights


def step(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.add_((torch.randn(tensor.shape) * 1e-3).to(tensor.dtype))


def expected(tensors: dict[str, torch.Tensor], form: str) -> dict[str, torch.Tensor]:
    found = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    codes, scales = FORMS[form].quantize(found[UP])
    return found | {UP: codes, FORMS[form].scale_name(UP): scales}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["mapping", "stream", "fp32", "pieces", "mapped"])
def test_each_version_has_the_codes_of_its_weights(store: MemoryStore, form: str, kind: str) -> None:
    trained = weights(torch.float32 if kind == "fp32" else torch.bfloat16)
    source = {
        "mapping": trained,
        "fp32": trained,
        "stream": lambda: iter(trained.items()),
        "pieces": trained
        | {
            UP: [
                LocalPart(trained[UP][:256], (384, 256), start=(0, 0)),
                LocalPart(trained[UP][256:], (384, 256), start=(256, 0)),
            ]
        },
        "mapped": mapped({f"x.{name}": tensor for name, tensor in trained.items()}, lambda name, _: name[2:]),
    }[kind]

    with Publisher(store, source, quantization=form) as publisher:
        for number in range(3):
            published = publisher.publish_patch(number).result()
            assert_served(store, expected(trained, form))
            assert (published.anchor is None) == (number > 0)
            step(trained)


@pytest.mark.parametrize("form", FORMS)
def test_another_default_device_or_dtype_changes_nothing(store: MemoryStore, form: str) -> None:
    trained = weights()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            publisher = Publisher(store, trained, quantization=form)
        for number in range(2):
            with torch.device("meta"):
                publisher.publish_patch(number).result()
            torch.set_default_dtype(torch.float32)
            assert_served(store, expected(trained, form))
            step(trained)
            torch.set_default_dtype(torch.float64)
        publisher.close()
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_run_in_fp8_is_continued(store: MemoryStore) -> None:
    trained = weights()
    with Publisher(store, trained, quantization="fp8-block") as publisher:
        publisher.publish_patch(0).result()
    with Publisher(store, trained, quantization="fp8-block", resume=True) as publisher:
        step(trained)
        assert publisher.publish_patch(1).result().anchor is None
    assert_served(store, expected(trained, "fp8-block"))

    for other in (None, "fp8-channel"):
        with pytest.raises(SchemaMismatch):
            Publisher(store, trained, quantization=other, resume=True)


def test_numbers_without_a_scale_publish_nothing_and_the_next_call_goes_on(store: MemoryStore) -> None:
    trained = weights()
    with Publisher(store, trained, quantization="fp8-block") as publisher:
        publisher.publish_patch(0).result()
        before = trained[UP][3, 4].clone()
        trained[UP][3, 4] = float("inf")
        with pytest.raises(UsageError, match=r"up_proj.*infinite or NaN"):
            publisher.publish_patch(1)
        trained[UP][3, 4] = before
        step(trained)
        assert publisher.publish_patch(2).result().version == 1
        assert_served(store, expected(trained, "fp8-block"))


CHANGES = {
    "added": ({"b.weight": torch.ones(256, 256)}, "'b.weight' was not there"),
    "codes": ({UP: torch.ones(384, 256).to(torch.float8_e4m3fn)}, r"was BF16 \[384, 256\], but is F8_E4M3"),
    "whole": ({UP: torch.ones(384, 256, dtype=torch.int8)}, "but is I8 "),
    "complex": ({UP: torch.ones(384, 256, dtype=torch.complex64)}, "has dtype torch.complex64"),
    "levels": ({UP: torch.ones(3, 128, 256)}, r"\[384, 256\].*but is .*\[3, 128, 256\] now"),
    "norm": ({"model.norm.weight": torch.ones(64)}, r"\[128\].*, but is .*\[64\] now"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_source_that_changes_publishes_nothing_and_goes_on_when_it_is_back(
    store: MemoryStore, change: str, is_stream: bool
) -> None:
    trained = weights()
    now, says = CHANGES[change]
    current = dict(trained)
    with Publisher(
        store, (lambda: iter(current.items())) if is_stream else current, quantization="fp8-block"
    ) as publisher:
        publisher.publish_patch(0).result()
        current |= now
        with pytest.raises(SchemaMismatch, match=says):
            publisher.publish_patch(1)
        current.clear()
        with pytest.raises(SchemaMismatch):
            publisher.publish_patch(1)
        step(trained)
        current |= trained
        assert publisher.publish_patch(2).result().version == 1
        assert_served(store, expected(trained, "fp8-block"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "boxes",
    [
        [(0, 0, 200, 256), (200, 0, 184, 256)],
        [(0, 0, 384, 100), (0, 100, 384, 156)],
        [(0, 0, 100, 60), (0, 60, 100, 196), (100, 0, 1, 256), (101, 0, 27, 256), (128, 0, 256, 256)],
    ],
)
def test_parts_that_cut_blocks_are_rounded_like_the_whole(
    store: MemoryStore, form: str, boxes: list[tuple[int, int, int, int]]
) -> None:
    trained = weights()
    parts = [
        LocalPart(trained[UP][row : row + rows, column : column + columns], (384, 256), start=(row, column))
        for row, column, rows, columns in boxes
    ]
    with Publisher(store, trained | {UP: parts}, quantization=form) as publisher:
        for number in range(3):
            publisher.publish_patch(number).result()
            assert_served(store, expected(trained, form))
            step(trained)


def test_a_stream_of_parts_that_cut_blocks_is_refused(store: MemoryStore) -> None:
    trained = weights()
    parts = [
        LocalPart(trained[UP][:200], (384, 256), start=(0, 0)),
        LocalPart(trained[UP][200:], (384, 256), start=(200, 0)),
    ]
    source = trained | {UP: parts}
    with pytest.raises(SchemaMismatch, match="must yield whole blocks"):
        Publisher(store, lambda: iter(source.items()), quantization="fp8-block")


def test_a_source_without_linear_layers_is_refused(store: MemoryStore) -> None:
    with pytest.raises(SchemaMismatch, match="no weight of a linear layer among 2 tensors"):
        Publisher(store, {"a": torch.ones(8, 8), "norm.weight": torch.ones(8)}, quantization="fp8-block")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "starts", [[(0, 0), (140, 0)], [(0, 0), (0, 100)], [(0, 0), (128, 0)], [(0, 0), (130, 0), (260, 0)]]
)
def test_matrices_of_several_ranks_have_the_scales_of_the_whole(
    form: str, starts: list[tuple[int, int]]
) -> None:
    whole = (torch.randn(300, 272) * torch.logspace(-3, 2, 272)).to(torch.bfloat16)
    axis = 0 if starts[-1][0] else 1
    ends = [start[axis] for start in starts[1:]] + [whole.shape[axis]]
    parts = [
        whole.narrow(axis, start[axis], end - start[axis]) for start, end in zip(starts, ends, strict=True)
    ]
    codes, scales = FORMS[form].quantize(whole)
    told: list[tuple[Cuts, Values]] = []
    barrier = Barrier(len(parts))

    def exchange(cuts: Cuts, local: Callable[[], Values]) -> Values:
        mine = cuts, local()
        told.append(mine)
        barrier.wait(60)
        place = next(i for i, each in enumerate(told) if each is mine)
        return joined([cuts for cuts, _ in told], [values for _, values in told])[place]

    def measure(found: Sequence[Rounded]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        views = [
            FORMS[form].maxima(torch.nn.functional.pad(weights.float(), (left, 0, above, 0)))
            for (weights, _, above, left), *_ in found
        ]
        # Not copies of each other: what is written to one must be seen in all.
        flat = torch.cat([each.reshape(-1) for each in views])
        firsts = [0, *accumulate(each.numel() for each in views)]
        return flat, [
            flat[at:][: each.numel()].view(each.shape) for at, each in zip(firsts, views, strict=False)
        ]

    def one(part: torch.Tensor, start: tuple[int, int]) -> tuple[Given, list[torch.Tensor]]:
        source = {"norm": torch.ones(3), UP: LocalPart(part, (300, 272), start=start)}
        choices = dict.fromkeys(("norm", UP, f"{UP}\t0"), Choice(torch.bfloat16))
        quantized = Quantized(Weights(source), Quantization(FORMS[form]), choices)
        quantized.read()
        quantized.share(exchange)
        seen: list[torch.Tensor] = []

        def measured(found: Sequence[Rounded]) -> tuple[torch.Tensor, Callable[[int], torch.Tensor]]:
            flat, views = measure(found)
            seen.extend(views)
            return flat, views.__getitem__

        return quantized.matrices(measured), seen

    with ThreadPoolExecutor(len(parts)) as pool:
        found = list(pool.map(one, parts, starts))

    published = []
    for (given, (maxima,)), part, start in zip(found, parts, starts, strict=True):
        assert list(given.plain) == ["norm"]
        ((matrix, _, scales_key, owned),) = given.rounded
        operands, its = FORMS[form].operands(maxima)
        block = FORMS[form].block_of((300, 272))
        rows = (torch.arange(part.shape[0]) + matrix.above) // block[0]
        columns = (torch.arange(part.shape[1]) + matrix.left) // block[1]
        spread = operands[rows][:, columns]
        scaled = part.float() * spread if FORMS[form].block else part.float() / spread + 0.0
        mine = codes[start[0] :, start[1] :][: part.shape[0], : part.shape[1]]
        assert torch.equal(bits(scaled.clamp(-448, 448).to(codes.dtype)), bits(mine.contiguous()))
        assert owned is not None
        if scales_key is not None:
            published.append(its[owned])
    assert torch.equal(torch.cat(published, dim=axis if FORMS[form].block else 0), scales)
