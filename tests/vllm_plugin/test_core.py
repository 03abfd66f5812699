"""What an engine core does for updates: vLLM's own core, with workers that take notes."""

from concurrent.futures import Future
from importlib.metadata import entry_points
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
from bare_core import Core, EngineCore, EngineCoreOutputs, Request
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.multimodal import utils as mm_utils
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.v1.core.sched import output
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from patchstore.errors import OtherServer, StaleCaches, UsageError
from vllm_plugin import plugin


@pytest.fixture
def core() -> Core:
    return Core()


class Connector:
    """Answers each reset with the next of `answers`."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def reset_cache(self) -> Any:
        return self.answers.pop(0)


class Bare:
    """A connector that has no more than vLLM's own method, which does nothing."""

    reset_cache = KVConnectorBase_V1.reset_cache


def test_the_plugin_is_loaded_by_its_entry_point_and_installs_its_parts_once():
    (entry,) = entry_points(group="vllm.general_plugins", name="patchstore")
    assert entry.load() is plugin.load
    names = ("collective_rpc", "add_request", "resume_scheduler", "wake_up", "set_weight_version")
    methods = [vars(EngineCore).get(name) for name in names]
    assert all(hasattr(each, "__wrapped__") for each in methods if each is not None)
    assert hasattr(MultiprocExecutor.collective_rpc, "__wrapped__")
    assert plugin.is_kept()
    plugin.load()
    assert [vars(EngineCore).get(name) for name in names] == methods


@pytest.mark.parametrize(
    "info", [{}, {"prefix_cache": "reset"}, {"prefix_cache": "keep"}, {"prefix_cache": "version"}]
)
def test_the_core_takes_what_workers_do_not_know(core, info):
    core.update(**info)
    assert core.calls == [
        ("start_weight_update", {}),
        ("update_weights", {"update_info": {"version": 1}}),
        ("finish_weight_update", {}),
    ]


def prove(core: Core, **info: Any) -> Any:
    return core.collective_rpc("delta_prove", args=({"version": 1} | info,))


@pytest.mark.parametrize(
    ("is_paused", "given", "kept"),
    [(False, {}, "resume"), (True, {}, "stay-paused"), (True, {"switch": "resume"}, "resume")],
)
def test_an_update_is_begun_and_proved_and_its_end_chosen_in_one_call(core, is_paused, given, kept):
    if is_paused:
        core.pause_scheduler("keep", False)
    assert prove(core, prefix_cache="keep", **given) == [{"switch": kept}]
    assert core.calls == [
        ("start_weight_update", {}),
        ("update_weights", {"update_info": {"version": 1, "switch": kept}}),
    ]
    assert core.is_scheduler_paused() == is_paused
    core.collective_rpc("finish_weight_update")
    assert core.get_weight_version() == "1"
    # As the update said.
    assert core.resets == ["write"]


def test_an_update_that_is_not_proved_is_closed_and_paused_by_no_one(core):
    with pytest.raises(UsageError, match="prefix_cache is one of"):
        prove(core, prefix_cache="no")
    assert core.num_dropped == 1
    core.failing.add("update_weights")
    with pytest.raises(RuntimeError, match="a worker failed"):
        prove(core)
    assert not core.is_scheduler_paused()
    core.wake_up(["scheduling"])
    core.failing.clear()
    core.collective_rpc("finish_weight_update")
    # Nothing was staged that it could be labelled with.
    assert core.get_weight_version() == "default"


def test_generation_goes_on_and_a_mark_is_removed_in_one_call(core):
    prove(core)
    core.collective_rpc("delta_pause")
    assert core.collective_rpc("delta_resume") == [{}]
    assert core.calls[-1] == ("delta_switch", {})
    # No switch holds it any more.
    core.pause_scheduler("keep", False)
    core.wake_up(["scheduling"])
    assert not core.is_scheduler_paused()


def test_a_mark_stays_while_generation_cannot_go_on(core):
    core.scheduler.connector = Connector(True, False, False, True)
    prove(core)
    core.collective_rpc("delta_pause")
    with pytest.raises(StaleCaches):
        core.collective_rpc("finish_weight_update")
    with pytest.raises(StaleCaches):
        core.collective_rpc("delta_resume")
    assert "delta_switch" not in {method for method, _ in core.calls}
    core.collective_rpc("delta_resume")
    assert core.calls[-1][0] == "delta_switch"
    assert not core.is_scheduler_paused()


