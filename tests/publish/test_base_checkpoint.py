"""A base checkpoint's tensors, and why some are not known."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from patchstore.publish.base_checkpoint import BaseCheckpoint


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
