"""Row sets: the classes and codes of a payload's parts. Small parts share them.

A set of 8 classes takes 26 bytes, and a part of 300 changes 260. So a part takes its own best rows only if
they save more than they cost; otherwise it takes those of another part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from patchstore.encodings.context.classes import MAX_CLASSES
from patchstore.encodings.context.parameters import (
    DENSE,
    RUNS,
    SILENT,
    SWAP,
    choose_classes,
    choose_rows,
    rice_bits,
    runs_bits,
)

SHARING = 8192
"""Parts of more changes have rows of their own."""
SET_BITS = 16
ROW_BITS = 24
_CANDIDATES = 16
"""Parts of a group, those with the most changes, whose own rows others may take."""
_LAST_SETS = 32
"""Sets that were made before, which parts may take."""
_PARTS_AHEAD = 256
_TIE = 1e-9
"""Of two sums of the same bits in different orders."""
_TERMS_TOGETHER = 1 << 19
"""Classes of parts and sets whose bits are worked out at a time."""

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class RowSet:
    """Classes, and the code of each."""

    lo: int
    """Exponents up to this one are in the first class."""
    rows: npt.NDArray[np.uint8]
    """[K, 3]"""

    @property
    def bits(self) -> int:
        return SET_BITS + ROW_BITS * len(self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What of the elements of T parts of one dtype decides on their rows."""

    changed: npt.NDArray[np.int64]
    """[T, 256], changes by the old exponent; at least one a part."""
    num_elements: npt.NDArray[np.int64]
    """[T, 16], elements by old exponent: of `first_exponent` and below, of the next ones, of the last and
    above."""
    changes: npt.NDArray[np.int64]
    """[T, 16, num_bins], changes in the same way, by the bin of |d|; see `parameters.used_bins`."""
    width: int
    """Bytes of an element."""

    def of(self, some: Array) -> "Totals":
        """Return those of some parts, by number."""
        return Totals(
            changed=self.changed[some],
            num_elements=self.num_elements[some],
            changes=self.changes[some],
            width=self.width,
        )


class BestRows(NamedTuple):
    """The rows that take least for each of T parts, if it is alone."""

    sets: list[RowSet]
    bits: npt.NDArray[np.float64]
    """[T], that its streams are expected to take, without the rows."""

    def of(self, some: Array) -> "BestRows":
        """Return those of some parts, by number."""
        return BestRows([self.sets[number] for number in some.tolist()], self.bits[some])


def first_exponent(changed: Array) -> npt.NDArray[np.int64]:
    """Return the first of 16 exponents that `Totals` tell apart: the last has no changes.

    Args:
        changed: int64 [T, 256], changes by the old exponent; at least one a part.
    """
    highest = 255 - np.argmax(changed[:, ::-1] > 0, axis=1)
    found: npt.NDArray[np.int64] = np.maximum(highest - (MAX_CLASSES - 2), 0)
    return found


def told_apart(counts: Array, base: Array) -> npt.NDArray[np.int64]:
    """Return what `Totals` hold of counts by exponent, int64 [T, 256]: int64 [T, 16]."""
    before = _before(counts)
    edges = np.clip(base[:, None] + np.arange(MAX_CLASSES + 1), 0, 256)
    edges[:, 0], edges[:, MAX_CLASSES] = 0, 256
    found: npt.NDArray[np.int64] = np.diff(np.take_along_axis(before, edges, axis=1), axis=1)
    return found