def test_caches_are_emptied_with_the_write_if_nothing_else_is_said(core):
    core.update()
    assert core.resets == ["write", "prefixes"]
    core.vllm_config.model_config.is_multimodal_model = True
    core.update()
    assert core.resets[2:] == ["write", "prefixes", "encoder"]
    core.update(prefix_cache="keep")
    assert core.resets[5:] == ["write"]
    # What one update says is not kept for the next.
    core.update()
    assert core.resets[6:] == ["write", "prefixes", "encoder"]
    # A connector is emptied before the write too.
    core.scheduler.connector = connector = Connector(True, True)
    core.update()
    assert core.resets[9:] == ["prefixes", "write", "prefixes", "encoder"]
    assert connector.answers == []


@pytest.mark.parametrize(
    ("takes_images", "is_sent_again", "are_sent"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_images_that_a_cached_prefix_covers_are_sent_where_a_request_is_sent_only_once(
    core, monkeypatch, takes_images, is_sent_again, are_sent
):
    strip = getattr(mm_utils, "strip_covered_mm_data", None)
    if strip is None:
        pytest.skip("this vLLM always sends them")
    monkeypatch.setattr(output, "strip_covered_mm_data", strip)
    core.vllm_config.model_config.is_multimodal_model = takes_images
    core.scheduler.use_v2_model_runner = is_sent_again
    core.scheduler.add_request = lambda request: None
    request = core.request()
    core.add_request(request)
    place = PlaceholderRange(offset=0, length=4)
    request.mm_features = [MultiModalFeatureSpec(MultiModalKwargsItem(), "image", "0", place)]
    # The prefix is found.
    request.num_computed_tokens = 8
    (sent,) = output.NewRequestData.from_request(request, ([],)).mm_features
    assert (sent.data is not None) == are_sent


@pytest.mark.parametrize("answer", [None, False, 1])
def test_nothing_is_written_where_a_connector_is_not_emptied(core, answer):
    core.scheduler.connector = Connector(answer)
    with pytest.raises(StaleCaches, match=r"^\[stale-caches\] version 1 was not applied: Connector"):
        core.update()
    assert "write" not in core.resets
    assert not core.is_scheduler_paused()
    assert core.num_dropped == 1


@pytest.mark.parametrize("was_paused", [False, True])
def test_nothing_is_generated_while_a_cache_of_older_weights_is_not_empty(core, was_paused):
    core.scheduler.connector = Connector(True, False, False, False, True)
    if was_paused:
        core.collective_rpc("delta_pause")
    with pytest.raises(StaleCaches, match=r"version 1 is served, but"):
        core.update()
    core.serving = 1
    assert core.is_scheduler_paused()
    assert core.get_weight_version() == "1"
    (status,) = core.collective_rpc("delta_status")
    assert "Connector" in status["stale"]
    for _ in range(2):
        with pytest.raises(StaleCaches):
            core.resume_scheduler()
    assert core.is_scheduler_paused()

    core.collective_rpc("delta_switch", args=(None,))

    assert core.is_scheduler_paused() == was_paused
    (status,) = core.collective_rpc("delta_status")
    assert status["stale"] is None


@pytest.mark.parametrize(
    ("name", "option"), [("connector", "--kv-transfer-config"), ("ec_connector", "--ec-transfer-config")]
)
@pytest.mark.parametrize("is_child", [False, True])
def test_a_connector_that_cannot_forget_is_refused_at_opening_with_its_name(core, name, option, is_child):
    setattr(core.scheduler, name, SimpleNamespace(_connectors=[Connector(), Bare()]) if is_child else Bare())
    for method, given in (
        ("init_weight_transfer_engine", {"kwargs": {"init_info": {"store": "s"}}}),
        ("delta_open", {"args": ({"store": "s", "prefix_cache": "reset"},)}),
        ("update_weights", {"kwargs": {"update_info": {"version": 1}}}),
    ):
        with pytest.raises(UsageError, match=rf"^\[usage\] Bare .*{option}"):
            core.collective_rpc(method, **given)
    with pytest.raises(UsageError, match=r"^\[usage\] .*Bare"):
        core.update(prefix_cache="version")
    assert "Bare" in core.collective_rpc("delta_status")[0]["keeps"]
    assert {method for method, _ in core.calls} == {"start_weight_update"}
    # A driver that accepts older results gets them.
    core.update(prefix_cache="keep")


@pytest.mark.parametrize("wrong", [1, "true", [], {}, True])
def test_a_wrong_word_for_caches_is_refused_and_reaches_no_worker(core, wrong):
    with pytest.raises(UsageError, match=r"^\[usage\] prefix_cache is one of reset, version, keep"):
        core.update(prefix_cache=wrong)
    assert [method for method, _ in core.calls] == ["start_weight_update"]


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        ("vllm_config.model_config.is_multimodal_model", True, "images or sound"),
        ("scheduler.connector", Connector(), "by tokens"),
        ("scheduler.ec_connector", Connector(), "by tokens"),
        ("scheduler", SimpleNamespace(kv_cache_manager=None), "not one whose prefix cache"),
        ("scheduler.kv_cache_manager", SimpleNamespace(), "not one whose prefix cache"),
    ],
)
def test_what_cannot_be_told_apart_by_salts_is_refused_and_changes_nothing(core, place, value, reason):
    holder, _, name = place.rpartition(".")
    setattr(attrgetter(holder)(core) if holder else core, name, value)
    init = {"init_info": {"store": "s", "prefix_cache": "version"}}
    with pytest.raises(UsageError, match=rf"^\[usage\] .*{reason}.* choose --prefix-cache reset"):
        core.collective_rpc("init_weight_transfer_engine", kwargs=init)
    with pytest.raises(UsageError, match=rf"^\[usage\] .*{reason}"):
        core.update(prefix_cache="version")
    assert [method for method, _ in core.calls] == ["start_weight_update"]
    assert core.num_dropped == 1


