"""Which salt a request has, and what an engine core answers: real requests and hashes, without a model."""

import os
import warnings
from concurrent.futures import Future
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    # torch warns of itself when vLLM imports it.
    warnings.simplefilter("ignore")
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor
    from vllm.v1.request import Request

from patchstore.errors import UsageError
from vllm_plugin import plugin, prefixes, replies

pytestmark = pytest.mark.vllm

BLOCK = 4


class Core:
    """An engine core with a scheduler that has no model."""

    collective_rpc = EngineCore.collective_rpc

    def __init__(self, **scheduler: Any) -> None:
        self.calls: list[tuple[Any, Any]] = []
        self.found: list[list[bytes]] = []
        """The hashes of each request whose prefix was looked for."""
        self.scheduler = object.__new__(Scheduler)
        self.scheduler.kv_cache_manager = SimpleNamespace(get_computed_blocks=self._look_up)
        self.scheduler.connector = None
        for name, value in scheduler.items():
            setattr(self.scheduler, name, value)
        self.model_executor = SimpleNamespace(collective_rpc=self._broadcast)
        self.vllm_config = SimpleNamespace(
            weight_transfer_config=SimpleNamespace(backend="delta"),
            model_config=SimpleNamespace(is_multimodal_model=False),
        )
        init_none_hash(sha256)
        self.request_block_hasher = get_request_block_hasher(BLOCK, sha256)
        self.pausing: Future[None] | None = None
        self.cleared: list[bool] = []
        """Of each pause, whether caches were to be cleared."""

    def _look_up(self, request: Request) -> None:
        self.found.append(list(request.block_hashes))

    def _broadcast(self, method: Any, timeout: Any, args: Any, kwargs: Any) -> list[Any]:
        self.calls.append((method, kwargs))
        return [None]

    def pause_scheduler(self, mode: str, clear_cache: bool) -> "Future[None] | None":
        assert mode == "keep"
        self.cleared.append(clear_cache)
        return self.pausing

    def request(self, num_tokens: int = 10, salt: str | None = None) -> Request:
        """Receive one, as a core does on its input thread."""
        return Request(
            request_id="r",
            prompt_token_ids=list(range(num_tokens)),
            sampling_params=SamplingParams(max_tokens=5),
            pooling_params=None,
            cache_salt=salt,
            block_hasher=self.request_block_hasher,
        )

    def look_up(self, request: Request) -> list[bytes]:
        """The hashes with which the scheduler looks for a prefix, when the request is scheduled."""
        self.scheduler.kv_cache_manager.get_computed_blocks(request)
        return self.found[-1]

    def update(self, **info: Any) -> None:
        """What the routes of an update call."""
        self.collective_rpc("start_weight_update")
        self.collective_rpc("update_weights", kwargs={"update_info": {"version": 1} | info})
        self.collective_rpc("finish_weight_update")


@pytest.fixture(autouse=True)
def installed() -> None:
    plugin.load()
    plugin.load()
    Core.collective_rpc = EngineCore.collective_rpc


@pytest.fixture
def core() -> Core:
    return Core()


def salted(core: Core) -> Core:
    core.update(new_prefixes=True)
    return core


def test_the_plugin_is_loaded_by_its_entry_point_and_installs_both_of_its_parts_once():
    (entry,) = entry_points(group="vllm.general_plugins", name="patchstore")
    assert entry.load() is plugin.load
    before = EngineCore.collective_rpc, MultiprocExecutor.collective_rpc
    assert all(hasattr(call, "__wrapped__") for call in before)
    assert replies.LOADED in os.environ
    plugin.load()
    assert (EngineCore.collective_rpc, MultiprocExecutor.collective_rpc) == before


def test_an_update_without_the_option_leaves_vllm_as_it_is(core):
    look_up, hasher = core.scheduler.kv_cache_manager.get_computed_blocks, core.request_block_hasher
    before = core.look_up(core.request())
    core.update()
    assert core.look_up(core.request()) == before
    assert core.scheduler.kv_cache_manager.get_computed_blocks == look_up
    assert core.request_block_hasher is hasher
    assert core.calls[1] == ("update_weights", {"update_info": {"version": 1}})


