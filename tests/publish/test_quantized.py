"""Runs in FP8: every version has the codes and scales of the weights at that step."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from threading import Barrier

import pytest
import torch

from patchstore import LocalPart, Publisher, Replica, as_saved, mapped
from patchstore.errors import SchemaMismatch, UsageError
from patchstore.publish.snapshot.rounded import Given, Rounded
from patchstore.publish.sources import Quantized, Weights
from patchstore.publish.sources.cuts import Cuts, Values, joined
from patchstore.quantization import FORMS, Quantization
from patchstore.stores.memory import MemoryStore
from patchstore.tensors.bits import bits

UP = "model.layers.0.mlp.up_proj.weight"


def weights(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {
        "model.embed_tokens.weight": torch.randn(256, 128).to(dtype),
        UP: (torch.randn(384, 256) * 0.02).to(dtype),
        "model.layers.0.mlp.gate.weight": torch.randn(8, 128).to(dtype),
        "model.norm.weight": torch.ones(128, dtype=dtype),
    }


def step(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.add_((torch.randn(tensor.shape) * 1e-3).to(tensor.dtype))


def expected(tensors: dict[str, torch.Tensor], form: str) -> dict[str, torch.Tensor]:
    found = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    codes, scales = FORMS[form].quantize(found[UP])
    return found | {UP: codes, FORMS[form].scale_name(UP): scales}


def assert_served(store: MemoryStore, wanted: dict[str, torch.Tensor]) -> None:
    """Compare the newest version, by its deltas from version 0 on."""
    replica = Replica(store, {})
    replica.update(0)
    replica.update()
    assert replica.tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(bits(replica.tensors[name]), bits(tensor)), name


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


def test_weights_that_are_in_fp8_already_are_not_quantised_again(store: MemoryStore) -> None:
    codes, scales = FORMS["fp8-block"].quantize(torch.randn(256, 256))
    given = weights() | {"a.weight": codes, "a.weight_scale_inv": scales}
    with pytest.raises(UsageError, match=r"'a.weight_scale_inv' is a scale of .* give dtype=None"):
        Publisher(store, given, quantization="fp8-block")
    with pytest.raises(SchemaMismatch, match=r"'a.weight' is in FP8 already.*without quantization="):
        Publisher(store, given, quantization="fp8-block", dtype=None)
    del given["a.weight"]
    with pytest.raises(SchemaMismatch, match=r"has a tensor 'a.weight_scale_inv', the name that"):
        Publisher(store, given | {"a.weight": torch.randn(256, 256)}, quantization="fp8-block")
    assert list(store.list()) == []


QUANTISED = {
    "blocks": {
        "a.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.ones(1, 1),
    },
    "nvfp4": {
        "a.weight": torch.zeros(8, 4, dtype=torch.uint8),
        "a.weight_scale": torch.ones(8, 1).to(torch.float8_e4m3fn),
        "a.weight_scale_2": torch.ones(()),
    },
    "inputs": {"a.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn), "a.input_scale": torch.ones(())},
    "awq": {"a.qweight": torch.zeros(8, 8, dtype=torch.int32), "a.scales": torch.ones(8, 1).half()},
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_scales_of_weights_that_are_quantised_already_are_not_rounded(store: MemoryStore, kind: str) -> None:
    given = QUANTISED[kind] | {"norm.weight": torch.ones(8)}
    with pytest.raises(
        UsageError, match=r"is a scale of the quantised weights 'a.q?weight'.* give dtype=None"
    ):
        Publisher(store, given)
    assert list(store.list()) == []
    with Publisher(store, given, dtype=None) as publisher:
        publisher.publish_patch(0).result()
    assert_served(store, given)


def test_a_gain_that_is_called_scale_is_rounded_like_all_weights(store: MemoryStore) -> None:
    given = {"norm.scale": torch.randn(8), "norm.count": torch.zeros(1, dtype=torch.uint8)}
    with Publisher(store, given) as publisher:
        publisher.publish_patch(0).result()
    assert_served(store, given | {"norm.scale": given["norm.scale"].bfloat16()})


def test_layers_with_transposed_weights_are_refused(store: MemoryStore) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=16)
    )
    with pytest.raises(SchemaMismatch, match=r"is a Conv1D.*publish without quantization="):
        Publisher(store, model, quantization="fp8-channel")


def test_blocks_that_do_not_divide_a_matrix_are_named(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"a.q_proj.weight": torch.randn(192, 256)}
    Publisher(store, given, quantization="fp8-block").close()
    assert (
        "1 matrices have sizes that blocks of 128 x 128 do not divide, such as 'a.q_proj.weight'"
        in caplog.text
    )
    caplog.clear()
    Publisher(MemoryStore(), given, quantization="fp8-channel").close()
    assert not caplog.text


@pytest.mark.parametrize("form", FORMS)
def test_a_tied_output_layer_stays_as_it_is_where_a_replay_is_opened(
    store: MemoryStore, tmp_path: Path, form: str
) -> None:
    transformers = pytest.importorskip("transformers")
    from patchstore.read.replay import replay

    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=128, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    base = json.loads((tmp_path / "base" / "config.json").read_text())
    key = "modules_to_not_convert" if form == "fp8-block" else "ignore"
    base["quantization_config"] = FORMS[form].config(["re:visual.*"])
    (tmp_path / "base" / "config.json").write_text(json.dumps(base))
    (tmp_path / "base" / "model.safetensors").unlink()
    with Publisher(store, model, quantization=form, files=tmp_path / "base") as publisher:
        publisher.publish_patch(0).result()
    replay(store, out=tmp_path / "replayed")

    found = json.loads((tmp_path / "replayed" / "config.json").read_text())["quantization_config"][key]
    assert found == ["lm_head", "model.embed_tokens", "re:visual.*"]
    if form == "fp8-channel":
        pytest.importorskip("compressed_tensors")
        opened = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "replayed", dtype=torch.bfloat16
        )
        tokens = torch.arange(8)[None]
        with torch.no_grad():
            logits, wanted = opened(tokens).logits, model(tokens).logits
        assert logits.isfinite().all()
        assert (logits - wanted).abs().max() < wanted.abs().max()


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


def test_weights_that_are_quantised_already_are_published_as_they_are(store: MemoryStore) -> None:
    codes, scales = FORMS["fp8-block"].quantize(torch.randn(256, 256))
    scales[0, 0], scales[0, 1], scales[1, 0] = 0.0, float("inf"), float("nan")
    given = {
        UP: codes,
        UP + "_scale_inv": scales,
        "packed.weight": torch.randint(0, 255, (64, 64), dtype=torch.uint8),
    }
    with Publisher(store, given, dtype=None) as publisher:
        publisher.publish_patch(0).result()
        assert_served(store, given)
        bits(codes)[::7] ^= 1
        scales[1, 1] *= 2
        publisher.publish_patch(1).result()
        assert_served(store, given)


def test_anchors_are_checkpoints_that_transformers_opens(store: MemoryStore, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from patchstore.read.replay import replay

    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=128, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    with Publisher(store, as_saved(model), quantization="fp8-block", files=tmp_path / "base") as publisher:
        publisher.publish_patch(0).result()
    replay(store, out=tmp_path / "replayed")

    opened = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "replayed",
        dtype=torch.bfloat16,
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True),
    )

    form = FORMS["fp8-block"]
    for name, tensor in model.state_dict().items():
        found = opened.state_dict()[name]
        if name.endswith("_proj.weight"):
            codes, scales = form.quantize(tensor)
            whole = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            assert torch.equal(bits(found), bits((codes.float() * whole).to(torch.bfloat16))), name
        else:
            assert torch.equal(bits(found), bits(tensor)), name


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
        quantized = Quantized(Weights(source), Quantization(FORMS[form]), torch.bfloat16)
        quantized.read()
        quantized.share(exchange)
        seen: list[torch.Tensor] = []

        def measured(found: Sequence[Rounded]) -> tuple[torch.Tensor, list[torch.Tensor]]:
            flat, views = measure(found)
            seen.extend(views)
            return flat, views

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
