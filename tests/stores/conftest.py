"""An S3 server of one's own: moto behind real HTTP, so that s3fs is used as it is."""

import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import s3fs
from aiobotocore.session import AioSession
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer


def pytest_configure(config: pytest.Config) -> None:
    # aiohttp would rather have a file than 8 MiB of bytes. A file that s3fs sends a second time, after
    # an error, is sent from where it stands: at its end, so as an empty part.
    config.addinivalue_line("filterwarnings", "ignore:Sending a large body directly:ResourceWarning")


@pytest.fixture(scope="session")
def s3_options() -> Iterator[dict[str, Any]]:
    """Options with which `open_store` reaches the server; it has a bucket named `bucket`.

    One session for all: each new one would read botocore's description of S3 again, for 0.3 s.
    """
    one_put_at_a_time(S3Response)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options: dict[str, Any] = {"endpoint_url": f"http://{host}:{port}", "key": "test", "secret": "test"}
    options["session"] = AioSession()
    fs = s3fs.S3FileSystem(**options, skip_instance_cache=True)
    fs.call_s3("create_bucket", Bucket="bucket")
    yield options
    fs.close_session(fs.loop, fs.s3)
    server.stop()


def one_put_at_a_time(responses: type[S3Response]) -> None:
    """Give moto the atomic create that S3 has: by itself it looks, then writes, and two can win."""
    put_object, lock = responses.put_object, threading.Lock()

    def locked(self: S3Response) -> Any:
        with lock:
            return put_object(self)

    responses.put_object = locked  # type: ignore[method-assign]


@pytest.fixture
def s3_url() -> str:
    """A prefix that no other test uses."""
    return f"s3://bucket/runs/{uuid.uuid4().hex}"
