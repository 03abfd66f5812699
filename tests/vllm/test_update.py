"""Whole or not at all, for one rank and without a server: a plain module with a loader of its own."""

import threading
from collections.abc import Iterable

import pytest
import torch
from trainer import Trainer

from patchstore import log
from patchstore.errors import (
    CorruptObject,
    LoadFailed,
    PatchstoreError,
    SchemaMismatch,
    TornModel,
    UsageError,
)
from patchstore.model import Schema
from vllm_plugin.live import LiveWeights
from vllm_plugin.origin import read_folder
from vllm_plugin.update import Updater, open_updater

pytestmark = pytest.mark.vllm


class Fused(torch.nn.Module):
    """Serves `a` and `b` as one parameter, as vLLM does with queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.ab = torch.nn.Parameter(torch.zeros(8, 4, dtype=torch.bfloat16))
        self.c = torch.nn.Parameter(torch.zeros(6, dtype=torch.bfloat16))
        self.failures = 0
        """How many of the next loads fail, after their first tensor."""
        self.ignored: set[str] = set()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name in self.ignored:
                continue
            {"a": self.ab.data[:4], "b": self.ab.data[4:], "c": self.c.data}[name].copy_(tensor)
            if self.failures:
                self.failures -= 1
                raise OSError("made to fail")


@pytest.fixture
def trainer(new_trainer) -> Trainer:
    random = torch.Generator().manual_seed(3)
    shapes = {"a": (4, 4), "b": (4, 4), "c": (6,)}
    return new_trainer({n: torch.randn(s, generator=random).bfloat16() for n, s in shapes.items()})


@pytest.fixture
def module() -> Fused:
    return Fused()


@pytest.fixture
def updater(trainer, module) -> Updater:
    """At version 0, with versions 1 to 3 in the store."""
    for _ in range(4):
        trainer.step(density=0.5)
    updater = open_updater(trainer.store, LiveWeights(module), lambda schema: {})
    apply(updater, 0)
    return updater


def apply(updater: Updater, version: int) -> None:
    updater.stage(version)
    updater.commit()
    updater.accept()


def serves(module: Fused, tensors: dict[str, torch.Tensor]) -> bool:
    return torch.equal(module.ab, torch.cat([tensors["a"], tensors["b"]])) and torch.equal(
        module.c, tensors["c"]
    )


def test_staging_touches_nothing(updater, module, trainer):
    updater.stage(2)
    assert updater.staged.version == 2
    assert updater.held.version == 0
    assert serves(module, trainer.history[0])


def wait_for_prefetch(updater: Updater, version: int) -> None:
    while not updater.prefetch(version):
        pass


def test_prefetching_returns_while_the_version_is_being_fetched(updater, module, trainer, monkeypatch):
    gate, stage = threading.Event(), updater._follower.stage
    monkeypatch.setattr(updater._follower, "stage", lambda version: gate.wait(60) and stage(version))
    assert not updater.prefetch(2)
    assert not updater.prefetch(2)
    assert serves(module, trainer.history[0])
    gate.set()
    apply(updater, 2)
    assert serves(module, trainer.history[2])


def test_a_prefetched_version_is_not_fetched_again(updater, module, trainer, monkeypatch):
    wait_for_prefetch(updater, 2)
    assert updater.staged is None
    monkeypatch.setattr(updater._follower, "stage", lambda version: pytest.fail("fetched again"))
    updater.stage(2)
    updater.commit()
    updater.accept()
    assert serves(module, trainer.history[2])


def test_another_version_than_was_prefetched_can_be_staged(updater, module, trainer):
    updater.prefetch(1)
    apply(updater, 3)
    assert serves(module, trainer.history[3])
    wait_for_prefetch(updater, 1)
    apply(updater, 1)
    assert serves(module, trainer.history[1])


def test_a_failed_prefetch_is_said_by_stage_and_tried_again(updater, module, trainer):
    wait_for_prefetch(updater, 4)
    with pytest.raises(PatchstoreError):
        updater.stage(4)
    trainer.step()
    wait_for_prefetch(updater, 4)
    apply(updater, 4)
    assert serves(module, trainer.history[4])


def test_an_update_that_nobody_finished_gives_way_to_a_prefetch(updater, module, trainer):
    updater.stage(1)
    assert updater.prefetch(1)
    wait_for_prefetch(updater, 2)
    assert updater.staged is None
    apply(updater, 2)
    assert serves(module, trainer.history[2])


def test_a_truncated_checkpoint_file_is_named(tmp_path, trainer):
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    with pytest.raises(CorruptObject, match=r"model\.safetensors"):
        read_folder(tmp_path, log.read_header(trainer.store).schema)


def test_a_commit_loads_the_version(updater, module, trainer):
    apply(updater, 2)
    assert updater.held.version == 2
    assert serves(module, trainer.history[2])


def test_a_commit_with_nothing_staged_is_a_mistake(updater, module, trainer):
    with pytest.raises(UsageError):
        updater.commit()
    updater.roll_back()
    assert serves(module, trainer.history[0])


def test_a_failed_stage_leaves_nothing_staged(updater):
    updater.stage(1)
    with pytest.raises(PatchstoreError):
        updater.stage(9)
    assert updater.staged is None


def test_a_committed_version_can_be_rolled_back(updater, module, trainer):
    # As a rank must that succeeded where another failed.
    updater.stage(1)
    updater.commit()
    updater.roll_back()
    assert updater.held.version == 0
    assert serves(module, trainer.history[0])


def test_a_failed_load_is_rolled_back(updater, module, trainer):
    module.failures = 1
    updater.stage(1)
    with pytest.raises(LoadFailed):
        updater.commit()
    assert not serves(module, trainer.history[0])

    updater.roll_back()

    assert (updater.held.version, updater.torn) == (0, False)
    assert serves(module, trainer.history[0])
    apply(updater, 2)
    assert serves(module, trainer.history[2])


def test_a_first_load_that_fails_leaves_the_weights_of_the_start(trainer, module):
    trainer.step()
    module.ab.data.fill_(float("nan"))
    updater = open_updater(trainer.store, LiveWeights(module), lambda schema: {})
    module.failures = 1
    updater.stage(0)
    with pytest.raises(LoadFailed):
        updater.commit()
    updater.roll_back()
    assert (updater.held, updater.torn) == (None, False)
    assert bool(module.ab.isnan().all())
    assert not module.c.any()


def test_a_failed_undo_is_torn_until_an_anchor_is_loaded(updater, module, trainer):
    module.failures = 2
    updater.stage(1)
    with pytest.raises(LoadFailed):
        updater.commit()
    with pytest.raises(TornModel):
        updater.roll_back()
    assert (updater.held, updater.torn, updater.copy()) == (None, True, {})

    # Failing again does not mend it.
    module.failures = 1
    updater.stage(1)
    with pytest.raises(LoadFailed):
        updater.commit()
    updater.roll_back()
    assert updater.torn

    updater.stage(2)
    assert updater.commit() == set()
    updater.accept()
    assert (updater.held.version, updater.torn) == (2, False)
    assert serves(module, trainer.history[2])


def test_names_that_the_loader_never_reads_are_reported(updater, module):
    module.ignored = {"b"}
    updater.stage(1)
    assert updater.commit() == {"b"}


def test_a_name_that_the_model_lacks_is_a_schema_mismatch(updater, module):
    with pytest.raises(SchemaMismatch, match="'more'"):
        LiveWeights(module).load({"a": torch.ones(4, 4), "more": torch.ones(2)})


def test_what_is_served_already_is_recognised_by_its_bits(trainer, module):
    for _ in range(4):
        trainer.step(density=0.5)
    updater = open_updater(trainer.store, LiveWeights(module), lambda schema: trainer.history[1])
    assert updater.held.version == 1

    other = {name: tensor.clone() for name, tensor in trainer.history[1].items()}
    other["c"][0] = -other["c"][0]
    assert open_updater(trainer.store, LiveWeights(module), lambda schema: other).held is None


def test_versions_before_the_nearest_anchor_are_not_searched(new_trainer, trainer, module):
    often = new_trainer(trainer.tensors, anchor_every=2)
    for _ in range(5):
        often.step(density=1.0)
    assert open_updater(often.store, LiveWeights(module), lambda schema: often.history[4]).held.version == 4
    assert open_updater(often.store, LiveWeights(module), lambda schema: often.history[0]).held is None


def test_a_folder_of_other_tensors_is_not_read(model, trainer, weights, new_trainer):
    trainer.step()
    assert read_folder(model, _schema(trainer)) == {}
    whole = new_trainer(weights)
    whole.publish()
    found = read_folder(model, _schema(whole))
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def _schema(trainer: Trainer) -> Schema:
    return log.read_header(trainer.store).schema


def test_tied_names_are_loaded_with_the_tensor_they_are_stored_under(new_trainer, module):
    # Stored once, under one of its names; the model's loader may know only the other.
    shared = torch.zeros(4, 4, dtype=torch.bfloat16)
    trainer = new_trainer({"a": shared, "b": shared})
    (stored,) = (spec.name for spec in _schema(trainer).tensors)
    module.ignored = {stored}
    trainer.publish()
    updater = open_updater(trainer.store, LiveWeights(module), lambda schema: {})
    updater.stage(0)
    assert updater.commit() == set()
