"""Publishers that go on with a run: from which version, what is refused, and after a kill at any moment."""

import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from patchstore import Publisher, Replica, verify
from patchstore.bucket import history
from patchstore.errors import CorruptObject, ResumeMismatch, SchemaMismatch
from patchstore.stores.folder import FolderStore
from patchstore.stores.memory import MemoryStore
from tests.support.trainers import Trainer
from tests.support.weights import Run, assert_same_bits, newest, served

NUM_WEIGHTS = 500

BEGIN = """
import os, signal, sys, time
from pathlib import Path
import torch
from patchstore import Publisher
from patchstore.stores.folder import FolderStore
from patchstore.testing.faults import Fault, FaultyStore

calls = dies_at = 0

def write(_):
    global calls
    calls += 1
    if calls == dies_at:
        os.kill(os.getpid(), signal.SIGKILL)

# All writes but those of probes.
WRITES = [Fault(verb=verb, key="[!p]*", effect="delay", times=None) for verb in ("put", "upload")]

def weights(step):
    places = torch.arange(step + 1, device="cpu") * 7919 % 500
    return torch.zeros(500).index_add_(0, places, torch.ones(step + 1))

def train(num_steps, dies=0):
    '''Go on from the last checkpoint, which may be older or newer than the last version.'''
    global dies_at
    dies_at, checkpoint = dies, Path(sys.argv[1] + ".checkpoint")
    step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    model = {"w": weights(step)}
    store = FaultyStore(FolderStore(sys.argv[1]), *WRITES, sleep=write)
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


def test_auto_publishes_other_weights_whole_behind_the_head_and_says_so(run: Run, caplog: Any) -> None:
    run.publish_versions(4)
    run.close()
    with caplog.at_level("INFO", logger="patchstore"):
        run.open(resume="auto")
    said = [record.getMessage() for record in caplog.records if record.name == "patchstore.publish.open"]
    assert len(said) == 1 and "whole model, behind version 3" in said[0]
    manifest = run.publish()
    assert (manifest.kind, manifest.delta, manifest.parent) == ("anchor", None, 4)
    assert_same_bits(newest(run.store), served(run.model))


def test_auto_skips_versions_that_were_deleted(run: Run) -> None:
    run.publish_versions(4)
    run.close()
    run.store.delete("versions/00000001.json")
    assert run.open(resume="auto").publish_patch(0).result().kind == "anchor"


def test_a_run_without_versions_is_begun_again(store: MemoryStore) -> None:
    model = {"w": torch.zeros(4)}
    Publisher(store, model).close()
    assert history.head(store) is None
    begun = history.read_header(store)
    model["w"] += 1
    with Publisher(store, model, resume="auto") as publisher:
        assert publisher.publish_patch(0).result().kind == "anchor"
    assert history.read_header(store) == begun


@pytest.mark.parametrize("resume", [True, "auto", 1])
def test_resuming_continues_from_the_version_that_has_these_weights(run: Run, resume: Any) -> None:
    run.publish_versions(3)
    run.close()
    run.go_back(1)
    publisher = run.open(resume=resume)
    claim = history.head(run.store)
    assert claim is not None and (claim.version, claim.parent, claim.writer.epoch) == (3, 1, 2)
    run.train()
    manifest = publisher.publish_patch(9).result()
    assert (manifest.version, manifest.parent) == (4, 3)
    assert manifest.delta is not None and manifest.delta.num_changed > 0
    assert_same_bits(newest(run.store), served(run.model))


def test_resuming_from_a_named_version_proves_it_first(run: Run) -> None:
    run.publish_versions(3)
    run.close()
    with pytest.raises(ResumeMismatch):
        run.open(resume=0)
    with pytest.raises(ResumeMismatch):
        run.open(resume=True)


@pytest.mark.parametrize("resume", [False, True, "auto", "anchor"])
def test_a_store_whose_run_lost_its_header_is_refused_and_left_alone(run: Run, resume: Any) -> None:
    run.publish_versions(3)
    run.close()
    run.store.delete("store.json")
    before = list(run.store.list())
    with pytest.raises(CorruptObject, match=r"no store\.json"):
        run.open(resume=resume)
    assert list(run.store.list()) == before


@pytest.mark.parametrize("resume", [True, "auto", "anchor", 0])
@pytest.mark.parametrize("lost", [(2,), (0, 1, 2)])
def test_numbers_of_versions_that_were_removed_are_not_used_again(
    run: Run, resume: Any, lost: tuple[int, ...]
) -> None:
    run.publish_versions(3)
    run.close()
    for version in lost:
        run.store.delete(f"versions/{version:08}.json")
    with pytest.raises(CorruptObject, match=r"head\.json names version 2"):
        run.open(resume=resume)


@pytest.mark.parametrize("resume", [True, "auto"])
def test_resuming_with_other_tensors_is_refused(run: Run, resume: Any) -> None:
    run.publish()
    run.close()
    run.model["scale"] = torch.zeros(2)
    with pytest.raises(SchemaMismatch):
        run.open(resume=resume)
