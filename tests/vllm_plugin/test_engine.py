"""The engine's own part, without a server: what it keeps to itself, and what an interrupt leaves."""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch
from trainer import Trainer

from patchstore.errors import CorruptObject, UsageError
from patchstore.format import history
from patchstore.read.host_cache import MAX_BYTES, HostCache
from patchstore.signing import KeySigner, RequiredKeys, stored
from patchstore.signing.floor import Floor
from patchstore.signing.required import checks
from patchstore.stores import open_store
from patchstore.stores.base import Store
from patchstore.tensors.bits import bits
from tests.support.keys import key_pair
from vllm_plugin import opening, rank_engine
from vllm_plugin.arguments import keywords
from vllm_plugin.engine import DeltaWeightTransferEngine
from vllm_plugin.identify import read_contents
from vllm_plugin.post_load import Derived
from vllm_plugin.rank_engine import InitInfo
from vllm_plugin.update import Updater
from vllm_plugin.weights import LiveWeights

pytestmark = pytest.mark.vllm


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
        self.b = torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            getattr(self, name).data.copy_(tensor)


@pytest.fixture
def trainer(new_trainer) -> Trainer:
    trainer = new_trainer({name: torch.randn(8).bfloat16() for name in "ab"})
    trainer.publish()
    trainer.step(density=1.0)
    return trainer


@pytest.fixture
def engine(trainer, new_engine) -> DeltaWeightTransferEngine:
    return new_engine(trainer)


@pytest.fixture
def new_engine(tmp_path, monkeypatch) -> Callable[[Trainer], DeltaWeightTransferEngine]:
    """Makes an engine of one rank, at version 0, that no vLLM has made."""
    return partial(_engine, tmp_path, monkeypatch)


def _engine(tmp_path, monkeypatch, trainer) -> DeltaWeightTransferEngine:
    monkeypatch.setattr(rank_engine, "groups", list)
    monkeypatch.setattr(DeltaWeightTransferEngine, "rank", 0)
    monkeypatch.setattr(DeltaWeightTransferEngine, "reset_weight_update_target", lambda self: None)
    engine = object.__new__(DeltaWeightTransferEngine)
    engine.parallel_config = SimpleNamespace(distributed_executor_backend="uni", world_size=1)
    model = Model()
    engine.live = LiveWeights([model], lambda model, weights: model.load_weights(weights), Derived([], print))
    engine.updater = updater = Updater(trainer.store, engine.live, HostCache(tmp_path / "scratch"))
    traced = updater.trace()
    updater.follow(traced, [engine.live.share(traced)])
    engine.is_open, engine.update_open, engine._sleep_level, engine._is_as_started = True, False, None, True
    engine._opening = engine.last_error = engine.switch = engine.required = None
    engine.floor = Floor()
    engine._checkpoint = None
    engine._serving = SimpleNamespace(
        models=lambda worker: [model],
        check_layout=lambda models: None,
        is_calculated=False,
        is_loaded_quantised=False,
        form="plain",
        check_fits=print,
        load=lambda model, weights: model.load_weights(weights),
        refresh=print,
    )
    update(engine, 0)
    return engine


def update(engine: DeltaWeightTransferEngine, version: int, **options: object) -> None:
    engine.start_weight_update()
    engine.update_weights({"version": version, **options})
    engine.finish_weight_update()


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_between_two_writes_leaves_no_version_behind(engine, monkeypatch, interrupt):
    scatter = engine.live.scatter

    def interrupted(change) -> None:
        scatter(change)
        raise interrupt

    monkeypatch.setattr(engine.live, "scatter", interrupted)
    with pytest.raises(interrupt):
        update(engine, 1)
    assert (engine.updater.held, engine.updater.half_applied) == (None, True)

    monkeypatch.undo()
    monkeypatch.setattr(rank_engine, "groups", list)
    monkeypatch.setattr(DeltaWeightTransferEngine, "rank", 0)
    update(engine, 1)
    assert (engine.updater.held.version, engine.updater.half_applied) == (1, False)


def test_weights_that_vllm_reloads_are_no_known_version(engine):
    engine.reloaded()
    assert engine.updater.held is None
    update(engine, 1)
    assert engine.updater.held.version == 1


def test_files_that_are_gone_already_fail_no_update(engine, tmp_path):
    engine.start_weight_update()
    engine.update_weights({"version": 1})
    shutil.rmtree(tmp_path / "scratch")
    engine.finish_weight_update()
    assert (engine.updater.held.version, engine.updater.staged) == (1, None)


def test_a_version_that_is_staged_is_not_staged_again(engine, monkeypatch):
    engine.start_weight_update()
    engine.update_weights({"version": 1})
    monkeypatch.setattr(engine.updater, "_prepare", lambda *args: pytest.fail("staged again"))
    update(engine, 1)
    assert engine.updater.held.version == 1


