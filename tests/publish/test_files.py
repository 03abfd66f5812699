"""Files that go into anchors beside the weights: configs and tokenizers."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from patchstore import Publisher
from patchstore.errors import UsageError
from patchstore.stores.memory import MemoryStore


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
    with pytest.raises(UsageError, match=error):
        Publisher(store, Configured(), files=tmp_path)
    assert list(store.list()) == []


def test_a_quantised_checkpoints_config_goes_with_quantised_weights(
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
    with pytest.raises(UsageError, match="checkpoint folder"):
        Publisher(store, {"w": torch.zeros(10)}, files=files)
    assert list(store.list()) == []
