"""Importing the plugin, and what its ranks say to each other."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.config import ParallelConfig

from patchstore.errors import UsageError
from vllm_plugin import DeltaWorkerExtension, replies
from vllm_plugin.engine import DeltaWeightTransferEngine
from vllm_plugin.ranks import Failure, describe, gather, is_last
from vllm_plugin.registration import BACKEND, register
from vllm_plugin.serving import Serving
from vllm_plugin.versions import check_version

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]


def test_importing_registers_the_backend_and_registering_again_is_harmless():
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    register()
    assert WeightTransferEngineFactory._registry[BACKEND]() is DeltaWeightTransferEngine


@pytest.mark.parametrize("found", ["0.25.1", "0.34.0", "1.0.0", "dev"])
def test_an_untried_vllm_is_refused(found):
    with pytest.raises(ImportError, match=r"0\.26 to 0\.33"):
        check_version(found)


@pytest.mark.parametrize("found", ["0.26.0", "0.32.0+cpu", "0.33.1rc2"])
def test_a_supported_vllm_is_accepted(found):
    check_version(found)


def test_without_vllm_the_import_fails_with_a_sentence():
    code = "import sys; sys.modules['vllm'] = None; from vllm_plugin import DeltaWorkerExtension"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "vLLM cannot be imported here: install vllm" in done.stderr


def test_experts_that_vllm_moves_between_ranks_are_refused():
    assert "enable_eplb" in {field.name for field in fields(ParallelConfig)}
    config = SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=True), model_config=None)
    with pytest.raises(UsageError, match="--enable-eplb"):
        Serving(config, torch.nn.Linear(2, 2)).check_layout([torch.nn.Linear(2, 2)])


def test_reasons_are_said_once_and_the_worst_first():
    failures = [
        Failure(rank=0, kind="data", message="bad"),
        Failure(rank=1, kind="data", message="bad"),
        Failure(rank=1, kind="half-applied", message="half"),
    ]
    assert describe(failures[:2]) == "[data] bad"
    assert describe(failures) == "[half-applied] rank 1: half; [data] rank 0, 1: bad"


def test_one_rank_agrees_with_itself():
    assert gather([], 7) == [7]
    assert is_last([])


RANK = """
import importlib.util, sys
import torch.distributed as dist

# By its path: the package would import vLLM, which takes many seconds a process.
spec = importlib.util.spec_from_file_location("ranks", sys.argv[1])
ranks = importlib.util.module_from_spec(spec)
sys.modules["ranks"] = ranks
spec.loader.exec_module(ranks)

rank = int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=4)
# Two pairs side by side, as tensor parallel groups are, and across them, as pipelines are.
rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
groups = [rows[rank // 2], columns[rank % 2]]
print(ranks.gather(groups, f"from {rank}"), ranks.is_last(groups))
dist.barrier()
"""


@pytest.mark.exhaustive
def test_all_ranks_of_two_groups_learn_the_same(tmp_path):
    command = [sys.executable, "-c", RANK, str(ROOT / "vllm_plugin" / "ranks.py"), str(tmp_path / "meet")]
    ranks = [
        subprocess.Popen([*command, str(rank)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for rank in range(4)
    ]
    said = [process.communicate(timeout=120)[0].strip() for process in ranks]
    everything = [f"from {rank}" for rank in range(4)]
    assert said == [f"{everything} {rank == 3}" for rank in range(4)]


class Replies:
    """A worker's queue: what it replied to earlier calls, and then to the last one."""

    def __init__(self, *unread: object) -> None:
        self.waiting = list(unread)

    def dequeue(self, timeout: float) -> object:
        reply = self.waiting.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply


@pytest.mark.parametrize("reply", [("SUCCESS", [1]), ("FAILURE", "made to fail"), RecursionError()])
def test_an_unread_reply_is_dropped_whether_it_can_be_read_or_not(reply):
    queues = [Replies(), Replies(reply)]

    def broadcast(call: tuple) -> None:
        _, (token,), _, _ = call
        for queue in queues:
            queue.waiting.append(("SUCCESS", token))

    executor = SimpleNamespace(
        rpc_broadcast_mq=SimpleNamespace(enqueue=broadcast), response_mqs=queues, is_failed=False
    )
    replies._drop_unread(executor)
    assert [queue.waiting for queue in queues] == [[], []]


def test_a_queue_that_cannot_be_read_any_more_is_no_endless_wait():
    executor = SimpleNamespace(
        rpc_broadcast_mq=SimpleNamespace(enqueue=lambda call: None),
        response_mqs=[Replies(RuntimeError("cancelled"), RuntimeError("cancelled"))],
        is_failed=False,
    )
    with pytest.raises(RuntimeError, match="cancelled"):
        replies._drop_unread(executor)


METHODS = [name for name in vars(DeltaWorkerExtension) if name.startswith("delta_")]


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_without_the_delta_engine_answers_and_does_not_raise(method):
    worker = object.__new__(DeltaWorkerExtension)
    for engine in (None, object()):
        worker.weight_transfer_engine = engine
        answer = getattr(worker, method)()
        assert [*answer] == ["error"]
        assert type(engine).__name__ in answer["error"]
        assert "--weight-transfer-config" in answer["error"]
