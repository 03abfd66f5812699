"""The engine's own part, without a server: what it keeps to itself, and what an interrupt leaves."""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import gettempdir
from typing import NoReturn
from unittest.mock import Mock

import pytest
import torch
from bare_engine import Plain, bare_engine, update
from trainer import Trainer

from patchstore.bucket import history
from patchstore.errors import CorruptObject, LoadFailed, UsageError
from patchstore.read.host_cache import MAX_BYTES, HostCache
from patchstore.read.run import Run
from patchstore.signing import KeySigner, RequiredKeys, statement
from patchstore.tensors.bits import bits
from tests.support.keys import key_pair
from vllm_plugin import engine as engine_module
from vllm_plugin import opening
from vllm_plugin.engine import DeltaWeightTransferEngine, InitInfo
from vllm_plugin.live.copies import PAGE_BYTES
from vllm_plugin.live.identify import Contents, read_contents
from vllm_plugin.live.weights import LiveWeights
from vllm_plugin.ranks import Failure, Ranks, RanksLost


class Worker:
    def __init__(self, engine: DeltaWeightTransferEngine) -> None:
        self.weight_transfer_engine = engine


@pytest.fixture
def trainer(new_trainer) -> Trainer:
    trainer = new_trainer({name: torch.randn(8).bfloat16() for name in "ab"})
    trainer.publish()
    trainer.step(density=1.0)
    return trainer


@pytest.fixture
def engine(trainer, new_engine, monkeypatch) -> DeltaWeightTransferEngine:
    """At version 0, in a worker that vLLM would have made it in."""
    worker = Worker(new_engine(trainer))
    monkeypatch.setattr(engine_module, "WORKERS", {worker})
    return worker.weight_transfer_engine


@pytest.fixture
def new_engine(tmp_path) -> Callable[[Trainer], DeltaWeightTransferEngine]:
    """Makes an engine of one rank, at version 0, that no vLLM has made."""

    def new(trainer: Trainer) -> DeltaWeightTransferEngine:
        engine = bare_engine(trainer.store, Plain(a=8, b=8), HostCache(tmp_path / "scratch"))
        update(engine, 0)
        return engine

    return new


class Alone(Ranks):
    """A rank whose others ended."""

    def gather(self, value: object) -> NoReturn:
        raise RanksLost([Failure(rank=0, kind="rank-lost", message="rank 1 ended")])


def test_an_update_that_was_only_staged_when_a_rank_ended_leaves_the_version_served(engine, trainer):
    trainer.step(1.0)
    engine.start_weight_update()
    engine.ranks = Alone(0, list, is_read_in_order=False)
    with pytest.raises(RuntimeError, match=r"^\[rank-lost\] rank 1 ended$"):
        engine.update_weights({"version": 1})
    with pytest.raises(RuntimeError, match=r"^\[rank-lost\] rank 1 ended$"):
        engine.finish_weight_update()
    assert (engine.updater.version, engine.updater.half_applied, engine.update_open) == (0, False, False)


def test_a_write_after_which_a_rank_ended_leaves_no_version_behind(engine, trainer):
    trainer.step(1.0)
    engine.start_weight_update()
    engine.update_weights({"version": 1})
    engine.ranks = Alone(0, list, is_read_in_order=False)
    both = r"^\[half-applied\] rank 0: .*; \[rank-lost\] rank 0: rank 1 ended$"
    with pytest.raises(RuntimeError, match=both):
        engine.finish_weight_update()
    assert (engine.updater.version, engine.updater.half_applied, engine.update_open) == (None, True, False)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("is_undone", [False, True])
def test_an_interrupt_between_two_writes_leaves_no_version_behind(engine, monkeypatch, interrupt, is_undone):
    scatter = engine.live.scatter

    def interrupted(change) -> None:
        raise interrupt

    def written(change) -> None:
        scatter(change)
        raise LoadFailed("made to fail") if is_undone else interrupt

    monkeypatch.setattr(engine.live, "scatter", written)
    if is_undone:
        monkeypatch.setattr(engine.live, "gather_back", interrupted)
    with pytest.raises(interrupt):
        update(engine, 1)
    assert (engine.updater.held, engine.updater.half_applied) == (None, True)

    monkeypatch.undo()
    update(engine, 1)
    assert (engine.updater.held.version, engine.updater.half_applied) == (1, False)


