"""A server that quantises a bf16 checkpoint itself starts only if it was told that this is slow."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from patchstore.errors import UsageError
from vllm_plugin.serving import Serving

pytestmark = pytest.mark.vllm


@pytest.fixture
def serving() -> Serving:
    """Of `--quantization fp8` over a checkpoint that says nothing of it."""
    nothing = SimpleNamespace()
    model = SimpleNamespace(quantization="fp8", hf_config=nothing, hf_text_config=nothing)
    return Serving(SimpleNamespace(model_config=model, parallel_config=nothing), None)


@pytest.mark.parametrize("value", [None, "", "0"])
def test_it_is_refused_with_what_to_do_instead(serving, monkeypatch, value):
    monkeypatch.delenv("PATCHSTORE_REQUANTIZE", raising=False)
    if value is not None:
        monkeypatch.setenv("PATCHSTORE_REQUANTIZE", value)
    with pytest.raises(UsageError, match=r"quantization=\"fp8-block\".* PATCHSTORE_REQUANTIZE=1"):
        serving.check_layout([])


def test_it_starts_where_the_operator_accepts_that(serving, monkeypatch):
    monkeypatch.setenv("PATCHSTORE_REQUANTIZE", "1")
    serving.check_layout([])
