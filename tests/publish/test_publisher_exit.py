"""What becomes of publications that are under way when a trainer ends without closing its publisher."""

import re
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from patchstore import Replica
from patchstore.format import history
from patchstore.stores.folder import FolderStore
from tests.support.trainers import Trainer
from tests.support.weights import assert_same_bits

BEGIN = """
import os, sys, threading, time
import torch
from patchstore import Publisher
from patchstore.errors import StoreUnavailable
from patchstore.stores.folder import FolderStore

import patchstore.publish.committer
patchstore.publish.uploads.FIRST_PAUSE_S = 0.001

class Slow(FolderStore):
    '''Takes a while for each payload, on a thread of a pool like real stores, and may fail.'''

    is_down = False

    def upload(self, key, chunks):
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(1) as pool:
            pool.submit(time.sleep, 0.4).result()
        if self.is_down:
            raise StoreUnavailable("no answer")
        super().upload(key, chunks)

model = {"w": torch.zeros(1000)}
store = Slow(sys.argv[1])

def train(publisher, steps):
    for step in steps:
        model["w"][step] = 1.0
        publisher.publish_patch(step)
"""


@pytest.fixture
def trainer(runner: "subprocess.Popen[str]", tmp_path: Path) -> Trainer:
    return Trainer(runner, tmp_path, BEGIN)


def assert_stored(bucket: Path, num_steps: int) -> None:
    """Fail unless the newest version is that of the last step, with its weights."""
    store = FolderStore(bucket)
    head = history.head(store)
    assert head is not None and head.step == num_steps - 1
    tensors: dict[str, torch.Tensor] = {}
    Replica(store, tensors).update()
    expected = torch.zeros(1000, dtype=torch.bfloat16)
    expected[:num_steps] = 1.0
    assert_same_bits(tensors, {"w": expected})


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("", 0),
        ("sys.exit(0)", 0),
        ("sys.exit(3)", 3),
        ("raise ValueError('of the trainer')", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("del publisher; import gc; gc.collect()", 0),
        ("threading.Thread(target=lambda: time.sleep(1)).start()", 0),
    ],
)
def test_what_is_under_way_when_a_trainer_ends_is_stored(trainer: Trainer, end: str, status: int) -> None:
    done = trainer(f"publisher = Publisher(store, model)\ntrain(publisher, range(3))\n{end}\n")
    assert (done.returncode, "patchstore" in done.stderr) == (status, False), done.stderr
    assert_stored(trainer.bucket, 3)


def test_a_trainer_that_ends_after_its_last_call_loses_neither_of_two(trainer: Trainer) -> None:
    done = trainer(
        "publisher = Publisher(store, model, encoding='context')\n"
        "train(publisher, [0])\npublisher.publish_patch(1).result()\ntrain(publisher, [2, 3])\n",
    )
    assert done.returncode == 0, done.stderr
    assert history.head(FolderStore(trainer.bucket)).version == 3  # type: ignore[union-attr]


def test_a_trainer_on_a_thread_of_its_own_is_waited_for(trainer: Trainer) -> None:
    done = trainer(
        "publisher = Publisher(store, model)\n"
        "def run():\n"
        "    for step in range(4):\n"
        "        train(publisher, [step])\n"
        "        time.sleep(0.2)\n"
        "threading.Thread(target=run).start()\n"
        "time.sleep(0.3)\n",
    )
    assert done.returncode == 0, done.stderr
    assert_stored(trainer.bucket, 4)


def test_a_thread_that_has_not_published_yet_is_waited_for_too(trainer: Trainer) -> None:
    done = trainer(
        "publisher = Publisher(store, model)\n"
        "def run():\n"
        "    time.sleep(0.5)\n"
        "    train(publisher, range(2))\n"
        "threading.Thread(target=run).start()\n"
    )
    assert done.returncode == 0, done.stderr
    assert_stored(trainer.bucket, 2)


DOWN = "publisher = Publisher(store, model)\ntrain(publisher, [7])\nstore.is_down = True\n"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("end", "status"),
    [("", 1), ("sys.exit(0)", 1), ("raise ValueError('of the trainer')", 1), ("sys.exit(3)", 1)],
)
def test_a_store_that_fails_at_the_end_is_said_and_is_no_success(
    trainer: Trainer, end: str, status: int
) -> None:
    done = trainer(f"import atexit\natexit.register(print, 'other handler', flush=False)\n{DOWN}{end}\n")
    assert done.returncode == status
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("patchstore:")]
    assert re.search(rf"of {trainer.bucket} step 7 could not be stored: .*no answer.*resume=\"auto\"", line)
    assert ("ValueError: of the trainer" in done.stderr) == ("ValueError" in end)
    # Whatever else is to be done at the end is done, and its output flushed.
    assert done.stdout == "other handler\n"
    assert history.head(FolderStore(trainer.bucket)) is None


