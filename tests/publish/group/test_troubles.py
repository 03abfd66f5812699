"""One rank of several goes wrong, or another process reaches the port of the ranks' key-value store.

Nothing hangs, all hear of it, no rank reports a wrong version, and the next publications repair it.
"""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import troubles

from patchstore.bucket import history
from patchstore.stores import opened
from tests.support.model_bits import Bits, read
from tests.support.ranks import Ranks, RanksOf

# Ranks wait for each other, and a busy machine is slow.
pytestmark = pytest.mark.timeout(600)
OTHER = pytest.mark.exhaustive


def check_repaired(url: str, found: list[tuple[str, int, Bits]]) -> None:
    assert len({(kind, version) for kind, version, _ in found}) == 1
    kind, version, expected = found[0]
    assert kind == "anchor"
    assert read(url, version) == expected


@pytest.mark.parametrize(
    ("num", "failing", "kind", "says"),
    [
        *((3, failing, "shape", "'weight'") for failing in range(3)),
        *(
            (
                2,
                failing,
                "number",
                "'weight' has 1 number beyond the range of torch.float16, such as 100000.0",
            )
            for failing in range(2)
        ),
    ],
)
def test_a_rank_that_fails_ends_the_publication_on_all(
    ranks_of: RanksOf, url: str, num: int, failing: int, kind: str, says: str
) -> None:
    results = ranks_of(num).run(troubles.one_rank_fails, url, failing, kind)
    for rank, ((error, message, _, took_s), _) in enumerate(results):
        if rank == failing:
            assert error == "schema-mismatch"
        else:
            assert error == ("rank-failed" if failing else "publish-failed")
            assert message.startswith(f"rank {failing} of {num}: ") or not failing
        assert says in message
        assert took_s < 40
    check_repaired(url, [found for _, found in results])


@pytest.mark.parametrize(
    ("num", "job", "args", "says"),
    [
        (3, troubles.one_store_fails, (0,), "upload of deltas/00000001"),
        (3, troubles.one_store_fails, (2,), "upload of deltas/00000001"),
        (3, troubles.steps_differ, (), "rank 1 of 3 publishes step 2, and rank 0 of 3 step 1"),
        *(
            (
                *(2, troubles.only_one_asks_for_changes, (asking,)),
                f"if_changed={asking == 1} on rank 1 of 2, and if_changed={asking == 0} on rank 0 of 2",
            )
            for asking in range(2)
        ),
    ],
)
def test_what_ranks_cannot_publish_together_ends_the_publication_on_all(
    ranks_of: RanksOf, url: str, num: int, job: Any, args: tuple[Any, ...], says: str
) -> None:
    results = ranks_of(num).run(job, url, *args)
    for (kind, message, named, _), _ in results:
        if job is troubles.one_store_fails:
            assert kind in {"publish-failed", "rank-failed"}
            assert named in ([], [*args])
        else:
            assert kind == "publish-failed"
        assert says in message
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


@pytest.mark.parametrize(
    ("job", "one", "says"),
    [
        (troubles.one_rank_closes, 0, "has closed its publisher"),
        (troubles.one_rank_closes, 2, "has closed its publisher"),
        (troubles.one_rank_does_not_open, 0, "did not open a publisher within 2 s"),
        pytest.param(
            *(troubles.one_rank_does_not_open, 2, "did not open a publisher within 2 s"), marks=OTHER
        ),
    ],
)
def test_a_rank_that_does_not_open_or_closes_is_named_to_the_others_at_once(
    ranks_of: RanksOf, url: str, job: Any, one: int, says: str
) -> None:
    for rank, (kind, message, named, took_s) in enumerate(ranks_of(3).run(job, url, one)):
        if rank != one:
            assert kind == "rank-failed"
            assert says in message
            assert one in named
            assert took_s < 40
            if job is troubles.one_rank_closes:
                assert message.startswith(f"rank {one} of 3")
                assert named == [one]


