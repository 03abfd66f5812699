"""A stub server, and a client of it."""

from collections.abc import Iterator

import pytest
from stub_server import StubServer, serving

from patchstore.integrations.vllm_server import VllmServer


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with serving(StubServer()) as stub:
        yield stub


@pytest.fixture
def server(stub: StubServer) -> Iterator[VllmServer]:
    with VllmServer(stub.url, timeout_s=30) as client:
        yield client