def test_failures_that_the_trainer_was_told_of_are_not_told_again(trainer: Trainer) -> None:
    done = trainer(
        "publisher = Publisher(store, model)\nstore.is_down = True\n"
        "try:\n    publisher.publish_patch(0).result()\nexcept Exception as exc:\n    print(exc.kind)\n",
    )
    assert (done.returncode, done.stdout) == (0, "publish-failed\n")
    assert "patchstore: " not in done.stderr


def test_a_closed_publisher_leaves_nothing_for_the_end(trainer: Trainer) -> None:
    done = trainer("with Publisher(store, model) as publisher:\n    train(publisher, range(2))\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert_stored(trainer.bucket, 2)


def test_a_publisher_that_failed_to_open_leaves_nothing_for_the_end(trainer: Trainer) -> None:
    done = trainer("try:\n    Publisher(store, model, resume=True)\nexcept Exception: pass\n")
    assert (done.returncode, done.stderr) == (0, "")


def test_no_publisher_is_opened_once_the_interpreter_ends(trainer: Trainer) -> None:
    done = trainer(
        "import atexit\n@atexit.register\ndef late():\n    try:\n        Publisher(store, model)\n"
        "    except Exception as exc:\n        print(exc.kind)\n"
        "Publisher(FolderStore(sys.argv[1] + '/other'), model)\n",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "usage\n", "")
    assert history.read_header(FolderStore(trainer.bucket)) is None


@pytest.mark.sample(1)
@pytest.mark.parametrize("caught", [True, False])
def test_ctrl_c_in_the_trainer_stores_what_is_under_way(trainer: Trainer, caught: bool) -> None:
    loop = "while True: time.sleep(0.05)"
    if caught:
        loop = f"try:\n    {loop}\nexcept KeyboardInterrupt: sys.exit(4)"
    done = trainer(
        f"publisher = Publisher(store, model)\ntrain(publisher, range(3))\nprint('go', flush=True)\n{loop}\n",
        interrupt=True,
    )
    assert done.returncode == (4 if caught else -signal.SIGINT), done.stderr
    assert_stored(trainer.bucket, 3)


def test_ctrl_c_while_the_end_waits_for_the_store_ends_the_process_and_says_what_is_lost(
    trainer: Trainer,
) -> None:
    done = trainer(
        "class Stuck(FolderStore):\n"
        "    def upload(self, key, chunks):\n"
        "        print('go', flush=True)\n"
        "        threading.Event().wait()\n"
        "publisher = Publisher(Stuck(sys.argv[1]), model)\ntrain(publisher, [5])\n",
        interrupt=True,
    )
    assert done.returncode == -signal.SIGINT
    assert re.search(r"patchstore: .*step 5 could not be stored: interrupted", done.stderr)


CHILDREN = {
    "multiprocessing": (
        "import multiprocessing\n"
        "child = multiprocessing.get_context('fork').Process(target=work)\n"
        "child.start(); child.join(60); print(child.exitcode, flush=True)\n"
    ),
    "os.fork": (
        "if (pid := os.fork()) == 0:\n    work()\n    sys.exit(0)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)\n"
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", CHILDREN)
def test_a_fork_of_a_trainer_leaves_the_publisher_to_its_parent(trainer: Trainer, way: str) -> None:
    done = trainer(
        "def work():\n"
        "    try:\n        publisher.publish_patch(9)\n    except Exception as exc:\n"
        "        print(exc.kind, flush=True)\n"
        "    publisher.close()\n"
        "publisher = Publisher(store, model)\ntrain(publisher, range(2))\n" + CHILDREN[way],
    )
    assert (done.returncode, done.stdout) == (0, "usage\n0\n"), done.stderr
    assert "patchstore" not in done.stderr
    assert_stored(trainer.bucket, 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("is_down", "status"), [("False", 0), ("True", 1)])
def test_a_child_process_stores_what_it_published_itself(trainer: Trainer, is_down: str, status: int) -> None:
    done = trainer(
        f"def work():\n    train(Publisher(store, model), range(2))\n    store.is_down = {is_down}\n"
        + CHILDREN["multiprocessing"],
    )
    assert (done.returncode, done.stdout) == (0, f"{status}\n"), done.stderr
    assert ("patchstore: " in done.stderr) == (status == 1)
    if status == 0:
        assert_stored(trainer.bucket, 2)


def test_a_process_that_is_killed_leaves_whole_versions(trainer: Trainer) -> None:
    done = trainer(
        "publisher = Publisher(store, model)\ntrain(publisher, range(3))\nos.kill(os.getpid(), 9)\n",
    )
    assert done.returncode == -signal.SIGKILL
    head = history.head(FolderStore(trainer.bucket))
    assert head is None or head.step < 3
    assert (trainer.bucket / "store.json").exists()
