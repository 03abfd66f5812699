"""What becomes of publications that are under way when a trainer ends without closing its publisher."""

import re
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from patchstore.bucket import history
from patchstore.stores.folder import FolderStore
from tests.support.trainers import Trainer
from tests.support.weights import assert_same_bits, newest

BEGIN = """
import os, sys, threading, time
import torch
from patchstore import Publisher
from patchstore.errors import StoreUnavailable
from patchstore.stores.folder import FolderStore
from patchstore.testing.faults import Fault, FaultyStore

import patchstore.stores.tries
patchstore.stores.tries.FIRST_PAUSE_S = 0.001

def slow(_):
    '''Takes a while for each payload, on a thread of a pool like real stores, and may fail.'''
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        pool.submit(time.sleep, 0.4).result()
    if store.is_down:
        raise StoreUnavailable("no answer")

model = {"w": torch.zeros(1000)}
store = FaultyStore(
    FolderStore(sys.argv[1]), Fault(verb="upload", effect="delay", times=None), sleep=slow
)
store.is_down = False

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
    tensors = newest(store)
    expected = torch.zeros(1000, dtype=torch.bfloat16)
    expected[:num_steps] = 1.0
    assert_same_bits(tensors, {"w": expected})


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


OPEN = "publisher = Publisher(store, model)\n"
THREE = f"{OPEN}train(publisher, range(3))\n"
ON_A_THREAD = "threading.Thread(target=run).start()\ntime.sleep(0.3)\n"
IN_A_CHILD = (
    "def work():\n"
    "    try:\n        publisher.publish_patch(9)\n    except Exception as exc:\n"
    "        print(exc.kind, flush=True)\n"
    f"    publisher.close()\n{OPEN}train(publisher, range(2))\n"
)
OTHER = pytest.mark.exhaustive
RESULTS_IN_A_CHILD = (
    "def work():\n"
    "    for publication in (stored, under_way):\n"
    "        try:\n            print(publication.result().step, flush=True)\n"
    "        except Exception as exc:\n            print(exc.kind, flush=True)\n"
    f"{OPEN}model['w'][0] = 1.0\nstored = publisher.publish_patch(0)\nstored.result()\n"
    "model['w'][1] = 1.0\nunder_way = publisher.publish_patch(1)\n"
)
ENDS = [
    pytest.param(THREE, 0, "", 3, id="the end"),
    pytest.param(f"{THREE}sys.exit(0)", 0, "", 3, id="exit", marks=OTHER),
    pytest.param(f"{THREE}sys.exit(3)", 3, "", 3, id="exit with a status", marks=OTHER),
    pytest.param(f"{THREE}raise ValueError('of the trainer')", 1, "", 3, id="an error", marks=OTHER),
    pytest.param(f"{THREE}raise KeyboardInterrupt", -signal.SIGINT, "", 3, id="interrupt", marks=OTHER),
    pytest.param(f"{THREE}del publisher; import gc; gc.collect()", 0, "", 3, id="collected", marks=OTHER),
    pytest.param(f"{THREE}threading.Thread(target=lambda: time.sleep(1)).start()", 0, "", 3, id="a thread"),
    pytest.param(
        "publisher = Publisher(store, model, encoding='context')\ntrain(publisher, [0])\n"
        "model['w'][1] = 1.0\npublisher.publish_patch(1).result()\ntrain(publisher, [2, 3])\n",
        *(0, "", 4),
        id="two behind one that was waited for",
    ),
    pytest.param(
        f"{OPEN}def run():\n    for step in range(4):\n        train(publisher, [step])\n"
        f"        time.sleep(0.2)\n{ON_A_THREAD}",
        *(0, "", 4),
        id="a thread publishes on",
    ),
    pytest.param(
        f"{OPEN}def run():\n    time.sleep(0.5)\n    train(publisher, range(4))\n{ON_A_THREAD}",
        *(0, "", 4),
        id="a thread has not published yet",
    ),
    pytest.param(
        f"{OPEN}store.is_down = True\n"
        "try:\n    publisher.publish_patch(0).result()\nexcept Exception as exc:\n    print(exc.kind)\n",
        *(0, "publish-failed\n", None),
        id="a failure that was told",
    ),
    pytest.param(
        "with Publisher(store, model) as publisher:\n    train(publisher, range(2))\n", 0, "", 2, id="closed"
    ),
    pytest.param(
        "try:\n    Publisher(store, model, resume=True)\nexcept Exception: pass\n", 0, "", 0, id="not opened"
    ),
    pytest.param(
        "import atexit\n@atexit.register\ndef late():\n    try:\n        Publisher(store, model)\n"
        "    except Exception as exc:\n        print(exc.kind)\n"
        "Publisher(FolderStore(sys.argv[1] + '/other'), model)\n",
        *(0, "usage\n", 0),
        id="opened while the interpreter ends",
    ),
    *(
        pytest.param(IN_A_CHILD + CHILDREN[way], 0, "usage\n0\n", 2, id=f"forked by {way}")
        for way in CHILDREN
    ),
    pytest.param(
        RESULTS_IN_A_CHILD + CHILDREN["os.fork"], 0, "0\nusage\n0\n", 2, id="a forked child asks for results"
    ),
    pytest.param(
        "def work():\n    train(Publisher(store, model), range(2))\n" + CHILDREN["multiprocessing"],
        *(0, "0\n", 2),
        id="a child publishes itself",
    ),
]


@pytest.mark.parametrize(("script", "status", "said", "num_stored"), ENDS)
def test_what_is_under_way_when_a_trainer_ends_is_stored_and_nothing_is_said(
    trainer: Trainer, script: str, status: int, said: str, num_stored: int | None
) -> None:
    done = trainer(script)
    assert (done.returncode, done.stdout) == (status, said), done.stderr
    assert "patchstore" not in done.stderr
    if num_stored:
        assert_stored(trainer.bucket, num_stored)
    elif num_stored is not None:
        assert history.read_header(FolderStore(trainer.bucket)) is None


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


@pytest.mark.exhaustive
def test_a_child_process_says_that_what_it_published_is_not_stored(trainer: Trainer) -> None:
    done = trainer(
        "def work():\n    train(Publisher(store, model), range(2))\n    store.is_down = True\n"
        + CHILDREN["multiprocessing"],
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert "patchstore: " in done.stderr
