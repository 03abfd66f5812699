"""Trainers that name or fuse tensors otherwise than checkpoints do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from patchstore import LocalPart, Publisher, as_saved, mapped
from patchstore.errors import UsageError
from patchstore.publish.sources import Weights
from patchstore.stores.memory import MemoryStore
from tests.support import saved_models
from tests.support.small_models import assert_refused, experts, layers, published, tied
from tests.support.weights import assert_same_bits, served

FUSED = {
    "qkv": torch.randn(12, 5),
    "experts": torch.randn(3, 8, 4),
    "norm": torch.randn(5),
    "stack.0": torch.randn(2, 3),
    "stack.1": torch.randn(2, 3),
    "rope": torch.randn(4),
}


def rule(name: str, tensor: torch.Tensor) -> Any:
    if name == "qkv":
        return zip(("q", "k", "v"), tensor.split([8, 2, 2]), strict=True)
    if name == "experts":
        return {
            f"experts.{number}.{part}": half.T
            for number, each in enumerate(tensor)
            for part, half in zip(("gate", "up"), each.chunk(2), strict=True)
        }
    if name.startswith("stack."):
        number = int(name[-1])
        return {"stacked": LocalPart(tensor.unsqueeze(0), (2, 2, 3), start=(number, 0, 0))}
    return None if name == "rope" else f"model.{name}"


EXPECTED = {
    "q": FUSED["qkv"][:8],
    "k": FUSED["qkv"][8:10],
    "v": FUSED["qkv"][10:],
    **{f"experts.{e}.gate": FUSED["experts"][e, :4].T for e in range(3)},
    **{f"experts.{e}.up": FUSED["experts"][e, 4:].T for e in range(3)},
    "stacked": torch.stack([FUSED["stack.0"], FUSED["stack.1"]]),
    "model.norm": FUSED["norm"],
}


def test_tensors_are_renamed_cut_stacked_and_transposed(store: MemoryStore) -> None:
    assert_same_bits(published(store, mapped(FUSED, rule)), served(EXPECTED))  # type: ignore[arg-type]


def test_a_stream_is_mapped_as_it_comes(store: MemoryStore) -> None:
    source = mapped(lambda: ((name, each.clone()) for name, each in FUSED.items()), rule)
    assert_same_bits(published(store, source), served(EXPECTED))  # type: ignore[arg-type]


def test_each_change_is_published_under_the_checkpoints_name(store: MemoryStore) -> None:
    weights = {name: each.clone() for name, each in FUSED.items()}
    with Publisher(store, mapped(weights, rule)) as publisher:
        publisher.publish_patch(0).result()
        weights["experts"][1, 5] = 9.0
        weights["stack.1"][0, 0] = 9.0
        delta = publisher.publish_patch(1).result().delta
    assert delta is not None and delta.num_changed == 5


def test_names_alone_may_be_a_mapping_and_rules_may_follow_each_other(store: MemoryStore) -> None:
    source = mapped(mapped(layers(), {"0.weight": "a", "1.weight": "b"}), {"a": "first"})
    assert published(store, source).keys() == {"first", "b", "2.weight"}  # type: ignore[arg-type]


def test_tied_tensors_stay_tied_under_other_names(store: MemoryStore) -> None:
    shared = torch.randn(3, 4)
    source = mapped({"a": shared, "b": shared}, {"a": "embed.weight", "b": "lm_head.weight"})
    published(store, source)
    assert tied(store) == {"lm_head.weight": "embed.weight"}


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (lambda tensor: {"q": tensor.clone()}, "'q' of 'w' is no view"),
        (lambda tensor: {"q": torch.empty(4, 6)}, "is no view"),
        (lambda tensor: {"q": tensor.view(2, 2, 6)}, "merges or splits dimensions"),
        (lambda tensor: {"q": tensor.flatten()}, "merges or splits dimensions"),
        (lambda tensor: {"q": tensor[::2]}, "takes steps"),
        (lambda tensor: {"q": tensor.expand(2, 4, 6)}, "merges or splits"),
        (lambda tensor: tensor[0], "returned a tensor for 'w', and no name"),
        (lambda tensor: {"q": "w"}, "names with views"),
        (lambda tensor: {"q": LocalPart(tensor, (4, 6), offset=0)}, "needs start="),
        (lambda tensor: {"q": LocalPart(tensor, (3, 6), start=(0, 0))}, "ends at 3"),
        (lambda tensor: [("q", tensor[:2]), ("q", tensor[2:])], "two tensors would be published as 'q'"),
        (lambda tensor: {"q": LocalPart(tensor[:2], (4, 6), start=(0, 0))}, "12 of the 24 elements"),
    ],
)
def test_what_is_no_layout_is_refused(store: MemoryStore, said: Any, says: str) -> None:
    assert_refused(store, mapped({"w": torch.randn(4, 6)}, lambda _, tensor: said(tensor)), says)


def test_a_rule_is_names_or_a_function() -> None:
    with pytest.raises(UsageError, match="mapping of names or a function"):
        mapped(layers(), "model")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: (mapped(FUSED, rule), FUSED), "experts.2.up"),
        (
            lambda: (as_saved(model := experts()), model.state_dict()),
            "model.layers.1.mlp.experts.3.up_proj.weight",
        ),
    ],
    ids=["mapped", "as_saved"],
)
def test_views_share_the_trainers_memory(build: Any, name: str) -> None:
    source, held = build()
    given = Weights(source).read()
    assert name in given.tensors
    storages = {each.untyped_storage().data_ptr() for each in held.values()}
    assert {each.untyped_storage().data_ptr() for each in given.tensors.values()} <= storages


def test_as_saved_takes_models_of_transformers() -> None:
    with pytest.raises(UsageError, match="a model of transformers"):
        as_saved(layers())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.sample(6)
@pytest.mark.parametrize("kind", saved_models.KINDS)
def test_names_and_bits_are_those_of_the_saved_files(store: MemoryStore, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("transformers", minversion="5.19")
    model = saved_models.build(kind)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    found = published(store, as_saved(model))
    assert found.keys() == saved.keys()
    assert_same_bits(found, {name: each.to(found[name].dtype) for name, each in saved.items()})


@pytest.mark.filterwarnings("ignore")
def test_a_model_inside_of_another_module_has_the_names_of_its_saved_files_behind_a_prefix(
    store: MemoryStore, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", minversion="5.19")
    model = saved_models.build("Mixtral")
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    valued = torch.nn.ModuleDict({"policy": model, "value": torch.nn.Linear(16, 1).bfloat16()})
    found = published(store, valued)
    assert found.keys() - {"value.weight", "value.bias"} == {f"policy.{name}" for name in saved}
    assert_same_bits({name: found[f"policy.{name}"] for name in saved}, saved)