class RowSets:
    """The row sets of a payload, in the order in which they were chosen."""

    def __init__(self) -> None:
        self.sets: list[RowSet] = []

    def choose(self, totals: Totals, own_rows: "BestRows | None" = None) -> npt.NDArray[np.int64]:
        """Choose sets for parts, by least expected length; return the number of each part's, int64 [T].

        The result depends on the parts that came before, and on the order.

        Args:
            own_rows: the best of these parts, if they are known.
        """
        own, costs = own_rows or best_rows(totals)
        num_changed = totals.changed.sum(axis=1)
        chosen = np.full(len(own), -1)
        small = np.flatnonzero(num_changed <= SHARING)
        for part in np.flatnonzero(num_changed > SHARING).tolist():
            chosen[part] = self._added(own[part])
        if not len(small):
            return chosen
        first = max(0, len(self.sets) - _LAST_SETS)
        by_size = small[np.argsort(-num_changed[small], kind="stable")]
        joint = [_joint(totals, small)] if len(small) > 1 else []
        fresh = joint + _distinct([own[part] for part in by_size[:_CANDIDATES].tolist()])
        bits = _Costs(totals.of(small)).of([*self.sets[first:], *fresh])
        num_old = len(self.sets) - first
        best = bits[:, :num_old].min(axis=1) if num_old else np.full(len(small), np.inf)
        taken = bits[:, :num_old].argmin(axis=1) if num_old else np.zeros(len(small), dtype=np.int64)
        opening = np.array([each.bits for each in fresh], dtype=np.float64)
        # Rows of its own are always an answer.
        alone = costs[small] + [own[part].bits for part in small.tolist()]
        is_alone = alone < best
        best = np.minimum(best, alone)
        while True:
            gains = np.maximum(best[:, None] - bits[:, num_old:], 0).sum(axis=0) - opening
            number = int(np.argmax(gains))
            if gains[number] <= 0:
                break
            better = bits[:, num_old + number] < best
            best[better], taken[better], is_alone[better] = (
                bits[better, num_old + number],
                num_old + number,
                False,
            )
        places: dict[int, int] = {}
        for number, part in enumerate(small.tolist()):
            if is_alone[number]:
                chosen[part] = self._added(own[part])
                continue
            which = int(taken[number])
            if which >= num_old and which not in places:
                places[which] = self._added(fresh[which - num_old])
            chosen[part] = places.get(which, first + which)
        return chosen

    def choose_alone(self, own: RowSet, cost: float, num_changed: int, ahead: "CostsAhead", part: int) -> int:
        """`choose` for a part that is alone in its call.

        Args:
            own, cost: the part's best rows.
            ahead: has this part by number.
        """
        first = max(0, len(self.sets) - _LAST_SETS)
        if num_changed > SHARING or not self.sets:
            return self._added(own)
        bits = ahead.of(part, self.sets, first)
        taken, alone = int(bits.argmin()), cost + own.bits
        if abs(bits[taken] - alone) <= _TIE * alone:
            # `choose` sums the bits of its own rows in another order than `best_rows`, which may decide.
            one = np.array([part])
            (chosen,) = self.choose(ahead.totals.of(one), BestRows([own], np.array([cost])))
            return int(chosen)
        return first + taken if bits[taken] < alone else self._added(own)

    def _added(self, each: RowSet) -> int:
        self.sets.append(each)
        return len(self.sets) - 1


def best_rows(totals: Totals) -> BestRows:
    """Return the best rows of each part; the same for a part in whatever company it is looked at."""
    lo, nums = choose_classes(totals.changed)
    at = _classes(first_exponent(totals.changed), lo, nums)
    # Classes ascend with exponents, so each has those from its first one on.
    begins = np.sum(at[:, None, :] < np.arange(MAX_CLASSES + 1)[:, None], axis=2)
    num_elements = np.diff(np.take_along_axis(_before(totals.num_elements), begins, axis=1), axis=1)
    changes = np.diff(np.take_along_axis(_before(totals.changes), begins[:, :, None], axis=1), axis=1)
    kept, rows, costs = choose_rows(num_elements, changes, nums, totals.width)
    sets = zip(lo.tolist(), kept.tolist(), rows, strict=True)
    return BestRows([RowSet(first, its[:num]) for first, num, its in sets], costs)


