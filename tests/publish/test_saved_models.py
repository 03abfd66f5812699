"""Mixtures of experts are published with the names and bits that `save_pretrained` writes."""

from pathlib import Path

import pytest
import saved_models
import torch
from small_models import published

from patchstore import as_saved
from patchstore.stores.memory import MemoryStore
from tests.support.weights import assert_same_bits

pytest.importorskip("transformers", minversion="5.19")
safetensors = pytest.importorskip("safetensors.torch")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.sample(6)
@pytest.mark.parametrize("kind", saved_models.KINDS)
def test_names_and_bits_are_those_of_the_saved_files(store: MemoryStore, tmp_path: Path, kind: str) -> None:
    model = saved_models.build(kind)
    model.save_pretrained(tmp_path)
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    found = published(store, as_saved(model))
    assert found.keys() == saved.keys()
    assert_same_bits(found, {name: each.to(found[name].dtype) for name, each in saved.items()})


@pytest.mark.filterwarnings("ignore")
def test_a_model_inside_of_another_module_has_the_names_of_its_saved_files_behind_a_prefix(
    store: MemoryStore, tmp_path: Path
) -> None:
    model = saved_models.build("Mixtral")
    model.save_pretrained(tmp_path)
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    valued = torch.nn.ModuleDict({"policy": model, "value": torch.nn.Linear(16, 1).bfloat16()})
    found = published(store, valued)
    assert found.keys() - {"value.weight", "value.bias"} == {f"policy.{name}" for name in saved}
    assert_same_bits({name: found[f"policy.{name}"] for name in saved}, saved)
