"""Fixtures for updates of plain modules, in one rank or two, without a server."""

from collections.abc import Callable, Iterator

import pytest
import torch
from plain_ranks import SHAPES, Fused, Ranks, publish
from trainer import Trainer

from patchstore.stores.folder import FolderStore
from tests.support.interpreted import DEVICE, kernels
from vllm_plugin.live.update import Updater
from vllm_plugin.live.weights import LiveWeights


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """A checkpoint; two of its names are one tensor."""
    random = torch.Generator().manual_seed(3)
    made = {n: torch.randn(s, generator=random).bfloat16() for n, s in SHAPES.items()}
    made["log_rate"] = made["log_rate"].float()
    return made | {"head": made["embed"]}


@pytest.fixture
def trainer(new_trainer, tensors) -> Trainer:
    """Has published versions 0 to 3, of which only 0 is an anchor."""
    # Interpreted, every tile takes a tenth of a second: `new_trainer` alone brings those to kernels.
    encoding = "auto" if Ranks.kind is LiveWeights else "gap"
    return publish(new_trainer(tensors, dtype=None, encoding=encoding), 4)


@pytest.fixture
def open_ranks(tmp_path) -> Iterator[Callable[..., Ranks]]:
    """Open a trainer's store in ranks that serve these modules."""
    made: list[Ranks] = []

    def start(trainer: Trainer, *modules: Fused) -> Ranks:
        made.append(Ranks(trainer.url, modules, tmp_path / f"scratch-{len(made)}"))
        made[-1].open()
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.fixture
def is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders count as those of another host, of which files are kept here."""
    monkeypatch.setattr(FolderStore, "is_on_this_host", lambda store, key: False)


@pytest.fixture
def module() -> Fused:
    return Fused()


@pytest.fixture
def ranks(trainer, module, open_ranks) -> Ranks:
    """One rank, at version 0."""
    ranks = open_ranks(trainer, module)
    ranks.apply(0)
    return ranks


@pytest.fixture
def updater(ranks) -> Updater:
    return ranks.one


@pytest.fixture
def pair(trainer, open_ranks) -> Ranks:
    """Two ranks, at version 0."""
    pair = open_ranks(trainer, Fused(0, 2), Fused(1, 2))
    pair.apply(0)
    return pair


@pytest.fixture(params=["plain", pytest.param("kernels", marks=pytest.mark.exhaustive)], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything here holds for plain torch, and for kernels."""
    if request.param == "plain":
        monkeypatch.setattr(Ranks, "kind", LiveWeights, raising=False)
    elif DEVICE.type == "cuda":
        pytest.skip("the modules here are on the CPU; tests on GPUs run the kernels for real")
    else:
        monkeypatch.setattr(Ranks, "kind", kernels("vllm_plugin.gpu.weights").DeviceWeights, raising=False)