def test_each_application_gives_later_requests_other_hashes(core):
    hashes = [core.look_up(core.request())]
    for _ in range(3):
        salted(core)
        hashes.append(core.look_up(core.request()))
        assert core.look_up(core.request()) == hashes[-1]
    blocks = [block for each in hashes for block in each]
    assert [len(each) for each in hashes] == [2, 2, 2, 2]
    assert len(set(blocks)) == len(blocks)


def test_the_engine_takes_the_key_that_workers_do_not_know(core):
    salted(core)
    assert core.calls == [
        ("start_weight_update", None),
        ("update_weights", {"update_info": {"version": 1}}),
        ("finish_weight_update", None),
    ]


def test_an_update_that_begins_anew_without_the_option_renews_nothing(core):
    core.collective_rpc("start_weight_update")
    core.collective_rpc("update_weights", kwargs={"update_info": {"version": 1, "new_prefixes": True}})
    before = core.look_up(core.request())
    core.update()
    assert core.look_up(core.request()) == before


def test_a_request_that_was_received_before_the_update_is_looked_for_with_the_new_salt(core):
    # One from before the first application, and one from between two.
    for _ in range(2):
        waiting = core.request()
        salted(core)
        assert core.look_up(waiting) == core.look_up(core.request())


def test_a_running_request_keeps_its_hashes_also_for_blocks_that_it_fills_later(core):
    for num_prompt in (2, 6):
        salted(core)
        running = core.request(num_prompt)
        core.look_up(running)
        running.num_computed_tokens = num_prompt
        twin = core.request(num_prompt)
        core.look_up(twin)
        twin.append_output_token_ids(list(range(num_prompt, 12)))
        before = list(twin.block_hashes)
        salted(core)
        running.append_output_token_ids(list(range(num_prompt, 12)))
        core.look_up(running)
        assert running.block_hashes == before
        assert len(before) == 3
        assert not set(core.look_up(core.request(12))) & set(before)


def test_a_running_request_from_before_the_first_application_keeps_its_hashes(core):
    core.collective_rpc("delta_prefixes")
    for num_prompt in (2, 6):
        running, twin = core.request(num_prompt), core.request(12)
        core.look_up(running)
        running.num_computed_tokens = num_prompt
    salted(core)
    running.append_output_token_ids(list(range(num_prompt, 12)))
    assert running.block_hashes == twin.block_hashes
    assert core.look_up(core.request(12)) != twin.block_hashes


def test_a_request_that_was_preempted_is_computed_anew(core):
    salted(core)
    preempted = core.request()
    core.look_up(preempted)
    preempted.append_output_token_ids([10, 11])
    salted(core)
    preempted.num_computed_tokens = 0
    assert core.look_up(preempted) == core.look_up(core.request(12))


def test_salts_of_requests_keep_them_apart_before_and_after(core):
    salts = (None, "a", "b")
    for _ in range(2):
        found = [tuple(core.look_up(core.request(salt=salt))) for salt in salts]
        assert len(set(found)) == 3
        assert found == [tuple(core.look_up(core.request(salt=salt))) for salt in salts]
        waiting = [core.request(salt=salt) for salt in salts]
        salted(core)
        later = [tuple(core.look_up(each)) for each in waiting]
        assert later == [tuple(core.look_up(core.request(salt=salt))) for salt in salts]
        assert not set(later) & set(found)


def test_a_salt_that_is_renewed_while_a_request_is_received_is_noticed(core, monkeypatch):
    salted(core)
    salts = getattr(core, prefixes._SALTS)
    hasher, renewals = core.request_block_hasher, [salts.renew]

    def renewed_meanwhile(request: Request) -> Any:
        hashes = hasher(request)
        if renewals:
            renewals.pop()()
        return hashes

    monkeypatch.setattr(core, "request_block_hasher", renewed_meanwhile)
    torn = core.request()
    monkeypatch.undo()
    assert core.look_up(torn) == core.look_up(core.request())
    assert renewals == []


