"""vLLM in the trainer's process: the example of `docs/vllm.md` as it stands, in vLLM's own settings."""

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


def run(folder: Path, *arguments: Path) -> dict[str, Any]:
    """Run a job of `offline_job`; return what it found."""
    folder.mkdir()
    environment = os.environ | ENVIRONMENT | {"VLLM_SERVER_DEV_MODE": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (folder / "log").open("w+b") as log:
        job = [sys.executable, str(HERE / "offline_job.py"), str(folder / "found"), *map(str, arguments)]
        ended = subprocess.run(
            job, check=False, env=environment, stdout=log, stderr=log, cwd=folder, timeout=900
        )
    assert ended.returncode == 0, (folder / "log").read_text()[-8000:]
    found: dict[str, Any] = json.loads((folder / "found").read_text())
    return found


def test_the_example_serves_each_version_as_a_fresh_start_does(model, tmp_path):
    found = run(tmp_path / "updated", model, tmp_path / "run")

    answers = found["answers"]
    assert len(answers) == 4
    assert all(before != after for before, after in pairwise(answers))
    # A version that does not exist changes nothing, and the next update is not disturbed.
    assert "[version-not-found]" in found["refusal"]
    assert "has no version 77" in found["refusal"]
    assert found["refused"] == [3, answers[3]]
    assert found["back"] == [1, answers[1]]
    replay(str(tmp_path / "run"), 3, out=tmp_path / "replayed")
    assert run(tmp_path / "fresh", tmp_path / "replayed")["answers"] == answers[3]
