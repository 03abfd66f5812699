"""Two ranks hold, verify and undo a version together."""

from contextlib import suppress

import pytest
import torch
from plain_ranks import Fused, equal, fail_scatters, loaded, serves

from patchstore.errors import LoadFailed, StateMismatch
from patchstore.tensors.bits import bits
from tests.support.weights import lie

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]


def test_two_ranks_hold_together_what_neither_holds_alone(pair):
    for each in pair.updaters:
        assert each.map.proved == {"a", "b", "bias", "cols", "embed", "norm"}
        assert each.find([each.slice_sums()]) is None
    assert pair.updaters[0].find([each.slice_sums() for each in pair.updaters]) == 0


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
    changes = [each.changes() for each in pair.updaters]
    slice_sums = [each.slice_sums() for each in pair.updaters]
    for each in pair.updaters:
        with pytest.raises(StateMismatch, match=name):
            each.verify(changes)
        with pytest.raises(StateMismatch, match=name):
            each.check_served(slice_sums)
        assert each.find(slice_sums) is None
        each.mark_half_applied()
    assert open_ranks(trainer, *pair.modules).held is None
    pair.apply(4)
    assert serves(pair, trainer.history[4])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_in_one_rank_is_undone_in_both(pair, trainer, rank):
    pair.stage(1)
    fail_scatters(pair.live[rank], 1)
    with suppress(LoadFailed):
        pair.updaters[0].apply()
    with suppress(LoadFailed):
        pair.updaters[1].apply()
    assert not any(equal(each.state(), loaded(trainer.history[0], each)) for each in pair.modules)
    pair.roll_back()
    assert (pair.held, pair.spooled()) == (0, [])
    assert serves(pair, trainer.history[0])
    pair.apply(3)
    assert serves(pair, trainer.history[3])


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
    assert [each.map.computed for each in ranks.updaters] == [{"log_rate", "norm"}] * 2
    assert open_ranks(trainer, *ranks.modules).held == 3

    trainer.step(density=1.0)
    lie(trainer.store, 4, "log_rate")
    for each in ranks.updaters:
        each.stage(4)
    changes = [each.changes() for each in ranks.updaters]
    for each in ranks.updaters:
        with pytest.raises(StateMismatch, match="log_rate"):
            each.verify(changes)


def test_ranks_that_fetched_other_values_of_a_calculated_name_are_refused(pair):
    for each in pair.updaters:
        each.stage(1)
    changes = [each.changes() for each in pair.updaters]
    pair.updaters[1].staged.after["log_rate"] = pair.updaters[1].staged.before["log_rate"]
    with pytest.raises(StateMismatch, match=r"copies of 'log_rate'"):
        pair.updaters[0].verify([changes[0], pair.updaters[1].changes()])
