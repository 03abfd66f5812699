"""Importing the plugin, and what its ranks say to each other."""

import importlib.util
import re
import subprocess
import sys
import warnings
from collections import deque
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.config import ParallelConfig

from patchstore.errors import UsageError
from vllm_plugin import DeltaWorkerExtension, check_version, plugin
from vllm_plugin.engine import DeltaWeightTransferEngine
from vllm_plugin.extension import BACKEND, register
from vllm_plugin.ranks import Failure, Ranks, describe
from vllm_plugin.serving import Serving, is_read_in_order

ROOT = Path(__file__).parents[2]


def test_importing_registers_the_backend_and_registering_again_is_harmless():
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    register()
    with pytest.raises(ValueError, match="already registered"):
        WeightTransferEngineFactory.register_engine(BACKEND, DeltaWeightTransferEngine)


@pytest.mark.parametrize(
    ("backend", "named", "taken"),
    [
        ("delta", "", "vllm_plugin.DeltaWorkerExtension"),
        ("delta", "team.Extension", "team.Extension"),
        ("nccl", "", ""),
        (None, "", ""),
    ],
)
def test_the_backend_brings_its_worker_extension_where_none_is_named(backend, named, taken):
    transfer = None if backend is None else SimpleNamespace(backend=backend)
    args = SimpleNamespace(weight_transfer_config=transfer, worker_extension_cls=named, load_format="auto")
    assert plugin.settle(args, lambda headless: headless, headless=True) is True
    assert args.worker_extension_cls == taken


@pytest.mark.parametrize(
    ("found", "refusal"),
    [
        *(
            (found, pytest.raises(ImportError, match=r"0\.26 to 0\.33"))
            for found in ("0.25.1", "0.34.0", "1.0.0", "dev")
        ),
        *((found, nullcontext()) for found in ("0.26.0", "0.32.0+cpu", "0.33.1rc2")),
    ],
)
def test_only_a_vllm_that_was_tried_is_accepted(found, refusal):
    with refusal:
        check_version(found)


def test_without_vllm_the_import_fails_with_a_sentence():
    code = "import sys; sys.modules['vllm'] = None; from vllm_plugin import DeltaWorkerExtension"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "vLLM cannot be imported here: install vllm" in done.stderr


def test_experts_that_vllm_moves_between_ranks_are_refused():
    assert "enable_eplb" in {field.name for field in fields(ParallelConfig)}
    model = SimpleNamespace(quantization=None, hf_config=None, hf_text_config=None)
    config = SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=True), model_config=model)
    with pytest.raises(UsageError, match="--enable-eplb"):
        Serving(config, torch.nn.Linear(2, 2)).check_layout([torch.nn.Linear(2, 2)])


@pytest.mark.parametrize("value", [None, "", "0"])
def test_a_server_that_would_quantize_by_itself_is_refused_with_what_to_do_instead(monkeypatch, value):
    # As with `--quantization fp8` over a checkpoint that says nothing of it.
    nothing = SimpleNamespace()
    model = SimpleNamespace(quantization="fp8", hf_config=nothing, hf_text_config=nothing)
    serving = Serving(SimpleNamespace(model_config=model, parallel_config=nothing), None)
    monkeypatch.delenv("PATCHSTORE_REQUANTIZE", raising=False)
    if value is not None:
        monkeypatch.setenv("PATCHSTORE_REQUANTIZE", value)
    with pytest.raises(UsageError, match=r"quantization=\"fp8-block\".* PATCHSTORE_REQUANTIZE=1"):
        serving.check_layout([])
    # The operator accepts it.
    monkeypatch.setenv("PATCHSTORE_REQUANTIZE", "1")
    serving.check_layout([])


def test_reasons_are_said_once_and_the_worst_first():
    failures = [
        Failure(rank=0, kind="data", message="bad"),
        Failure(rank=1, kind="data", message="bad"),
        Failure(rank=1, kind="half-applied", message="half"),
    ]
    assert describe(failures[:2]) == "[data] bad"
    assert describe(failures) == "[half-applied] rank 1: half; [data] rank 0, 1: bad"


