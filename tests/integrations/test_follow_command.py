"""`patchstore follow` as a process: what it prints, and how it ends."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from stub_server import StubServer

from patchstore import Publisher, open_store


@pytest.fixture
def bucket(tmp_path: Path, stub: StubServer) -> Path:
    with Publisher(open_store(tmp_path / "bucket"), {"w": torch.zeros(10)}) as publisher:
        publisher.publish_patch(0).result()
        stub.run_id = publisher.run_id
    return tmp_path / "bucket"


def follow(bucket: Path, server: str, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "patchstore.cli", "follow", str(bucket), "--server", server, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_each_change_is_one_json_object_and_a_signal_ends_it_well(
    bucket: Path, stub: StubServer, ending: signal.Signals
) -> None:
    following = follow(bucket, stub.url, "--json")
    assert following.stdout is not None
    events = [json.loads(following.stdout.readline()) for _ in range(2)]
    following.send_signal(ending)
    _, complaints = following.communicate(timeout=60)
    assert [(event["event"], event["version"]) for event in events] == [("initialised", None), ("applied", 0)]
    assert events[1]["server"] == stub.url
    assert events[1]["timings"] == {"fetch": 0.5}
    assert stub.opened == {"store": str(bucket)}
    assert following.returncode == 0, complaints


def test_a_server_that_is_down_is_said_and_waited_for(bucket: Path) -> None:
    following = follow(bucket, "http://127.0.0.1:9", "--json")
    assert following.stdout is not None
    event = json.loads(following.stdout.readline())
    following.terminate()
    following.communicate(timeout=60)
    assert event["event"] == "failed"
    assert event["error"]["kind"] == "server-unavailable"
    assert following.returncode == 0
