"""Matrices are compared with their codes as if codes had been made first, by the forms in plain torch."""

from collections.abc import Iterator, Sequence

import pytest
import torch

from patchstore import Publisher
from patchstore.errors import SchemaMismatch, UsageError
from patchstore.publish import snapshot
from patchstore.publish.sources import quantized
from patchstore.quantization import FORMS
from patchstore.quantization.forms import Matrix
from patchstore.stores.memory import MemoryStore
from patchstore.tensors.bits import bits
from tests.support.interpreted import DEVICE, kernels
from tests.support.quantized import assert_served

# A minute, where they are interpreted.
pytestmark = pytest.mark.timeout(1200)

compare = kernels("patchstore.kernels.compare")
index_encode = kernels("patchstore.kernels.index_encode")
e4m3 = kernels("patchstore.kernels.quantize")
rounded = kernels("patchstore.kernels.rounded")
TILE_BYTES = 1024


def random(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(rows, columns) * torch.logspace(-6, 3, columns)).to(dtype).to(DEVICE)


def within(rows: int, columns: int, **options: torch.dtype) -> torch.Tensor:
    """Columns of a wider matrix, at an address that 16 divides."""
    return random(rows, columns + 40, **options)[:, 8 : 8 + columns]


MATRICES = {
    "whole": [Matrix(random(256, 384), torch.bfloat16)],
    "one-block": [Matrix(random(128, 128), torch.bfloat16)],
    "smaller": [Matrix(random(3, 8), torch.bfloat16), Matrix(random(1, 1), torch.bfloat16)],
    "edges": [Matrix(random(200, 264), torch.bfloat16)],
    "odd": [Matrix(random(131, 77), torch.bfloat16), Matrix(random(40, 1030), torch.bfloat16)],
    "unaligned": [Matrix(random(130, 137)[:, 1:], torch.bfloat16)],
    "turned": [Matrix(random(136, 200).t(), torch.bfloat16)],
    "columns": [Matrix(within(150, 256), torch.bfloat16)],
    "fp32": [Matrix(random(256, 264, torch.float32), torch.float32)],
    "fp32-to-bf16": [Matrix(random(256, 264, torch.float32), torch.bfloat16)],
    "fp32-odd": [Matrix(random(70, 33, torch.float32), torch.bfloat16)],
    "fp16-to-bf16": [Matrix((torch.randn(130, 128) * 0.02).half().to(DEVICE), torch.bfloat16)],
    "fp16": [Matrix((torch.randn(130, 128) * 0.02).half().to(DEVICE), torch.float16)],
    "many": [
        matrix
        for k in range(4)
        for matrix in (
            Matrix(random(64 + 64 * k, 128), torch.bfloat16),
            Matrix(random(9, 17 + k), torch.bfloat16),
            Matrix(random(16 * k, 40, torch.float32), torch.bfloat16),
        )
    ],
    "zeros": [Matrix(torch.zeros(256, 136, dtype=torch.bfloat16, device=DEVICE), torch.bfloat16)],
    "signs": [Matrix(-torch.zeros(130, 128, dtype=torch.bfloat16, device=DEVICE), torch.bfloat16)],
}


