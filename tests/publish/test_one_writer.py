"""A run has one publisher: of several that open it, or come later, one goes on."""

import threading

import pytest
import torch

from patchstore import Publisher
from patchstore.errors import RunExists, VersionConflict
from patchstore.stores.memory import MemoryStore
from tests.support.weights import Run, assert_same_bits, newest, served

RANKS = [
    ({"RANK": "3"}, "rank 3"),
    ({"LOCAL_RANK": "1"}, "rank 1"),
    ({"RANK": "3", "WORLD_SIZE": "4"}, "rank 3 of 4"),
    ({"RANK": "0", "WORLD_SIZE": "1"}, None),
    ({"RANK": "0", "LOCAL_RANK": "0"}, None),
    ({"RANK": "x"}, None),
    ({}, None),
]


@pytest.mark.parametrize(("environment", "said"), RANKS)
def test_a_second_rank_is_told_to_leave_publishing_to_one(
    run: Run, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], said: str | None
) -> None:
    run.publish()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunExists) as caught:
        Publisher(run.store, run.model)
    if said is None:
        assert "rank" not in str(caught.value)
    else:
        assert f"{said}, and this Publisher publishes alone: open it only where" in str(caught.value)


def test_the_rank_of_an_initialised_group_comes_before_the_environment(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.publish()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    with pytest.raises(RunExists, match="rank 5 of 8"):
        Publisher(run.store, run.model)
    # The others may have been first.
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    with pytest.raises(RunExists, match="rank 0 of 8: if the others open a Publisher too, let only this one"):
        Publisher(run.store, run.model)


def test_of_two_publishers_on_one_run_exactly_one_goes_on(run: Run) -> None:
    run.publish()
    first = run.publisher
    second = Publisher(run.store, run.model, resume=True)
    run.train()
    with pytest.raises(VersionConflict):
        first.publish_patch(1).result()
    with pytest.raises(VersionConflict):
        first.publish_patch(2)
    first.close()
    run._publisher = None
    manifest = second.publish_patch(1).result()
    second.close()
    assert (manifest.version, manifest.writer.epoch) == (2, 2)
    assert_same_bits(newest(run.store), served(run.model))


def test_a_second_run_cannot_open_the_same_prefix_by_accident(run: Run) -> None:
    run.publish()
    with pytest.raises(RunExists):
        Publisher(run.store, run.model)


def test_two_publishers_that_create_a_run_at_once_leave_one(store: MemoryStore) -> None:
    opened, errors = [], []
    barrier = threading.Barrier(4)

    def create() -> None:
        barrier.wait()
        try:
            opened.append(Publisher(store, {"w": torch.zeros(4)}))
        except RunExists as exc:
            errors.append(exc)

    threads = [threading.Thread(target=create) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(opened), len(errors)) == (1, 3)
    opened[0].close()
