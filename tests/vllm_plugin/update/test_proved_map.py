"""The checkpoint that vLLM loaded proves the map before generation pauses: no loader runs in the pause."""

from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest
import torch
from plain_ranks import Fused, Ranks, equal, serves
from safetensors.torch import save_file

from patchstore.errors import HostError, StateMismatch
from vllm_plugin.live import rank_weights


class Counting(Fused):
    """Remembers what its loader was given, other than for a trace."""

    def __init__(self, rank: int = 0, num_ranks: int = 1) -> None:
        super().__init__(rank, num_ranks)
        self.loaded: list[str] = []

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        if not tensor.is_meta:
            self.loaded.append(name)
        super().load_one(name, tensor)


class Swapped(Counting):
    """Loads otherwise than it shows when it is traced: the map is wrong."""

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        if not tensor.is_meta:
            name = {"a": "b", "b": "a"}.get(name, name)
            self.count += 1
        super().load_one(name, tensor)


@pytest.fixture
def checkpoint(tmp_path, tensors) -> Path:
    """What the server was started from: no version of the run."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture
def start(checkpoint, tensors, trainer, open_ranks) -> Callable[..., Ranks]:
    """Open ranks that were loaded from the checkpoint, and forget what their loaders did so far."""

    def start(*modules: Counting) -> Ranks:
        for module in modules:
            module.load_weights((name, tensor + 1) for name, tensor in tensors.items())
        ranks = open_ranks(trainer, *modules)
        assert ranks.held is None
        for each in ranks.updaters:
            each.weights.loaded_from = checkpoint
        for module in modules:
            module.loaded.clear()
        return ranks

    return start


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_map_that_is_wrong_is_not_proved_and_noticed_by_the_first_anchor(start, has_checkpoint):
    module = Swapped()
    ranks = start(module)
    if not has_checkpoint:
        ranks.one.weights.loaded_from = None
    before = module.state()
    ranks.stage(0)
    with pytest.raises(StateMismatch, match="a, b"):
        ranks.write()
    assert not equal(module.state(), before)
    ranks.roll_back()
    # Also where no name of the map leads.
    assert equal(module.state(), before)
    assert (ranks.held, ranks.one.weights.is_map_proved) == (None, False)


def test_after_the_proof_an_anchor_is_written_through_the_map(start, trainer):
    modules = [Counting(0, 2), Counting(1, 2)]
    ranks = start(*modules)
    before = [module.state() for module in modules]
    ranks.stage(2)
    assert all(each.weights.is_map_proved for each in ranks.updaters)
    assert all(equal(module.state(), was) for module, was in zip(modules, before, strict=True))
    ranks.write()
    assert serves(ranks, trainer.history[2])
    # What is calculated has no place to be written to.
    assert all(set(module.loaded) == {"log_rate"} for module in modules)
    ranks.roll_back()
    assert all(equal(module.state(), was) for module, was in zip(modules, before, strict=True))
    ranks.apply(3)
    assert serves(ranks, trainer.history[3])


def _write_one_bit(module: Fused, _: Path) -> None:
    module.ab.data.view(torch.int16)[1, 2] ^= 1


def _remove(_: Fused, folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _truncate(_: Fused, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"12345678")


def _leave_out(_: Fused, folder: Path) -> None:
    save_file({"a": torch.zeros(4, 6, dtype=torch.bfloat16)}, folder / "model.safetensors")


@pytest.mark.parametrize("change", [_write_one_bit, _remove, _truncate, _leave_out])
def test_without_a_proof_the_loader_writes_the_anchor(change, start, trainer, checkpoint):
    module = Counting()
    ranks = start(module)
    change(module, checkpoint)
    ranks.stage(0)
    assert not ranks.one.weights.is_map_proved
    ranks.write()
    assert {"a", "b", "cols", "norm"} <= set(module.loaded)
    assert serves(ranks, trainer.history[0])


def test_the_weights_are_saved_while_an_anchor_is_fetched(start, trainer, monkeypatch):
    ranks = start(Counting())
    saved, save, open_ = Event(), ranks.one.weights.live.save, rank_weights.open_anchor

    def saving(*args):
        found = save(*args)
        saved.set()
        return found

    def opening(*args):
        assert saved.wait(60)
        return open_(*args)

    monkeypatch.setattr(ranks.one.weights.live, "save", saving)
    monkeypatch.setattr(rank_weights, "open_anchor", opening)
    ranks.apply(2)
    assert serves(ranks, trainer.history[2])


def test_weights_that_cannot_be_saved_fail_the_update_and_stay(start, trainer, monkeypatch):
    module = Counting()
    ranks = start(module)
    before = module.state()
    with monkeypatch.context() as patched:
        patched.setattr(ranks.one.weights.live, "save", lambda *_: torch.empty(2**60))
        with pytest.raises(HostError, match="memory"):
            ranks.stage(2)
    assert equal(module.state(), before)
    assert ranks.spooled() == []
    ranks.apply(2)
    assert serves(ranks, trainer.history[2])
