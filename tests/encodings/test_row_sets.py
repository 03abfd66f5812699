"""Row sets, which parts of a payload share."""

import numpy as np
import pytest

from patchstore.codec.context import rows
from patchstore.codec.context.bits import Array
from patchstore.codec.context.classes import MAX_CLASSES
from patchstore.codec.context.rows import (
    BINS,
    DENSE,
    RUNS,
    SHARING,
    SILENT,
    SWAP,
    Costs,
    RowSets,
    Sets,
    Totals,
    best_rows,
    choose_by_group,
    first_exponent,
)
from patchstore.codec.part_table import Together
from patchstore.tensors.bits import TOGETHER


def told_apart(counts: Array, base: Array) -> Array:
    """What `Totals` hold of counts by exponent, int64 [T, 256]: int64 [T, 16]."""
    before = np.zeros((len(counts), 257), dtype=np.int64)
    np.cumsum(counts, axis=1, out=before[:, 1:])
    edges = np.clip(base[:, None] + np.arange(MAX_CLASSES + 1), 0, 256)
    edges[:, 0], edges[:, MAX_CLASSES] = 0, 256
    return np.diff(np.take_along_axis(before, edges, axis=1), axis=1)


def random_totals(num_parts: int, seed: int) -> Totals:
    """Totals of parts of different sizes and scales, where small weights change more often."""
    random = np.random.default_rng(seed)
    exponents = np.arange(256)
    elements, changed = np.zeros((2, num_parts, 256), dtype=np.int64)
    bins = np.zeros((num_parts, 256, BINS), dtype=np.int64)
    for part in range(num_parts):
        middle, spread = random.integers(90, 130), random.uniform(1, 4)
        share = np.exp(-(((exponents - middle) / spread) ** 2))
        elements[part] = random.multinomial(int(2 ** random.uniform(6, 22)), share / share.sum())
        rate = np.clip(0.02 * 2.0 ** (middle - exponents), 0.0001, 0.6)
        changed[part] = random.binomial(elements[part], rate)
        changed[part, elements[part].argmax()] += (
            elements[part].max() > changed[part, elements[part].argmax()]
        )
        sizes = 0.4 ** np.arange(BINS)
        for exponent in np.flatnonzero(changed[part]):
            bins[part, exponent] = random.multinomial(changed[part, exponent], sizes / sizes.sum())
    base = first_exponent(changed)
    return Totals(
        changed=changed,
        num_elements=told_apart(elements, base),
        changes=np.stack([told_apart(bins[:, :, each], base) for each in range(BINS)], axis=2),
        width=2,
    )


def random_sets(num: int, seed: int) -> Sets:
    random = np.random.default_rng(seed)
    found = []
    for _ in range(num):
        its_rows = []
        for _ in range(random.integers(1, 17)):
            kind = random.integers(4)
            rice = int(random.integers(16))
            its_rows.append(
                [
                    (SILENT, 0, 0),
                    (DENSE, 0, SWAP if rice > 12 else rice),
                    (random.integers(len(RUNS)), 0, 0),
                    (random.integers(len(RUNS)), random.integers(1, len(RUNS) + 1), rice),
                ][kind]
            )
        lo, nums = np.array([random.integers(80, 130)]), np.array([len(its_rows)])
        found.append(Sets.of(lo, nums, np.array(its_rows, dtype=np.uint8)))
    return Sets.joined(found)


@pytest.mark.parametrize("seed", range(4))
def test_costs_are_the_same_in_whatever_company_sets_and_parts_are_looked_at(seed: int) -> None:
    """A publisher on the CPU and one on a GPU look at others together, and must choose the same bytes."""
    totals = random_totals(12, seed)
    sets = Sets.joined([random_sets(30, seed), best_rows(totals).sets])
    together = Costs(totals).of(sets)
    assert np.isfinite(together).any()
    for number in range(len(sets)):
        alone = Costs(totals).of(sets.at(slice(number, number + 1)))
        assert np.array_equal(alone[:, 0], together[:, number])
    for part in range(12):
        assert np.array_equal(Costs(totals.of(np.array([part]))).of(sets)[0], together[part])


def test_the_cost_of_a_parts_best_rows_is_what_choosing_them_said() -> None:
    totals = random_totals(20, 9)
    own = best_rows(totals)
    costs = Costs(totals).of(own.sets)
    for part in range(20):
        assert costs[part, part] == pytest.approx(own.bits[part], rel=1e-9)


def test_best_rows_of_many_parts_are_those_of_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    totals = random_totals(20, 3)
    together = best_rows(totals)
    monkeypatch.setattr(rows, "PARTS_TOGETHER", 3)
    found = best_rows(totals)
    assert_same_sets(found.sets, together.sets)
    assert np.array_equal(found.bits, together.bits)
    assert len(best_rows(totals.of(np.zeros(0, dtype=np.int64))).sets) == 0


def test_known_best_rows_change_no_choice() -> None:
    totals = random_totals(40, 5)
    known, unknown = RowSets(), RowSets()
    own = best_rows(totals)
    for some in np.split(np.arange(40), [3, 4, 20]):
        its = totals.of(some)
        assert known.choose(its, own.of(some)).tolist() == unknown.choose(its).tolist()
    assert_same_sets(known.sets, unknown.sets)


def assert_same_sets(found: Sets, expected: Sets) -> None:
    for name in ("lo", "nums", "rows"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_ahead", "num_first"), [(1, 30), (7, 40), (256, 60)])
def test_parts_that_are_alone_get_what_they_get_one_after_the_other(
    seed: int, num_ahead: int, num_first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "PARTS_AHEAD", num_ahead)
    totals = random_totals(90, seed)
    num_small = int((totals.changed.sum(axis=1) <= SHARING).sum())
    assert 50 < num_small < 90
    every, one_by_one = np.arange(90), RowSets()
    expected = [int(one_by_one.choose(totals.of(np.array([part])))[0]) for part in range(90)]
    found = np.concatenate([totals.num_elements[:, :, None], totals.changes], axis=2)
    # In two calls, as for a snapshot that is coded in chunks.
    row_sets, numbers = RowSets(), list[int]()
    for some in np.split(every, [num_first]):
        its = totals.changed[some], found[some], np.full(len(some), 2)
        numbers += choose_by_group(row_sets, *its, every[: len(some)], np.arange(len(some) + 1)).tolist()
    assert numbers == expected
    assert_same_sets(row_sets.sets, one_by_one.sets)
    # Some shared what others had, and some did not.
    assert 90 - num_small < len(row_sets.sets) < 90


def test_small_parts_of_a_dtype_are_coded_together_whatever_lies_between() -> None:
    half, large = TOGETHER // 2, TOGETHER // 2 + 1
    sizes = np.array([half, large, half, 7, large, half, 0, half])
    dtypes = np.array([0, 0, 0, 1, 0, 0, 1, 0])
    kinds, groups = Together.of(dtypes, sizes)
    assert kinds.tolist() == [0, 1, 0, 2, 1, 0, 2, 0]
    assert groups.tolist() == [0, 2, 0, 4, 3, 1, 4, 1]
    nothing = Together.of(dtypes[:0], sizes[:0])
    assert (nothing.kinds.tolist(), nothing.groups.tolist()) == ([], [])