def test_each_core_has_an_id_of_its_own_and_refuses_calls_that_are_meant_for_another(core):
    (told,) = core.collective_rpc("delta_engine")
    (status,) = core.collective_rpc("delta_status", kwargs={"engine": told["engine"]})
    assert status["engine"] == told["engine"]
    other = Core()
    for method, given in (
        ("delta_status", {"kwargs": {"engine": told["engine"]}}),
        ("delta_prove", {"args": ({"version": 1},), "kwargs": {"engine": told["engine"]}}),
        ("delta_pause", {"kwargs": {"engine": told["engine"]}}),
        ("update_weights", {"kwargs": {"update_info": {"version": 1, "engine": told["engine"]}}}),
        ("init_weight_transfer_engine", {"kwargs": {"init_info": {"store": "s", "engine": told["engine"]}}}),
    ):
        with pytest.raises(OtherServer, match=r"^\[other-server\]"):
            other.collective_rpc(method, **given)
    assert other.calls == []
    assert not other.is_scheduler_paused()


def test_answers_are_labelled_when_a_store_is_opened_that_has_what_is_served(core):
    core.serving = 3
    core.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {"store": "s"}})
    assert core.get_weight_version() == "3"


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


@pytest.mark.parametrize(("pause", "switch"), [("core", "resume"), ("route", "resume"), ("core", None)])
def test_a_server_that_is_woken_up_while_a_driver_holds_it_stays_paused(core, pause, switch):
    core.collective_rpc("update_weights", kwargs={"update_info": {"version": 1, "switch": switch}})
    core.collective_rpc("delta_pause") if pause == "core" else core.pause_scheduler("keep", False)
    for _ in range(2):
        core.wake_up(["scheduling"])
        assert core.is_scheduler_paused()
    core.collective_rpc("delta_resume")
    core.collective_rpc("delta_switch", args=(None,))
    assert not core.is_scheduler_paused()
    # As ever, where vLLM's own route has paused it and no switch is under way.
    core.pause_scheduler("keep", False)
    core.wake_up(["scheduling"])
    assert not core.is_scheduler_paused()


def drive(core: Core, name: str, wants: str = "the newest version", seconds: float = 60) -> list[dict]:
    """Ask as a driver does, and return whom the core knows beside it."""
    driver = {"id": name, "wants": wants, "seconds": seconds}
    return core.collective_rpc("delta_status", kwargs={"driver": driver})[0]["drivers"]


def test_drivers_hear_of_each_other_until_one_leaves_or_was_killed(core):
    assert drive(core, "a") == []
    assert drive(core, "b", "version 3") == [{"id": "a", "wants": "the newest version"}]
    assert drive(core, "a") == [{"id": "b", "wants": "version 3"}]
    drive(core, "b", seconds=0)
    assert drive(core, "a") == []
    # As one that was killed.
    drive(core, "c", seconds=1e-9)
    assert drive(core, "a") == []


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        1,
        {},
        {"id": "a"},
        {"id": "a", "wants": "", "seconds": "1"},
        {"id": [], "wants": "", "seconds": 1},
    ],
)
def test_a_driver_in_a_wrong_form_is_refused(core, wrong):
    with pytest.raises(UsageError, match=r"^\[usage\]"):
        core.collective_rpc("delta_status", kwargs={"driver": wrong})


# Which salt a request has: real requests and hashes.


def salted(core: Core) -> Core:
    core.update(prefix_cache="version")
    return core


def test_an_update_without_the_option_leaves_vllm_as_it_is(core):
    look_up, hasher = core.scheduler.kv_cache_manager.get_computed_blocks, core.request_block_hasher
    before = core.look_up(core.request())
    # Also where an update was begun with it that no one finished.
    core.collective_rpc("update_weights", kwargs={"update_info": {"version": 1, "prefix_cache": "version"}})
    assert core.request_block_hasher is hasher
    core.update()
    assert core.look_up(core.request()) == before
    assert core.scheduler.kv_cache_manager.get_computed_blocks == look_up
    assert core.request_block_hasher is hasher


