"""What an API server makes of names of adapters, without an engine."""

import asyncio
import gc
import itertools
import shutil
import tempfile
import warnings
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tiny_adapter
from fastapi import HTTPException

from patchstore import PeftAdapter, Publisher
from patchstore.bucket import history, kept
from patchstore.errors import UsageError
from patchstore.ops.retention import Retention, collect, retire
from patchstore.read.run import Run
from patchstore.signing import KeySigner, statement
from patchstore.stores import open_store
from tests.support.keys import key_pair
from tests.support.weights import small_model
from vllm_plugin.adapter_folders import AdapterFolders
from vllm_plugin.permission import KEYS, STORES, default_scratch


@pytest.fixture(scope="module")
def adapters() -> ModuleType:
    with warnings.catch_warnings():
        # What vLLM's servers import warns of itself.
        warnings.simplefilter("ignore")
        from vllm_plugin import adapters
    return adapters


class Engine:
    """Takes adapters, and knows nothing of requests but what a test says."""

    def __init__(self) -> None:
        self.loaded: dict[int, Any] = {}
        self.num_loads = 0
        self.refusal: Exception | None = None
        self.errored = False
        self.state: str | None = None
        self.update_open = False
        self.output_processor = SimpleNamespace(request_states={})
        lora = SimpleNamespace(max_cpu_loras=2, max_lora_rank=8, target_modules=None)
        model = SimpleNamespace(model="/models/tiny", revision=None)
        transfer = SimpleNamespace(backend="delta")
        self.vllm_config = SimpleNamespace(
            lora_config=lora, model_config=model, weight_transfer_config=transfer
        )

    async def add_lora(self, request: Any) -> None:
        self.num_loads += 1
        await asyncio.sleep(0)
        if self.refusal is not None:
            raise self.refusal
        self.loaded[request.lora_int_id] = request.lora_name

    async def remove_lora(self, number: int) -> None:
        del self.loaded[number]

    async def collective_rpc(self, method: str) -> list[dict[str, Any]]:
        assert method == "delta_status"
        return [{"state_digest": self.state, "update_open": self.update_open}] * 2


class Models:
    """What `Adapters` uses of vLLM's list of models."""

    def __init__(self) -> None:
        self.engine_client = Engine()
        self.base_model_paths = [SimpleNamespace(name="served")]
        self.lora_requests: dict[str, Any] = {}
        numbers = itertools.count(1)
        self.lora_id_counter = SimpleNamespace(inc=lambda _: next(numbers))

    def is_base_model(self, name: str) -> bool:
        return name == "served"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Five versions of an adapter."""
    publish(tmp_path / "run", 5)
    return tmp_path / "run"


def publish(
    store: Path,
    versions: int,
    adapter: str | PeftAdapter = "default",
    renamed: tuple[str, str] = ("", ""),
    **others: Any,
) -> None:
    tensors = {name.replace(*renamed): each for name, each in tiny_adapter.tensors().items()}
    folder = tiny_adapter.config(store.with_name(f"{store.name}-config"), **others)
    with Publisher(store, tensors, adapter=adapter, files=folder, dtype=None) as publisher:
        for step in range(versions):
            publisher.publish_patch(step).result()
            for tensor in tensors.values():
                tensor[0] *= 2


@pytest.fixture
def new(
    adapters: ModuleType, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Make the adapters of a new server."""
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def make(names: str = f"policy={store}") -> Any:
        monkeypatch.setenv(adapters.ADAPTERS, names)
        return adapters.Adapters(Models())

    return make


def request(name: str, place: object = None, *, inplace: bool = False) -> Any:
    path = f"patchstore:{place}"
    return SimpleNamespace(lora_name=name, lora_path=path, load_inplace=inplace)


async def nothing(*_: Any) -> None: ...


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def test_many_requests_at_once_load_a_version_once_and_one_that_gives_up_ends_nothing(new):
    found = new()

    async def ask() -> list[Any]:
        asked = [asyncio.create_task(found.resolve("policy@2")) for _ in range(5)]
        await asyncio.sleep(0)
        asked[0].cancel()
        return await asyncio.gather(*asked, return_exceptions=True)

    first, *others = run(ask())
    assert isinstance(first, asyncio.CancelledError)
    assert others == ["policy@2"] * 4
    assert found.models.engine_client.num_loads == 1
    assert [*found.models.lora_requests] == ["policy@2"]