@pytest.mark.parametrize("encoding", ["gap", "context"])
def test_weights_that_something_else_wrote_to_are_found_out_and_replaced(new_trainer, new_engine, encoding):
    trainer = new_trainer({name: 0.02 * torch.randn(8).bfloat16() for name in "ab"}, encoding=encoding)
    for _ in range(4):
        trainer.step(density=0.5)
    engine = new_engine(trainer)
    update(engine, 1)
    engine.live._models[0].a.data.mul_(1.3)
    with pytest.raises(RuntimeError, match="something else wrote to them"):
        update(engine, 2)
    assert engine.updater.half_applied
    update(engine, 3)
    assert torch.equal(bits(engine.live._models[0].a), bits(trainer.history[3]["a"]))
    assert not engine.updater.half_applied


class Worker:
    """What vLLM would have made the engine in."""

    def __init__(self, engine: DeltaWeightTransferEngine) -> None:
        self.weight_transfer_engine = engine


@pytest.fixture
def opened(monkeypatch, engine) -> Callable[..., list]:
    """Opens a store in the engine as far as the cache, and returns what each cache was made with."""
    worker, made = Worker(engine), []

    def refuse(folder, *, max_bytes) -> NoReturn:
        made.append((folder, max_bytes))
        raise UsageError("far enough")

    monkeypatch.setattr(rank_engine, "_workers", {worker})
    monkeypatch.setattr(opening, "HostCache", refuse)

    def start(**given) -> list:
        with pytest.raises(RuntimeError, match="far enough"):
            engine.init_transfer_engine(InitInfo(given={"store": "memory://none", **given}))
        return made

    return start


def test_the_folder_and_the_bound_of_what_stays_there_are_the_callers(opened, tmp_path):
    opened(scratch=str(tmp_path), cache_bytes=0, partial=True)
    opened(scratch=str(tmp_path))
    assert opened() == [
        (tmp_path, 0),
        (tmp_path, MAX_BYTES),
        (Path(gettempdir()) / f"patchstore-{os.geteuid()}", MAX_BYTES),
    ]


@pytest.fixture
def slow(monkeypatch, engine) -> Iterator[threading.Event]:
    """Stores open only when this is set."""
    worker, gate = Worker(engine), threading.Event()

    def open_late(url, **options) -> Store:
        assert gate.wait(60)
        return open_store(url, **options)

    monkeypatch.setattr(rank_engine, "_workers", {worker})
    monkeypatch.setattr(opening, "open_store", open_late)
    yield gate
    gate.set()


def open_to_the_end(engine, given) -> None:
    while not engine.open_ahead(given):
        pass
    engine.init_transfer_engine(InitInfo(given=given))


def test_updates_go_on_while_a_store_is_opened(slow, engine, trainer, tmp_path):
    given, trace = {"store": trainer.url, "scratch": str(tmp_path / "again")}, engine.updater
    assert not engine.open_ahead(given)
    assert not engine.open_ahead(given)
    assert engine.updater is trace
    slow.set()
    open_to_the_end(engine, given)
    assert (engine.updater is trace, engine.updater.held.version) == (False, 0)
    update(engine, 1)
    assert torch.equal(bits(engine.live._models[0].a), bits(trainer.history[1]["a"]))


def test_weights_that_changed_while_a_store_was_opened_are_looked_at_again(slow, engine, trainer, tmp_path):
    given = {"store": trainer.url, "scratch": str(tmp_path / "again")}
    slow.set()
    while not engine.open_ahead(given):
        pass
    update(engine, 1)
    assert engine._opening is None
    engine.init_transfer_engine(InitInfo(given=given))
    assert engine.updater.held.version == 1


def test_another_store_takes_the_place_of_one_that_is_being_opened(slow, engine, trainer, tmp_path):
    given = {"store": trainer.url, "scratch": str(tmp_path / "again")}
    assert not engine.open_ahead({"store": str(tmp_path / "lost")})
    first = engine._opening
    assert not engine.open_ahead(given)
    slow.set()
    open_to_the_end(engine, given)
    assert engine.updater.store.url == trainer.url
    assert first.failures == [] and first.advance()


def test_what_is_wrong_with_a_store_is_said_when_it_was_opened(slow, engine, tmp_path):
    slow.set()
    before = engine.updater
    with pytest.raises(RuntimeError, match=r"\[version-not-found\] this server finds no run"):
        open_to_the_end(engine, {"store": str(tmp_path / "empty")})
    assert (engine.updater, engine.is_open) == (before, True)
    update(engine, 1)


@pytest.mark.parametrize("wrong", [{"cache_bytes": True}, {"cache_bytes": "4 GiB"}, {"partial": 1}])
def test_keywords_of_another_type_are_refused(engine, wrong):
    with pytest.raises(RuntimeError, match=rf"as '{next(iter(wrong))}'"):
        engine.init_transfer_engine(InitInfo(given={"store": "memory://none", **wrong}))


def test_values_that_may_be_secrets_are_not_repeated():
    for given in ("hunter2", {"store": "s3://b", "storage_options": "hunter2"}):
        with pytest.raises(UsageError) as caught:
            keywords("init_info", given, {"store": str, "storage_options": dict}, required={"store"})
        assert "hunter2" not in str(caught.value)


