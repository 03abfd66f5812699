"""Ranks that publish together, with a signer: one signature per version, by the rank that commits."""

from collections.abc import Callable
from pathlib import Path

import jobs
import pytest
import torch

from patchstore import Replica
from patchstore.errors import Unsigned
from patchstore.format import history, layout
from patchstore.stores import opened
from tests.support.keys import key_pair
from tests.support.ranks import Ranks

RanksOf = Callable[[int], Ranks]

# Ranks wait for each other, and a busy machine is slow.
pytestmark = pytest.mark.timeout(600)


def test_versions_of_several_ranks_are_signed(ranks_of: RanksOf, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path)
    url = str(tmp_path / "store")
    found = ranks_of(2).run(jobs.train_and_sign, url, [str(private)] * 2, 3)
    assert [version for version, _ in found[0]] == [0, 1, 2]
    with opened(url) as store:
        for version, expected in found[0]:
            tensors: dict[str, torch.Tensor] = {}
            Replica(store, tensors, required_keys=public).update(version)
            assert jobs.serve_bits(tensors) == expected
            assert len(list(store.list(layout.signature_prefix(version)))) == 1
        with pytest.raises(Unsigned):
            Replica(store, {}, required_keys=key_pair(tmp_path, "other")[1]).update(2)


def test_ranks_with_different_signers_publish_nothing(ranks_of: RanksOf, tmp_path: Path) -> None:
    one, other = (str(key_pair(tmp_path, name)[0]) for name in ("one", "other"))
    for number, keys in enumerate([[one, None], [None, one], [one, other]]):
        url = str(tmp_path / f"store-{number}")
        kinds = ranks_of(2).run(jobs.train_and_sign, url, keys, 1)
        assert all(isinstance(kind, str) for kind in kinds), kinds
        with opened(url) as store:
            assert history.read_header(store) is None