def test_head_is_the_newest_version_also_where_another_is_chosen(new, store):
    found = new(f"policy={store}@best")
    kept.tag(open_store(store), "best", 1)
    assert [run(found.resolve(name)) for name in ("policy", "policy@head")] == ["policy@1", "policy@4"]


def test_a_version_whose_payloads_were_deleted_is_not_found(new, store):
    folder, tomorrow = tiny_adapter.config(store / "config"), datetime.now(UTC) + timedelta(hours=25)
    with Publisher(
        store / "full", tiny_adapter.tensors(), adapter="default", files=folder, anchor_every=1
    ) as its:
        for step in range(3):
            its.publish_patch(step).result()
    store = store / "full"
    found = new(f"policy={store}")
    assert retire(str(store), Retention(keep_last=1), dry_run=False).num_retired == 2
    assert collect(str(store), dry_run=False, clock=lambda: tomorrow).num_objects
    for version in (0, 1):
        with pytest.raises(HTTPException, match=f"version {version} .*retired") as refused:
            run(found.resolve(f"policy@{version}"))
        assert refused.value.status_code == 404
    assert found.models.engine_client.num_loads == 0


def test_other_models_are_left_to_vllm(new):
    found = new()
    for name in ("served", "other", "other@3", "served@2"):
        assert run(found.resolve(name)) == name
    assert found.models.engine_client.num_loads == 0


