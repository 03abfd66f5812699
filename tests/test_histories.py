"""Each process sleeps before each of its requests while others go on, or is killed; and random histories.

Nothing that was promised may be lost: see `tests.support.histories`.
"""

import argparse
import logging
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patchstore.signing import KeySigner
from tests.support.histories import (
    DAY_H,
    POLICIES,
    REPLICA,
    SOURCE,
    Histories,
    Loss,
    Op,
    alone_in_time,
)
from tests.support.keys import key_pair

Record = Callable[[str, object], None]


def wait(hours: float) -> Op:
    return Op("time", "wait", (hours,))


def days(place: int, policy: int = 0) -> list[Op]:
    """What operators do in three days, so that all goes that may go."""
    collector = Op("collector", "collect", (place,))
    return [
        Op("operator", "retire", (place, POLICIES[policy])),
        *(collector, wait(DAY_H), collector, wait(DAY_H), collector),
    ]


def half_days(place: int) -> list[Op]:
    """The same, as far as a reader need not notice it."""
    collector = Op("collector", "collect", (place,))
    return [Op("operator", "retire", (place, POLICIES[0])), wait(20.0), collector]


BEGIN = [
    Op("trainer", "train", (SOURCE, None, 7)),
    Op("tagger", "tag", (SOURCE, "best", 5)),
    Op("replicator", "replicate"),
    Op("reader", "follow", (SOURCE, 2)),
]
COMPACT = Op("compactor", "compact", (SOURCE, 2))
REPLICATE = Op("replicator", "replicate")
SETUPS = {
    "a run": BEGIN,
    "a compacted run": [*BEGIN, COMPACT, REPLICATE, wait(DAY_H)],
    "shortcuts without records": [
        *BEGIN,
        COMPACT,
        Op("replicator", "replicate", dies="shortcuts/"),
        Op("trainer", "train", (SOURCE, None, 4)),
        Op("compactor", "compact", (SOURCE, 2), dies="shortcuts/"),
        *(Op("collector", "collect", (place,)) for place in (SOURCE, REPLICA)),
        wait(DAY_H),
    ],
    "a retired run": [*BEGIN, *days(SOURCE, 1), Op("trainer", "train", (SOURCE, None, 3))],
    "a replica with a retention": [*BEGIN, *days(REPLICA), Op("trainer", "train", (SOURCE, None, 1))],
}
SLEEPERS = {
    "a trainer goes back": Op("trainer 2", "train", (SOURCE, 3, 2)),
    "a trainer goes on": Op("trainer 2", "train", (SOURCE, 0, 2, "auto")),
    "a retirement": Op("operator 2", "retire", (SOURCE, POLICIES[0])),
    "a collector": Op("collector 2", "collect", (SOURCE,)),
    "a compactor": Op("compactor 2", "compact", (SOURCE, 2)),
    "a tagger": Op("tagger 2", "tag", (SOURCE, "last", 3)),
    "a tag that moves": Op("tagger 2", "tag", (SOURCE, "best", 1)),
    "a tag that ends": Op("tagger 2", "untag", (SOURCE, "best")),
    "a replicator": Op("replicator 2", "replicate"),
    "a retirement of the replica": Op("operator 2", "retire", (REPLICA, POLICIES[0])),
    "a collector of the replica": Op("collector 2", "collect", (REPLICA,)),
    "a reader": Op("reader", "follow", (SOURCE, None)),
    "a reader of the replica": Op("reader 2", "follow", (REPLICA, 2)),
}
MEANWHILE: dict[str, list[Op] | None] = {
    "killed": None,
    "days": days(SOURCE),
    "half a day": half_days(SOURCE),
    "days of the replica": days(REPLICA),
    "collectors": days(SOURCE)[1:],
    "a day": [wait(DAY_H)],
    "a tag moves": [Op("tagger", "tag", (SOURCE, "best", 0)), Op("collector", "collect", (SOURCE,))],
    "a tag goes back": [Op("tagger", "tag", (SOURCE, "best", 4))],
    "a trainer goes back": [Op("trainer", "train", (SOURCE, 4, 2))],
    "shortcuts": [COMPACT, REPLICATE],
    "shortcuts that replace": [COMPACT, wait(DAY_H), *days(SOURCE, 1)],
    "a replicator": [REPLICATE],
    "a promotion": [Op("operator", "promote"), Op("trainer 3", "train", (REPLICA, 2, 2))],
}
AFTER = [
    wait(DAY_H),
    Op("collector", "collect", (SOURCE,)),
    Op("tagger", "tag", (SOURCE, "best", 0)),
    Op("tagger", "untag", (SOURCE, "last")),
    Op("collector", "collect", (SOURCE,)),
    REPLICATE,
    wait(DAY_H),
    Op("collector", "collect", (SOURCE,)),
    Op("collector", "collect", (REPLICA,)),
    Op("trainer", "train", (SOURCE, 1, 1)),
    REPLICATE,
]


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    logging.disable(logging.WARNING)
    with alone_in_time():
        yield
    logging.disable(logging.NOTSET)


