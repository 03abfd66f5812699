"""What is verified before and after a version is applied, by digest sums."""

import pytest
from plain_ranks import equal, schema_of, serves

from patchstore.errors import StateMismatch
from patchstore.format import history
from patchstore.format.state_sums import read_sums
from patchstore.tensors.bits import bits
from patchstore.testing.faults import FaultyStore
from tests.support.weights import lie

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]


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
    recorded = read_sums(trainer.store, schema_of(trainer), history.read_manifest(trainer.store, 1))
    for updater in pair.updaters:
        whole = updater.sums(0, 10_000)
        assert (whole["serving"], whole["num_applied"], whole["next"]) == (1, 2, None)
        assert (whole["computed"], whole["unverified"]) == (["log_rate"], ["rotary"])
        found, at, num_parts = {}, 0, 0
        while at is not None:
            part = updater.sums(at, 20)
            num_parts += 1
            assert not found.keys() & part["sums"].keys()
            found |= part["sums"]
            at = part["next"]
        assert (found, num_parts > 2) == (whole["sums"], True)
        assert found.keys() == recorded.keys() - {"log_rate", "rotary"}
        # A whole tensor's are those that were published.
        ((_, norm),) = found["norm"]
        assert norm == recorded["norm"].hex()
    one, other = (updater.sums(0, 10_000)["sums"] for updater in pair.updaters)
    assert (one["norm"] == other["norm"], one["a"] == other["a"]) == (True, False)


def test_nothing_is_read_from_the_store_while_generation_waits(ranks, updater, trainer):
    watched = FaultyStore(updater.store)
    for version in (1, 0):
        updater.store = updater.weights._store = watched
        updater.stage(version)
        assert any(key.startswith("states/") for _, key in watched.calls)
        watched.calls.clear()
        updater.verify([updater.changes()])
        ranks.write()
        updater.accept()
        ranks.check_served()
        assert watched.calls == []
        # The next one starts from an anchor.
        updater.forget()
    assert serves(ranks, trainer.history[0])
