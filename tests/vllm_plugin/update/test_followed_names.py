"""Which names of a checkpoint a model has, and where: what is refused, and what is served in part."""

import pytest
import torch
from plain_ranks import Fused, equal, parameter, publish, serves

from patchstore.errors import SchemaMismatch, StateMismatch, UsageError, VersionNotFound

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]


def test_a_version_that_is_missing_names_the_store_that_the_server_has_open(trainer, open_ranks, module):
    ranks = open_ranks(trainer, module)
    with pytest.raises(VersionNotFound, match=f"{trainer.url} is the store that this server has open"):
        ranks.apply(77)


def test_a_name_that_the_model_lacks_is_refused(new_trainer, tensors, open_ranks, module):
    trainer = publish(new_trainer(tensors | {"more": torch.ones(2)}, dtype=None), 1)
    before = module.state()
    with pytest.raises(SchemaMismatch, match="'more'"):
        open_ranks(trainer, module)
    assert equal(module.state(), before)


def test_a_parameter_that_gets_nothing_is_refused(trainer, open_ranks, module):
    module.extra = parameter(7)
    with pytest.raises(SchemaMismatch, match=r"'extra' \(7 elements\)"):
        open_ranks(trainer, module)


def test_a_parameter_that_gets_only_a_part_is_refused(trainer, open_ranks, module):
    module.ignored |= {"b"}
    with pytest.raises(SchemaMismatch, match=r"'ab' \(24 elements\)"):
        open_ranks(trainer, module)


@pytest.mark.parametrize("known", ["embed", "head"])
def test_tied_names_are_followed_under_whichever_the_loader_knows(trainer, open_ranks, module, known):
    module.ignored |= {"embed", "head"} - {known}
    ranks = open_ranks(trainer, module)
    for version in (0, 2):
        ranks.apply(version)
        assert serves(ranks, trainer.history[version])
    assert ranks.one.map.absent == {"rotary"}


class OtherWhenReal(Fused):
    """Loads otherwise than it shows when it is traced: the map is wrong."""

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        if not tensor.is_meta:
            name = {"a": "b", "b": "a"}.get(name, name)
            self.count.fill_(7)
        super().load_one(name, tensor)


def test_a_map_that_is_wrong_is_noticed_by_the_first_anchor(trainer, open_ranks):
    module = OtherWhenReal()
    ranks = open_ranks(trainer, module)
    before = module.state()
    ranks.stage(0)
    with pytest.raises(StateMismatch, match="a, b"):
        ranks.write()
    assert not equal(module.state(), before)
    ranks.roll_back()
    # Also where no name of the map leads.
    assert equal(module.state(), before)
    assert (ranks.held, ranks.one.weights.is_map_proved) == (None, False)


def test_weights_that_are_not_where_the_loader_puts_them_are_refused(ranks, updater, module, trainer):
    updater.check_map(trainer.history[0])
    module.ab.data.copy_(module.ab.data.roll(1, 0))
    with pytest.raises(UsageError, match=r"2 tensors .* such as 'a'"):
        updater.check_map(trainer.history[0])


class TakesAPart(Fused):
    """Has no use for the last rows of `cols`."""

    def __init__(self, rank: int = 0, num_ranks: int = 1) -> None:
        super().__init__(rank, num_ranks)
        self.cols = parameter(4, 8 // num_ranks)

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        super().load_one(name, tensor[:4] if name == "cols" else tensor)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_names_that_are_served_in_part_are_listed_and_exact(trainer, open_ranks, num_ranks):
    ranks = open_ranks(trainer, *(TakesAPart(rank, num_ranks) for rank in range(num_ranks)))
    for version in (0, 1, 3):
        ranks.apply(version)
        assert serves(ranks, trainer.history[version])
    assert ranks.updaters[0].map.partial == {"cols"}
    assert ranks.updaters[0].sums(0, 10_000)["unverified"] == ["cols", "rotary"]
    # Their other parts still tell one version from another.
    assert open_ranks(trainer, *ranks.modules).held == 3


def test_what_is_served_in_part_tells_versions_apart_too(trainer, open_ranks):
    # Only in `cols`, of which no digest can be told, does version 4 differ from 3.
    trainer.tensors["cols"].neg_()
    trainer.publish()
    module = TakesAPart()
    module.load_weights((n, t.clone()) for n, t in trainer.history[3].items())
    ranks = open_ranks(trainer, module)
    assert ranks.held is None

    ranks.apply(4)
    assert serves(ranks, trainer.history[4])
    assert open_ranks(trainer, module).held == 4