_continued: dict[tuple[str, int], Loss | None] = {}
"""What was lost afterwards, by what happened and what was there then."""


@cache
def begun(setup: str, *, is_signed: bool = False) -> Histories:
    with tempfile.TemporaryDirectory() as folder:
        signer = KeySigner(key_pair(Path(folder))[0]) if is_signed else None
    base = Histories(signer)
    base.do_all(SETUPS[setup])
    base.close()
    return base


@cache
def num_requests(setup: str, sleeper: str) -> int:
    """Return how many requests a process makes where nothing else happens."""
    lives = begun(setup).copy()
    try:
        return lives.do(SLEEPERS[sleeper]).num
    finally:
        lives.close()


class Counts(NamedTuple):
    """What was tried, and what was lost."""

    operations: int
    pauses: int
    losses: list[str]


def pauses(setup: str, sleeper: str, meanwhile: str, every: int) -> Counts:
    """Let a process sleep before each of its requests, or each so many."""
    num, num_operations, losses = 0, 0, list[str]()
    at = 1 + crc32(f"{setup}{sleeper}{meanwhile}".encode()) % every
    while num or at <= num_requests(setup, sleeper):
        lives = begun(setup).copy()
        try:
            turn = lives.do(SLEEPERS[sleeper], at, MEANWHILE[meanwhile])
            if turn.num < at:
                break
            lives.check()
            mark = meanwhile, lives.mark()
            if mark not in _continued:
                _continued[mark] = None
                try:
                    lives.do_all(AFTER)
                except Loss as exc:
                    _continued[mark] = exc
            if (found := _continued[mark]) is not None:
                raise found
        except Loss as exc:
            happened = "".join(f"\n    {each}" for each in lives.told)
            losses.append(f"{setup}, {sleeper}, {meanwhile}, {at}: {exc}{happened}")
        finally:
            lives.close()
            num_operations += lives.num_operations
        num += 1
        at += every
    return Counts(num_operations, num, losses)


_BACK = st.integers(0, 6)
_PLACES = st.sampled_from([SOURCE, SOURCE, REPLICA])
_NAMES = st.sampled_from(["best", "last"])
_SKEWS = st.sampled_from([0.0, 0.0, -1.0, 1.0])


def ops(who: str, does: str, *args: st.SearchStrategy[Any], skews: st.SearchStrategy[float] = _SKEWS) -> Any:
    names = st.sampled_from([who, f"{who} 2"])
    return st.builds(Op, names, st.just(does), st.tuples(*args), skews)


OPS = st.one_of(
    ops("trainer", "train", st.just(SOURCE), st.none(), st.integers(1, 4)),
    ops("trainer", "train", st.just(SOURCE), _BACK, st.integers(0, 3), st.sampled_from([None, "auto"])),
    ops("heir", "train", st.just(REPLICA), st.none() | _BACK, st.integers(0, 3)),
    ops("operator", "retire", _PLACES, st.sampled_from(POLICIES), skews=_SKEWS | st.just(-30.0)),
    ops("collector", "collect", _PLACES, skews=_SKEWS | st.just(-30.0)),
    ops("compactor", "compact", st.just(SOURCE), st.integers(2, 4)),
    ops("tagger", "tag", _PLACES, _NAMES, _BACK),
    ops("tagger", "untag", _PLACES, _NAMES),
    ops("replicator", "replicate"),
    ops("forger", "forge"),
    ops("reader", "follow", _PLACES, st.none() | _BACK),
    st.builds(wait, st.sampled_from([1.0, 20.0, DAY_H, DAY_H])),
)
_PROMOTION = st.just(Op("operator", "promote"))
_MEANWHILE = st.none() | st.lists(OPS | _PROMOTION, min_size=1, max_size=5)
STEPS = st.one_of(
    st.fixed_dictionaries({"op": OPS}),
    st.fixed_dictionaries({"op": OPS, "at": st.integers(1, 50), "meanwhile": _MEANWHILE}),
    st.fixed_dictionaries({"op": OPS, "storm": st.sampled_from([0.05, 0.2, 0.5])}),
)


