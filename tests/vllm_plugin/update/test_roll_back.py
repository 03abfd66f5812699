"""A write that fails is undone, or the weights are half-applied until an anchor is loaded."""

import pytest
import torch
from plain_ranks import equal, fail_scatters, loaded, serves

from patchstore.errors import HalfApplied, LoadFailed, UsageError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]


def test_a_commit_with_nothing_staged_is_a_mistake(ranks, updater, trainer):
    with pytest.raises(UsageError):
        updater.apply()
    updater.roll_back()
    assert serves(ranks, trainer.history[0])


def test_a_failed_write_is_rolled_back(ranks, updater, trainer):
    fail_scatters(ranks.live[0], 1)
    ranks.stage(1)
    with pytest.raises(LoadFailed):
        updater.apply()
    assert not serves(ranks, trainer.history[0])

    updater.roll_back()

    assert (ranks.held, updater.half_applied, updater.staged) == (0, False, None)
    assert serves(ranks, trainer.history[0])
    ranks.apply(2)
    assert serves(ranks, trainer.history[2])


def test_calculated_weights_are_rolled_back_when_their_loader_fails(ranks, updater, module, trainer):
    module.fails_after = "log_rate"
    ranks.stage(1)
    with pytest.raises(LoadFailed, match=r"log_rate.*made to fail"):
        updater.apply()
    assert not torch.equal(module.state()["rate"], loaded(trainer.history[0], module)["rate"])
    updater.roll_back()
    assert serves(ranks, trainer.history[0])
    # What they are calculated from is that of version 0 still.
    ranks.apply(2)
    assert serves(ranks, trainer.history[2])


@pytest.mark.parametrize("name", ["a", "cols", "rotary"])
def test_a_first_load_that_fails_leaves_the_weights_of_the_start(trainer, module, open_ranks, name):
    module.ab.data.fill_(float("nan"))
    module.count.fill_(-0.0)
    before = module.state()
    ranks = open_ranks(trainer, module)
    module.fails_after = name
    ranks.stage(0)
    with pytest.raises(LoadFailed):
        ranks.write()
    ranks.roll_back()
    assert (ranks.held, ranks.one.half_applied) == (None, False)
    assert equal(module.state(), before)


def test_a_failed_undo_is_half_applied_until_an_anchor_is_loaded(ranks, updater, module, trainer):
    fail_scatters(ranks.live[0], 2)
    ranks.stage(1)
    with pytest.raises(LoadFailed):
        updater.apply()
    with pytest.raises(HalfApplied):
        updater.roll_back()
    updater.mark_half_applied()
    assert (ranks.held, updater.half_applied) == (None, True)

    # Another failure does not fix it.
    fail_scatters(ranks.live[0], 1)
    ranks.stage(1)
    with pytest.raises(LoadFailed):
        updater.apply()
    updater.roll_back()
    assert (ranks.held, updater.half_applied) == (None, True)

    ranks.apply(2)
    assert (ranks.held, updater.half_applied) == (2, False)
    assert serves(ranks, trainer.history[2])
