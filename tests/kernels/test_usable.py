"""Where kernels cannot run, one warning says so, and plain torch does the work."""

from collections.abc import Iterator

import pytest
import torch

from patchstore.kernels import are_usable
from tests.support.interpreted import DEVICE, kernels


@pytest.fixture(autouse=True)
def _forgetful() -> Iterator[None]:
    are_usable.cache_clear()
    yield
    are_usable.cache_clear()


def test_the_cpu_has_no_kernels():
    assert not are_usable(torch.device("cpu"))


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_a_gpu_with_triton_has_kernels():
    assert are_usable(DEVICE)


def test_a_compiler_that_fails_is_noticed_once(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    calls = []

    def failing(device: torch.device) -> None:
        calls.append(device)
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(kernels("patchstore.kernels.probe"), "run", failing)
    assert [are_usable(torch.device("cuda", 0)) for _ in range(2)] == [False, False]
    assert calls == [torch.device("cuda", 0)]
    assert "Failed to find C compiler" in caplog.text
