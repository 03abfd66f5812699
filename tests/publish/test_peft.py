"""PEFT trains adapters. Published is what its merge_and_unload would leave, and the model is not touched."""

import copy
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from patchstore import Publisher, as_saved
from patchstore.errors import SchemaMismatch
from patchstore.stores.memory import MemoryStore
from patchstore.tensors.bits import bits
from tests.support.adapted_models import KINDS, Net, adapted, lora
from tests.support.small_models import assert_refused, causal, compiled, computed, experts, published
from tests.support.small_models import tied as tied_names
from tests.support.weights import assert_same_bits, rebuilt

peft = pytest.importorskip("peft")


def qwen(*, tied: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    return causal("Qwen2", dtype, vocab_size=32, tie_word_embeddings=tied, initializer_range=0.1)


def learnt(model: Any) -> Any:
    """Return a model whose adapters are no zeros."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("lora_", "hada_", "ia3_")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def merged(model: Any) -> dict[str, torch.Tensor]:
    """Return what PEFT merges."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(copy.deepcopy(model).merge_and_unload().state_dict())


def held(model: Any) -> dict[str, Any]:
    return {name: bits(each).clone() for name, each in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "tied, head alone"])
def test_each_version_is_what_peft_merges(store: MemoryStore, kind: str, dtype: torch.dtype) -> None:
    model = adapted(kind, dtype)
    optimiser = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    with Publisher(store, model, dtype=None) as publisher:
        for step in range(3):
            before = held(model)
            publication = publisher.publish_patch(step)
            after = held(model)
            assert all(torch.equal(before[name], after[name]) for name in before)
            assert before.keys() == after.keys()
            version = publication.result().version
            expected = merged(model)
            assert_same_bits(replayed(store, version), expected)
            model(torch.arange(8).reshape(2, 4)).square().mean().backward()
            optimiser.step()
            optimiser.zero_grad()


def replayed(store: MemoryStore, version: int) -> dict[str, torch.Tensor]:
    """Return a version, with tied tensors under all of their names."""
    found = rebuilt(store, version)
    return found | {alias: found[name] for alias, name in tied_names(store).items()}


def test_merged_adapters_are_published_as_they_are(store: MemoryStore) -> None:
    model = adapted("linear")
    expected = merged(model)
    model.merge_adapter()
    found = published(store, model)
    assert_same_bits(found, expected)


def test_disabled_adapters_are_not_merged(store: MemoryStore) -> None:
    model = adapted("linear")
    with Publisher(store, model) as publisher:
        publisher.publish_patch(0).result()
        with model.disable_adapter():
            version = publisher.publish_patch(1).result().version
    assert_same_bits(replayed(store, version), dict(Net().to(torch.bfloat16).state_dict()))