@pytest.mark.parametrize("wrong", [None, 1, "true", [], {}])
def test_a_wish_in_a_wrong_form_is_refused_and_reaches_no_worker(core, wrong):
    with pytest.raises(UsageError, match=r"^\[usage\] new_prefixes is true or false"):
        core.update(new_prefixes=wrong)
    assert [method for method, _ in core.calls] == ["start_weight_update"]
    with pytest.raises(TypeError):
        core.collective_rpc("delta_prefixes", args=(True, True))
    with pytest.raises(TypeError):
        core.collective_rpc("delta_pause", kwargs={"mode": "wait"})


def test_a_wish_that_is_false_is_none(core):
    before = core.look_up(core.request())
    core.update(new_prefixes=False)
    assert core.calls[1] == ("update_weights", {"update_info": {"version": 1}})
    assert core.look_up(core.request()) == before
    after = salted(core).look_up(core.request())
    core.update(new_prefixes=False)
    assert core.look_up(core.request()) == after


def test_prefixes_are_renewed_on_request(core):
    before = core.look_up(core.request())
    ((answer,),) = (core.collective_rpc("delta_prefixes"),)
    assert answer == {"salt": None}
    assert core.look_up(core.request()) == before
    ((answer,),) = (core.collective_rpc("delta_prefixes", args=(True,)),)
    assert answer["salt"]
    assert core.look_up(core.request()) != before
    assert core.calls == []


def test_a_server_with_another_backend_is_left_alone(core):
    for config in (None, SimpleNamespace(backend="nccl")):
        core.vllm_config.weight_transfer_config = config
        core.collective_rpc("delta_prefixes", args=(True,))
        core.update(new_prefixes=True)
    assert not hasattr(core, prefixes._SALTS)
    assert core.calls[0] == ("delta_prefixes", None)
    assert core.calls[2] == ("update_weights", {"update_info": {"version": 1, "new_prefixes": True}})


def multimodal(core: Core) -> None:
    core.vllm_config.model_config.is_multimodal_model = True


def connected(core: Core) -> None:
    core.scheduler.connector = object()


def encoding(core: Core) -> None:
    core.scheduler.ec_connector = object()


def unknown(core: Core) -> None:
    core.scheduler = SimpleNamespace(kv_cache_manager=core.scheduler.kv_cache_manager)


def without_lookup(core: Core) -> None:
    core.scheduler.kv_cache_manager = SimpleNamespace()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (multimodal, "images or sound"),
        (connected, "--kv-transfer-config"),
        (encoding, "--kv-transfer-config"),
        (unknown, "not one whose prefix cache"),
        (without_lookup, "not one whose prefix cache"),
    ],
)
def test_what_is_not_covered_is_refused_with_a_sentence_and_changes_nothing(core, change, reason):
    change(core)
    for args in ((), (True,)):
        (answer,) = core.collective_rpc("delta_prefixes", args=args)
        assert [*answer] == ["error"]
        assert reason in answer["error"] and "--prefix-cache reset" in answer["error"]
    with pytest.raises(UsageError, match=rf"^\[usage\] .*{reason}"):
        core.update(new_prefixes=True)
    assert [method for method, _ in core.calls] == ["start_weight_update"]
    assert not hasattr(core, prefixes._SALTS)


def test_a_pause_clears_caches_if_asked_and_not_where_the_front_has_one_too(core):
    assert [core.collective_rpc("delta_pause", args=args) for args in ((), (False,), (True,))] == [[{}]] * 3
    assert core.cleared == [False, False, True]
    core.vllm_config.model_config.is_multimodal_model = True
    (answer,) = core.collective_rpc("delta_pause", args=(True,))
    assert "/pause" in answer["error"]
    assert core.collective_rpc("delta_pause", args=(False,)) == [{}]
    assert core.cleared == [False, False, True, False]


def test_a_pause_answers_when_it_is_complete(core):
    assert core.collective_rpc("delta_pause") == [{}]
    core.pausing = Future()
    answer = core.collective_rpc("delta_pause")
    assert not answer.done()
    core.pausing.set_result(None)
    assert answer.result(timeout=0) == [{}]
    core.pausing = Future()
    answer = core.collective_rpc("delta_pause")
    core.pausing.set_exception(RuntimeError("the device is gone"))
    with pytest.raises(RuntimeError, match="the device is gone"):
        answer.result(timeout=0)
