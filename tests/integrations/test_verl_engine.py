"""verl's own classes around our checkpoint engine: FSDP2's shards are published, and its receiver writes."""

import asyncio
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import patchstore
from patchstore.errors import PublishFailed, UsageError
from tests.support.ranks import RanksOf

pytest.importorskip("verl.checkpoint_engine.base", reason="needs verl 0.9")

pytestmark = [
    pytest.mark.timeout(900),
    # verl's, where there is no GPU.
    pytest.mark.filterwarnings("ignore"),
]

BUCKET_BYTES = 2000


class Layers(nn.Module):
    """Sides that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(101, 24)
        self.up = nn.Linear(24, 50)
        self.norm = nn.LayerNorm(24)
        self.register_buffer("steps", torch.arange(5))


def engine_of(model: nn.Module) -> Any:
    """Return verl's FSDP engine around a model, without all that it trains with."""
    from verl.workers.engine.fsdp import transformer_impl

    class Bare(transformer_impl.FSDPEngine):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            self.module = model
            self._uses_fsdp2_cpu_offload_policy = self._is_offload_param = False

    transformer_impl.get_device_id = lambda: "cpu"
    return Bare()


class Server:
    """Weights as an inference engine has them, which verl's receiver for SGLang writes."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("verl")
        assert spec is not None and spec.origin is not None
        path = Path(spec.origin).parent / "workers" / "rollout" / "sglang_rollout" / "delta_loader.py"
        # By its path: its package needs SGLang.
        found = importlib.util.spec_from_file_location("delta_loader_of_verl", path)
        assert found is not None and found.loader is not None
        self._loader = importlib.util.module_from_spec(found)
        found.loader.exec_module(self._loader)
        self.weights: dict[str, torch.Tensor] = {}

    def load_weights(self, chunk: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in chunk:
            if name not in self.weights:
                self.weights[name] = torch.zeros_like(tensor)
            self.weights[name].copy_(tensor)

    def update(self, flushes: Iterator[Any]) -> list[str]:
        """Take flushes; return their encodings."""
        encodings, lasts = [], []
        for named, is_last in flushes:
            spec = json.loads(bytes(dict(named)["__delta_spec__"].numpy().tobytes()))
            encodings.append(spec["encoding"])
            lasts.append(is_last)
            self._loader.apply_delta(self, named)
        assert lasts == [False] * (len(lasts) - 1) + [True] * bool(lasts)
        return encodings


def served(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, each in model.state_dict().items():
        whole = each.full_tensor() if hasattr(each, "full_tensor") else each
        found[name] = whole.detach().to(torch.bfloat16) if whole.is_floating_point() else whole.clone()
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, each in found.items():
        assert each.dtype == expected[name].dtype, name
        assert torch.equal(each.view(-1).view(torch.uint8), expected[name].reshape(-1).view(torch.uint8)), (
            name
        )


class Sync:
    """What verl's manager does in each sync, and its workers on one rank. Rank 0 has a rollout worker too."""

    def __init__(self, rank: int, url: str, engine: Any, **publisher: Any) -> None:
        from verl.checkpoint_engine.base import CheckpointEngineRegistry

        import patchstore.integrations.verl  # noqa: F401

        def new(**kwargs: Any) -> Any:
            options = {"rank_timeout_s": 60, **publisher}
            return CheckpointEngineRegistry.new(
                "delta_sharded",
                bucket_size=BUCKET_BYTES,
                store=url,
                timeout_s=30.0,
                publisher=options,
                **kwargs,
            )

        self.engine, self.actor = engine, new(is_master=rank == 0)
        self.rollout = new()
        self.server = Server()
        self.is_first = rank == 0

    def send(self, step: int | None = None) -> dict[str, float]:
        metadata: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(metadata, self.actor.prepare())
        actors, rollouts = type(self.actor).build_topology(
            len(metadata), 1, [*metadata, self.rollout.prepare()]
        )
        self.actor.init_process_group(**{key: each[0] for key, each in actors.items()})
        self.rollout.init_process_group(**{key: each[0] for key, each in rollouts.items()})
        try:
            found: dict[str, float] = asyncio.run(self.actor.send_weights(self.engine, global_steps=step))
        finally:
            self.actor.finalize()
        return found

    def receive(self) -> list[str]:
        return self.server.update(self.rollout.receive_weights()) if self.is_first else []

    def close(self) -> None:
        self.actor.close()
        self.rollout.close()