def test_short_memory_in_a_merge_is_called_that_and_the_next_call_goes_on(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapted("linear")

    def merge(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")

    with Publisher(store, model) as publisher:
        publisher.publish_patch(0).result()
        with monkeypatch.context() as patched:
            patched.setattr(peft.tuners.lora.Linear, "merge", merge)
            with pytest.raises(torch.OutOfMemoryError, match=r"2\.00 GiB"):
                publisher.publish_patch(1)
        learnt(model)
        version = publisher.publish_patch(2).result().version
    assert_same_bits(replayed(store, version), merged(model))


def grouped() -> Any:
    model = Net()
    model.conv = nn.Conv1d(10, 10, 3, padding=1, groups=2)
    return peft.get_peft_model(model, lora("conv"))


def prompted() -> Any:
    return peft.get_peft_model(
        causal("Llama", torch.float32), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("build", "says"), [(grouped, "cannot merge the adapter of 'conv'"), (prompted, "learns a prompt")]
)
def test_what_peft_does_not_merge_is_refused(store: MemoryStore, build: Callable[[], Any], says: str) -> None:
    assert_refused(store, build(), says)


def test_one_layer_at_a_time_is_merged() -> None:
    model = adapted("linear")
    num, most = computed(model)
    # Weights and biases of four layers were yielded, but not held at once.
    assert num == 6
    assert most <= 2


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapted_experts_of_transformers_are_published_as_saved(store: MemoryStore, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = peft.get_peft_model(experts(), lora("q_proj", "o_proj", init_lora_weights=False))
    copy.deepcopy(model).merge_and_unload().save_pretrained(tmp_path)
    assert_same_bits(published(store, as_saved(model)), safetensors.load_file(tmp_path / "model.safetensors"))


class ValueHead(nn.Module):
    """As trainers of PPO wrap a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.pretrained_model, self.v_head = model, nn.Linear(16, 1)


def mixed(config: Any, of_other: str) -> Any:
    model = peft.get_peft_model(qwen(), config, mixed=True)
    model.add_adapter("other", peft.LoHaConfig(target_modules=[of_other], r=2))
    model.set_adapter(["default", "other"])
    return model


def added(config: Any) -> Any:
    model = qwen()
    model.add_adapter(config)
    return model


def compiled_within(config: Any) -> Any:
    model = peft.get_peft_model(qwen(), config)
    layers = model.get_base_model().model.layers
    layers[0], layers[1].mlp.up_proj = compiled(layers[0]), compiled(layers[1].mlp.up_proj)
    return model


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "added by transformers": added,
    "injected": lambda config: peft.inject_adapter_in_model(config, qwen()),
    "of two kinds": lambda config: mixed(config, "down_proj"),
    "of two kinds in one layer": lambda config: mixed(config, "q_proj"),
    "compiled": lambda config: compiled(peft.get_peft_model(qwen(), config)),
    "compiled before": lambda config: peft.get_peft_model(compiled(qwen()), config),
    "compiled within": compiled_within,
    "compiled for data parallel": lambda config: nn.DataParallel(
        compiled(peft.get_peft_model(qwen(), config))
    ),
    "averaged, and unwrapped": lambda config: (
        torch.optim.swa_utils.AveragedModel(peft.get_peft_model(qwen(), config)).module
    ),
}


def answers(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(torch.arange(20).reshape(1, 20)).logits
    return found


@pytest.mark.parametrize("named", [lambda model: model, as_saved], ids=["model", "as_saved"])
@pytest.mark.parametrize("kind", WRAPPED)
def test_adapters_are_merged_wherever_they_are_in_the_model(
    store: MemoryStore, kind: str, named: Callable[[Any], Any]
) -> None:
    model = learnt(WRAPPED[kind](lora("q_proj", "up_proj")))
    plain = qwen()
    plain.load_state_dict(published(store, named(model), dtype=None))
    torch.testing.assert_close(answers(plain), answers(getattr(model, "module", model)))


@pytest.mark.parametrize("kind", ["added by transformers", "injected"])
def test_a_value_head_around_adapters_keeps_the_names_of_its_parts(store: MemoryStore, kind: str) -> None:
    model = ValueHead(learnt(WRAPPED[kind](lora("q_proj", "up_proj"))))
    assert published(store, model).keys() == ValueHead(qwen()).state_dict().keys()
    model = ValueHead(learnt(peft.get_peft_model(qwen(), lora("q_proj", "up_proj"))))
    assert published(MemoryStore(), model).keys() == ValueHead(qwen()).state_dict().keys()


def tied_and_added() -> Any:
    model = qwen(tied=True)
    model.add_adapter(lora("lm_head"))
    return model


ONE_TENSOR: dict[str, tuple[str, Callable[[], Any]]] = {
    "head alone": (
        "only the first has an adapter",
        lambda: peft.get_peft_model(qwen(tied=True), lora("q_proj", "lm_head")),
    ),
    "embeddings alone": (
        "only the first has an adapter",
        lambda: peft.get_peft_model(qwen(tied=True), lora("embed_tokens")),
    ),
    "both": (
        "one tensor with two adapters",
        lambda: peft.get_peft_model(qwen(tied=True), lora("embed_tokens", "lm_head")),
    ),
    "layers used twice": (
        "one tensor with two adapters",
        lambda: peft.get_peft_model(qwen(), lora("q_proj", layer_replication=[(0, 2), (1, 2)])),
    ),
    "added by transformers": ("only the first has an adapter", tied_and_added),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ONE_TENSOR)
def test_an_adapter_of_a_tensor_that_another_module_uses_without_it_is_refused(
    store: MemoryStore, kind: str
) -> None:
    # Also while adapters are zeros, and not only in the middle of the training.
    reason, build = ONE_TENSOR[kind]
    assert_refused(store, build(), rf"{reason}.*ensure_weight_tying=True")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapters_that_peft_ties_are_merged_once(store: MemoryStore) -> None:
    config = lora("q_proj", "embed_tokens", "lm_head", ensure_weight_tying=True, task_type="CAUSAL_LM")
    model = peft.get_peft_model(qwen(tied=True), config)
    optimiser = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    tokens = torch.arange(20).reshape(1, 20)
    with Publisher(store, model, dtype=None) as publisher:
        for step in range(3):
            publisher.publish_patch(step).result()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimiser.step()
            optimiser.zero_grad()
        version = publisher.publish_patch(3).result().version
    plain = qwen(tied=True)
    plain.load_state_dict(replayed(store, version))
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    torch.testing.assert_close(answers(plain), answers(model))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tied_adapters_with_scales_of_their_own_are_refused(store: MemoryStore) -> None:
    tied = {"ensure_weight_tying": True, "alpha_pattern": {"lm_head": 64}, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(qwen(tied=True), lora("embed_tokens", "lm_head", **tied))
    assert_refused(store, learnt(model), "one tensor with two adapters")


def test_what_peft_puts_in_and_cannot_take_out_again_is_refused(store: MemoryStore) -> None:
    prompt = peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=1, task_type="CAUSAL_LM")
    with pytest.raises(SchemaMismatch, match="have servers load the adapter themselves"):
        Publisher(store, peft.get_peft_model(causal("Llama", torch.float32), prompt))


def test_the_log_says_how_much_of_small_adapters_is_rounded_away(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "patchstore")
    model = peft.get_peft_model(qwen(dtype=torch.bfloat16), lora("q_proj", "up_proj"))
    sizes = (0.0, 1e-5, 1e-2, 1e-1, 1.0)
    with Publisher(store, model) as publisher:
        for step, size in enumerate(sizes):
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.data.fill_(size)
            publisher.publish_patch(step).result()
    said = [each for each in caplog.records if "relative error" in each.getMessage()]
    # Nothing of adapters that are zeros, and of the first three that are not.
    assert len(said) == 3
    first = said[0].getMessage()
    assert "in torch.bfloat16 with a relative error of 0.99" in first
    assert "dtype=torch.float32 avoids it" in first
    assert [each.levelno for each in said] == [logging.WARNING, logging.INFO, logging.INFO]


def test_in_float32_adapters_over_bf16_keep_what_they_add(store: MemoryStore) -> None:
    model = peft.get_peft_model(qwen(dtype=torch.bfloat16), lora("q_proj"))
    base = {name: each.clone() for name, each in qwen(dtype=torch.bfloat16).state_dict().items()}
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(1e-5)
    for dtype, least, most in ((torch.float32, 0.0, 0.01), (torch.bfloat16, 0.9, 2.0)):
        found = published(MemoryStore(), model, dtype=dtype)
        for name, module in model.named_modules():
            if name.endswith("q_proj"):
                own = name.removeprefix("base_model.model.") + ".weight"
                added = module.get_delta_weight("default")
                error = (found[own].float() - base[own].float() - added).norm() / added.norm()
                assert least <= error <= most, (dtype, own)
