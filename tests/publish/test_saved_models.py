"""Mixtures of experts are published with the names and bits that `save_pretrained` writes."""

from pathlib import Path

import pytest
import saved_models
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