def test_an_interrupt_behind_the_last_write_leaves_no_version_behind(engine, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(engine.updater.weights, "accept", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            update(engine, 1)
    assert (engine.updater.held, engine.updater.half_applied) == (None, True)
    update(engine, 1)
    assert (engine.updater.version, engine.updater.half_applied) == (1, False)


def test_a_server_sleeps_once_nothing_reads_its_weights(engine, trainer, tmp_path, monkeypatch):
    reading, go_on, slice_sums = threading.Event(), threading.Event(), LiveWeights.slice_sums
    ended = []

    def slow(live, names):
        reading.set()
        go_on.wait(30)
        found = slice_sums(live, names)
        ended.append(True)
        return found

    monkeypatch.setattr(LiveWeights, "slice_sums", slow)
    while not reading.is_set():
        engine.open_ahead({"store": trainer.url, "scratch": str(tmp_path / "again")})
    threading.Timer(0.5, go_on.set).start()
    # vLLM unmaps the weights as soon as this returns.
    engine.sleeping(1)
    assert ended


def test_weights_that_vllm_reloads_are_no_known_version(engine):
    engine.reloaded()
    assert engine.updater.held is None
    update(engine, 1)
    assert engine.updater.held.version == 1


def test_what_a_version_needs_is_not_kept_once_another_one_is_staged(engine, trainer, monkeypatch):
    trainer.step(1.0)

    def read_meanwhile(*args: object) -> Contents:
        monkeypatch.undo()
        update(engine, 1)
        return read_contents(*args)

    # As if one of its tiles were on several ranks.
    monkeypatch.setattr(engine.live, "cut_by", lambda deltas: {"a"})
    monkeypatch.setattr("vllm_plugin.live.rank_weights.read_contents", read_meanwhile)
    before = engine.live.cut
    with pytest.raises(UsageError, match="version 2 was still being fetched"):
        engine.updater.stage(2)
    assert (engine.live.cut, engine.updater.version) == (before, 1)
    update(engine, 2)
    assert engine.updater.version == 2


def test_files_that_are_gone_already_fail_no_update(engine, tmp_path):
    engine.start_weight_update()
    engine.update_weights({"version": 1})
    shutil.rmtree(tmp_path / "scratch")
    engine.finish_weight_update()
    assert (engine.updater.held.version, engine.updater.staged) == (1, None)


def test_a_version_that_is_staged_is_not_staged_again(engine, monkeypatch):
    engine.start_weight_update()
    engine.update_weights({"version": 1})
    monkeypatch.setattr(engine.updater, "prepare", lambda *args: pytest.fail("staged again"))
    update(engine, 1)
    assert engine.updater.held.version == 1


@pytest.mark.parametrize("encoding", ["gap", "context"])
def test_weights_that_something_else_wrote_to_are_found_out_and_replaced(new_trainer, new_engine, encoding):
    trainer = new_trainer({name: 0.02 * torch.randn(8).bfloat16() for name in "ab"}, encoding=encoding)
    for _ in range(4):
        trainer.step(density=0.5)
    engine = new_engine(trainer)
    update(engine, 1)
    engine.live.models.every[0].a.data.mul_(1.3)
    with pytest.raises(RuntimeError, match="something else wrote to them"):
        update(engine, 2)
    assert engine.updater.half_applied
    update(engine, 3)
    assert torch.equal(bits(engine.live.models.every[0].a), bits(trainer.history[3]["a"]))
    assert not engine.updater.half_applied


@pytest.fixture
def opened(monkeypatch, engine) -> Callable[..., list]:
    """Opens a store in the engine as far as the cache, and returns what each cache was made with."""
    made = []

    def refuse(folder, *, max_bytes) -> NoReturn:
        made.append((folder, max_bytes))
        raise UsageError("far enough")

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


def move(engine, memory: torch.Tensor) -> None:
    """Have a parameter of 8 elements in this memory, with what it has."""
    parameter = engine.live.models.every[0].a
    parameter.data = memory.copy_(parameter.data)


def test_weights_that_other_processes_map_are_refused_when_a_store_is_opened(engine, reopen, tmp_path):
    opened = engine.updater
    for memory in (
        torch.zeros(8, dtype=torch.bfloat16).share_memory_(),
        torch.from_file(weights_file(tmp_path), shared=True, size=8, dtype=torch.bfloat16),
    ):
        move(engine, memory)
        with pytest.raises(RuntimeError, match=r"\[usage\] .* 'a' is in shared memory.*ipc_cache"):
            reopen()
        assert engine.updater is opened
        assert torch.equal(bits(memory), bits(engine.live.models.every[0].a))


def test_weights_in_a_private_mapping_of_a_file_are_updated_and_the_file_is_not(
    engine, reopen, trainer, tmp_path
):
    path = weights_file(tmp_path)
    move(engine, torch.from_file(path, shared=False, size=8, dtype=torch.bfloat16))
    reopen()
    update(engine, 1)
    assert torch.equal(bits(engine.live.models.every[0].a), bits(trainer.history[1]["a"]))
    assert Path(path).read_bytes() == bytes(PAGE_BYTES)


def weights_file(folder: Path) -> str:
    path = folder / "weights"
    path.write_bytes(bytes(PAGE_BYTES))
    return str(path)


@pytest.fixture
def reopen(engine, trainer, tmp_path) -> Callable[..., None]:
    """Opens the trainer's store again, or another one."""

    def start(**given: object) -> None:
        given = {"store": trainer.url, "scratch": str(tmp_path / "again"), **given}
        engine.init_transfer_engine(InitInfo(given=given))

    return start


def open_ahead(engine, **given: str) -> None:
    while not engine.open_ahead(given):
        pass


def test_weights_that_changed_while_a_store_was_opened_are_looked_at_again(engine, reopen, trainer, tmp_path):
    open_ahead(engine, store=trainer.url, scratch=str(tmp_path / "again"))
    update(engine, 1)
    reopen()
    assert engine.updater.held.version == 1


def test_what_is_wrong_with_a_store_is_said_when_it_was_opened(engine, reopen, tmp_path):
    before, given = engine.updater, {"store": str(tmp_path / "empty"), "scratch": str(tmp_path / "again")}
    open_ahead(engine, **given)
    with pytest.raises(RuntimeError, match=r"\[version-not-found\] this server finds no run"):
        reopen(**given)
    assert (engine.updater, engine.is_open) == (before, True)
    update(engine, 1)


@pytest.mark.parametrize("wrong", [{"cache_bytes": True}, {"cache_bytes": "4 GiB"}, {"partial": 1}])
def test_keywords_of_another_type_are_refused(engine, wrong):
    with pytest.raises(RuntimeError, match=rf"as '{next(iter(wrong))}'"):
        engine.init_transfer_engine(InitInfo(given={"store": "memory://none", **wrong}))


@pytest.mark.parametrize("given", ["hunter2", {"store": "s3://b", "storage_options": "hunter2"}])
def test_values_that_may_be_secrets_are_not_repeated(engine, given):
    with pytest.raises(RuntimeError, match=r"\[usage\] init_info .* 'storage_options' \(dict, opt") as caught:
        engine.init_transfer_engine(InitInfo(given=given))
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
            statement.sign_version(trainer.store, signers[key], header, version)

    sign()
    return sign


@pytest.fixture
def requiring(engine, sign, reopen, tmp_path) -> Callable[..., None]:
    """Open the store with an engine that requires the trainer's key."""
    engine.required = RequiredKeys.of(tmp_path / "trainer.pub")
    return reopen


def bits_of(engine) -> list[torch.Tensor]:
    return [bits(each.data).clone() for each in engine.live.models.every[0].parameters()]


def test_only_what_a_required_key_signed_is_applied(engine, requiring, sign):
    requiring()
    assert engine.updater.held is None
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


def test_a_server_that_was_started_from_a_version_goes_back_only_when_told(engine, requiring, sign, trainer):
    sign(0, 1)
    engine.live.models.every[0].load_weights(trainer.history[1].items())
    engine.reloaded()
    requiring()
    assert engine.updater.held.version == 1
    before = bits_of(engine)
    with pytest.raises(RuntimeError, match=r"\[rollback\] version 0 is signed, but version 1 was used"):
        update(engine, 0)
    assert (engine.updater.held.version, engine.updater.staged, engine.update_open) == (1, None, False)
    assert all(map(torch.equal, before, bits_of(engine)))
    update(engine, 0, allow_rollback=True)
    assert engine.updater.held.version == 0


def test_a_request_cannot_switch_the_check_off(engine, requiring):
    before = engine.updater
    for given in ({"partial": True}, {"required_keys": []}, {"required": None}, {"store": "memory://none"}):
        with pytest.raises(RuntimeError, match=r"\[(usage|version-not-found)\]"):
            requiring(**given)
        assert engine.updater is before
    requiring()
    with pytest.raises(RuntimeError, match=r"\[unsigned\]"):
        update(engine, 1)


class Beside(Ranks):
    """A rank beside another, which requires other keys."""

    def __init__(self, required: list[str] | None) -> None:
        super().__init__(0, list, is_read_in_order=False)
        self._required = required

    def gather(self, value: object) -> list:
        _, failure = value
        return [value, (self._required, failure)]


@pytest.mark.parametrize("other", [None, ["another"], ["trainer.pub", "another"]])
def test_ranks_that_require_different_keys_open_no_store(engine, requiring, sign, other):
    sign(0)
    before, engine.ranks = engine.updater, Beside(other)
    with pytest.raises(RuntimeError, match=r"\[usage\] the ranks of this server require different keys"):
        requiring()
    assert engine.updater is before


def test_with_required_keys_the_whole_anchor_of_an_adopted_version_is_verified(trainer, sign, tmp_path):
    sign(1)
    store, cache = trainer.store, HostCache(tmp_path / "whole", max_bytes=0)
    requiring = Run.open(store, RequiredKeys.of(tmp_path / "trainer.pub"))
    found = read_contents(requiring, 1, ["a"], cache)
    assert torch.equal(bits(found.tensors["a"]), bits(trainer.history[1]["a"]))
    (payload,) = history.read_manifest(store, 0).anchor.payloads
    data = store.get(payload.key)
    # The last bytes are those of the other tensor, whose sums are not looked at.
    store.put(payload.key, data[:-1] + bytes([data[-1] ^ 1]))
    read_contents(Run.open(store), 1, ["a"], cache)
    with pytest.raises(CorruptObject):
        read_contents(requiring, 1, ["a"], cache)


@pytest.mark.parametrize("fault", [KeyboardInterrupt, RuntimeError])
def test_weights_that_cannot_be_put_back_while_the_first_store_is_opened_are_half_applied(
    trainer, tmp_path, monkeypatch, fault
):
    engine = bare_engine(trainer.store, Plain(a=8, b=8), HostCache(tmp_path / "scratch"))
    monkeypatch.setattr(engine_module, "WORKERS", {Worker(engine)})
    engine.updater, engine.live, engine.is_open = None, None, False
    given = {"store": trainer.store.url, "scratch": str(tmp_path / "scratch")}
    with monkeypatch.context() as patched:
        patched.setattr(LiveWeights, "restore", Mock(side_effect=fault))
        with pytest.raises((KeyboardInterrupt, RuntimeError)):
            engine.init_transfer_engine(InitInfo(given=given))
    assert (engine.updater.held, engine.updater.half_applied, engine.is_open) == (None, True, False)
    with pytest.raises(RuntimeError, match="open"):
        update(engine, 1)
    engine.init_transfer_engine(InitInfo(given=given))
    assert (engine.updater.held, engine.updater.half_applied) == (None, True)
    update(engine, 1)
    assert (engine.updater.version, engine.updater.half_applied) == (1, False)


def test_an_interrupt_while_a_store_is_opened_again_leaves_no_version_behind(trainer, tmp_path, monkeypatch):
    class Calculated(Plain):
        def load_weights(self, weights) -> None:
            for name, tensor in weights:
                getattr(self, name).data.copy_(-torch.exp(tensor.float()) if name == "b" else tensor)

    engine = bare_engine(trainer.store, Calculated(a=8, b=8), HostCache(tmp_path / "scratch"))
    monkeypatch.setattr(engine_module, "WORKERS", {Worker(engine)})
    update(engine, 0)
    given = {"store": trainer.store.url, "scratch": str(tmp_path / "scratch")}
    with monkeypatch.context() as patched:
        patched.setattr(LiveWeights, "restore", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.init_transfer_engine(InitInfo(given=given))
    assert (engine.updater.held, engine.updater.half_applied) == (None, True)
    update(engine, 1)
    assert (engine.updater.version, engine.updater.half_applied) == (1, False)