def syncs(rank: int, url: str) -> None:
    model = fully_shard(Layers())
    sync = Sync(rank, url, engine_of(model))
    for step in range(4):
        figures = sync.send(10 + step)
        encodings = sync.receive()
        expected = served(model)
        if sync.is_first:
            assert set(encodings) == ({"dense"} if step == 0 else {"indices"})
            assert len(encodings) > 1
            assert figures["checkpoint_engine/version"] == step
            assert_same(sync.server.weights, expected)
            if step:
                assert 0 < figures["checkpoint_engine/changed_ratio"] < 0.6
        else:
            assert figures == {}
        for each in model.parameters():
            each.data.to_local().view(-1)[step::3] *= -1.5
    sync.send()
    sync.receive()

    # Nothing changes.
    sync.send()
    assert sync.receive() == []

    # NaN, which verl's receivers would leave out of a delta.
    model.norm.weight.data.to_local()[:1] = float("nan")
    sync.send()
    assert set(sync.receive()) <= {"dense"}
    expected = served(model)
    if sync.is_first:
        assert expected["norm.weight"].isnan().any()
        assert_same(sync.server.weights, expected)
    model.norm.weight.data.to_local()[:1] = 1.0
    sync.send()
    assert set(sync.receive()) <= {"indices"}
    expected = served(model)
    if sync.is_first:
        assert_same(sync.server.weights, expected)

    # Both ends are closed and go on.
    sync.close()
    for each in model.parameters():
        each.data.to_local().view(-1)[1::2] -= 1
    figures = sync.send()
    assert set(sync.receive()) <= {"dense"}
    expected = served(model)
    if sync.is_first:
        assert figures["checkpoint_engine/version"] > 7
        assert_same(sync.server.weights, expected)

    # A receiver that stops half-way gets the whole model next.
    for each in model.parameters():
        each.data.to_local().view(-1)[::2] += 1
    sync.send()
    if sync.is_first:
        flushes = sync.rollout.receive_weights()
        next(flushes)
        flushes.close()
    sync.send()
    assert set(sync.receive()) <= {"dense"}
    expected = served(model)
    if sync.is_first:
        assert_same(sync.server.weights, expected)
    sync.close()


@pytest.mark.parametrize("num", [2, 3])
def test_a_server_has_each_version_of_shards(ranks_of: RanksOf, tmp_path: Path, num: int) -> None:
    ranks_of(num).run(syncs, str(tmp_path / "store"))


def resumes(rank: int, url: str) -> None:
    model = fully_shard(Layers())
    sync = Sync(rank, url, engine_of(model))
    sync.send(1)
    sync.receive()
    sync.close()
    # By version 1 the run is resumed; the step then has one version.
    versions = []
    received = []
    for _ in range(2):
        versions.append(sync.send(2).get("checkpoint_engine/version"))
        received.append(set(sync.receive()))
    assert received == ([{"dense"}, set()] if sync.is_first else [set(), set()])
    assert versions == ([1, 1] if sync.is_first else [None, None])
    weights = served(model)
    if sync.is_first:
        assert_same(sync.server.weights, weights)
    sync.close()


def test_a_job_that_is_resumed_goes_on_with_the_version_of_its_weights(
    ranks_of: RanksOf, tmp_path: Path
) -> None:
    ranks_of(2).run(resumes, str(tmp_path / "store"))


def troubles(rank: int, url: str) -> None:
    model = fully_shard(Layers())
    engine = engine_of(model)
    sync = Sync(rank, url, engine)
    sync.send()
    sync.receive()
    before = {name: each.clone() for name, each in sync.server.weights.items()}

    def broken(**kwargs: Any) -> Any:
        raise ValueError("the weights are elsewhere")

    good = engine.get_per_tensor_param_shard
    engine.get_per_tensor_param_shard = broken
    with pytest.raises(ValueError, match="elsewhere"):
        sync.send()
    if sync.is_first:
        with pytest.raises(PublishFailed, match="could not publish: ValueError: the weights are elsewhere"):
            sync.receive()
        assert_same(sync.server.weights, before)
    engine.get_per_tensor_param_shard = good
    for _ in range(3):
        # Ranks may hear of the failure a call later.
        try:
            sync.send()
        except PublishFailed:
            continue
        break
    sync.receive()
    expected = served(model)
    if sync.is_first:
        assert_same(sync.server.weights, expected)
    sync.close()


def test_a_trainer_that_fails_tells_rollout_workers(ranks_of: RanksOf, tmp_path: Path) -> None:
    ranks_of(2).run(troubles, str(tmp_path / "store"))