MISMATCH = "schema-mismatch"
REFUSED: dict[str, tuple[Any, tuple[Any, ...], list[str], str]] = {
    "other arguments": (
        *(troubles.opened_otherwise, ([{"anchor_every": each} for each in (3, 3, 4)],), ["usage"] * 3),
        "anchor_every is 3 on rank 0 of 3 and 4 on rank 2 of 3",
    ),
    **{
        f"{one} and {other}": (
            *(troubles.opened_otherwise, ([{"resume": one}, {"resume": other}],), ["usage"] * 2),
            f"resume is '{one}' on rank 0 of 2 and '{other}' on rank 1 of 2",
        )
        for one, other in ((True, 1), (False, 0), ("auto", True))
    },
    "other buckets": (
        *(troubles.elsewhere, (), ["rank-failed", "rank-failed", "usage"]),
        "is another place on rank 2 of 3 than on rank 0 of 3",
    ),
    "an unreadable tensor": (
        *(troubles.unreadable, (), ["rank-failed", MISMATCH, "rank-failed"]),
        "'a' is on the meta device",
    ),
    "an unreadable run": (troubles.store_unreadable, (), ["rank-failed", "store-unavailable"], "injected"),
    "parts that overlap": (troubles.overlapping, (), ["rank-failed", MISMATCH], "'weight'"),
    "partial sums": (troubles.partial, (), [MISMATCH] * 2, "each rank has a summand"),
    "a group that lacks a part": (
        *(troubles.missing_part, (), ["usage", "usage", ""]),
        "without [2] there is no whole tensor",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_ranks_that_cannot_publish_together_are_refused_and_all_told_why(
    ranks_of: RanksOf, url: str, case: str
) -> None:
    job, args, kinds, says = REFUSED[case]
    for rank, (kind, message, named, took_s) in enumerate(ranks_of(len(kinds)).run(job, url, *args)):
        assert kind == kinds[rank]
        assert says in message or not kind
        assert took_s < 40
        if case.startswith("an unreadable"):
            assert rank == 1 or named == [1]
    assert not list(Path(url).parent.glob("*/store.json"))
    assert not list(Path(url).parent.glob("*/probes/*"))


@pytest.mark.parametrize(("how", "kind"), [(0, "delta"), (True, "delta"), ("anchor", "anchor")])
def test_ranks_go_on_from_the_first_version(ranks_of: RanksOf, url: str, how: Any, kind: str) -> None:
    for version, parent, found, expected in ranks_of(2).run(troubles.opened_again, url, how):
        assert (version, parent, found) == (2, 1, kind)
        assert read(url, version) == expected


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


# A process that reaches the store of keys.


@pytest.mark.parametrize("kind", ["another message", "with a tag of another", "its own of before", "garbage"])
def test_a_report_that_was_rewritten_ends_the_publication_on_all_ranks(
    ranks_of: RanksOf, url: str, kind: str
) -> None:
    results = ranks_of(2).run(troubles.beside_an_intruder, url, 0, "/2[.]2/1$", kind)
    for (error, message, named, _), _ in results:
        assert error == "rank-failed"
        assert "rank 0 of 2 found another message in the place of that of rank 1 of 2" in message
        assert named == [1]
    check_repaired(url, [found for _, found in results])
    with opened(url) as store:
        assert [history.read_manifest(store, version).step for version in range(2)] == [0, 2]


def test_an_answer_that_was_rewritten_is_an_error_on_the_rank_that_hears_it(
    ranks_of: RanksOf, url: str
) -> None:
    results = ranks_of(2).run(troubles.beside_an_intruder, url, 1, "/2[.]2/answer$", "the answer of before")
    (leader, _), ((error, message, named, _), _) = results
    # The leader has committed what both stored.
    assert leader[0] == ""
    assert error == "rank-failed"
    assert "rank 1 of 2 found another message in the place of that of rank 0 of 2" in message
    assert "what the ranks concluded is unknown here" in message
    assert named == [0]
    check_repaired(url, [found for _, found in results])
    read(url, 1)


def test_the_largest_weights_of_a_block_that_were_rewritten_end_the_publication(
    ranks_of: RanksOf, url: str
) -> None:
    results = ranks_of(2).run(troubles.quantize_beside_an_intruder, url, "/maxima/[0-9a-f]+/2[.]1/1$")
    for error, message, _, _ in results:
        assert error == "rank-failed"
        assert "another process writes there" in message
    with opened(url) as store:
        head = history.head(store)
    assert head is not None and head.version == 0
