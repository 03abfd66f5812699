"""`resume="auto"`: a trainer that is killed at any moment and started again, always in the same way."""

import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from patchstore import Publisher, Replica, verify
from patchstore.errors import SchemaMismatch
from patchstore.format import history
from patchstore.stores.folder import FolderStore
from patchstore.stores.memory import MemoryStore
from tests.support.trainers import Trainer
from tests.support.weights import Run, assert_same_bits, served

NUM_WEIGHTS = 500

BEGIN = """
import os, signal, sys, time
from pathlib import Path
import torch
from patchstore import Publisher
from patchstore.stores.folder import FolderStore

calls = 0

class Dying(FolderStore):
    '''Kills the process before its n-th write.'''

    dies_at = 0

    def _counted(self, key, write):
        global calls
        if key.startswith("probes/"):
            return write()
        calls += 1
        if calls == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        write()

    def put(self, key, data, *, if_absent=False):
        self._counted(key, lambda: super(Dying, self).put(key, data, if_absent=if_absent))

    def upload(self, key, chunks):
        time.sleep(0.01)
        self._counted(key, lambda: super(Dying, self).upload(key, chunks))

def weights(step):
    places = torch.arange(step + 1, device="cpu") * 7919 % 500
    return torch.zeros(500).index_add_(0, places, torch.ones(step + 1))

def train(num_steps, dies_at=0):
    '''Go on from the last checkpoint, which may be older or newer than the last version.'''
    checkpoint = Path(sys.argv[1] + ".checkpoint")
    step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    model = {"w": weights(step)}
    store = Dying(sys.argv[1])
    store.dies_at = dies_at
    with Publisher(store, model, resume="auto", anchor_every=4) as publisher:
        for step in range(step, step + num_steps):
            model["w"].copy_(weights(step))
            publication = publisher.publish_patch(step)
            if step % 3 == 0:
                checkpoint.with_suffix(".new").write_text(str(step))
                checkpoint.with_suffix(".new").rename(checkpoint)
            if step % 2:
                print(publication.result().version, step, flush=True)
"""


def weights(step: int) -> torch.Tensor:
    places = torch.arange(step + 1) * 7919 % NUM_WEIGHTS
    return torch.zeros(NUM_WEIGHTS).index_add_(0, places, torch.ones(step + 1))


def assert_every_version_is_what_it_says(bucket: Path) -> int:
    """Prove all versions and compare each with the weights of its step; return how many there are."""
    store = FolderStore(bucket)
    head = history.head(store)
    assert head is not None
    tensors: dict[str, torch.Tensor] = {}
    follower = Replica(store, tensors)
    for version in range(head.version + 1):
        verify(store, version)
        step = follower.update(version).step
        assert_same_bits(tensors, served({"w": weights(step)}))
    return head.version + 1


@pytest.fixture
def trainer(runner: "subprocess.Popen[str]", tmp_path: Path) -> Trainer:
    return Trainer(runner, tmp_path, BEGIN)


def acknowledged(output: str) -> dict[int, int]:
    """Return versions that a trainer was told of, and their steps."""
    lines = [line.split() for line in output.splitlines(keepends=True) if line.endswith("\n")]
    return {int(version): int(step) for version, step in lines}


def test_a_kill_at_each_write_leaves_a_run_that_goes_on(trainer: Trainer) -> None:
    stored: dict[int, int] = {}
    for dies_at in range(1, 18):
        done = trainer(f"train(6, {dies_at})")
        assert done.returncode == -9, done.stderr
        stored |= acknowledged(done.stdout)
    done = trainer("train(9)")
    assert done.returncode == 0, done.stderr
    assert assert_every_version_is_what_it_says(trainer.bucket) > 10
    for version, step in (stored | acknowledged(done.stdout)).items():
        assert history.read_manifest(FolderStore(trainer.bucket), version).step == step


@pytest.mark.exhaustive
def test_kills_at_random_moments_leave_a_run_that_goes_on(trainer: Trainer) -> None:
    moments, stored = random.Random(0), dict[int, int]()
    for _ in range(15):
        done = trainer("train(1000)", kill_after_s=moments.uniform(0.02, 1.5))
        assert done.returncode == -9, done.stderr
        stored |= acknowledged(done.stdout)
    done = trainer("train(9)")
    assert done.returncode == 0, done.stderr
    assert_every_version_is_what_it_says(trainer.bucket)
    for version, step in (stored | acknowledged(done.stdout)).items():
        assert history.read_manifest(FolderStore(trainer.bucket), version).step == step


def test_auto_begins_a_run_where_there_is_none(run: Run) -> None:
    run.open(resume="auto")
    assert [manifest.kind for manifest in run.publish_versions(2)] == ["anchor", "delta"]


def test_auto_goes_on_from_the_version_that_has_these_weights(run: Run) -> None:
    run.publish_versions(4)
    run.close()
    for name, tensor in run.history[2].items():
        run.model[name].copy_(tensor)
    run.open(resume="auto")
    claim = history.head(run.store)
    assert claim is not None and (claim.version, claim.parent, claim.writer.epoch) == (4, 2, 2)
    run.train()
    manifest = run.publish()
    assert (manifest.version, manifest.parent) == (5, 4)
    assert manifest.delta is not None and manifest.delta.num_changed > 0
    verify(run.store)


def test_auto_publishes_other_weights_whole_behind_the_head_and_says_so(run: Run, caplog: Any) -> None:
    run.publish_versions(4)
    run.close()
    with caplog.at_level("INFO", logger="patchstore"):
        run.open(resume="auto")
    said = [record.getMessage() for record in caplog.records if record.name == "patchstore.publish.resume"]
    assert len(said) == 1 and "whole model, behind version 3" in said[0]
    manifest = run.publish()
    assert (manifest.kind, manifest.delta, manifest.parent) == ("anchor", None, 4)
    tensors: dict[str, torch.Tensor] = {}
    Replica(run.store, tensors).update()
    assert_same_bits(tensors, served(run.model))


def test_auto_skips_versions_that_were_deleted(run: Run) -> None:
    run.publish_versions(4)
    run.close()
    run.store.delete("versions/00000001.json")
    assert run.open(resume="auto").publish_patch(0).result().kind == "anchor"


def test_auto_refuses_other_tensors(run: Run) -> None:
    run.publish()
    run.close()
    run.model["scale"] = torch.zeros(2)
    with pytest.raises(SchemaMismatch):
        run.open(resume="auto")


def test_a_run_without_versions_is_begun_again(store: MemoryStore) -> None:
    model = {"w": torch.zeros(4)}
    Publisher(store, model).close()
    assert history.head(store) is None
    begun = history.read_header(store)
    model["w"] += 1
    with Publisher(store, model, resume="auto") as publisher:
        assert publisher.publish_patch(0).result().kind == "anchor"
    assert history.read_header(store) == begun