def _joint(totals: Totals, some: Array) -> RowSet:
    """Return the best rows of several parts together."""
    base = first_exponent(totals.changed[some])
    changed = totals.changed[some].sum(axis=0, keepdims=True)
    at = _classes(base, first_exponent(changed).repeat(len(some)), np.full(len(some), MAX_CLASSES))
    changes = np.zeros_like(totals.changes[:1])
    num_elements = np.zeros_like(totals.num_elements[:1])
    np.add.at(changes[0], at, totals.changes[some])
    np.add.at(num_elements[0], at, totals.num_elements[some])
    (found,), _ = best_rows(
        Totals(changed=changed, num_elements=num_elements, changes=changes, width=totals.width)
    )
    return found


def _classes(base: Array, lo: Array, nums: Array) -> npt.NDArray[np.int64]:
    """Return the class of each of the 16 exponents from `base` on, int64 [T, 16]."""
    exponents = base[:, None] + np.arange(MAX_CLASSES)
    found: npt.NDArray[np.int64] = np.clip(exponents - lo[:, None], 0, nums[:, None] - 1)
    return found


def _distinct(sets: list[RowSet]) -> list[RowSet]:
    return list({(each.lo, each.rows.tobytes()): each for each in sets}.values())


class _Costs:
    """The bits that the streams of parts are expected to take with any rows."""

    def __init__(self, totals: Totals) -> None:
        self._totals = totals
        self._base = first_exponent(totals.changed)
        self._lowest = np.argmax(totals.changed > 0, axis=1)
        num = totals.changes.sum(axis=2)
        # Behind the sums of classes from the first on: that of no class.
        self._elements = _before(totals.num_elements)
        self._changes = _before(num)
        self._ones = _before(totals.changes[:, :, 0])
        sparse, dense = rice_bits(totals.changes, totals.width)
        self._sparse, self._dense = _before(sparse), _before(dense)

    def of(self, sets: list[RowSet]) -> npt.NDArray[np.float64]:
        """Return float64 [T, sets]; infinite where a set cannot say what changes."""
        step = max(1, _TERMS_TOGETHER // (len(self._base) * MAX_CLASSES))
        return np.concatenate([self._of(sets[i : i + step]) for i in range(0, len(sets), step)], axis=1)

    def _of(self, sets: list[RowSet]) -> npt.NDArray[np.float64]:
        """Return the same of a few sets: each row of each class once, however many sets have it."""
        lo, num_rows = np.array([[each.lo, len(each.rows)] for each in sets]).T
        # Changes below the first exponent that is told apart must all be in the first class.
        is_lost = (lo < self._base[:, None]) & (self._lowest < self._base)[:, None]
        cost = np.where(is_lost, np.inf, 0.0)
        rows = np.concatenate([each.rows for each in sets]).astype(np.int64)
        begins = num_rows.cumsum() - num_rows
        number = np.arange(len(rows)) - np.repeat(begins, num_rows)
        fields = np.repeat(lo, num_rows), np.repeat(num_rows, num_rows), number, *rows.T
        # A byte each in one integer, which is quicker to sort than columns.
        packed = np.sum([field << 8 * place for place, field in enumerate(fields)], axis=0)
        found, which = np.unique(packed, return_inverse=True)
        first, second = self._terms(found[:, None] >> 8 * np.arange(6) & 0xFF)
        # Class after class, so that a sum is the same in whatever company a set is looked at.
        for k in range(int(num_rows.max())):
            some = np.flatnonzero(num_rows > k)
            term = which[begins[some] + k]
            cost[:, some] = cost[:, some] + first[term].T + second[term].T
        return cost

    def _terms(self, terms: Array) -> tuple[Array, Array]:
        """Return what rows of classes take, in two summands: float64 [num, T] each.

        Args:
            terms: int64 [num, 6]: the set's `lo` and number of rows, the class, and the row.
        """
        lo, num_rows, k = (terms[:, at : at + 1] for at in range(3))
        runs, steps, rice = (terms[:, at : at + 1] for at in range(3, 6))
        begin = np.where(k == 0, 0, np.clip(lo + k - self._base, 0, MAX_CLASSES))
        end = np.where(k + 1 == num_rows, MAX_CLASSES, np.clip(lo + k + 1 - self._base, 0, MAX_CLASSES))
        part = np.arange(len(self._base))

        def of_class(sums: Array, some: Array, *at: Array) -> Array:
            found: Array = sums[(part, end[some], *at)] - sums[(part, begin[some], *at)]
            return found

        every = np.arange(len(terms))
        n, num = of_class(self._elements, every), of_class(self._changes, every)
        more = num - of_class(self._ones, every)
        first, second = np.zeros(num.shape), np.zeros(num.shape)

        silent = np.flatnonzero(runs == SILENT)
        first[silent] = np.where(num[silent] > 0, np.inf, 0.0)

        dense = np.flatnonzero(runs == DENSE)
        is_swap = rice[dense] == SWAP
        code = np.where(is_swap, 0, rice[dense])
        same = n[dense] - num[dense]
        its = of_class(self._dense, dense, code) + same * (code + 1.0) + num[dense]
        first[dense] = np.where(is_swap, its + same - (num[dense] - more[dense]), its)

        sparse = np.flatnonzero((runs != SILENT) & (runs != DENSE))
        first[sparse] = runs_bits(RUNS[runs[sparse]], num[sparse], n[sparse]) + num[sparse]
        lone = sparse[steps[sparse, 0] == 0]
        second[lone] = np.where(more[lone] > 0, np.inf, 0.0)
        larger = sparse[steps[sparse, 0] > 0]
        second[larger] = runs_bits(RUNS[steps[larger] - 1], more[larger], num[larger])
        second[larger] += of_class(self._sparse, larger, rice[larger])
        return first, second


class CostsAhead:
    """What parts take with row sets, worked out for parts and sets that are asked for next too.

    A call costs half a millisecond, for one part and set as for hundreds.
    """

    def __init__(self, totals: Totals, order: Sequence[int], sure: Sequence[tuple[int, RowSet]] = ()) -> None:
        """Take the parts that are asked for, by number, in that order.

        Args:
            sure: sets that will be made, whatever is chosen for these parts, in order; and before which place
                in `order` each is.
        """
        self.totals = totals
        self._order = np.array(order, dtype=np.int64)
        self._places = {part: place for place, part in enumerate(order)}
        self._sure = sure
        self._begin = self._end = 0
        self._columns: dict[int, Array] = {}
        """By the identity of the set, which `sure`, or whoever asks, keeps."""
        self._costs: _Costs | None = None
        self._asked: tuple[int, int] | None = None
        """Which sets were asked for last: from which on, and how many there were."""
        self._table: Array = np.zeros((0, 0))
        """float64 [parts, sets], of those."""

    def of(self, part: int, sets: Sequence[RowSet], first: int) -> npt.NDArray[np.float64]:
        """Return the bits of a part with each of the sets from `first` on.

        Args:
            sets: those of the calls before, and perhaps more behind them.
        """
        place = self._places[part]
        if self._costs is None or not self._begin <= place < self._end:
            self._begin, self._end = place, min(place + _PARTS_AHEAD, len(self._order))
            self._costs = _Costs(self.totals.of(self._order[self._begin : self._end]))
            self._columns, self._asked = {}, None
            self._work_out(
                [*sets[first:], *(each for at, each in self._sure if self._begin < at < self._end)]
            )
        if self._asked != (first, len(sets)):
            self._work_out(sets[first:])
            self._table = np.stack([self._columns[id(each)] for each in sets[first:]], axis=1)
            self._asked = first, len(sets)
        its: npt.NDArray[np.float64] = self._table[place - self._begin]
        return its

    def _work_out(self, sets: Sequence[RowSet]) -> None:
        assert self._costs is not None
        if missing := [each for each in sets if id(each) not in self._columns]:
            self._columns |= zip(map(id, missing), self._costs.of(missing).T, strict=True)


def _before(values: Array) -> Array:
    """Return the sums of values along axis 1 before each place, and of all."""
    found = np.zeros((values.shape[0], values.shape[1] + 1, *values.shape[2:]), dtype=values.dtype)
    np.cumsum(values, axis=1, out=found[:, 1:])
    return found
