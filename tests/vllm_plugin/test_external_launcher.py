"""Ranks that torchrun starts make the calls of vLLM themselves, and each hears of every failure."""

import json
import os
import subprocess
import sys
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from server_process import ENVIRONMENT, HERE
from trainer import Trainer, replayed

from patchstore import replay
from patchstore.stores import open_store

pytestmark = pytest.mark.exhaustive

NUM_RANKS = 2


def launch(folder: Path, model: Path, store: str = "", *, example: bool = False) -> list[dict[str, Any]]:
    """Start an engine of two ranks, that of the page as an example; return what each of them was answered."""
    folder.mkdir()
    options = {} if example else {"tensor_parallel_size": NUM_RANKS}
    job = [str(HERE / "launched_ranks.py"), str(folder), str(model), store, json.dumps(options)]
    at = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(NUM_RANKS)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *at, *job],
        env=os.environ
        | ENVIRONMENT
        | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "GLOO_SOCKET_IFNAME": "lo", "VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(NUM_RANKS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("launched")


@pytest.fixture(scope="module")
def store(folder: Path, weights) -> str:
    """Versions 0 to 3 of the tiny model."""
    with closing(Trainer(folder / "store", weights)) as trainer:
        trainer.publish()
        for _ in range(3):
            trainer.step(density=0.3)
        return trainer.url


@pytest.fixture(scope="module")
def found(folder: Path, model: Path, store: str) -> list[dict[str, Any]]:
    """What each rank was answered: see `launched_ranks.follow`."""
    return launch(folder / "followed", model, store)


@pytest.mark.parametrize("version", [1, 2])
def test_every_rank_answers_as_after_a_fresh_start(found, folder, model, store, version):
    out = folder / f"replayed-{version}"
    with closing(open_store(store)) as opened:
        replayed(opened, version, out, model)
    fresh = launch(folder / f"fresh-{version}", out)

    for rank in range(NUM_RANKS):
        state = found[rank][str(version)]
        assert (state["rank"], state["serving"], state["label"]) == (rank, version, str(version))
        assert state["answer"] == fresh[rank]["answer"]
        assert state["fingerprint"] == fresh[rank]["fingerprint"]
    assert found[0]["1"]["answer"] != found[0]["2"]["answer"]


def test_a_version_that_is_unknown_is_refused_in_every_rank_and_leaves_the_label(found):
    for rank in found:
        staged, finished, state = rank["unknown"]
        assert staged.startswith("[version-not-found]")
        assert finished.startswith("[usage]")
        assert state == rank["1"]


def test_a_store_that_is_missing_is_refused_in_every_rank(found):
    for rank in found:
        opened, state = rank["missing"]
        assert opened.startswith("[version-not-found]")
        assert state == rank["1"]


def test_what_one_rank_answers_unlike_another_engine_is_raised_in_every_rank(found):
    for rank in found:
        assert rank["differs"] == "[engines-differ] serving is 1, not 7"


def test_a_write_that_fails_in_one_rank_is_raised_in_every_rank_and_the_next_update_succeeds(found):
    for rank in found:
        applied, state = rank["failed"]
        assert applied == "[load-failed] made to fail by the test"
        assert state == rank["1"]
        assert rank["2"]["serving"] == 2


def test_a_rank_that_ended_is_named_to_the_other_now_and_later(found):
    finished, state, applied, opened = found[0]["left"]
    assert finished.startswith("[half-applied] rank 0: what the other ranks wrote is unknown")
    assert "[rank-lost] rank 0: rank 1 of torch.distributed ended" in finished
    assert (state["serving"], state["half_applied"], state["label"]) == (None, True, "default")
    assert applied == opened
    assert applied.startswith("[rank-lost] rank 1 of torch.distributed ended, or did not answer")


def test_ranks_that_also_train_serve_what_they_publish_as_a_fresh_start_does(folder, model):
    ranks = launch(folder / "example", model, str(folder / "run"), example=True)
    answers = ranks[0]["answers"]
    assert [rank["answers"] for rank in ranks] == [answers] * NUM_RANKS
    assert [rank["serving"] for rank in ranks] == [3] * NUM_RANKS
    assert len(answers) == 4
    assert all(before != after for before, after in pairwise(answers))
    replay(str(folder / "run"), 3, out=folder / "replayed")
    fresh = launch(folder / "fresh", folder / "replayed")
    assert [rank["answer"] for rank in fresh] == [answers[3]] * NUM_RANKS
    assert [rank["fingerprint"] for rank in fresh] == [rank["fingerprint"] for rank in ranks]
