"""What a base checkpoint in files= gives a run: configs and tokenizers beside the weights of every anchor."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from patchstore import Publisher
from patchstore.errors import UsageError
from patchstore.publish.base_checkpoint import BaseCheckpoint
from patchstore.stores.memory import MemoryStore
from tests.support import saved_models
from tests.support.small_models import assert_refused, causal


def test_config_and_tokenizer_files_go_into_every_anchor(store: MemoryStore, tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("[]")
    (tmp_path / "model.safetensors").write_text("not me")
    with Publisher(store, {"w": torch.zeros(10)}, files=tmp_path, anchor_every=1) as publisher:
        for step in range(2):
            manifest = publisher.publish_patch(step).result()
            assert manifest.anchor is not None
            names = [payload.key.rsplit("/", 1)[1] for payload in manifest.anchor.files]
            assert names == ["config.json", "tokenizer.json"]


UNFIT = [
    ("not JSON", "is not JSON"),
    ("[]", "not a JSON object"),
    ('{"quantization_config": {"quant_method": "fp8"}}', "quantization_config"),
    ('{"tie_word_embeddings": false}', "'lm_head.weight' and 'model.embed_tokens.weight' are one tensor"),
    ('{"text_config": {"tie_word_embeddings": false}}', "one tensor"),
    ('{"vocab_size": 11}', "its vocab_size is 11, and that of the model to publish is 10"),
    ('{"vocab_size": 10, "model_type": "unknown", "tie_word_embeddings": true}', None),
]


class Configured(torch.nn.Module):
    """A model whose output layer is its embedding, with a config as Transformers' models have."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(10, 4)})
        self.lm_head = torch.nn.Linear(4, 10, bias=False)
        self.lm_head.weight = self.model["embed_tokens"].weight
        self.config = SimpleNamespace(to_dict=lambda: {"vocab_size": 10})


@pytest.mark.parametrize(("config", "error"), UNFIT)
def test_a_config_with_which_a_replay_would_be_another_model_is_refused(
    store: MemoryStore, tmp_path: Path, config: str, error: str | None
) -> None:
    (tmp_path / "config.json").write_text(config)
    if error is None:
        Publisher(store, Configured(), files=tmp_path).close()
        return
    assert_refused(store, Configured(), error, UsageError, files=tmp_path)


def test_a_quantized_checkpoints_config_goes_with_quantized_weights(
    store: MemoryStore, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {}}')
    model = {"w": torch.zeros(4, dtype=torch.int8), "w_scale": torch.ones(1)}
    Publisher(store, model, dtype=None, files=tmp_path).close()


