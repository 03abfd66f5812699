"""What is verified before and after a version is applied, by digest sums, in one rank and in two together."""

import pytest
import torch
from plain_ranks import Fused, equal, schema_of, serves

from patchstore.bucket import history
from patchstore.bucket.state_sums import by_name, read_sums
from patchstore.errors import StateMismatch
from patchstore.tensors.bits import bits
from patchstore.testing.faults import FaultyStore
from tests.support.weights import lie


@pytest.mark.parametrize("name", ["norm", "cols", "log_rate"])
@pytest.mark.parametrize("held", [0, None])
def test_a_version_that_is_not_what_its_manifest_says_is_refused(ranks, updater, trainer, name, held):
    if held is None:
        updater.forget()
    lie(trainer.store, 1, name)
    with pytest.raises(StateMismatch, match=name):
        ranks.apply(1)
    updater.roll_back()
    assert serves(ranks, trainer.history[0])


def test_what_no_rank_serves_cannot_be_proved_and_is_no_obstacle(ranks, trainer):
    lie(trainer.store, 1, "rotary")
    ranks.apply(1)
    assert serves(ranks, trainer.history[1])


def test_weights_that_something_else_wrote_to_are_noticed(ranks, module, trainer):
    ranks.check_served()
    for tensor in trainer.tensors.values():
        tensor.neg_()
    trainer.publish()
    bits(module.cols)[5] ^= 1

    with pytest.raises(StateMismatch, match="cols"):
        ranks.stage(4)
    with pytest.raises(StateMismatch, match=r"version 0, such as 'cols'"):
        ranks.check_served()

    ranks.one.mark_half_applied()
    ranks.apply(4)
    assert serves(ranks, trainer.history[4])


def test_a_write_after_staging_is_noticed_before_anything_is_written(ranks, updater, module, trainer):
    for tensor in trainer.tensors.values():
        tensor.neg_()
    trainer.publish()
    ranks.stage(4)
    bits(module.cols)[5] ^= 1
    before = module.state()

    with pytest.raises(StateMismatch, match="'cols' after this version was staged"):
        updater.apply()
    updater.roll_back()

    assert equal(module.state(), before)


def test_sums_come_in_parts_that_make_up_the_whole(pair, trainer):
    pair.apply(1)
    schema, first = schema_of(trainer), history.read_manifest(trainer.store, 1)
    recorded = by_name(schema, read_sums(trainer.store, schema, first))
    for updater in pair.updaters:
        whole = updater.weights.sums(0, 10_000)
        assert whole["next"] is None
        assert (whole["computed"], whole["unverified"]) == (["log_rate"], ["rotary"])
        found, at, num_parts = {}, 0, 0
        while at is not None:
            part = updater.weights.sums(at, 20)
            num_parts += 1
            assert not found.keys() & part["sums"].keys()
            found |= part["sums"]
            at = part["next"]
        assert (found, num_parts > 2) == (whole["sums"], True)
        assert found.keys() == recorded.keys() - {"log_rate", "rotary"}
        # A whole tensor's are those that were published.
        ((_, norm),) = found["norm"]
        assert norm == recorded["norm"].hex()
    one, other = (updater.weights.sums(0, 10_000)["sums"] for updater in pair.updaters)
    assert (one["norm"] == other["norm"], one["a"] == other["a"]) == (True, False)


def test_nothing_is_read_from_the_store_while_generation_waits(ranks, updater, trainer):
    watched = FaultyStore(updater.run.store)
    for version in (1, 0):
        updater.run.store = watched
        updater.stage(version)
        assert any(key.startswith("states/") for _, key in watched.calls)
        watched.calls.clear()
        updater.verify([updater.weights.changes(updater.staged)])
        ranks.write()
        updater.accept()
        ranks.check_served()
        assert watched.calls == []
        # The next one starts from an anchor.
        updater.forget()
    assert serves(ranks, trainer.history[0])


def test_two_ranks_hold_together_what_neither_holds_alone(pair):
    for each in pair.updaters:
        assert each.weights.map.proved == {"a", "b", "bias", "cols", "embed", "norm"}
        assert each.weights.find([each.weights.slice_sums()]) is None
    assert pair.updaters[0].weights.find([each.weights.slice_sums() for each in pair.updaters]) == 0


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["norm", "cols"])
def test_one_rank_that_differs_is_noticed_by_both(pair, trainer, open_ranks, rank, name):
    # The one is a copy of what the other rank has too, the other a slice that only this rank has.
    for tensor in trainer.tensors.values():
        tensor.neg_()
    trainer.publish()
    bits(getattr(pair.modules[rank], name))[0] ^= 1

    for each in pair.updaters:
        each.stage(4)
    changes = [each.weights.changes(each.staged) for each in pair.updaters]
    slice_sums = [each.weights.slice_sums() for each in pair.updaters]
    for each in pair.updaters:
        with pytest.raises(StateMismatch, match=name):
            each.verify(changes)
        with pytest.raises(StateMismatch, match=name):
            each.weights.check_served(slice_sums, each.version)
        assert each.weights.find(slice_sums) is None
        each.mark_half_applied()
    assert open_ranks(trainer, *pair.modules).held is None
    pair.apply(4)
    assert serves(pair, trainer.history[4])


class Stage(Fused):
    """The second of two stages of a pipeline: only it has the rate, and the first calculates the norm."""

    def __init__(self, rank: int = 0, num_ranks: int = 1) -> None:
        super().__init__(rank, num_ranks)
        self.ignored |= {"log_rate"} if rank == 0 else set()

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        super().load_one(name, tensor + 1 if name == "norm" and self.rank == 0 else tensor)


def test_names_that_one_rank_calculates_are_updated_and_proved_in_all(trainer, open_ranks):
    ranks = open_ranks(trainer, Stage(0, 2), Stage(1, 2))
    for version in (0, 1, 3):
        ranks.apply(version)
        assert serves(ranks, trainer.history[version])
        ranks.check_served()
    assert [each.weights.map.computed for each in ranks.updaters] == [{"log_rate", "norm"}] * 2
    assert open_ranks(trainer, *ranks.modules).held == 3

    trainer.step(density=1.0)
    lie(trainer.store, 4, "log_rate")
    for each in ranks.updaters:
        each.stage(4)
    changes = [each.weights.changes(each.staged) for each in ranks.updaters]
    for each in ranks.updaters:
        with pytest.raises(StateMismatch, match="log_rate"):
            each.verify(changes)


def test_ranks_that_fetched_other_values_of_a_calculated_name_are_refused(pair):
    for each in pair.updaters:
        each.stage(1)
    changes = [each.weights.changes(each.staged) for each in pair.updaters]
    pair.updaters[1].staged.after["log_rate"] = pair.updaters[1].staged.before["log_rate"]
    with pytest.raises(StateMismatch, match=r"copies of 'log_rate'"):
        pair.updaters[0].verify([changes[0], pair.updaters[1].weights.changes(pair.updaters[1].staged)])