def all_pauses(setups: Iterable[str], sleeper: str, every: int) -> Counts:
    """Let a process sleep in all places and meanwhile all that is known happen."""
    found = [pauses(setup, sleeper, meanwhile, every) for setup in setups for meanwhile in MEANWHILE]
    losses = [loss for each in found for loss in each.losses]
    return Counts(sum(each.operations for each in found), sum(each.pauses for each in found), losses)


def random_histories(num: int) -> Counts:
    """Live so many random histories. The shortest one in which something is lost is printed."""
    counts = [0, 0]

    @settings(
        max_examples=num,
        deadline=None,
        print_blob=True,
        report_multiple_bugs=False,
        suppress_health_check=[*HealthCheck],
    )
    @given(st.booleans(), st.lists(STEPS, min_size=5, max_size=25))
    def live(is_signed: bool, steps: list[dict[str, Any]]) -> None:
        lives = begun("a run", is_signed=is_signed).copy()
        try:
            for step in steps:
                turn = lives.do(**step)
                counts[1] += turn.is_disturbed or turn.is_dead
                lives.check()
        finally:
            lives.close()
            counts[0] += lives.num_operations

    losses = []
    try:
        live()
    except Loss as exc:
        losses.append("\n".join([str(exc), *getattr(exc, "__notes__", ())]))
    return Counts(*counts, losses)


HISTORIES = {
    "the trainer goes back to what a replica gave up by itself": [
        Op("trainer", "train", (SOURCE, None, 8)),
        REPLICATE,
        *days(REPLICA),
        Op("trainer", "train", (SOURCE, 3, 2)),
        REPLICATE,
    ],
    "a source gives up what its replica gave up before, as it has an anchor behind that": [
        Op("trainer", "train", (SOURCE, None, 8)),
        REPLICATE,
        *days(REPLICA),
        Op("trainer", "train", (SOURCE, 3, 2)),
        COMPACT,
        wait(DAY_H),
        *days(SOURCE, 1),
        REPLICATE,
    ],
}


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_a_history_loses_nothing(history: list[Op]) -> None:
    lives = Histories()
    lives.do_all(history)
    lives.close()


@pytest.mark.parametrize("every", [400, pytest.param(7, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("sleeper", SLEEPERS)
@pytest.mark.parametrize("setup", SETUPS)
def test_who_sleeps_or_is_killed_before_a_request_loses_nothing(
    setup: str, sleeper: str, every: int, record_property: Record
) -> None:
    report(all_pauses([setup], sleeper, every), record_property)


@pytest.mark.parametrize("num", [6, pytest.param(150, marks=pytest.mark.exhaustive)])
def test_random_histories_lose_nothing(num: int, record_property: Record) -> None:
    report(random_histories(num), record_property)


def report(found: Counts, record_property: Record) -> None:
    """Have the counts in the last lines of the run, and fail if something was lost."""
    record_property("operations, pauses, losses", (found.operations, found.pauses, len(found.losses)))
    assert not found.losses, f"{len(found.losses)} losses, of which the first is: {found.losses[0]}"


def main() -> None:
    """Print a table of what is found, with all pauses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1, help="of how many requests each is slept before one")
    parser.add_argument("--num", type=int, default=1000, help="of random histories")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    sys.stdout.write("| who sleeps or is killed | operations | pauses | losses |\n|---|---|---|---|\n")
    with alone_in_time():
        for name in [*SLEEPERS, "anyone"]:
            is_random = name == "anyone"
            found = (
                random_histories(arguments.num) if is_random else all_pauses(SETUPS, name, arguments.every)
            )
            row = f"| {name} | {found.operations:,} | {found.pauses:,} | {len(found.losses)} |"
            sys.stdout.write(f"{row}\n")
            sys.stdout.flush()
            sys.stderr.writelines(f"{loss}\n" for loss in found.losses[:3])


if __name__ == "__main__":
    main()
