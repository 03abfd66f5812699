"""PEFT trains adapters. Published is what its merge_and_unload would leave, and the model is not touched."""

import copy
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import computed, experts, published
from torch import nn

from patchstore import Publisher, as_saved
from patchstore.errors import SchemaMismatch
from patchstore.stores.memory import MemoryStore
from patchstore.tensors.bits import bits
from tests.support.weights import assert_same_bits

peft = pytest.importorskip("peft")


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 8, 16)), nn.Parameter(torch.randn(3, 16, 8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        each = torch.einsum("eoi,bti->ebto", self.up, hidden)
        return torch.einsum("eio,ebto->bti", self.down, each) * 1e-3


class Net(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = {"model_type": "custom", "tie_word_embeddings": tied}
        self.embed_tokens = nn.Embedding(32, 16)
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.experts = Experts()
        self.lm_head = nn.Linear(16, 32, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.down(torch.relu(self.up(self.embed_tokens(tokens))))
        hidden = hidden + self.conv(hidden.transpose(1, 2)).transpose(1, 2) + self.experts(hidden)
        found: torch.Tensor = self.lm_head(hidden) * self.scale
        return found


def adapted(*configs: Any, tied: bool = False, dtype: torch.dtype = torch.bfloat16) -> Any:
    model = peft.get_peft_model(Net(tied=tied).to(dtype), configs[0])
    for number, config in enumerate(configs[1:]):
        model.add_adapter(f"other{number}", config)
    if len(configs) > 1:
        model.base_model.set_adapter(["default", *(f"other{number}" for number in range(len(configs) - 1))])
    # Adapters begin as zeros.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "base_layer" not in name and "original_module" not in name and parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def lora(*modules: str, **options: Any) -> Any:
    return peft.LoraConfig(target_modules=list(modules), r=4, **options)


MODELS: dict[str, Callable[[], Any]] = {
    "linear": lambda: adapted(lora("up", "down")),
    "fp32": lambda: adapted(lora("up", "down"), dtype=torch.float32),
    "rank-stabilised, with bias": lambda: adapted(lora("up", use_rslora=True, lora_bias=True)),
    "embedding and convolution": lambda: adapted(lora("embed_tokens", "conv")),
    "dora": lambda: adapted(lora("up", "down", "conv", use_dora=True)),
    "modules to save": lambda: adapted(lora("up", modules_to_save=["lm_head"])),
    "several": lambda: adapted(lora("up"), lora("up", "down", lora_alpha=3)),
    "tokens": lambda: adapted(lora("up", trainable_token_indices={"embed_tokens": [3, 5]})),
    "ia3": lambda: adapted(peft.IA3Config(target_modules=["up", "down"], feedforward_modules=["down"])),
    "loha": lambda: adapted(peft.LoHaConfig(target_modules=["up"], r=2)),
    "parameters": lambda: adapted(
        peft.LoraConfig(target_modules=[], target_parameters=["experts.up", "experts.down"], r=2)
    ),
    "tied, head to save": lambda: adapted(lora("up", modules_to_save=["lm_head"]), tied=True),
    "tied, both to save": lambda: adapted(
        lora("up", modules_to_save=["embed_tokens", "lm_head"], ensure_weight_tying=True), tied=True
    ),
}


def causal(*, tied: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """Return a small model of transformers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tied, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Qwen2ForCausalLM(config).to(dtype)


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
@pytest.mark.parametrize("kind", MODELS)
def test_each_version_is_what_peft_merges(store: MemoryStore, kind: str) -> None:
    model = MODELS[kind]()
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
            assert_same_bits(replayed(store, version, expected), expected)
            model(torch.arange(8).reshape(2, 4)).square().mean().backward()
            optimiser.step()
            optimiser.zero_grad()


def replayed(store: MemoryStore, version: int, names: Any) -> dict[str, torch.Tensor]:
    """Return a version, with tied tensors under all of their names."""
    from patchstore import Replica
    from patchstore.format import history

    found: dict[str, torch.Tensor] = {}
    Replica(store, found).update(version)
    header = history.read_header(store)
    assert header is not None
    return found | {alias: found[name] for alias, name in header.schema.tied.items() if alias not in found}


def test_merged_adapters_are_published_as_they_are(store: MemoryStore) -> None:
    model = MODELS["linear"]()
    expected = merged(model)
    model.merge_adapter()
    found = published(store, model)
    assert_same_bits(found, expected)


def test_disabled_adapters_are_not_merged(store: MemoryStore) -> None:
    model = MODELS["linear"]()
    with Publisher(store, model) as publisher:
        publisher.publish_patch(0).result()
        with model.disable_adapter():
            version = publisher.publish_patch(1).result().version
    assert_same_bits(replayed(store, version, None), dict(Net().to(torch.bfloat16).state_dict()))


def test_ddp_around_an_adapted_model(store: MemoryStore, group: None) -> None:
    model = MODELS["linear"]()
    parallel = nn.parallel.DistributedDataParallel(model)
    assert_same_bits(published(store, parallel), merged(model))


def test_short_memory_in_a_merge_is_called_that_and_the_next_call_goes_on(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS["linear"]()

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
    assert_same_bits(replayed(store, version, None), merged(model))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_peft_does_not_merge_is_refused(store: MemoryStore) -> None:
    grouped = Net()
    grouped.conv = nn.Conv1d(16, 16, 3, padding=1, groups=2)
    model = peft.get_peft_model(grouped, lora("conv"))
    with pytest.raises(SchemaMismatch, match=r"cannot merge the adapter of 'conv'"):
        Publisher(store, model)
    assert list(store.list()) == []


def test_a_learnt_prompt_is_refused(store: MemoryStore) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), prompt)
    with pytest.raises(SchemaMismatch, match="learns a prompt"):
        Publisher(store, model)


def test_one_layer_at_a_time_is_merged() -> None:
    model = MODELS["linear"]()
    num, most = computed(model)
    # Weight and bias of two layers were yielded, but not held at once.
    assert num == 4
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


def mixed(config: Any) -> Any:
    model = peft.get_peft_model(causal(), config, mixed=True)
    model.add_adapter("other", peft.LoHaConfig(target_modules=["down_proj"], r=2))
    model.set_adapter(["default", "other"])
    return model


def added(config: Any) -> Any:
    model = causal()
    model.add_adapter(config)
    return model


def compiled(model: nn.Module) -> nn.Module:
    """Wrap as torch.compile does; nothing is run, so nothing is compiled."""
    return torch.compile(model, backend="eager")


def compiled_within(config: Any) -> Any:
    model = peft.get_peft_model(causal(), config)
    layers = model.get_base_model().model.layers
    layers[0], layers[1].mlp.up_proj = compiled(layers[0]), compiled(layers[1].mlp.up_proj)
    return model


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "added by transformers": added,
    "injected": lambda config: peft.inject_adapter_in_model(config, causal()),
    "of two kinds": mixed,
    "compiled": lambda config: compiled(peft.get_peft_model(causal(), config)),
    "compiled before": lambda config: peft.get_peft_model(compiled(causal()), config),
    "compiled within": compiled_within,
    "compiled for data parallel": lambda config: nn.DataParallel(
        compiled(peft.get_peft_model(causal(), config))
    ),
    "averaged, and unwrapped": lambda config: (
        torch.optim.swa_utils.AveragedModel(peft.get_peft_model(causal(), config)).module
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
    plain = causal()
    plain.load_state_dict(published(store, named(model), dtype=None))
    torch.testing.assert_close(answers(plain), answers(getattr(model, "module", model)))


@pytest.mark.parametrize("kind", ["added by transformers", "injected"])
def test_a_value_head_around_adapters_keeps_the_names_of_its_parts(store: MemoryStore, kind: str) -> None:
    model = ValueHead(learnt(WRAPPED[kind](lora("q_proj", "up_proj"))))
    assert published(store, model).keys() == ValueHead(causal()).state_dict().keys()
    model = ValueHead(learnt(peft.get_peft_model(causal(), lora("q_proj", "up_proj"))))
    assert published(MemoryStore(), model).keys() == ValueHead(causal()).state_dict().keys()


def test_adapters_of_two_kinds_in_one_layer_are_both_merged(store: MemoryStore) -> None:
    model = peft.get_peft_model(causal(), lora("q_proj"), mixed=True)
    model.add_adapter("other", peft.LoHaConfig(target_modules=["q_proj"], r=2))
    model.set_adapter(["default", "other"])
    learnt(model)
    plain = causal()
    plain.load_state_dict(published(store, model, dtype=None))
    torch.testing.assert_close(answers(plain), answers(model))


def tied_and_added() -> Any:
    model = causal(tied=True)
    model.add_adapter(lora("lm_head"))
    return model


ONE_TENSOR: dict[str, tuple[str, Callable[[], Any]]] = {
    "head alone": (
        "only the first has an adapter",
        lambda: peft.get_peft_model(causal(tied=True), lora("q_proj", "lm_head")),
    ),
    "embeddings alone": (
        "only the first has an adapter",
        lambda: peft.get_peft_model(causal(tied=True), lora("embed_tokens")),
    ),
    "both": (
        "one tensor with two adapters",
        lambda: peft.get_peft_model(causal(tied=True), lora("embed_tokens", "lm_head")),
    ),
    "layers used twice": (
        "one tensor with two adapters",
        lambda: peft.get_peft_model(causal(), lora("q_proj", layer_replication=[(0, 2), (1, 2)])),
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
    with pytest.raises(SchemaMismatch, match=rf"{reason}.*ensure_weight_tying=True"):
        Publisher(store, build())
    assert list(store.list()) == []


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapters_that_peft_ties_are_merged_once(store: MemoryStore) -> None:
    config = lora("q_proj", "embed_tokens", "lm_head", ensure_weight_tying=True, task_type="CAUSAL_LM")
    model = peft.get_peft_model(causal(tied=True), config)
    optimiser = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    tokens = torch.arange(20).reshape(1, 20)
    with Publisher(store, model, dtype=None) as publisher:
        for step in range(3):
            publisher.publish_patch(step).result()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimiser.step()
            optimiser.zero_grad()
        version = publisher.publish_patch(3).result().version
    plain = causal(tied=True)
    plain.load_state_dict(replayed(store, version, None))
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    torch.testing.assert_close(answers(plain), answers(model))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tied_adapters_with_scales_of_their_own_are_refused(store: MemoryStore) -> None:
    tied = {"ensure_weight_tying": True, "alpha_pattern": {"lm_head": 64}, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(causal(tied=True), lora("embed_tokens", "lm_head", **tied))
    with pytest.raises(SchemaMismatch, match="one tensor with two adapters"):
        Publisher(store, learnt(model))


def test_what_peft_puts_in_and_cannot_take_out_again_is_refused(store: MemoryStore) -> None:
    model = pytest.importorskip("transformers").LlamaForCausalLM(
        pytest.importorskip("transformers").LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
    )
    prompt = peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=1, task_type="CAUSAL_LM")
    with pytest.raises(SchemaMismatch, match="have servers load the adapter themselves"):
        Publisher(store, peft.get_peft_model(model, prompt))


def test_the_log_says_how_much_of_small_adapters_is_rounded_away(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "patchstore")
    model = peft.get_peft_model(causal(dtype=torch.bfloat16), lora("q_proj", "up_proj"))
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
    model = peft.get_peft_model(causal(dtype=torch.bfloat16), lora("q_proj"))
    base = {name: each.clone() for name, each in causal(dtype=torch.bfloat16).state_dict().items()}
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
