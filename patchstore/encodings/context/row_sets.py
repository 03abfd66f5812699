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
_FEW = 4
"""Sets that are worked out one by one before those of the parts that come next are, too."""
_TIE = 1e-9
"""Of two sums of the same bits in different orders."""
_TERMS_TOGETHER = 1 << 20
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
    return list({_key(each): each for each in sets}.values())


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
        is_lost = (lo[:, None] < self._base) & (self._lowest < self._base)
        cost = np.where(is_lost, np.inf, 0.0)
        rows = np.concatenate([each.rows for each in sets]).astype(np.int64)
        begins = num_rows.cumsum() - num_rows
        number = np.arange(len(rows)) - np.repeat(begins, num_rows)
        fields = np.repeat(lo, num_rows), np.repeat(num_rows, num_rows), number, *rows.T
        # A byte each in one integer, which is quicker to sort than columns.
        packed = np.sum([field << 8 * place for place, field in enumerate(fields)], axis=0)
        found, which = np.unique(packed, return_inverse=True)
        terms = self._terms(*(found >> 8 * place & 0xFF for place in range(6)))
        # Class after class, so that a sum is the same in whatever company a set is looked at.
        for k in range(int(num_rows.max())):
            some = np.flatnonzero(num_rows > k)
            cost[some] += terms[which[begins[some] + k]]
        return cost.T

    def _terms(self, lo: Array, num_rows: Array, k: Array, runs: Array, steps: Array, rice: Array) -> Array:
        """Return what rows of classes take: float64 [num, T].

        Args:
            lo, num_rows, k: int64 [num], the set's first exponent and number of rows, and which class it is.
            runs, steps, rice: int64 [num], the row.
        """
        # Few classes have many rows, and few codes are in many rows: each is worked out once.
        classes, at = np.unique(lo << 16 | num_rows << 8 | k, return_inverse=True)
        n, num, more, sparse_rice, dense_rice = self._of_classes(
            classes >> 16, classes >> 8 & 0xFF, classes & 0xFF
        )
        found = np.zeros((len(at), n.shape[1]))

        silent = np.flatnonzero(runs == SILENT)
        found[silent] = np.where(num[at[silent]] > 0, np.inf, 0.0)

        dense = np.flatnonzero(runs == DENSE)
        its, is_swap = at[dense], rice[dense] == SWAP
        code = np.where(is_swap, 0, rice[dense])
        same = n[its] - num[its]
        bits = dense_rice[its, code] + same * (code + 1.0)[:, None] + num[its]
        found[dense] = np.where(is_swap[:, None], bits + same - (num[its] - more[its]), bits)

        sparse = np.flatnonzero((runs != SILENT) & (runs != DENSE))
        codes, which = np.unique(at[sparse] << 8 | runs[sparse], return_inverse=True)
        its = codes >> 8
        found[sparse] = (runs_bits(RUNS[codes & 0xFF][:, None], num[its], n[its]) + num[its])[which]
        lone = sparse[steps[sparse] == 0]
        found[lone] = np.where(more[at[lone]] > 0, np.inf, found[lone])
        larger = sparse[steps[sparse] > 0]
        codes, which = np.unique(at[larger] << 8 | steps[larger], return_inverse=True)
        its = codes >> 8
        found[larger] += runs_bits(RUNS[(codes & 0xFF) - 1][:, None], more[its], num[its])[which]
        found[larger] += sparse_rice[at[larger], rice[larger]]
        return found

    def _of_classes(self, lo: Array, num_rows: Array, k: Array) -> tuple[Array, Array, Array, Array, Array]:
        """Return what classes have of each part: elements, changes, and changes by more than one, [C, T]; and
        the bits of their Rice codes, sparse and dense, by the code: [C, codes, T].
        """
        lo, num_rows, k = lo[:, None], num_rows[:, None], k[:, None]
        begin = np.where(k == 0, 0, np.clip(lo + k - self._base, 0, MAX_CLASSES))
        end = np.where(k + 1 == num_rows, MAX_CLASSES, np.clip(lo + k + 1 - self._base, 0, MAX_CLASSES))
        part = np.arange(len(self._base))

        def of_class(sums: Array) -> Array:
            found: Array = sums[part, end] - sums[part, begin]
            return found

        num = of_class(self._changes)
        sparse, dense = (
            np.ascontiguousarray(of_class(sums).swapaxes(1, 2)) for sums in (self._sparse, self._dense)
        )
        return of_class(self._elements), num, num - of_class(self._ones), sparse, dense


class CostsAhead:
    """What parts take with row sets, worked out for parts and sets that are asked for next too.

    A call costs half a millisecond, for one part and set as for tens. Sets that are made are the best of some
    part; where many are made, those of the parts that come next are worked out at once.
    """

    def __init__(
        self,
        totals: Totals,
        own: Sequence[RowSet],
        order: Sequence[int],
        sure: Sequence[tuple[int, RowSet]] = (),
    ) -> None:
        """Take the parts that are asked for, by number, in that order.

        Args:
            own: the best rows of each part of `totals`.
            sure: sets that will be made, whatever is chosen for these parts, in order; and before which place
                in `order` each is.
        """
        self.totals = totals
        self._own, self._sure = own, sure
        self._order = np.array(order, dtype=np.int64)
        self._places = {part: place for place, part in enumerate(order)}
        self._begin = self._end = 0
        self._costs: _Costs | None = None
        self._worked_out: dict[tuple[int, bytes], Array] = {}
        """float64 [parts] of sets, of the parts from `begin` to `end`."""
        self._first = 0
        self._asked: list[Array] = []
        """The same of all sets from the first one on."""
        self._num_missed = 0
        """Sets among these that had not been worked out."""

    def of(self, part: int, sets: Sequence[RowSet], first: int) -> npt.NDArray[np.float64]:
        """Return the bits of a part with each of the sets from `first` on.

        Args:
            sets: those of the calls before, and perhaps more behind them.
        """
        place = self._places[part]
        if self._costs is None or not self._begin <= place < self._end:
            self._go_to(place, sets[first:])
            self._first, self._asked, self._num_missed = first, [], 0
        for each in sets[self._first + len(self._asked) :]:
            if _key(each) not in self._worked_out:
                self._num_missed += 1
                self._work_out([each, *(self._own_from(place) if self._num_missed > _FEW else ())])
            self._asked.append(self._worked_out[_key(each)])
        its = self._asked[first - self._first :]
        return np.array([each[place - self._begin] for each in its])

    def _go_to(self, place: int, sets: Sequence[RowSet]) -> None:
        self._begin, self._end = place, min(place + _PARTS_AHEAD, len(self._order))
        self._costs, self._worked_out = _Costs(self.totals.of(self._order[self._begin : self._end])), {}
        self._work_out([*sets, *(each for at, each in self._sure if self._begin < at < self._end)])

    def _own_from(self, place: int) -> list[RowSet]:
        some = self._order[place : self._end].tolist()
        return [own for own in (self._own[part] for part in some) if _key(own) not in self._worked_out]

    def _work_out(self, sets: Sequence[RowSet]) -> None:
        assert self._costs is not None
        different = {_key(each): each for each in sets}
        self._worked_out |= zip(different, self._costs.of([*different.values()]).T, strict=True)


def _key(each: RowSet) -> tuple[int, bytes]:
    return each.lo, each.rows.tobytes()


def _before(values: Array) -> Array:
    """Return the sums of values along axis 1 before each place, and of all."""
    found = np.zeros((values.shape[0], values.shape[1] + 1, *values.shape[2:]), dtype=values.dtype)
    np.cumsum(values, axis=1, out=found[:, 1:])
    return found
