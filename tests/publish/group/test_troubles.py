"""One rank of several goes wrong: nothing hangs, all hear of it, and the next publications repair it."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
import troubles

from patchstore import Replica
from patchstore.format import history
from patchstore.stores import opened
from patchstore.tensors.bits import bits
from tests.support.ranks import Ranks

RanksOf = Callable[[int], Ranks]

# Ranks wait for each other, and a busy machine is slow.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def read(url: str, version: int | None = None) -> jobs.Bits:
    """Return a version as a reader that starts from nothing rebuilds it."""
    found: dict[str, torch.Tensor] = {}
    with opened(url) as store:
        Replica(store, found).update(version)
    return {n: (each.dtype, tuple(each.shape), bits(each).numpy().tobytes()) for n, each in found.items()}


def check_repaired(url: str, found: list[tuple[str, int, jobs.Bits]]) -> None:
    assert len({(kind, version) for kind, version, _ in found}) == 1
    kind, version, expected = found[0]
    assert kind == "anchor"
    assert read(url, version) == expected


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_fails_ends_the_publication_on_all(ranks_of: RanksOf, url: str, failing: int) -> None:
    results = ranks_of(3).run(troubles.one_rank_fails, url, failing)
    for rank, ((kind, message, _, took_s), _) in enumerate(results):
        assert kind == (
            "schema-mismatch" if rank == failing else "rank-failed" if failing else "publish-failed"
        )
        assert "'weight'" in message
        assert took_s < 40
        if failing and rank != failing:
            assert message.startswith(f"rank {failing} of 3: ")
    check_repaired(url, [found for _, found in results])


@pytest.mark.parametrize("failing", [0, 1])
def test_a_number_beyond_the_range_on_one_rank_ends_the_publication_on_all(
    ranks_of: RanksOf, url: str, failing: int
) -> None:
    results = ranks_of(2).run(troubles.one_number_is_too_large, url, failing)
    for rank, ((kind, message, _, _), _) in enumerate(results):
        assert kind == (
            "schema-mismatch" if rank == failing else "rank-failed" if failing else "publish-failed"
        )
        assert "'weight' has 1 numbers beyond the range of torch.float16, such as 100000.0" in message
    check_repaired(url, [found for _, found in results])


@pytest.mark.parametrize("failing", [0, 2])
def test_a_rank_whose_store_fails_ends_the_publication_on_all(
    ranks_of: RanksOf, url: str, failing: int
) -> None:
    results = ranks_of(3).run(troubles.one_store_fails, url, failing)
    for (kind, message, ranks, _), _ in results:
        assert kind in {"publish-failed", "rank-failed"}
        assert "upload of deltas/00000001" in message
        assert ranks in ([], [failing])
    check_repaired(url, [found for _, found in results])


@pytest.mark.parametrize("late", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_late_rank_ends_the_publication_within_the_timeout(ranks_of: RanksOf, url: str, late: int) -> None:
    results = ranks_of(3).run(troubles.one_rank_is_late, url, late)
    if late:
        for (kind, message, ranks, took_s), _ in results:
            assert kind == "rank-failed"
            assert f"rank {late} of 3 was not heard of within 8 s when ranks begin a publication" in message
            assert ranks == [late]
            assert took_s < 30
    check = [found for _, found in results]
    assert len({version for _, version, _ in check}) == 1
    assert read(url, check[0][1]) == check[0][2]


def test_ranks_with_other_steps_are_refused(ranks_of: RanksOf, url: str) -> None:
    results = ranks_of(3).run(troubles.steps_differ, url)
    for (kind, message, _, _), _ in results:
        assert kind == "publish-failed"
        assert "rank 1 of 3 publishes step 2, and rank 0 of 3 step 1" in message
    check_repaired(url, [found for _, found in results])


@pytest.mark.parametrize("asking", [0, 1])
def test_ranks_of_which_one_alone_has_if_changed_are_told_so(
    ranks_of: RanksOf, url: str, asking: int
) -> None:
    results = ranks_of(2).run(troubles.only_one_asks_for_changes, url, asking)
    for (kind, message, _, _), _ in results:
        assert kind == "publish-failed"
        assert (
            f"step 1 has if_changed={asking == 1} on rank 1 of 2, and if_changed={asking == 0} on rank 0 of 2"
        ) in message
    check_repaired(url, [found for _, found in results])


@pytest.mark.parametrize("leaving", [0, 2])
def test_a_rank_that_closes_ends_the_publication_of_the_others_at_once(
    ranks_of: RanksOf, url: str, leaving: int
) -> None:
    results = ranks_of(3).run(troubles.one_rank_closes, url, leaving)
    for rank, (kind, message, ranks, took_s) in enumerate(results):
        if rank != leaving:
            assert kind == "rank-failed"
            assert message.startswith(f"rank {leaving} of 3")
            assert "has closed its publisher" in message
            assert ranks == [leaving]
            assert took_s < 40


@pytest.mark.parametrize("missing", [0, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_rank_that_does_not_open_is_named(ranks_of: RanksOf, url: str, missing: int) -> None:
    results = ranks_of(3).run(troubles.one_rank_does_not_open, url, missing)
    for rank, (kind, message, ranks, took_s) in enumerate(results):
        if rank != missing:
            assert kind == "rank-failed"
            assert "did not open a publisher within 2 s" in message
            assert missing in ranks
            assert took_s < 40


def test_ranks_must_open_with_the_same_arguments(ranks_of: RanksOf, url: str) -> None:
    options = [{"anchor_every": 3}, {"anchor_every": 3}, {"anchor_every": 4}]
    for kind, message, _, _ in ranks_of(3).run(troubles.opened_otherwise, [url] * 3, options):
        assert kind == "usage"
        assert "anchor_every is 3 on rank 0 of 3 and 4 on rank 2 of 3" in message
    assert not Path(url, "store.json").exists()


@pytest.mark.parametrize(("how", "kind"), [(0, "delta"), (True, "delta"), ("anchor", "anchor")])
def test_ranks_go_on_from_the_first_version(ranks_of: RanksOf, url: str, how: Any, kind: str) -> None:
    for version, parent, found, expected in ranks_of(2).run(troubles.opened_again, url, how):
        assert (version, parent, found) == (2, 1, kind)
        assert read(url, version) == expected


@pytest.mark.parametrize(("one", "other"), [(True, 1), (False, 0), ("auto", True)])
def test_ranks_that_resume_otherwise_are_refused(ranks_of: RanksOf, url: str, one: Any, other: Any) -> None:
    options = [{"resume": one}, {"resume": other}]
    for kind, message, _, _ in ranks_of(2).run(troubles.opened_otherwise, [url] * 2, options):
        assert kind == "usage"
        assert f"resume is '{one}' on rank 0 of 2 and '{other}' on rank 1 of 2" in message


def test_a_rank_whose_key_value_store_is_gone_is_told_so_within_the_timeout(url: str) -> None:
    ranks = Ranks(2)
    try:
        ranks.run(troubles.here)
        ranks.end_store()
        ranks.begin(troubles.opened_without_a_store, url)
        for kind, message, _, _ in ranks.end(range(2)):
            assert kind == "rank-failed"
            assert "cannot reach the key-value store of torch.distributed" in message
            assert "it did not answer within 3 s" in message
    finally:
        for process in ranks.processes:
            process.kill()


def test_ranks_with_other_buckets_are_refused(ranks_of: RanksOf, tmp_path: Path) -> None:
    urls = [str(tmp_path / each) for each in ("a", "a", "b")]
    results = ranks_of(3).run(troubles.opened_otherwise, urls, [{}] * 3)
    assert [kind for kind, _, _, _ in results] == ["rank-failed", "rank-failed", "usage"]
    for _, message, _, _ in results:
        assert "is another place on rank 2 of 3 than on rank 0 of 3" in message
    assert not list(tmp_path.glob("*/store.json"))
    assert not list(tmp_path.glob("*/probes/*"))


def test_a_tensor_that_ranks_describe_otherwise_is_refused(ranks_of: RanksOf, url: str) -> None:
    for kind, message, _, _ in ranks_of(2).run(troubles.overlapping, url):
        assert kind in {"schema-mismatch", "rank-failed"}
        assert "'weight'" in message


def test_a_rank_that_cannot_read_its_tensors_tells_the_others(ranks_of: RanksOf, url: str) -> None:
    for rank, (kind, message, ranks, took_s) in enumerate(ranks_of(3).run(troubles.unreadable, url)):
        assert "'a' is on the meta device" in message
        assert kind == ("schema-mismatch" if rank == 1 else "rank-failed")
        assert rank == 1 or ranks == [1]
        assert took_s < 40


def test_a_rank_that_cannot_read_the_run_tells_the_others(ranks_of: RanksOf, url: str) -> None:
    for rank, (kind, message, ranks, took_s) in enumerate(ranks_of(2).run(troubles.store_unreadable, url)):
        assert "injected" in message
        assert kind == ("store-unavailable" if rank == 1 else "rank-failed")
        assert rank == 1 or ranks == [1]
        assert took_s < 40


def test_partial_sums_are_refused(ranks_of: RanksOf, url: str) -> None:
    for kind, message, _, _ in ranks_of(2).run(troubles.partial, url):
        assert kind == "schema-mismatch"
        assert "each rank has a summand" in message


def test_a_group_without_all_parts_is_refused(ranks_of: RanksOf, url: str) -> None:
    for kind, message, _, _ in ranks_of(3).run(troubles.missing_part, url)[:2]:
        assert kind == "usage"
        assert "without [2] there is no whole tensor" in message


def test_one_rank_may_publish_plain_tensors_alone(ranks_of: RanksOf, url: str) -> None:
    assert [kind for kind, _, _, _ in ranks_of(3).run(troubles.alone_in_a_job, url)] == [""] * 3
    assert read(url).keys() == {"weight"}


@pytest.fixture
def doomed() -> Iterator[Ranks]:
    """Ranks to be killed."""
    ranks = Ranks(3)
    yield ranks
    for process in ranks.processes:
        process.kill()


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_after_a_kill_no_reader_sees_a_mixture_and_another_job_continues(
    ranks_of: RanksOf, doomed: Ranks, url: str, tmp_path: Path, killed: int
) -> None:
    ready = str(tmp_path / "ready")
    doomed.begin(troubles.publish_until_killed, url, ready)
    deadline = time.monotonic() + 200
    while not all(Path(f"{ready}-{rank}").exists() for rank in range(3)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(random.Random(killed).uniform(0, 0.3))
    os.kill(doomed.processes[killed].pid or 0, signal.SIGKILL)
    # The others go on for a while, and must not commit anything without it.
    time.sleep(1)
    with opened(url) as store:
        head = history.head(store)
    assert head is not None
    time.sleep(4)
    for process in doomed.processes:
        process.kill()
    with opened(url) as store:
        after = history.head(store)
    assert after == head
    for version in range(head.version + 1):
        read(url, version)
    newest: Any = [read(url, head.version)]
    results = ranks_of(2).run(troubles.resume, url, head.version, newest, "auto")
    for version, parent, kind, expected in results:
        assert (version, parent, kind) == (head.version + 2, head.version + 1, "delta")
        assert read(url, version) == expected