class OfMegatron:
    """As verl's engine for Megatron: its shards have other names, of which their specs say nothing."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def get_per_tensor_param_shard(self) -> Any:
        from verl.workers.engine.spec import ShardSpec

        return iter([("decoder.qkv", torch.ones(4), ShardSpec(full_shape=(4,)))]), None

    def get_per_tensor_param(self) -> Any:
        return ((f"hf.{name}", tensor) for name, tensor in served(self._model).items()), None


def gathered(rank: int, url: str, is_megatron: bool) -> None:
    model = fully_shard(Layers())
    engine = OfMegatron(model) if is_megatron else engine_of(model)
    if not is_megatron:
        export = engine.get_per_tensor_param_shard

        def converted() -> Any:
            found = list(export()[0])
            for _, _, spec in found:
                spec.hf_slots = [("a", (1,))]
            return iter(found), None

        engine.get_per_tensor_param_shard = converted
        engine.get_per_tensor_param = OfMegatron(model).get_per_tensor_param
    sync = Sync(rank, url, engine)
    sync.send()
    sync.receive()
    expected = served(model)
    if sync.is_first:
        assert_same(sync.server.weights, {f"hf.{name}": each for name, each in expected.items()})
    sync.close()


@pytest.mark.parametrize("is_megatron", [False, True])
def test_shards_in_other_coordinates_are_gathered_by_verl(
    ranks_of: RanksOf, tmp_path: Path, is_megatron: bool
) -> None:
    ranks_of(2).run(gathered, str(tmp_path / "store"), is_megatron)


def placed(rank: int, url: str) -> None:
    from verl.workers.engine.spec import BlockPlacement, ShardSpec

    whole = {name: torch.randn(5, 4) for name in ("flat", "block", "plain")}
    range_, columns = ((0, 7), (7, 20))[rank], ((0, 3), (3, 4))[rank]

    def export() -> Any:
        block = whole["block"][:, slice(*columns)].flatten()
        shape, start = (5, columns[1] - columns[0]), (0, columns[0])
        found = [
            ("flat", whole["flat"].view(-1)[slice(*range_)], ShardSpec(full_shape=(5, 4), place=range_[0])),
            ("block", block, ShardSpec(full_shape=(5, 4), place=BlockPlacement(shape, start, (5, 4)))),
            ("plain", whole["plain"].view(-1), ShardSpec(full_shape=(5, 4))),
        ]
        return iter(found), None

    engine = engine_of(nn.Module())
    engine.get_per_tensor_param_shard = export
    sync = Sync(rank, url, engine)
    for _ in range(2):
        sync.send()
        sync.receive()
        if sync.is_first:
            assert_same(sync.server.weights, {name: each.bfloat16() for name, each in whole.items()})
        for each in whole.values():
            each.view(-1)[::3] += 1
    sync.close()


def test_places_that_verl_states_itself(ranks_of: RanksOf, tmp_path: Path) -> None:
    ranks_of(2).run(placed, str(tmp_path / "store"))


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    from patchstore.integrations.verl import PatchstoreCheckpointEngine as Ours

    with pytest.raises(UsageError, match=r"engine_kwargs\.delta_sharded\.store"):
        Ours(1)
    with pytest.raises(UsageError, match="is_master"):
        Ours.build_topology(1, 1, [{}, {}])
    actor, rollout = Ours(1, store=str(tmp_path), is_master=True), Ours(1, store=str(tmp_path), timeout_s=0.2)
    _, told = Ours.build_topology(1, 1, [actor.prepare(), {}])
    rollout.init_process_group(told["meeting"][0])
    with pytest.raises(PublishFailed, match=r"named no version within 0.2 s"):
        next(rollout.receive_weights())
    with pytest.raises(UsageError, match="delta_sharded alone"):
        asyncio.run(actor.send_weights(iter([("w", torch.ones(1))])))
    with pytest.raises(PublishFailed, match="delta_sharded alone"):
        next(rollout.receive_weights())


class Servers:
    """What verl's clients of vLLM and SGLang are given."""

    def __init__(self) -> None:
        self.adapter: dict[str, torch.Tensor] = {}
        self.told: dict[str, Any] = {}

    async def update_weights(self, weights: Iterator[tuple[str, torch.Tensor]], **told: Any) -> None:
        self.adapter, self.told = {name: each.clone() for name, each in weights}, told


def rollout_worker(engine: Any, load_format: str = "auto") -> Any:
    """Return verl's own worker, without Ray and the process group that it starts."""
    from verl.checkpoint_engine.base import CheckpointEngineWorker

    worker = CheckpointEngineWorker.__new__(CheckpointEngineWorker)
    worker.checkpoint_engine, worker.server_adapter = engine, Servers()
    worker.rollout_config = SimpleNamespace(load_format=load_format)
    return worker


def adapted(*, merge: bool = False, shard: Any = lambda model: model) -> tuple[Any, Any]:
    """Return a model with an adapter, and verl's engine around it."""
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=3, lora_alpha=12, target_modules=["up"], init_lora_weights=False)
    model = shard(peft.get_peft_model(Layers(), config))
    engine = engine_of(model)
    engine.model_config = SimpleNamespace(lora={"merge": merge})
    return model, engine


