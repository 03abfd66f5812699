"""A server goes round damaged shortcuts, in all ranks alike."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from bare_engine import Plain, bare_engine, update
from trainer import Trainer

from patchstore.bucket import lineage, shortcuts
from patchstore.bucket.records import Ends
from patchstore.errors import CorruptObject
from patchstore.ops.compact.service import Compactor
from patchstore.read.host_cache import HostCache
from patchstore.stores import Store
from patchstore.tensors.bits import bits
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.damage import flip, forge, payload_of, record_of, remove
from vllm_plugin.engine import DeltaWeightTransferEngine
from vllm_plugin.ranks import Ranks

HEAD = 50
ANCHOR, ROLLUP = Ends(32, None), Ends(48, 32)


class Both(Ranks):
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, meeting: threading.Barrier, said: list[Any]) -> None:
        super().__init__(rank, list, is_read_in_order=False)
        self._number, self._meeting, self._said = rank, meeting, said

    def gather(self, value: Any) -> list[Any]:
        self._said[self._number] = value
        self._meeting.wait(timeout=60)
        heard = list(self._said)
        self._meeting.wait(timeout=60)
        return heard


@pytest.fixture
def trainer(new_trainer) -> Trainer:
    """Has published versions 0 to 50; 0 has the only anchor of its own, and 32 one among the shortcuts."""
    trainer = new_trainer({"a": torch.randn(4096).bfloat16()}, encoding="gap")
    trainer.publish()
    for _ in range(HEAD):
        trainer.step(density=0.01)
    list(Compactor(trainer.store, anchor_every=32).compact())
    assert ANCHOR in lineage.read(trainer.store, HEAD).plan().over
    assert ROLLUP in lineage.read(trainer.store, HEAD, 32).plan().over
    return trainer


@pytest.fixture
def new_engine(tmp_path: Path) -> Callable[..., DeltaWeightTransferEngine]:
    def new(store: Store, rank: int = 0, ranks: Ranks | None = None) -> DeltaWeightTransferEngine:
        cache = HostCache(tmp_path / str(rank), max_bytes=0)
        return bare_engine(store, Plain(a=4096), cache, rank=rank, ranks=ranks)

    return new


def served(engine: DeltaWeightTransferEngine) -> torch.Tensor:
    return bits(engine.live.models.every[0].a).clone()


def assert_serves(engine: DeltaWeightTransferEngine, trainer: Trainer, version: int) -> None:
    assert engine.updater is not None and engine.updater.version == version
    assert torch.equal(served(engine), bits(trainer.history[version]["a"]))


@pytest.mark.parametrize(
    ("held", "damage"), [(32, flip), (32, remove), (32, forge), (None, flip), (None, remove)]
)
def test_damaged_shortcuts_of_one_kind_cost_no_update(trainer, new_engine, held, damage) -> None:
    engine = new_engine(trainer.store)
    if held is not None:
        update(engine, held)
    for ends in shortcuts.listed(trainer.store):
        if (ends.parent is None) == (held is None):
            damage(trainer.store, ends)
    update(engine, HEAD)
    assert_serves(engine, trainer, HEAD)
    assert held is None or engine.updater.around.without.shortcuts == frozenset()


@pytest.mark.parametrize("ends", [ANCHOR, ROLLUP], ids=str)
def test_an_update_from_a_wrong_anchor_is_undone_and_a_later_one_goes_round(trainer, new_engine, ends):
    engine = new_engine(trainer.store)
    update(engine, 0)
    # A server that forgot what it holds starts from an anchor, and has something to lose.
    engine.updater.forget()
    before = served(engine)
    forge(trainer.store, ends)
    # It cannot tell which of both is wrong, and an anchor may be needed. So the rollup is left out first.
    for suspect in (ROLLUP, ANCHOR)[: 1 if ends == ROLLUP else 2]:
        key = record_of(suspect)
        with pytest.raises(RuntimeError, match=rf"^\[state-mismatch\].*{key}.*update again"):
            update(engine, HEAD)
        assert torch.equal(served(engine), before)
        assert not engine.update_open
    update(engine, HEAD)
    assert_serves(engine, trainer, HEAD)


def test_the_error_of_the_plain_way_is_raised_and_the_version_stays(trainer, new_engine) -> None:
    engine = new_engine(trainer.store)
    update(engine, 32)
    forge(trainer.store, ROLLUP)
    key = f"deltas/{40:08d}-"
    rollups = {
        payload_of(trainer.store, each) for each in shortcuts.listed(trainer.store) if each.version == 40
    }
    (payload,) = [each for each in trainer.store.list(key) if each not in rollups]
    trainer.store.put(payload, b"garbage")
    forge(trainer.store, Ends(40, 32))
    trainer.store.delete(record_of(ANCHOR))
    with pytest.raises(RuntimeError, match=payload):
        update(engine, HEAD)
    assert_serves(engine, trainer, 32)
    update(engine, 39)
    assert_serves(engine, trainer, 39)


@pytest.mark.parametrize("ends", [ANCHOR, ROLLUP], ids=str)
def test_ranks_take_the_same_way_if_one_alone_meets_damage(trainer, new_engine, ends) -> None:
    """Such as bytes that were damaged on their way to one host."""
    meeting, said = threading.Barrier(2), [None, None]
    fault = Fault(verb="get", key=payload_of(trainer.store, ends), effect="flip", times=1)
    faulty = FaultyStore(trainer.store, fault)
    engines = [
        new_engine(store, rank, Both(rank, meeting, said))
        for rank, store in enumerate((trainer.store, faulty))
    ]

    def run(engine: DeltaWeightTransferEngine) -> None:
        if ends == ROLLUP:
            update(engine, 32)
        update(engine, HEAD)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(run, engine) for engine in engines]:
            done.result()
    assert payload_of(trainer.store, ends) in {key for _, key in faulty.calls}
    for engine in engines:
        assert_serves(engine, trainer, HEAD)


def test_damage_that_is_no_shortcuts_is_raised(trainer, new_engine) -> None:
    engine = new_engine(trainer.store)
    update(engine, 49)
    (key,) = trainer.store.list(f"deltas/{HEAD:08d}-")
    trainer.store.put(key, b"garbage")
    with pytest.raises(RuntimeError, match=rf"^\[{CorruptObject.kind}\].*{key}"):
        update(engine, HEAD)
    assert_serves(engine, trainer, 49)
