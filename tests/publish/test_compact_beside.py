"""Anchors that another process adds beside a publisher, and anchors whose distance is `auto`."""

import logging
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

from patchstore import Publisher, open_store
from patchstore.bucket import history
from patchstore.errors import UsageError
from patchstore.publish import compactor as beside
from patchstore.stores import opened_elsewhere
from patchstore.stores.memory import MemoryStore
from tests.support.beside import EVERY, check_beside, is_running, until
from tests.support.weights import Run


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "INTERVAL_S", 0.1)


def test_a_process_beside_the_publisher_adds_the_anchors_and_ends_with_it(tmp_path: Path) -> None:
    with closing(open_store(tmp_path / "bucket")) as store:
        check_beside(store)


def test_what_cannot_run_beside_a_publisher_is_refused(tmp_path: Path) -> None:
    model = {"w": torch.zeros(3)}
    for wrong in ({"anchor_every": None}, {"anchor_every": 1}, {"anchor_every": 5000}):
        with pytest.raises(UsageError):
            Publisher(tmp_path / "bucket", model, compact=True, **wrong)
    with pytest.raises(UsageError, match="give a URL or a path"):
        Publisher(MemoryStore(), model, compact=True)
    with pytest.raises(UsageError, match="give a URL or a path"):
        opened_elsewhere(open_store("memory://beside"))
    assert not (tmp_path / "bucket").exists()


def test_a_process_that_does_not_start_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(beside, "AGAIN_S", 0.01)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    run = Run(open_store(tmp_path / "bucket"))
    publisher = run.open(anchor_every=EVERY, compact=True)
    run.publish_versions(3)
    until(lambda: publisher.compaction is not None and publisher.compaction.num_failures > 1)
    run.close()
    assert "could not be started" in caplog.text
    assert {each.levelno for each in caplog.records if "beside" in each.message} == {logging.WARNING}


def test_auto_makes_an_anchor_when_the_deltas_have_its_size(run: Run) -> None:
    run.open(anchor_every="auto", max_pending=1)
    run.publish_versions(60)
    size = sum(spec.num_bytes for spec in run.publisher.schema.tensors)
    run.close()
    manifests = sorted(history.read_back(run.store, 59), key=lambda each: each.version)
    assert sum(each.anchor is not None for each in manifests) > 2
    spent = 0
    for each in manifests[1:]:
        assert (each.anchor is not None) == (spent >= size), each.version
        assert each.delta is not None
        spent = 0 if each.anchor is not None else spent + each.delta.num_bytes


def test_auto_goes_on_counting_when_a_run_is_resumed(run: Run) -> None:
    run.open(anchor_every=None)
    for _ in range(40):
        run.train()
        run.publish()
    run.close()
    run.open(anchor_every="auto", resume=True, max_pending=1)
    # The claim is version 40. What leads to it has the size of an anchor already.
    assert run.publish().anchor is not None
    assert run.publish().anchor is None
    run.close()


KILLED = """
import sys, time, torch
from patchstore import Publisher
from patchstore.publish import compactor as beside
beside.INTERVAL_S = 0.1
model = {"w": torch.zeros(1000)}
publisher = Publisher(sys.argv[1], model, anchor_every=2, compact=True)
for step in range(5):
    model["w"][step] = 1
    publisher.publish_patch(step).result()
while publisher.compaction.newest_anchor != 4:
    time.sleep(0.05)
import os
if os.fork() == 0:  # holds the other end of the pipe
    time.sleep(60)
    os._exit(0)
print(publisher._compactor._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_process_ends_with_a_trainer_that_is_killed(tmp_path: Path, how: signal.Signals) -> None:
    temp = tmp_path / "temp"
    temp.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "bucket")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temp)},
        start_new_session=True,
    ) as trainer:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        assert is_running(pid)
        os.kill(trainer.pid, how)
        trainer.wait(60)
        until(lambda: not is_running(pid), 20)
        assert list(temp.iterdir()) == []
        os.killpg(trainer.pid, signal.SIGKILL)


@pytest.mark.exhaustive
def test_what_is_wrong_in_the_bucket_is_reported_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(open_store(tmp_path / "bucket"))
    publisher = run.open(anchor_every=EVERY, compact=True)
    run.publish_versions(4)
    key = history.read_manifest(run.store, 2).delta.payloads[0].key  # type: ignore[union-attr]
    run.store.put(key, b"wrong")
    run.publish_versions(2)
    until(lambda: publisher.compaction is not None and publisher.compaction.failure is not None)
    assert publisher.compaction is not None
    assert "corrupt-object" in str(publisher.compaction.failure) and key in caplog.text
    run.publish_versions(2)
    run.close()
