from typing import Any

import pytest

from patchstore.publish import snapshot
from tests.support.interpreted import kernels


@pytest.fixture(params=["device", "host"])
def place(request: pytest.FixtureRequest) -> snapshot.Place:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many programs each launch of a kernel has, as the test goes on."""
    from triton.runtime.jit import KernelInterface

    found: list[int] = []
    launch: Any = KernelInterface.__getitem__

    def noted(kernel: Any, grid: Any) -> Any:
        found.append(grid[0])
        return launch(kernel, grid)

    monkeypatch.setattr(KernelInterface, "__getitem__", noted)
    return found


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publish with kernels also where there is no GPU."""
    monkeypatch.setattr(snapshot, "have_kernels", lambda devices: True)
    for name in ("compare", "index_encode"):
        monkeypatch.setattr(kernels(f"patchstore.kernels.{name}"), "BLOCK", 1024)