def test_without_permission_to_load_at_run_time_nothing_is_pulled(new, monkeypatch):
    found = new()
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0")
    assert run(found.resolve("policy@2")) == "policy@2"
    assert found.models.engine_client.num_loads == 0
    with pytest.raises(UsageError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        run(found.begin(nothing))


@pytest.mark.parametrize("names", ["policy", "=x", "policy=", "a=/x, a=/y", "a@1=/x"])
def test_names_that_cannot_be_are_refused_at_the_start(new, names):
    with pytest.raises(UsageError, match="NAME=STORE"):
        new(names)


def test_a_server_without_adapters_or_with_such_a_model_does_not_start(new, store, monkeypatch):
    found = new()
    found.models.engine_client.vllm_config.lora_config = None
    with pytest.raises(UsageError, match="--enable-lora"):
        run(found.begin(nothing))
    with pytest.raises(UsageError, match="another model"):
        run(new(f"served={store}").begin(nothing))
    monkeypatch.setenv(STORES, "s3://bucket")
    with pytest.raises(UsageError, match=STORES):
        run(new().begin(nothing))


def test_versions_that_nothing_asks_for_make_room(new, store, adapters, monkeypatch):
    found = new()
    engine = found.models.engine_client
    run(found.load(nothing, request("chosen", f"{store}@0")))
    for version in (0, 1, 2):
        run(found.resolve(f"policy@{version}"))
    # All were asked for just now.
    assert len(engine.loaded) == 4
    monkeypatch.setattr(adapters, "IDLE_S", 0.0)
    engine.output_processor.request_states["a"] = SimpleNamespace(lora_name="policy@0")
    run(found.resolve("policy@3"))
    assert {*engine.loaded.values()} == {"chosen@0", "policy@0", "policy@3"}
    assert {*found.models.lora_requests} == {*engine.loaded.values()}
    assert run(found.resolve("policy@1")) == "policy@1"


def test_a_folder_stays_for_as_long_as_a_request_has_it(new, store):
    found = new()
    engine, run_ = found.models.engine_client, Run.open(open_store(store))
    for version in (1, 2):
        run(found.resolve(f"policy@{version}"))
    before = found.models.lora_requests["policy@1"]
    path = Path(before.lora_path)
    run(found.unload(nothing, request("policy@1")))
    assert [*engine.loaded.values()] == ["policy@2"]
    none = AdapterFolders(default_scratch(), keep=0)
    none.lend(run_, 3).close()
    assert path.is_dir()
    del before
    gc.collect()
    none.lend(run_, 3).close()
    assert not path.is_dir()
    assert Path(found.models.lora_requests["policy@2"].lora_path).is_dir()


@pytest.mark.parametrize("gone", ["", "adapter_model.safetensors", "adapter_config.json"])
def test_a_folder_that_others_removed_is_made_again_before_vllm_may_load_it(new, store, gone):
    found = new()
    engine = found.models.engine_client
    run(found.resolve("policy@1"))
    before = found.models.lora_requests["policy@1"]
    path = Path(before.lora_path)
    path.chmod(0o700)
    files = {each.name: each.read_bytes() for each in path.iterdir()}
    shutil.rmtree(path) if not gone else (path / gone).unlink()
    run(found.resolve("policy@1"))
    assert {each.name: each.read_bytes() for each in path.iterdir()} == files
    assert found.models.lora_requests["policy@1"] is before
    assert engine.num_loads == 1
    # It is held again.
    AdapterFolders(default_scratch(), keep=0).lend(Run.open(open_store(store)), 3).close()
    assert path.is_dir()


def test_a_version_that_a_request_has_named_is_in_use_until_its_answer_is_sent(new, store):
    found = new()

    async def ask() -> None:
        answered = asyncio.Event()

        async def handle() -> None:
            await found.resolve("policy@1")
            # As where vLLM makes tokens of its prompt.
            await answered.wait()

        asked = asyncio.create_task(handle())
        while "policy@1" not in found.models.lora_requests:
            await asyncio.sleep(0.001)
        with pytest.raises(HTTPException) as caught:
            await found.unload(nothing, request("policy@1"))
        assert caught.value.status_code == 409
        answered.set()
        await asked
        await found.unload(nothing, request("policy@1"))

    run(ask())
    assert found.models.lora_requests == {}


def test_what_a_run_held_before_its_objects_were_replaced_is_not_called_what_is_there_now(
    new, store, tmp_path
):
    found = new()
    kept.tag(open_store(store), "best", 2)
    for version in (0, 1, 2):
        run(found.resolve(f"policy@{version}"))
    shutil.rmtree(store)
    publish(tmp_path / "new", 3)
    (tmp_path / "new").rename(store)
    kept.tag(open_store(store), "best", 2)
    for ask in (
        found.load(nothing, request("policy@1", f"{store}@1")),
        found.load(nothing, request("policy", f"{store}@1", inplace=True)),
        found.resolve("policy@best"),
    ):
        with pytest.raises(HTTPException, match=r"\[store-replaced\] policy@[12] .* unload it first"):
            run(ask)
    run(found.unload(nothing, request("policy@1")))
    run(found.load(nothing, request("policy", f"{store}@1", inplace=True)))
    folder = Path(found.models.lora_requests["policy@1"].lora_path)
    assert folder.parent.name == history.run_header(open_store(store)).run_id


@pytest.mark.parametrize("digits", [20, 5000])
def test_a_number_too_large_for_a_version_is_refused_in_a_sentence(new, store, digits):
    found, full = new(), f"policy@{'9' * digits}"
    for call in (
        found.resolve(full),
        found.load(nothing, request(full, str(store))),
        found.load(nothing, request("policy@1", f"{store}@{'9' * digits}")),
        found.unload(nothing, request(full)),
    ):
        with pytest.raises(HTTPException, match="version must be from 0 to"):
            run(call)


def test_a_version_that_a_served_name_stands_for_is_not_loaded(new, store):
    found = new("")
    found.models.is_base_model = lambda name: name in {"served", "policy@1"}
    with pytest.raises(HTTPException, match="policy@1 is a model of this server"):
        run(found.load(nothing, request("policy@1", f"{store}@1")))


def test_what_vllm_refuses_is_said_and_not_held(new):
    found = new()
    engine = found.models.engine_client
    engine.refusal = Exception(
        "Call to add_lora method failed: Worker failed with error 'While loading /a, expected target modules "
        "in {'o_proj'} but received ['model.layers.0.mlp.one', 'model.layers.1.mlp.one', 'x.two']. Please "
        "verify', please check the stack trace above for the root cause"
    )
    with pytest.raises(HTTPException) as caught:
        run(found.resolve("policy@1"))
    assert caught.value.status_code == 400
    assert caught.value.detail == (
        "[load-failed] policy@1 was not loaded: vLLM does not adapt one, two of this model"
    )
    assert found.models.lora_requests == {}
    engine.refusal = None
    assert run(found.resolve("policy@1")) == "policy@1"
    engine.refusal, engine.errored = RuntimeError("dead"), True
    with pytest.raises(RuntimeError, match="dead"):
        run(found.resolve("policy@2"))


@dataclass
class OlderHelper:
    """Of a vLLM that reads less of a config, as 0.27 does."""

    r: int
    lora_alpha: int
    target_modules: list[str]

    @classmethod
    def from_local_dir(cls, *_: Any) -> Any:
        return SimpleNamespace(validate_legal=lambda _: None)


def test_scales_of_single_modules_that_an_older_vllm_leaves_out_are_refused(
    new, adapters, tmp_path, monkeypatch
):
    publish(tmp_path / "scaled", 1, alpha_pattern={"q_proj": 64}, rank_pattern={})
    found = new(f"policy={tmp_path / 'scaled'}")
    assert run(found.resolve("policy@0")) == "policy@0"
    monkeypatch.setattr(adapters, "PEFTHelper", OlderHelper)
    with pytest.raises(HTTPException, match=r"policy@0 was not loaded: vLLM \S+ leaves out its alpha_patt"):
        run(new(f"policy={tmp_path / 'scaled'}").resolve("policy@0"))


@pytest.mark.parametrize(
    ("module", "is_fused"), [("experts", True), ("experts.base_layer", True), ("experts.0.up_proj", False)]
)
def test_vllm_is_told_that_all_experts_of_a_layer_are_one_parameter(new, tmp_path, module, is_fused):
    publish(tmp_path / "experts", 1, renamed=("up_proj", module))
    found = new(f"policy={tmp_path / 'experts'}")
    assert run(found.resolve("policy@0")) == "policy@0"
    assert found.models.lora_requests["policy@0"].is_3d_lora_weight is is_fused


def test_modules_that_vllm_would_leave_out_are_refused(new, adapters, monkeypatch):
    found = new()
    found.models.engine_client.vllm_config.lora_config.target_modules = ["o_proj", "qkv_proj"]
    packed = SimpleNamespace(packed_modules_mapping={"qkv_proj": ["q_proj", "k_proj", "v_proj"]})
    monkeypatch.setattr("vllm.model_executor.model_loader.get_model_cls", lambda _: packed)
    with pytest.raises(HTTPException, match="it adapts down_proj, gate_proj, up_proj, which"):
        run(found.resolve("policy@1"))


@pytest.mark.parametrize("may_change", [False, True])
def test_an_adapter_of_another_version_of_the_base_is_refused(new, tmp_path, may_change):
    with Publisher(tmp_path / "base", small_model()) as publisher:
        publisher.publish_patch(0).result()
    adapter = PeftAdapter(base=f"{tmp_path / 'base'}@0", base_may_change=may_change)
    publish(tmp_path / "of-base", 2, adapter)
    found = new(f"policy={tmp_path / 'of-base'}")
    engine = found.models.engine_client
    engine.state = history.read_manifest(open_store(tmp_path / "base"), 0).state.total
    assert run(found.resolve("policy@0")) == "policy@0"
    for state in ("blake3:" + 64 * "0", None):
        engine.state = state
        if may_change:
            assert run(found.resolve("policy@1")) == "policy@1"
        else:
            with pytest.raises(HTTPException, match="schema-mismatch"):
                run(found.resolve("policy@1"))


def test_an_adapter_is_not_loaded_while_an_update_of_the_base_is_open_or_may_begin(
    new, adapters, store, monkeypatch
):
    found = new()
    engine = found.models.engine_client
    engine.update_open = True
    with pytest.raises(HTTPException) as caught:
        run(found.resolve("policy@1"))
    assert (caught.value.status_code, engine.num_loads) == (503, 0)
    engine.update_open = False
    refused = []

    async def status(_: str) -> list[dict[str, Any]]:
        # From before the server is asked what it serves, until the adapter is unloaded.
        with pytest.raises(HTTPException, match="unload it before the base is updated") as caught:
            await adapters.update_base(engine, nothing, "delta_prove")
        refused.append(caught.value.status_code)
        return [{"state_digest": None, "update_open": False}]

    monkeypatch.setattr(engine, "collective_rpc", status)
    run(found.resolve("policy@1"))
    assert refused == [400]


@pytest.mark.parametrize("may_change", [False, True])
@pytest.mark.parametrize("method", ["update_weights", "delta_prove"])
def test_the_base_is_updated_only_under_adapters_that_allow_it(new, adapters, tmp_path, may_change, method):
    publish(tmp_path / "run-of-base", 2, PeftAdapter(base_may_change=may_change))
    found = new(f"policy={tmp_path / 'run-of-base'}")
    done = []

    async def call(*given: Any, **named: Any) -> None:
        done.append((given, named))

    def update() -> None:
        run(adapters.update_base(found.models.engine_client, call, method, kwargs={"a": 1}))

    update()
    run(found.resolve("policy@0"))
    if may_change:
        update()
    else:
        with pytest.raises(
            HTTPException, match=r"policy@0 is of adapters of the base .* may not change: unload"
        ):
            update()
        assert len(done) == 1
        found.models.engine_client.refusal = ValueError("no room")
        with pytest.raises(HTTPException, match="no room"):
            run(found.resolve("policy@1"))
        run(found.unload(nothing, request("policy@0")))
        update()
    assert done == 2 * [((method,), {"kwargs": {"a": 1}})]


def test_a_driver_that_fails_leaves_the_name_free(new, store, tmp_path):
    found = new("")
    with pytest.raises(HTTPException) as caught:
        run(found.load(nothing, request("policy", f"{tmp_path / 'none'}@1")))
    assert caught.value.status_code == 404
    assert run(found.resolve("policy@1")) == "policy@1"
    assert found.models.engine_client.num_loads == 0
    run(found.load(nothing, request("policy@1", f"{store}@1")))
    assert run(found.resolve("policy")) == "policy@1"


def test_a_server_that_requires_keys_loads_only_what_they_signed(new, store, tmp_path, monkeypatch):
    private, public = key_pair(tmp_path)
    monkeypatch.setenv(KEYS, str(public))
    opened = open_store(store)
    statement.sign_version(opened, KeySigner(private), history.run_header(opened), 3)
    found = new()
    # An unsigned one is covered by the chain of digests of a signed one, but is not served itself.
    assert run(found.resolve("policy@3")) == "policy@3"
    with pytest.raises(HTTPException) as caught:
        run(found.resolve("policy@2"))
    assert (caught.value.status_code, caught.value.detail[:10]) == (503, "[unsigned]")
    monkeypatch.setenv(KEYS, str(tmp_path / "none.pub"))
    with pytest.raises(UsageError, match=KEYS):
        run(new().begin(nothing))


def test_first_loads_of_a_name_at_once_are_of_one_name(new, store):
    found = new("")

    async def load() -> None:
        await asyncio.gather(
            *(found.load(nothing, request(f"p@{each}", f"{store}@{each}")) for each in (1, 2))
        )

    run(load())
    assert [run(found.resolve(f"p@{each}")) for each in (1, 2)] == ["p@1", "p@2"]
    assert found.models.engine_client.num_loads == 2
    run(found.unload(nothing, request("p@1")))
    assert run(found.resolve("p")) == "p@2"


def test_another_run_takes_the_place_of_a_name_when_it_is_chosen(new, store, tmp_path):
    publish(tmp_path / "other", 2)
    found = new()
    for version in (1, 3):
        assert run(found.resolve(f"policy@{version}")) == f"policy@{version}"
    with pytest.raises(HTTPException, match="policy@1 is of"):
        run(found.load(nothing, request("policy@1", f"{tmp_path / 'other'}@1")))
    run(found.load(nothing, request("policy@0", f"{tmp_path / 'other'}@0")))
    run(found.load(nothing, request("policy", f"{tmp_path / 'other'}@0", inplace=True)))
    assert run(found.resolve("policy")) == "policy@0"
    folder = Path(found.models.lora_requests["policy@0"].lora_path)
    assert folder.parent.name == history.run_header(open_store(tmp_path / "other")).run_id
    # Further versions are those of the run that was chosen.
    with pytest.raises(HTTPException, match="version-not-found"):
        run(found.resolve("policy@4"))