@pytest.mark.parametrize("is_read_in_order", [True, False])
def test_one_rank_agrees_with_itself_and_raises(is_read_in_order):
    ranks = Ranks(0, list, is_read_in_order=is_read_in_order)
    assert ranks.gather(7) == [7]
    with pytest.raises(RuntimeError, match=r"^\[data\] bad$"):
        ranks.fail([Failure(rank=0, kind="data", message="bad")])


# What vLLM's executors import warns of itself.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_executor_is_known_by_what_it_is_and_not_by_its_name(monkeypatch):
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    class Mine(MultiprocExecutor): ...

    class Other(Executor): ...

    def found(backend: object) -> bool:
        return is_read_in_order(
            SimpleNamespace(parallel_config=SimpleNamespace(distributed_executor_backend=backend))
        )

    assert [found(backend) for backend in ("mp", Mine)] == [True, True]
    assert [found(backend) for backend in ("uni", "external_launcher", Other)] == [False] * 3
    if importlib.util.find_spec("ray") is None:
        return
    for reads_queues in (False, True):
        monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", str(int(reads_queues)))
        assert found("ray") == reads_queues


RANK = """
import importlib.util, os, sys, time
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist

# By its path: the package would import vLLM, which takes many seconds a process.
spec = importlib.util.spec_from_file_location("ranks", sys.argv[1])
ranks = importlib.util.module_from_spec(spec)
sys.modules["ranks"] = ranks
spec.loader.exec_module(ranks)

folder, rank, leaves = Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
at = folder / "meet"
dist.init_process_group("gloo", init_method=f"file://{at}", rank=rank, world_size=4)
# Two pairs side by side, as tensor parallel groups are, and across them, as pipelines are.
timeout = timedelta(seconds=8 if leaves == "stays away" else 600)
rows = [dist.new_group(ranks, timeout=timeout) for ranks in ([0, 1], [2, 3])]
columns = [dist.new_group(ranks, timeout=timeout) for ranks in ([0, 2], [1, 3])]
groups = [rows[rank // 2], columns[rank % 2]]
found = ranks.Ranks(rank, lambda: groups, is_read_in_order=True)


def told(step, *args):
    try:
        print(step(*args), flush=True)
    except Exception as exc:
        print(f"{type(exc).__name__}: {exc}", flush=True)


told(found.gather, f"from {rank}" + "." * 100 * rank)
failures = [ranks.Failure(rank=1, kind="data", message="bad")]
told(found.fail, failures)
if leaves:
    if rank == 2:
        # The others are alive until all of them heard.
        if leaves == "ends":
            os._exit(0)
        while not all((folder / f"heard-{other}").exists() for other in (0, 1, 3)):
            time.sleep(0.1)
    for _ in range(2):
        told(found.gather, rank)
    told(found.fail, failures)
    (folder / f"heard-{rank}").touch()
    while not all((folder / f"heard-{other}").exists() for other in (0, 1, 3)):
        time.sleep(0.1)
os._exit(0)
"""


