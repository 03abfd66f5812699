"""vLLM in one process: the code of `docs/in-process.md` as it stands, in vLLM's own settings."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from server_process import ENVIRONMENT, HERE

from patchstore import replay

pytestmark = pytest.mark.exhaustive


def run(folder: Path, which: str, *arguments: Path) -> dict[str, Any]:
    """Run a job of `offline_job`; return what it found."""
    folder.mkdir()
    environment = os.environ | ENVIRONMENT | {"VLLM_SERVER_DEV_MODE": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (folder / "log").open("w+b") as log:
        job = [sys.executable, str(HERE / "offline_job.py"), str(folder / "found"), which]
        ended = subprocess.run(
            [*job, *map(str, arguments)],
            check=False,
            env=environment,
            stdout=log,
            stderr=log,
            cwd=folder,
            timeout=900,
        )
    assert ended.returncode == 0, (folder / "log").read_text()[-8000:]
    found: dict[str, Any] = json.loads((folder / "found").read_text())
    return found


def test_both_scripts_serve_each_version_as_a_fresh_start_does(model, tmp_path):
    found = run(tmp_path / "updated", "beside_a_trainer", model, tmp_path / "run")

    answers = found["answers"]
    assert len(answers) == 4
    assert all(before != after for before, after in pairwise(answers))
    # What is refused changes nothing, and the next update is not disturbed.
    unknown, unstaged, negative, misspelt = found["refusals"]
    assert "[version-not-found]" in unknown
    assert "has no version 77" in unknown
    assert all("[usage]" in refusal for refusal in (unstaged, negative, misspelt))
    assert found["refused"] == [3, answers[3]]
    assert found["under_way"] == [16, 16]
    assert found["back"] == [1, answers[1]]
    replay(str(tmp_path / "run"), 3, out=tmp_path / "replayed")
    assert run(tmp_path / "fresh", "fresh", tmp_path / "replayed")["answers"] == answers[3]
    elsewhere = run(tmp_path / "elsewhere", "elsewhere", model, tmp_path / "run")
    assert elsewhere["answers"] == {str(version): answers[version] for version in (1, 2, 3)}


def test_an_engine_without_the_backend_says_what_to_add(model, tmp_path):
    found = run(tmp_path / "config", "without_config", model)
    assert "weight_transfer_config" in found["opened"]
    assert "--weight-transfer-config" in found["status"][0]["error"]
