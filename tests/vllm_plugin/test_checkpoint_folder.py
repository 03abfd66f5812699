"""Where the checkpoint is that vLLM loaded: a folder, what it downloaded from the Hub, or nowhere."""

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm_plugin.opening import checkpoint_folder

pytestmark = pytest.mark.vllm

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def config(model: str, *, load_format: str = "auto", download_dir: Path | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        load_config=SimpleNamespace(load_format=load_format, download_dir=download_dir),
        model_config=SimpleNamespace(model=model, revision=None),
    )


@pytest.fixture
def downloaded(tmp_path) -> Path:
    """A cache of the Hub's client, with a snapshot of `org/model`."""
    folder = tmp_path / "models--org--model"
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    (folder / "snapshots" / COMMIT / "model.safetensors").touch()
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    return tmp_path


def test_a_folder_is_itself(tmp_path):
    assert checkpoint_folder(config(str(tmp_path))) == tmp_path


def test_what_was_downloaded_from_the_hub_is_found(downloaded):
    found = checkpoint_folder(config("org/model", download_dir=downloaded))
    assert found == downloaded / "models--org--model" / "snapshots" / COMMIT


@pytest.mark.parametrize("model", ["org/other", "no folder/and no/name", "s3://bucket/model"])
def test_what_is_not_on_this_host_is_nowhere(downloaded, model):
    assert checkpoint_folder(config(model, download_dir=downloaded)) is None


@pytest.mark.parametrize("index", ['{"weight_map": {"a": "model-1.safetensors"}}', "{}", "[", "[]"])
def test_what_was_downloaded_in_part_is_not_used(downloaded, index):
    (downloaded / "models--org--model" / "snapshots" / COMMIT / "model.safetensors.index.json").write_text(
        index
    )
    assert checkpoint_folder(config("org/model", download_dir=downloaded)) is None


@pytest.mark.parametrize("load_format", ["dummy", "runai_streamer", "tensorizer"])
def test_what_was_not_loaded_from_safetensors_is_nowhere(tmp_path, load_format):
    assert checkpoint_folder(config(str(tmp_path), load_format=load_format)) is None
