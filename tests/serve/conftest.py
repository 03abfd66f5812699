"""A store with one version, a stub server, and a client of it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fleet_thread import listening

from patchstore.follow.vllm_server import VllmServer
from patchstore.stores.memory import MemoryStore
from tests.support.commands import patchstore  # noqa: F401 -- a fixture
from tests.support.manifests import begin_run, commit
from tests.support.vllm_stub import StubServer, serving


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with serving(StubServer()) as stub:
        yield stub


@pytest.fixture
def server(stub: StubServer) -> Iterator[VllmServer]:
    with VllmServer(stub.url, timeout_s=30) as client:
        yield client


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore("memory://follow")
    begin_run(store)
    commit(store, 0)
    return store


@pytest.fixture
def serve(store: MemoryStore) -> Callable[..., Any]:
    """Follow that store for some servers, and listen."""
    return lambda *urls, **options: listening(store, urls, **options)
