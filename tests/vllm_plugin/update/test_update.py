"""What is served after an update, bit for bit, also of a draft model."""

from collections.abc import Iterable

import pytest
import torch
from plain_ranks import Fused, equal, loaded, parameter, publish, serves

from patchstore.errors import SchemaMismatch
from patchstore.tensors.bits import bits

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]


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
    assert ranks.one.map.computed == {"log_rate"}
    assert ranks.one.map.absent == {"rotary"}


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
    ranks = open_ranks(trainer, *(Fused(rank, num_ranks) for rank in range(num_ranks)))
    # One delta, back through an anchor, several deltas, and across an anchor.
    for version in (0, 1, 2, 1, 6, 3, 5):
        ranks.apply(version)
        assert serves(ranks, trainer.history[version])
        ranks.check_served()


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
    assert ranks.one.replaces_all
    ranks.write()
    assert serves(ranks, trainer.history[0])
    ranks.roll_back()
    assert (ranks.held, ranks.one.half_applied) == (1, False)
    assert serves(ranks, trainer.history[1])


def test_a_version_in_which_nothing_changed_is_held_too(ranks, trainer):
    trainer.publish()
    ranks.apply(3)
    ranks.apply(4)
    assert ranks.held == 4


def test_memory_stays_where_it_was(ranks, module):
    before = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    for version in (1, 0, 3):
        ranks.apply(version)
    assert {name: tensor.data_ptr() for name, tensor in module.state_dict().items()} == before


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
    assert ranks.one.map.absent == {"layer.embed", "rotary"}
    fingerprint = ranks.live[0].fingerprint()
    assert fingerprint["draft.embed"] == fingerprint["embed"]
    assert fingerprint.keys() >= {"draft.own", "norm"}

    ranks.stage(1)
    ranks.write()
    ranks.roll_back()
    assert serves(ranks, trainer.history[3])
    assert torch.equal(bits(draft.own), bits(trainer.history[3]["layer.own"]))
    assert open_ranks(trainer, module).held == 3
