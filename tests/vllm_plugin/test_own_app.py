"""An app of one's own over `AsyncLLM`, with the routers of vLLM and without."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from asking import PROMPT
from fastapi import FastAPI
from server_process import HERE, ServerProcess
from starlette.staticfiles import StaticFiles
from starlette.testclient import TestClient

from patchstore import replay
from patchstore.errors import ServerUnavailable, VersionNotFound
from patchstore.follow.vllm_protocol import ROUTES
from patchstore.follow.vllm_server import VllmServer
from patchstore.ops.doctor import examine

# Those of what vLLM's front imports.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def included(app: FastAPI) -> FastAPI:
    """The app with the routers of the page."""
    from own_app import updates

    updates().include_updates(app, None)
    return app


@pytest.mark.parametrize("has_files", [False, True])
def test_the_routers_of_the_page_have_the_routes_and_do_nothing_when_asked_for_options(tmp_path, has_files):
    app = included(FastAPI())
    if has_files:
        app.mount("/", StaticFiles(directory=tmp_path))
    with TestClient(app) as client:
        answers = {route: client.options(route.split()[1]) for route in ROUTES}
    assert {answer.status_code for answer in answers.values()} == {405}
    if not has_files:
        allowed = {f"{answer.headers['allow']} {route.split()[1]}" for route, answer in answers.items()}
        assert allowed == {*ROUTES}


def test_an_app_without_them_answers_that_it_has_none():
    with TestClient(FastAPI()) as client:
        assert {client.options(route.split()[1]).status_code for route in ROUTES} == {404}


class OwnApp(ServerProcess):
    def program(self, model: Path) -> list[str]:
        return [str(HERE / "own_app.py"), str(model), str(self.port)]


@pytest.fixture(scope="module")
def process(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnApp]:
    log = tmp_path_factory.mktemp("app") / "app.log"
    with OwnApp(log, environment={"VLLM_SERVER_DEV_MODE": "0"}).serving(model) as process:
        yield process


def answer(server: VllmServer) -> list[int]:
    return httpx.post(f"{server.url}/ask", json=PROMPT, timeout=60).raise_for_status().json()


@pytest.mark.exhaustive
def test_an_app_without_vllms_routes_is_told_which_routers_have_them(process, new_trainer):
    trainer = new_trainer()
    trainer.publish()
    bare = f"{process.url}/bare"
    with VllmServer(bare) as server, pytest.raises(ServerUnavailable) as caught:
        server.status()
    said = str(caught.value)
    assert all(route.split()[1] in said for route in ROUTES)
    modules = re.findall(r"vllm\.[a-z_.]+api_router", said)
    found = [module for module in modules if importlib.util.find_spec(module.rpartition(".")[0]) is not None]
    routers = [importlib.import_module(module).router for module in found]
    assert {
        f"{method} {route.path}" for each in routers for route in each.routes for method in route.methods
    } >= {*ROUTES}
    (finding,) = [each for each in examine(trainer.store, [bare], read_only=True) if each.about == bare]
    assert finding.kind == "not-vllm"
    assert all(route.split()[1] in finding.found for route in ROUTES)


@pytest.mark.exhaustive
def test_an_app_with_the_routers_of_the_page_is_updated_and_equals_a_fresh_start(
    process, server, new_trainer, model, tmp_path
):
    trainer = new_trainer(files=str(model))
    trainer.publish()
    trainer.step(density=0.5)
    trainer.step(density=0.5)
    assert {httpx.get(f"{process.url}/{path}").status_code for path in ("version", "server_info")} == {404}

    server.init_weight_transfer(trainer.url)
    words = [answer(server)]
    for version in (1, 2):
        server.apply(version)
        words.append(answer(server))
    with pytest.raises(VersionNotFound, match="77"):
        server.apply(77)
    assert (server.status().serving, answer(server)) == (2, words[2])
    httpx.post(f"{process.url}/update", json={"version": 1}, timeout=60).raise_for_status()
    assert (server.status().serving, answer(server)) == (1, words[1])
    findings = {each.kind: each for each in examine(trainer.store, [process.url], read_only=True)}
    assert {"server", "delta", "behind", "tensors"} <= {*findings}
    assert "in an app of its own" in findings["server"].found

    process.stop()
    replay(trainer.store, 2, out=tmp_path / "replayed")
    process.start(tmp_path / "replayed")
    assert answer(server) == words[2]
    assert len({*map(tuple, words)}) == 3
