"""Of tied names, the one that `save_pretrained` writes is stored, so a replay is what it would have saved."""

import copy
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from patchstore import Publisher, as_saved, mapped, replay
from patchstore.publish.sources import Weights
from patchstore.stores.memory import MemoryStore
from tests.support import tied_models
from tests.support.small_models import published, tied
from tests.support.weights import State, assert_same_bits

transformers = pytest.importorskip("transformers", minversion="5.19")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.filterwarnings("ignore")


def saved(model: Any, folder: Path) -> State:
    """Return what `save_pretrained` writes."""
    model.save_pretrained(folder)
    found: State = safetensors.load_file(folder / "model.safetensors")
    return found


def _ignored(model: Any, expected: State) -> set[str]:
    """Return what is saved under no name, as its class computes it, such as positions; it is stored here."""
    state = model.state_dict()
    fixed = {name for name, _ in model.named_buffers()}
    fixed |= {name for name, each in model.named_parameters() if not each.requires_grad}
    written = {state[name].data_ptr() for name in expected.keys() & state.keys()}
    return {name for name in fixed & state.keys() if state[name].data_ptr() not in written}


@pytest.mark.parametrize("name", tied_models.NAMES)
def test_a_replay_of_a_tied_model_has_the_names_and_bits_of_save_pretrained_and_computes_the_same(
    tmp_path: Path, name: str
) -> None:
    model = tied_models.build(name)
    expected = saved(model, tmp_path / "saved")
    ignored = _ignored(model, expected)
    rounded = copy.deepcopy(model)
    rounded.load_state_dict({name: each.to(torch.bfloat16) for name, each in model.state_dict().items()})
    for options, trained in (({"dtype": None}, model), ({}, rounded)):
        bucket, out = tmp_path / f"bucket{len(options)}", tmp_path / f"out{len(options)}"
        with Publisher(bucket, as_saved(model), files=tmp_path / "saved", **options) as publisher:
            publisher.publish_patch(0)
        replay(str(bucket), out=out)
        found = safetensors.load_file(out / "model.safetensors")
        assert found.keys() - ignored == expected.keys()
        assert_same_bits(
            {name: found[name] for name in expected},
            {name: each.to(found[name].dtype) for name, each in expected.items()},
        )
        again = type(model).from_pretrained(out, dtype=torch.float32)
        assert_same_bits(again.state_dict(), trained.state_dict())
        result, expected_result = tied_models.computed(again), tied_models.computed(trained)
        if result is not None and expected_result is not None:
            assert torch.equal(result, expected_result)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_all_tied_models_that_can_be_made_are_stored_under_the_names_that_are_saved(tmp_path: Path) -> None:
    num_tied = 0
    for model in tied_models.every():
        if not Weights(model).read().tied:
            continue
        try:
            expected = saved(model, tmp_path)
        except StrictDataclassError:
            # transformers refuses the small config.
            continue
        num_tied += 1
        found = published(MemoryStore(), as_saved(model), dtype=None)
        assert found.keys() - _ignored(model, expected) == expected.keys(), type(model)
        assert_same_bits({name: found[name] for name in expected}, expected)
    assert num_tied > 100


class Valued(torch.nn.Module):
    """A model with another head beside its own, as trainers of values have."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.pretrained_model, self.v_head = model, torch.nn.Linear(32, 1)


def adapted(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["query_key_value"]))


def sharded(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model)


def replicated(model: Any) -> Any:
    return torch.nn.parallel.DistributedDataParallel(model)


def of_an_earlier_release(model: Any) -> Any:
    """What code of models from the Hub has: names alone, without the one that is kept."""

    class Earlier(type(model)):  # type: ignore[misc]
        _tied_weights_keys: ClassVar = ["embed_out.weight"]

    model.__class__ = Earlier
    return model


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("wrap", "prefix"),
    [
        (torch.compile, ""),
        (replicated, ""),
        (sharded, ""),
        (adapted, ""),
        (lambda model: replicated(torch.compile(model)), ""),
        (lambda model: replicated(adapted(model)), ""),
        (Valued, "pretrained_model."),
        (lambda model: replicated(Valued(model)), "pretrained_model."),
        (of_an_earlier_release, ""),
    ],
)
def test_the_name_that_is_saved_is_found_inside_of_wrappers(
    store: MemoryStore, wrap: Any, prefix: str
) -> None:
    published(store, wrap(tied_models.build("GPTNeoXJapaneseForCausalLM")))
    assert tied(store) == {f"{prefix}embed_out.weight": f"{prefix}gpt_neox_japanese.embed_in.weight"}


def test_names_stay_where_they_belong_if_a_rule_changes_them(store: MemoryStore) -> None:
    model = tied_models.build("LlamaForCausalLM")
    published(store, mapped(model, {"lm_head.weight": "a.weight", "model.embed_tokens.weight": "b.weight"}))
    assert tied(store) == {"a.weight": "b.weight"}


def test_a_run_that_began_under_the_other_name_keeps_it(store: MemoryStore) -> None:
    model = tied_models.build("GPTNeoXJapaneseForCausalLM")
    # A mapping does not say which name is saved.
    published(store, model.state_dict())
    assert tied(store) == {"gpt_neox_japanese.embed_in.weight": "embed_out.weight"}
    with Publisher(store, as_saved(model), resume=True) as publisher:
        assert publisher.publish_patch(1).result().kind == "delta"


def test_names_that_a_model_does_not_declare_as_tied_have_the_words_decide(
    store: MemoryStore, tmp_path: Path
) -> None:
    model = tied_models.build("LlamaForCausalLM")
    model.model.norm.weight = model.model.layers[0].input_layernorm.weight
    with pytest.raises(RuntimeError, match="shared"):
        model.save_pretrained(tmp_path)
    published(store, model)
    assert tied(store)["model.norm.weight"] == "model.layers.0.input_layernorm.weight"