def test_each_application_gives_later_requests_other_hashes(core):
    hashes = [core.look_up(core.request())]
    for _ in range(3):
        salted(core)
        hashes.append(core.look_up(core.request()))
        assert core.look_up(core.request()) == hashes[-1]
    blocks = [block for each in hashes for block in each]
    assert [len(each) for each in hashes] == [2, 2, 2, 2]
    assert len(set(blocks)) == len(blocks)


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
    hasher, renewals = core.request_block_hasher, [salted]

    def renewed_meanwhile(request: Request) -> Any:
        hashes = hasher(request)
        if renewals:
            renewals.pop()(core)
        return hashes

    monkeypatch.setattr(core, "request_block_hasher", renewed_meanwhile)
    torn = core.request()
    monkeypatch.undo()
    assert core.look_up(torn) == core.look_up(core.request())
    assert renewals == []


def test_a_server_with_another_backend_is_left_alone(core):
    before = core.look_up(core.request())
    for config in (None, SimpleNamespace(backend="nccl")):
        core.vllm_config.weight_transfer_config = config
        core.update(prefix_cache="version")
        assert core.calls[-2] == (
            "update_weights",
            {"update_info": {"version": 1, "prefix_cache": "version"}},
        )
        assert core.look_up(core.request()) == before


def test_steps_that_were_under_way_at_a_write_keep_the_label_of_what_computed_them(core):
    if "weight_version" not in EngineCoreOutputs.__struct_fields__:
        pytest.skip("this vLLM does not label tokens")
    core.update()
    core.batch_queue = [None, None]
    core.update(version=2)
    assert core.end_step().weight_version == "1"
    core.batch_queue = [None, None]
    core.update(version=3)
    assert [core.end_step().weight_version for _ in range(3)] == ["1", "2", "3"]


def test_weights_that_are_no_version_have_no_versions_label(core):
    core.update()
    core.collective_rpc("reload_weights")
    assert core.get_weight_version() == "default"
    core.serving = 1
    core.collective_rpc(lambda worker: None)
    assert core.get_weight_version() == "1"
    # A client's own text stays.
    core.set_weight_version("mine")
    core.collective_rpc("reload_weights")
    assert core.get_weight_version() == "mine"


def test_nothing_is_labelled_with_a_number_while_no_version_is_served(core):
    for label in ("1", "9" * 5000):
        with pytest.raises(UsageError, match="no version is served, so answers are not labelled"):
            core.set_weight_version(label)
    core.set_weight_version("mine")
    assert core.get_weight_version() == "mine"


def test_a_write_that_fails_leaves_the_label_of_what_is_served(core):
    core.update()
    core.serving = 1
    core.failing.add("finish_weight_update")
    with pytest.raises(RuntimeError, match="a worker failed"):
        core.update(version=2)
    assert core.get_weight_version() == "1"


# Which requests the served version may answer.


def test_requests_that_an_update_ends_do_not_keep_its_caches_from_being_emptied(core):
    core.update()
    for name, wanted in (("exactly", "=1"), ("held", "hold"), ("later", ">=1")):
        core.asking(wanted, name, num_computed=4)
    assert core.told() == {}
    core.resets.clear()
    core.update(version=2)
    assert core.resets == ["write", "prefixes"]
    assert core.scheduler.requests.keys() == {"later"}
    told = core.told()
    assert {name: each["status"] for name, each in told.items()} == {"exactly": 409, "held": 409}
    assert told["held"]["serving"] == 2
    assert core.told() == {}


def test_a_request_that_is_refused_ends_and_leaves_the_core_as_it_was(core):
    core.serving = 3
    core.asking("=2", "no")
    core.asking("=3", "yes")
    assert core.scheduler.requests.keys() == {"yes"}
    assert core.told()["no"] == {
        "status": 409,
        "message": "the request accepts version 2, and the server serves version 3",
        "serving": 3,
    }


def test_what_waits_is_not_answered_from_a_cache_that_an_update_keeps(core):
    core.update()
    for name, wanted in (("waiting", ">=1"), ("held", "hold")):
        core.asking(wanted, name)
    core.serving = 1
    core.failing.add("finish_weight_update")
    with pytest.raises(RuntimeError, match="a worker failed"):
        core.update(version=2, prefix_cache="keep")
    core.failing.clear()
    assert core.scheduler.requests.keys() == {"waiting", "held"}
    core.update(version=2, prefix_cache="keep")
    assert {each["status"] for each in core.told().values()} == {400}
    assert core.scheduler.requests.keys() == set()
