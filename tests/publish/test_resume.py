"""Publishers that go on with a run: from which version, and what is refused."""

from typing import Any

import pytest
import torch

from patchstore import Publisher
from patchstore.errors import CorruptObject, ResumeMismatch, SchemaMismatch
from patchstore.format import history
from patchstore.stores.memory import MemoryStore
from tests.support.weights import Run, assert_same_bits, newest, served


def test_resuming_with_other_ties_is_refused(store: MemoryStore) -> None:
    tensor = torch.zeros(4)
    with Publisher(store, {"x": tensor}) as publisher:
        publisher.publish_patch(0).result()
    with pytest.raises(SchemaMismatch):
        Publisher(store, {"x": tensor, "z": tensor}, resume=True)


def test_resuming_continues_from_the_version_that_has_these_weights(run: Run) -> None:
    run.publish_versions(3)
    run.close()
    run.model.update(
        {name: tensor.float() for name, tensor in run.history[1].items() if tensor.is_floating_point()}
    )
    run.model["head.weight"] = run.model["embed.weight"]
    publisher = run.open(resume=True)
    claim = history.head(run.store)
    assert claim is not None and (claim.version, claim.parent, claim.writer.epoch) == (3, 1, 2)
    run.train()
    manifest = publisher.publish_patch(9).result()
    assert (manifest.version, manifest.parent) == (4, 3)
    assert_same_bits(newest(run.store), served(run.model))


def test_resuming_from_a_named_version_proves_it_first(run: Run) -> None:
    run.publish_versions(3)
    run.close()
    with pytest.raises(ResumeMismatch):
        run.open(resume=0)
    with pytest.raises(ResumeMismatch):
        run.open(resume=True)


def test_weights_of_no_version_can_resume_as_an_anchor(run: Run) -> None:
    run.publish_versions(3)
    run.close()
    publisher = run.open(resume="anchor")
    manifest = publisher.publish_patch(7).result()
    assert (manifest.kind, manifest.delta) == ("anchor", None)
    assert_same_bits(newest(run.store), served(run.model))


def test_an_empty_prefix_has_nothing_to_resume(store: MemoryStore) -> None:
    with pytest.raises(ResumeMismatch):
        Publisher(store, {"w": torch.zeros(3)}, resume=True)


@pytest.mark.parametrize("resume", [False, True, "auto", "anchor"])
def test_a_store_whose_run_lost_its_header_is_refused_and_left_alone(run: Run, resume: Any) -> None:
    run.publish_versions(3)
    run.close()
    run.store.delete("store.json")
    before = list(run.store.list())
    with pytest.raises(CorruptObject, match=r"no store\.json"):
        run.open(resume=resume)
    assert list(run.store.list()) == before


@pytest.mark.parametrize("resume", [True, "auto", "anchor", 0])
@pytest.mark.parametrize("lost", [(2,), (0, 1, 2)])
def test_numbers_of_versions_that_were_removed_are_not_used_again(
    run: Run, resume: Any, lost: tuple[int, ...]
) -> None:
    run.publish_versions(3)
    run.close()
    for version in lost:
        run.store.delete(f"versions/{version:08}.json")
    with pytest.raises(CorruptObject, match=r"head\.json names version 2"):
        run.open(resume=resume)


def test_resuming_with_other_tensors_is_refused(run: Run) -> None:
    run.publish()
    run.close()
    run.model["scale"] = torch.zeros(2)
    with pytest.raises(SchemaMismatch):
        run.open(resume=True)