# Servers that require signatures.


@pytest.fixture
def sign(trainer, tmp_path) -> Callable[..., None]:
    """Sign versions of the trainer's with a key, which is made when it is first named."""
    header = history.read_header(trainer.store)
    signers: dict[str, KeySigner] = {}

    def sign(*versions: int, key: str = "trainer") -> None:
        if key not in signers:
            signers[key] = KeySigner(key_pair(tmp_path, key)[0])
        for version in versions:
            stored.sign_version(trainer.store, signers[key], header, version)

    sign()
    return sign


@pytest.fixture
def requiring(engine, sign, tmp_path, monkeypatch) -> Iterator[Callable[..., None]]:
    """Open the store with an engine that requires the trainer's key."""
    engine.required = RequiredKeys.of(tmp_path / "trainer.pub")
    worker = Worker(engine)
    monkeypatch.setattr(rank_engine, "_workers", {worker})
    url = engine.updater.store.url

    def open_it(**given: object) -> None:
        given = {"store": url, "scratch": str(tmp_path / "signed"), **given}
        engine.init_transfer_engine(InitInfo(given=given))

    return open_it


def bits_of(engine) -> list[torch.Tensor]:
    return [bits(each.data).clone() for each in engine.live._models[0].parameters()]


def test_only_what_a_required_key_signed_is_applied(engine, requiring, sign):
    sign(0)
    requiring()
    assert engine.updater.held.version == 0
    before = bits_of(engine)
    for key in ("other", "third"):
        with pytest.raises(RuntimeError, match=r"\[unsigned\] version 1"):
            update(engine, 1)
        assert (engine.updater.held.version, engine.updater.staged, engine.update_open) == (0, None, False)
        assert all(map(torch.equal, before, bits_of(engine)))
        sign(1, key=key)
    engine.prefetch(1)
    with pytest.raises(RuntimeError, match=r"\[unsigned\]"):
        update(engine, 1)
    sign(1)
    update(engine, 1)
    assert engine.updater.held.version == 1
    assert not all(map(torch.equal, before, bits_of(engine)))


def test_a_server_goes_back_only_when_told_and_remembers_over_stores(engine, requiring, sign, trainer):
    trainer.step(density=1.0)
    sign(0, 1, 2)
    requiring()
    update(engine, 2)
    before = bits_of(engine)
    requiring()
    engine.sleeping(2)
    engine.sleeping(None)
    for version in (0, 1):
        with pytest.raises(RuntimeError, match=r"\[rollback\] version . is signed, but version 2 was used"):
            update(engine, version)
        assert (engine.updater.staged, engine.update_open) == (None, False)
        assert all(map(torch.equal, before, bits_of(engine)))
    update(engine, 0, allow_rollback=True)
    assert engine.updater.held.version == 0
    with pytest.raises(RuntimeError, match=r"\[rollback\]"):
        update(engine, 1)
    update(engine, 2)
    assert engine.updater.held.version == 2
    with pytest.raises(RuntimeError, match=r"\[usage\]"):
        update(engine, 2, allow_rollback="yes")


def test_weights_of_an_unsigned_version_are_held_as_no_version(engine, requiring, sign):
    requiring()
    assert engine.updater.held is None
    sign(1)
    update(engine, 1)
    assert engine.updater.held.version == 1


def test_a_request_cannot_switch_the_check_off(engine, requiring):
    before = engine.updater
    for given in ({"partial": True}, {"required_keys": []}, {"required": None}, {"store": "memory://none"}):
        with pytest.raises(RuntimeError, match=r"\[(usage|version-not-found)\]"):
            requiring(**given)
        assert engine.updater is before
    requiring()
    with pytest.raises(RuntimeError, match=r"\[unsigned\]"):
        update(engine, 1)


def test_ranks_that_require_different_keys_open_no_store():
    opening._check_same_keys([["a"], ["a"]])
    opening._check_same_keys([None, None])
    for one, other in ((["a"], None), (["a"], ["b"]), (None, ["a"])):
        with pytest.raises(UsageError, match="different keys"):
            opening._check_same_keys([one, other])


def test_with_required_keys_the_whole_anchor_of_an_adopted_version_is_verified(trainer, sign, tmp_path):
    sign(1)
    store, header = trainer.store, history.read_header(trainer.store)
    check = checks(RequiredKeys.of(tmp_path / "trainer.pub"), store, header)
    cache = HostCache(tmp_path / "whole", max_bytes=0)
    found = read_contents(store, header.schema, 1, ["a"], cache, check)
    assert torch.equal(bits(found.tensors["a"]), bits(trainer.history[1]["a"]))
    (payload,) = history.read_manifest(store, 0).anchor.payloads
    data = store.get(payload.key)
    # The last bytes are those of the other tensor, whose sums are not looked at.
    store.put(payload.key, data[:-1] + bytes([data[-1] ^ 1]))
    read_contents(store, header.schema, 1, ["a"], cache)
    with pytest.raises(CorruptObject):
        read_contents(store, header.schema, 1, ["a"], cache, check)