def adapters(rank: int, url: str) -> None:
    import peft

    model, engine = adapted(shard=fully_shard)
    sync = Sync(rank, url, engine, adapter="default")
    worker = rollout_worker(sync.rollout)
    for step in range(3):
        figures = sync.send(10 + step)
        state = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
        expected = {name: each.full_tensor() for name, each in state.items()}
        if sync.is_first:
            asyncio.run(worker.update_weights(global_steps=10 + step))
            assert figures["checkpoint_engine/version"] == step
            assert_same(worker.server_adapter.adapter, expected)
            assert_same(dict(patchstore.open(url).load(step)), expected)
            told = worker.server_adapter.told
            assert (told["global_steps"], told["base_sync_done"]) == (10 + step, True)
            config = told["peft_config"]
            assert (config["r"], config["lora_alpha"], config["target_modules"]) == (3, 12, ["up"])
        for name, each in model.named_parameters():
            if "lora_" in name:
                each.data.to_local().view(-1)[step::3] *= -1.5
    with pytest.raises(UsageError, match="in another way"):
        next(sync.rollout.receive_weights())
    if sync.is_first:
        worker = rollout_worker(sync.rollout, "dummy")
        with pytest.raises(UsageError, match=r"load_format=auto"):
            asyncio.run(worker.update_weights())
        assert worker.server_adapter.told == {}
    sync.close()


def test_servers_load_each_version_of_an_adapter(ranks_of: RanksOf, tmp_path: Path) -> None:
    ranks_of(2).run(adapters, str(tmp_path / "store"))


@pytest.mark.parametrize(
    ("options", "merge", "says"),
    [
        ({}, False, r"publisher\.adapter=default .*lora\.merge=True"),
        ({"adapter": "default"}, True, r"lora\.merge=True verl starts servers that load no adapters"),
        ({"adapter": "other"}, False, "no adapter 'other'; it has 'default'"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    tmp_path: Path, options: dict[str, str], merge: bool, says: str
) -> None:
    from patchstore.integrations.verl import PatchstoreCheckpointEngine as Ours

    _, engine = adapted(merge=merge)
    engine.get_per_tensor_param = lambda: (iter([("up.weight", torch.ones(2))]), {"r": 3})
    given: dict[str, Any] = {"store": str(tmp_path / "store"), "publisher": options}
    actor, rollout = Ours(1, is_master=True, **given), Ours(1, **given)
    found, told = Ours.build_topology(1, 1, [actor.prepare(), {}])
    actor.init_process_group(found["meeting"][0])
    rollout.init_process_group(told["meeting"][0])
    with pytest.raises(UsageError, match=says):
        asyncio.run(actor.send_weights(engine))
    with pytest.raises(PublishFailed, match=says):
        asyncio.run(rollout_worker(rollout).update_weights()) if options else next(rollout.receive_weights())
    assert not list(tmp_path.glob("store/versions/*"))


def test_an_engine_without_a_peft_model_is_refused(tmp_path: Path) -> None:
    from patchstore.integrations.verl import PatchstoreCheckpointEngine as Ours

    actor = Ours(1, store=str(tmp_path / "store"), is_master=True, publisher={"adapter": "default"})
    actor.init_process_group(actor.prepare())
    with pytest.raises(UsageError, match="OfMegatron of verl has no PEFT model"):
        asyncio.run(actor.send_weights(OfMegatron(nn.Module())))
    engine = engine_of(Layers())
    engine.model_config = SimpleNamespace(lora={})
    with pytest.raises(UsageError, match="Layers has no adapters of PEFT"):
        asyncio.run(actor.send_weights(engine))

    class First(FullyShardedDataParallel):
        """FSDP1's own constructor needs a GPU."""

        def __init__(self) -> None:
            nn.Module.__init__(self)

    with pytest.raises(UsageError, match=r"actor\.strategy=fsdp2"):
        asyncio.run(actor.send_weights(engine_of(First())))


def test_the_configuration_of_the_page_makes_an_engine(tmp_path: Path) -> None:
    import importlib

    import yaml
    from verl.checkpoint_engine.base import CheckpointEngineRegistry

    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
    section = page.partition("\n## verl\n")[2].partition("\n## ")[0]
    given = yaml.safe_load(section.partition("```yaml\n")[2].partition("```")[0])
    config = given["actor_rollout_ref"]["rollout"]["checkpoint_engine"]
    ours = importlib.import_module(config["custom_backend_module"])
    arguments = config["engine_kwargs"][config["backend"]]
    arguments["store"] = arguments["store"].replace("s3://bucket/my-run", str(tmp_path))
    engine = CheckpointEngineRegistry.new(config["backend"], bucket_size=1 << 20, **arguments)
    assert isinstance(engine, ours.PatchstoreCheckpointEngine)