def reference(form: str, matrices: Sequence[Matrix]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [FORMS[form].quantize(matrix.weights.cpu().to(matrix.served)) for matrix in matrices]


class Comparison:
    """The codes of `old` in a snapshot, and what a comparison with `new` found."""

    def __init__(self, form: str, old: Sequence[torch.Tensor], new: Sequence[Matrix]) -> None:
        self.codes = old
        sizes = [each.numel() for each in old]
        tiles = compare.cut(sizes, [1] * len(sizes), DEVICE, tile_bytes=TILE_BYTES)
        self.snapshot = torch.zeros(tiles.first_bytes[-1], dtype=torch.uint8, device=DEVICE)
        self.starts = tiles.first_bytes
        for codes, start in zip(old, self.starts, strict=False):
            self.snapshot[start : start + codes.numel()] = codes.view(-1).view(torch.uint8).to(DEVICE)
        self.found = compare.Found(tiles, sum(sizes) + 1)
        self.plan = rounded.plan(self.found, list(enumerate(new)), FORMS[form].block)
        maxima = torch.full((self.plan.num_groups,), -1.0, device=DEVICE)
        rounded.measure(self.plan, maxima)
        operands, scales = FORMS[form].operands(maxima)
        # Two parts of the tiles, which cut matrices.
        for some in (range(tiles.num_tiles // 2), range(tiles.num_tiles // 2, tiles.num_tiles)):
            rounded.compare(self.plan, self.found, operands, self.snapshot.data_ptr(), some)
        self.scales = [
            scales[first : first + down * across].view(down, across).cpu()
            for first, (down, across) in zip(self.plan.firsts, self.plan.shapes, strict=True)
        ]

    def applied(self) -> list[torch.Tensor]:
        compare.apply(self.found, self.snapshot.data_ptr())
        return [
            self.snapshot[start : start + codes.numel()].cpu().view(codes.shape)
            for codes, start in zip(self.codes, self.starts, strict=False)
        ]


@pytest.mark.sample(6)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", MATRICES)
def test_codes_and_scales_are_those_of_the_form(form: str, kind: str) -> None:
    wanted = reference(form, MATRICES[kind])
    old = [codes.clone().view(torch.uint8) for codes, _ in wanted]
    for each in old:
        each.view(-1)[::97] ^= 1
    num_changed = sum(-(-each.numel() // 97) for each in old)

    comparison = Comparison(form, old, MATRICES[kind])

    assert int(comparison.found.cursor) == num_changed
    for found, (codes, _) in zip(comparison.applied(), wanted, strict=True):
        assert torch.equal(found, codes.view(torch.uint8))
    for found, (_, scales) in zip(comparison.scales, wanted, strict=True):
        assert torch.equal(bits(found), bits(scales))


def test_codes_that_did_not_change_are_not_found() -> None:
    matrices = MATRICES["many"]
    old = [codes.view(torch.uint8) for codes, _ in reference("fp8-block", matrices)]
    assert int(Comparison("fp8-block", old, matrices).found.cursor) == 0


@pytest.mark.parametrize("start", [(0, 0), (100, 0), (0, 8), (27, 64), (127, 3)])
def test_a_part_is_rounded_with_the_maxima_of_whole_blocks(start: tuple[int, int]) -> None:
    form, whole = FORMS["fp8-block"], random(300, 272)
    rows, columns = slice(start[0], start[0] + 130), slice(start[1], start[1] + 136)
    codes, _ = form.quantize(whole.cpu())
    wanted = codes[rows, columns].contiguous().view(torch.uint8)
    matrix = Matrix(whole[rows, columns], torch.bfloat16, start[0] % 128, start[1] % 128)
    found = compare.Found(compare.cut([wanted.numel()], [1], DEVICE, tile_bytes=TILE_BYTES), 99_999)
    plan = rounded.plan(found, [(0, matrix)], form.block)
    maxima = torch.zeros(plan.num_groups, device=DEVICE)
    rounded.measure(plan, maxima)
    down, across = plan.shapes[0]
    own = maxima[: down * across].view(down, across)
    assert torch.equal(own, form.maxima(form.part(matrix.weights, start)))

    # As the other parts' processes tell it.
    own.copy_(form.maxima(whole)[start[0] // 128 :, start[1] // 128 :][:down, :across])
    snapshot_ = torch.zeros(wanted.numel() + 8, dtype=torch.uint8, device=DEVICE)
    everything = range(found.tiles.num_tiles)
    rounded.compare(plan, found, form.operands(maxima)[0], snapshot_.data_ptr(), everything)
    compare.apply(found, snapshot_.data_ptr())

    assert torch.equal(snapshot_[: wanted.numel()].cpu().view(wanted.shape), wanted)


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("form", FORMS)
def test_a_group_that_is_not_finite_says_so(form: str, number: float) -> None:
    weights = random(200, 264)
    weights[140, 261] = number
    found = compare.Found(compare.cut([weights.numel()], [1], DEVICE), 1)
    plan = rounded.plan(found, [(0, Matrix(weights, torch.bfloat16))], FORMS[form].block)
    maxima = torch.zeros(plan.num_groups, device=DEVICE)
    rounded.measure(plan, maxima)
    strange = (~maxima.isfinite()).nonzero().view(-1).tolist()
    assert strange == [5 if form == "fp8-block" else 140]


@pytest.mark.parametrize("instruction", [False, True])
def test_numbers_become_the_codes_that_torch_makes_of_them(instruction: bool) -> None:
    if instruction and (DEVICE.type == "cpu" or torch.cuda.get_device_capability() < (8, 9)):
        pytest.skip("needs a GPU that converts to E4M3")
    assert e4m3.rounds_exactly(DEVICE, instruction=instruction)


def test_a_device_that_rounds_otherwise_is_not_told_to(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    e4m3.converts.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(e4m3, "rounds_exactly", lambda device, instruction: False)
    assert not e4m3.converts(torch.device("cuda"))
    assert "does not round to FP8 as torch does" in caplog.text
    e4m3.converts.cache_clear()


def test_there_may_be_no_matrix() -> None:
    found = compare.Found(compare.cut([], [], DEVICE), 1)
    plan = rounded.plan(found, [], (128, 128))
    maxima = torch.zeros(plan.num_groups, device=DEVICE)
    rounded.measure(plan, maxima)
    rounded.compare(plan, found, maxima, 0, range(0))
    assert int(found.cursor) == 0


# Runs.


@pytest.fixture
def trained() -> dict[str, torch.Tensor]:
    random_ = {
        "model.embed_tokens.weight": torch.randn(100, 48),
        "model.layers.0.mlp.up_proj.weight": torch.randn(136, 136) * 0.02,
        "model.layers.0.mlp.down_proj.weight": torch.randn(77, 131) * 0.02,
        "model.norm.weight": torch.ones(64),
    }
    return {name: tensor.to(torch.bfloat16).to(DEVICE) for name, tensor in random_.items()}


def step(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        chosen = torch.rand(tensor.shape) < 0.01
        tensor[chosen.to(DEVICE)] *= 1.3


def expected(tensors: dict[str, torch.Tensor], form: str) -> dict[str, torch.Tensor]:
    found = {name: tensor.detach().to(torch.bfloat16).cpu() for name, tensor in tensors.items()}
    for name in list(found):
        if "_proj" in name:
            found[name], found[FORMS[form].scale_name(name)] = FORMS[form].quantize(found[name])
    return found


@pytest.mark.sample(4)
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["bf16", "fp32", "turned", "stream", "moving", "mixed"])
def test_each_version_has_the_codes_of_its_weights(
    store: MemoryStore, trained: dict[str, torch.Tensor], place: snapshot.Place, form: str, kind: str
) -> None:
    if kind in {"fp32", "mixed"}:
        chosen = [name for name in trained if kind == "fp32" or "down" in name]
        trained.update({name: trained[name].float() for name in chosen})
    if kind == "turned":
        trained.update({name: each.t().contiguous().t() for name, each in trained.items() if each.dim() == 2})

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield from trained.items()

    source = stream if kind == "stream" else trained
    # Without a pattern what is in float32 among others in bfloat16 would be rounded from float32.
    asked = {"*": "bfloat16"} if kind == "mixed" else torch.bfloat16
    options = {"quantization": form, "dtype": asked, "snapshot": place, "encoding": "gap"}
    with Publisher(store, source, **options) as publisher:  # type: ignore[arg-type]
        for number in range(3):
            published = publisher.publish_patch(number).result()
            assert_served(store, expected(trained, form))
            assert (published.anchor is None) == (number > 0)
            step(trained)
            if kind == "moving":
                trained.update({name: tensor.clone() for name, tensor in trained.items()})


@pytest.mark.usefixtures("_kernels")
def test_another_default_device_or_dtype_changes_nothing(
    store: MemoryStore, trained: dict[str, torch.Tensor]
) -> None:
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            publisher = Publisher(store, trained, quantization="fp8-block", encoding="gap")
        for number in range(2):
            with torch.device("meta"):
                publisher.publish_patch(number).result()
            torch.set_default_dtype(torch.float32)
            assert_served(store, expected(trained, "fp8-block"))
            step(trained)
            torch.set_default_dtype(torch.float64)
        publisher.close()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_kernels")
def test_all_matrices_are_compared_at_once(
    store: MemoryStore, trained: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("measure", "compare"):
        real = getattr(rounded, name)
        monkeypatch.setattr(rounded, name, lambda *args, n=name, f=real: (calls.append(n), f(*args)))
    with Publisher(store, trained, quantization="fp8-block", encoding="gap") as publisher:
        publisher.publish_patch(0).result()
        calls.clear()
        step(trained)
        publisher.publish_patch(1).result()
    # Compared again where there was too little room for what was found.
    assert calls[0] == "measure"
    assert set(calls[1:]) == {"compare"}


@pytest.mark.usefixtures("_kernels")
def test_matrices_are_listed_again_only_where_they_moved(
    store: MemoryStore, trained: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[object] = []
    real = quantized.Rounded
    monkeypatch.setattr(quantized, "Rounded", lambda *given: listed.append(given) or real(*given))
    found = []
    with Publisher(store, trained, quantization="fp8-block", encoding="gap") as publisher:
        for number in range(6):
            if number == 3:
                trained.update({name: tensor.clone() for name, tensor in trained.items()})
            publisher.publish_patch(number).result()
            assert_served(store, expected(trained, "fp8-block"))
            found.append(len(listed))
            step(trained)
    # The first version is the snapshot's; and of tensors that moved it is known at the next call.
    assert found == [0, 2, 2, 4, 6, 6]


@pytest.mark.usefixtures("_kernels")
def test_a_step_that_changes_every_code_has_room(
    store: MemoryStore, trained: dict[str, torch.Tensor]
) -> None:
    with Publisher(store, trained, quantization="fp8-block", encoding="gap") as publisher:
        publisher.publish_patch(0).result()
        for tensor in trained.values():
            tensor.copy_(torch.randn(tensor.shape))
        publisher.publish_patch(1).result()
    assert_served(store, expected(trained, "fp8-block"))


@pytest.mark.usefixtures("_kernels")
def test_numbers_without_a_scale_publish_nothing_and_the_next_call_goes_on(
    store: MemoryStore, trained: dict[str, torch.Tensor]
) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    with Publisher(store, trained, quantization="fp8-block", encoding="gap") as publisher:
        publisher.publish_patch(0).result()
        kept = trained[name].clone()
        trained[name][130, 5] = float("nan")
        with pytest.raises(UsageError, match=f"'{name}' has numbers that are infinite or NaN"):
            publisher.publish_patch(1)
        trained[name].copy_(kept)
        step(trained)
        publisher.publish_patch(2).result()
    assert_served(store, expected(trained, "fp8-block"))


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda each: each.update({"model.norm.weight": torch.ones(65, device=DEVICE)}), "norm.weight.* was"),
        (lambda each: each.pop("model.layers.0.mlp.up_proj.weight"), "up_proj.weight' is gone"),
        (lambda each: each.pop("model.norm.weight"), "norm.weight' is gone"),
        (
            lambda each: each.update(
                {"model.layers.0.mlp.up_proj.weight": torch.ones(8, 8, device=DEVICE).bfloat16()}
            ),
            r"up_proj.weight' was BF16 \[136, 136\], but is BF16 \[8, 8\] now",
        ),
    ],
)
def test_another_model_is_refused_by_name(
    store: MemoryStore, trained: dict[str, torch.Tensor], change: object, message: str
) -> None:

    with Publisher(store, lambda: dict(trained), quantization="fp8-block", encoding="gap") as publisher:
        publisher.publish_patch(0).result()
        kept = dict(trained)
        change(trained)  # type: ignore[operator]
        with pytest.raises(SchemaMismatch, match=message):
            publisher.publish_patch(1)
        trained.update(kept)
        step(trained)
        publisher.publish_patch(2).result()
    assert_served(store, expected(trained, "fp8-block"))
