"""What is served after an update, bit for bit, also of a draft model; and after one that failed."""

from collections.abc import Iterable

import pytest
import torch
from plain_ranks import Fused, equal, fail_scatters, loaded, parameter, publish, serves

from patchstore.errors import HalfApplied, LoadFailed, SchemaMismatch, UsageError
from patchstore.tensors.bits import bits
from vllm_plugin.live import copies


def test_a_version_is_served_as_the_loader_lays_it_out(ranks, module, trainer):
    ranks.apply(2)
    then = trainer.history[2]
    expected = {
        "ab": torch.cat([then["a"], then["b"]]),
        "bias": then["bias"].float(),
        "cols": then["cols"],
        "embed": then["embed"],
        "norm": then["norm"],
        "rate": -torch.exp(then["log_rate"]),
        "count": torch.zeros(2),
    }
    assert equal(module.state(), {name: bits(tensor) for name, tensor in expected.items()})
    assert ranks.held == 2
    assert ranks.one.weights.map.computed == {"log_rate"}
    assert ranks.one.weights.map.absent == {"rotary"}


class Tied(Fused):
    """Has one tensor for two names, and loads the first of them only, as vLLM does where both were equal."""

    def __init__(self) -> None:
        super().__init__()
        self.head = self.embed
        self.ignored = {"rotary", "head"}


def test_a_tensor_that_the_server_would_leave_out_is_named_once_it_differs(new_trainer, tensors, open_ranks):
    trainer = new_trainer(tensors | {"head": tensors["embed"].clone()}, dtype=None, encoding="gap")
    trainer.publish()
    trainer.step(density=0.5)
    module = Tied()
    ranks = open_ranks(trainer, module)
    ranks.apply(0)
    before = module.state()
    with pytest.raises(SchemaMismatch, match=r"'head' than as 'embed'.*tie_word_embeddings"):
        ranks.apply(1)
    assert ranks.held == 0
    assert equal(module.state(), before)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_version_is_reached_bit_for_bit(new_trainer, tensors, open_ranks, num_ranks):
    trainer = publish(new_trainer(tensors, dtype=None, anchor_every=3), 7)
    # In which nothing changed.
    trainer.publish()
    ranks = open_ranks(trainer, *(Fused(rank, num_ranks) for rank in range(num_ranks)))
    places = [each.data_ptr() for module in ranks.modules for each in module.state_dict().values()]
    # One delta, back through an anchor, several deltas, across an anchor, and one without a change.
    for version in (0, 1, 2, 1, 6, 7, 3, 5):
        ranks.apply(version)
        assert ranks.held == version
        assert serves(ranks, trainer.history[version])
        ranks.check_served()
    # All memory stayed where it was.
    assert [each.data_ptr() for module in ranks.modules for each in module.state_dict().values()] == places


def test_nan_payloads_and_negative_zeros_arrive_and_are_undone(ranks, module, trainer):
    strange = torch.tensor([0x7FC1, -0x0040, -0x8000, 0], dtype=torch.int16).view(torch.bfloat16)
    for name in ("cols", "a", "norm"):
        trainer.tensors[name].view(-1)[:4] = strange
    trainer.tensors["bias"].copy_(strange)
    trainer.publish()
    trainer.step(density=1.0)

    ranks.apply(4)
    before = module.state()
    assert equal(before, loaded(trainer.history[4], module))
    ranks.stage(5)
    ranks.write()
    assert not equal(module.state(), before)
    ranks.roll_back()
    assert equal(module.state(), before)


def test_an_anchor_can_be_undone_too(new_trainer, tensors, module, open_ranks):
    trainer = publish(new_trainer(tensors, dtype=None, anchor_every=2), 3)
    ranks = open_ranks(trainer, module)
    ranks.apply(1)
    # Back to an anchor and, with the map proved by now, through the map.
    ranks.stage(0)
    assert ranks.one.staged.plan.anchor is not None
    ranks.write()
    assert serves(ranks, trainer.history[0])
    ranks.roll_back()
    assert (ranks.held, ranks.one.half_applied) == (1, False)
    assert serves(ranks, trainer.history[1])


class Draft(torch.nn.Module):
    """Shares the target's embedding, although the checkpoint has one for it too."""

    def __init__(self, target: Fused) -> None:
        super().__init__()
        self.embed = target.embed
        self.own = parameter(3)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        targets = {"embed": self.embed, "layer.embed": self.embed, "layer.own": self.own}
        for name, tensor in weights:
            if name in targets:
                targets[name].data.copy_(tensor)


def test_a_draft_model_is_updated_with_its_target_and_leaves_what_they_share_to_it(
    new_trainer, tensors, open_ranks
):
    more = {"layer.embed": torch.ones(8, 4).bfloat16(), "layer.own": torch.ones(3).bfloat16()}
    trainer = publish(new_trainer(tensors | more, dtype=None, anchor_every=2), 4)
    module = Fused()
    module.ignored |= more.keys()
    draft = Draft(module)
    module.drafts = (draft,)
    ranks = open_ranks(trainer, module)
    # The first by loaders, the others through the map: an anchor and deltas.
    for version in (0, 1, 2, 3):
        ranks.apply(version)
        assert serves(ranks, trainer.history[version])
        assert torch.equal(bits(draft.own), bits(trainer.history[version]["layer.own"]))
        ranks.check_served()
    assert ranks.one.weights.map.absent == {"layer.embed", "rotary"}
    fingerprint = ranks.live[0].models.fingerprint()
    assert fingerprint["draft.embed"] == fingerprint["embed"]
    assert fingerprint.keys() >= {"draft.own", "norm"}

    ranks.stage(1)
    ranks.write()
    ranks.roll_back()
    assert serves(ranks, trainer.history[3])
    assert torch.equal(bits(draft.own), bits(trainer.history[3]["layer.own"]))
    assert open_ranks(trainer, module).held == 3


# Writes that fail.


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


def test_a_first_load_that_fails_leaves_the_weights_of_the_start(trainer, module, open_ranks):
    module.ab.data.fill_(float("nan"))
    module.count.fill_(-0.0)
    before = module.state()
    ranks = open_ranks(trainer, module)
    module.fails_after = "log_rate"
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


def test_an_undo_succeeds_where_its_check_finds_no_room_on_the_device(
    ranks, updater, module, trainer, monkeypatch
):
    updater.forget()
    ranks.stage(3)
    before = module.state()
    fail_scatters(ranks.live[0], 1)
    with pytest.raises(LoadFailed):
        ranks.write()
    assert not equal(module.state(), before)

    def full(lane, given):
        raise torch.OutOfMemoryError("made to fail")

    monkeypatch.setattr(copies.Lane, "to_device", full)
    ranks.roll_back()
    assert equal(module.state(), before)
    assert not updater.half_applied
