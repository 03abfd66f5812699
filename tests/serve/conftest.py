"""A stub server, and a client of it."""

from collections.abc import Iterator

import pytest

from patchstore.serve.vllm_server import VllmServer
from patchstore.testing.vllm_stub import StubServer, serving


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with serving(StubServer()) as stub:
        yield stub


@pytest.fixture
def server(stub: StubServer) -> Iterator[VllmServer]:
    with VllmServer(stub.url, timeout_s=30) as client:
        yield client