def four_ranks(folder: Path, leaves: str) -> list[list[str]]:
    """Run four ranks, of which rank 2 may leave after a first agreement; return what each prints."""
    command = [sys.executable, "-c", RANK, str(ROOT / "vllm_plugin" / "ranks.py"), str(folder)]
    running = [
        subprocess.Popen([*command, str(rank), leaves], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for rank in range(4)
    ]
    return [process.communicate(timeout=120)[0].splitlines() for process in running]


@pytest.mark.exhaustive
def test_all_ranks_of_two_groups_learn_the_same_and_the_last_one_raises(tmp_path):
    everything = str([f"from {rank}" + "." * 100 * rank for rank in range(4)])
    raised = ["None"] * 3 + ["RuntimeError: [data] bad"]
    assert four_ranks(tmp_path, "") == [[everything, heard] for heard in raised]


@pytest.mark.exhaustive
@pytest.mark.parametrize("leaves", ["ends", "stays away"])
def test_a_rank_that_leaves_is_named_to_all_others_now_and_later_and_all_of_them_raise(tmp_path, leaves):
    said = four_ranks(tmp_path, leaves)
    for rank in (0, 1, 3):
        first, second, third = said[rank][2:]
        assert first == second
        # Rank 1 asks rank 3, which waits for rank 2 as long as rank 1 does.
        named = "2|3" if (rank, leaves) == (1, "stays away") else "2"
        said_so = rf"RanksLost: \[rank-lost\] rank ({named}) of torch.distributed ended, or did not answer"
        assert re.match(said_so, first)
        assert third == "RuntimeError: [data] bad"
    if leaves == "stays away":
        # What it missed is over: it must not go on alone.
        assert said[2][2].startswith("RanksLost: [rank-lost]")


class Replies:
    """A worker's queue: what it replied to earlier calls, and then to the last one."""

    def __init__(self, *unread: object) -> None:
        self.waiting = list(unread)

    def dequeue(self, timeout: float) -> object:
        reply = self.waiting.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply


@pytest.fixture
def executor():
    """vLLM's, of two workers that answer each call with its first argument."""
    with warnings.catch_warnings():
        # Of itself.
        warnings.simplefilter("ignore")
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

    plugin.load()

    def broadcast(call: tuple) -> None:
        for queue in executor.response_mqs:
            queue.waiting.append((WorkerProc.ResponseStatus.SUCCESS, call[1][0]))

    executor = object.__new__(MultiprocExecutor)
    delta = SimpleNamespace(backend="delta")
    parallel = SimpleNamespace(enable_fault_tolerance=False)
    executor.vllm_config = SimpleNamespace(
        weight_transfer_config=delta, lora_config=None, parallel_config=parallel
    )
    executor.is_failed, executor.futures_queue = False, deque()
    executor.rpc_broadcast_mq = SimpleNamespace(enqueue=broadcast)
    executor.response_mqs = [Replies(), Replies()]
    return executor


@pytest.mark.parametrize("unread", [("SUCCESS", [1]), ("FAILURE", "made to fail"), RecursionError()])
def test_a_call_after_one_that_failed_has_its_own_answer_whatever_the_workers_had_replied(executor, unread):
    executor.response_mqs[0].waiting.append(("FAILURE", "made to fail"))
    executor.response_mqs[1].waiting.append(unread)
    with pytest.raises(RuntimeError, match="made to fail"):
        executor.collective_rpc("first", args=("one",))
    assert executor.collective_rpc("second", args=("two",)) == ["two", "two"]
    assert [queue.waiting for queue in executor.response_mqs] == [[], []]


@pytest.mark.parametrize(("lora", "second"), [(object(), "two"), (None, "unread")])
def test_a_server_with_adapters_is_kept_in_step_and_others_are_left_alone(executor, lora, second):
    executor.vllm_config.weight_transfer_config, executor.vllm_config.lora_config = None, lora
    executor.response_mqs[0].waiting.append(("FAILURE", "made to fail"))
    executor.rpc_broadcast_mq.enqueue((None, ("unread",)))
    with pytest.raises(RuntimeError, match="made to fail"):
        executor.collective_rpc("first", args=("one",))
    assert executor.collective_rpc("second", args=("two",)) == [second] * 2


def test_a_queue_that_cannot_be_read_any_more_is_no_endless_wait(executor):
    for _ in range(3):
        executor.response_mqs[0].waiting.append(RuntimeError("cancelled"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cancelled"):
            executor.collective_rpc("any", args=("one",))


METHODS = [
    name for name in vars(DeltaWorkerExtension) if name.startswith("delta_") and name != "delta_adapter"
]


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_without_the_delta_engine_answers_and_does_not_raise(method):
    worker = object.__new__(DeltaWorkerExtension)
    for engine in (None, object()):
        worker.weight_transfer_engine = engine
        answer = getattr(worker, method)()
        assert [*answer] == ["error"]
        assert answer["error"].startswith(f"[usage] the weight transfer engine is {type(engine).__name__};")
        assert "--weight-transfer-config" in answer["error"]
