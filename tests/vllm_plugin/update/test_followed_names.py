"""Which names of a checkpoint a model has, and where: what is refused, and what is served in part."""

import pytest
import torch
from plain_ranks import Fused, equal, parameter, publish, serves
from safetensors.torch import save_file

from patchstore.errors import SchemaMismatch, UsageError, VersionNotFound


def test_a_version_that_is_missing_names_the_store_that_the_server_has_open(trainer, open_ranks, module):
    ranks = open_ranks(trainer, module)
    with pytest.raises(VersionNotFound, match=f"{trainer.url} is the store that this server has open"):
        ranks.apply(77)


def needs_more(module: Fused) -> None:
    module.extra = parameter(7)


def ignores_half(module: Fused) -> None:
    module.ignored |= {"b"}


@pytest.mark.parametrize(
    ("more", "change", "named"),
    [
        ({"more": torch.ones(2)}, Fused.state, "'more'"),
        ({}, needs_more, r"'extra' \(7 elements\)"),
        ({}, ignores_half, r"'ab' \(24 elements\)"),
    ],
)
def test_what_only_the_run_or_only_the_model_has_is_refused(
    new_trainer, tensors, open_ranks, module, more, change, named
):
    trainer = publish(new_trainer(tensors | more, dtype=None), 1)
    change(module)
    before = module.state()
    with pytest.raises(SchemaMismatch, match=named):
        open_ranks(trainer, module)
    assert equal(module.state(), before)


@pytest.mark.parametrize("known", ["embed", "head"])
def test_tied_names_are_followed_under_whichever_the_loader_knows(trainer, open_ranks, module, known):
    module.ignored |= {"embed", "head"} - {known}
    ranks = open_ranks(trainer, module)
    for version in (0, 2):
        ranks.apply(version)
        assert serves(ranks, trainer.history[version])
    assert ranks.one.weights.map.absent == {"rotary"}


def test_weights_that_are_not_where_the_loader_puts_them_are_refused(
    ranks, updater, module, trainer, tmp_path
):
    save_file(
        {name: each.clone() for name, each in trainer.history[0].items()}, tmp_path / "model.safetensors"
    )
    updater.weights.check_arrangement(tmp_path)
    module.ab.data.copy_(module.ab.data.roll(1, 0))
    with pytest.raises(UsageError, match=r"2 tensors .* such as 'a'"):
        updater.weights.check_arrangement(tmp_path)


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
    assert ranks.updaters[0].weights.map.partial == {"cols"}
    assert ranks.updaters[0].weights.sums(0, 10_000)["unverified"] == ["cols", "rotary"]
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