@pytest.mark.parametrize("kind", ["adapter", "pipe", "link to nothing"])
def test_what_is_no_file_of_a_base_checkpoint_is_refused(
    store: MemoryStore, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    if kind == "adapter":
        (tmp_path / "adapter_config.json").write_text("{}")
    elif kind == "pipe":
        os.mkfifo(tmp_path / "tokenizer.json")
    else:
        (tmp_path / "tokenizer.json").symlink_to(tmp_path / "gone")
    with pytest.raises(UsageError, match=r"adapter_config\.json|tokenizer\.json"):
        Publisher(store, {"w": torch.zeros(10)}, files=tmp_path)


@pytest.mark.parametrize("files", ["", "missing", "here"])
def test_a_folder_that_is_no_checkpoint_is_refused_and_nothing_of_it_uploaded(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    for folder in (tmp_path, tmp_path / "here"):
        (folder / "secrets.json").write_text("{}")
    assert_refused(store, {"w": torch.zeros(10)}, "checkpoint folder", UsageError, files=files)


def folder_of(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def qwen(**changes: Any) -> Any:
    pytest.importorskip("transformers", minversion="5.19")
    return causal("Qwen2", **{"tie_word_embeddings": False, **changes})


@pytest.mark.filterwarnings("ignore")
def test_the_folder_of_another_model_is_refused_also_for_what_has_no_config(
    store: MemoryStore, tmp_path: Path
) -> None:
    trained = qwen()
    tensors = dict(trained.state_dict())
    others = {
        "another architecture": causal("GPTNeoX"),
        "another size": qwen(intermediate_size=32),
        "another vocabulary": qwen(vocab_size=65),
    }
    for name, model in others.items():
        assert_refused(
            store, tensors, "that of another model", UsageError, files=folder_of(model, tmp_path / name)
        )
    Publisher(store, tensors, files=folder_of(trained, tmp_path / "own")).close()


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_may_have_more_than_is_trained_or_less(store: MemoryStore, tmp_path: Path) -> None:
    base = folder_of(qwen(), tmp_path)
    tensors = dict(qwen().state_dict())
    with_head = tensors | {"score.weight": torch.zeros(1, 16)}
    fewer = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    for given in (with_head, fewer):
        Publisher(MemoryStore(), given, files=base).close()
    with pytest.raises(UsageError, match=r"'score.weight', and 1 of its tensors .* 'lm_head.weight'"):
        Publisher(store, fewer | {"score.weight": torch.zeros(1, 16)}, files=base)


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_a_tied_model_may_have_more_than_is_trained(
    store: MemoryStore, tmp_path: Path
) -> None:
    trained = qwen(tie_word_embeddings=True)
    base = folder_of(trained, tmp_path)
    tensors = load_file(base / "model.safetensors")
    # As in checkpoints of GPT-2, or of models with layers that predict further tokens.
    save_file(tensors | {"model.layers.0.attn.bias": torch.ones(4)}, base / "model.safetensors")
    Publisher(store, trained, files=base).close()


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_the_model_without_its_head_may_name_tensors_without_its_prefix(
    store: MemoryStore, tmp_path: Path
) -> None:
    trained = qwen()
    Publisher(store, trained, files=folder_of(trained.model, tmp_path)).close()


@pytest.mark.filterwarnings("ignore")
def test_weights_that_the_trainer_packed_do_not_fit_the_checkpoint_that_they_were_made_from(
    store: MemoryStore, tmp_path: Path
) -> None:
    base = folder_of(qwen(), tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    weight = qwen().state_dict()[name]
    for codes in (torch.zeros(512, 1, dtype=torch.uint8), torch.zeros_like(weight, dtype=torch.int8)):
        tensors = dict(qwen().state_dict()) | {name: codes}
        assert_refused(store, tensors, rf"'{name}' is published as [UI]8", UsageError, files=base, dtype=None)


@pytest.mark.filterwarnings("ignore")
def test_experts_that_a_model_fuses_have_the_names_of_the_checkpoint(
    store: MemoryStore, tmp_path: Path
) -> None:
    model = saved_models.build("Mixtral")
    base = folder_of(model, tmp_path)
    with Publisher(store, model, files=base) as publisher:
        publisher.publish_patch(0).result()
    with safe_open(base / "model.safetensors", "pt") as saved:
        assert {spec.name for spec in publisher.schema.tensors} == set(saved.keys())
    with pytest.raises(UsageError, match="fuses tensors otherwise: pass the model itself"):
        Publisher(MemoryStore(), dict(model.state_dict()), files=base)


@pytest.mark.filterwarnings("ignore")
def test_a_head_of_its_own_under_a_config_that_says_tied_is_refused(
    store: MemoryStore, tmp_path: Path
) -> None:
    model = qwen(tie_word_embeddings=True)
    base = folder_of(model, tmp_path / "base")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 1.5)
    assert_refused(store, model, r"'lm_head.weight' is a tensor of its own", UsageError, files=base)
    model.config.tie_word_embeddings = False
    Publisher(store, model, files=folder_of(model, tmp_path / "untied")).close()


@pytest.mark.parametrize("wrong", [None, "missing", "pointer", "index"])
def test_a_folder_says_why_some_of_its_tensors_are_not_known(tmp_path: Path, wrong: str | None) -> None:
    for name in ("a", "b"):
        save_file({f"{name}.weight": torch.ones(4)}, tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"a.weight": "a.safetensors", "b.weight": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    if wrong == "missing":
        (tmp_path / "b.safetensors").unlink()
    elif wrong == "pointer":
        (tmp_path / "b.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    elif wrong == "index":
        (tmp_path / "model.safetensors.index.json").write_text("{")
    found = BaseCheckpoint(tmp_path)
    if wrong is None:
        assert (found.unread, len(found.specs)) == (None, 2)
    else:
        assert found.unread is not None
        assert ("index" if wrong == "index" else "b.safetensors") in found.unread
