"""Rows: how each class is coded. They are chosen from a part's totals, and parts share sets of them.

Every encoder chooses here, so all of them make the same bytes of the same change.

A set of 8 classes takes 26 bytes, and a part of 300 changes 260. So a part takes its own best rows only if
they save more than they cost; otherwise it takes those of another part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from patchstore.codec.context.bits import Array
from patchstore.codec.context.classes import MAX_CLASSES
from patchstore.tensors.columns import ramps

RUNS = np.array([1, 2, 3] + [(4 + f) << j for j in range(15) for f in range(4)], dtype=np.int64)
"""Lengths of runs, by code."""
SILENT = 0x7F
DENSE = 0x80
SWAP = 0x80
MAX_RICE = 15
UNARY_LIMIT = 24
"""A Rice code with so many ones goes on with the value's raw bits."""

BINS = 42
"""Bins of |d|: 1 to 31 have one each, and from 32 on every power of two."""
_EXACT = 31
_VALUES = np.array([*range(1, 32), *(3 << (j - 1) for j in range(5, 15)), 1 << 15], dtype=np.int64)
_FEWEST = 8  # changes at or below the lowest class: fewer do not pay for a row
_CELLS, _FIRST_RATE, _LAST_RATE = 64, -30, 5
"""Of a table by log2 of rates: cells of each power of two, and its ends."""
SHARING = 8192
"""Parts of more changes have rows of their own."""
SET_BITS = 16
ROW_BITS = 24
_CANDIDATES = 16
"""Parts of a group, those with the most changes, whose own rows others may take."""
_LAST_SETS = 32
"""Sets that were made before, which parts may take."""
PARTS_AHEAD = 256
_TIE = 1e-9
"""Of two sums of the same bits in different orders."""
_ON_ONE_THREAD = 1 << 18
"""Products of a matrix for which OpenBLAS starts no other threads, which would take seconds of CPU time."""
PARTS_TOGETHER = 512
"""Parts whose best rows are worked out at a time, in the processor's caches."""
_TERMS_TOGETHER = 1 << 19
"""Classes of parts and sets whose bits are worked out at a time."""


def bin_of(magnitudes: Array) -> npt.NDArray[np.int64]:
    """Return the bins of |d| of 1 to 32,768, int64."""
    magnitudes = np.asarray(magnitudes, dtype=np.int64)
    powers = np.frexp(magnitudes.astype(np.float64))[1] - 6  # 32 to 63 give 0
    return np.where(magnitudes <= _EXACT, magnitudes - 1, _EXACT + powers)


def used_bins(changes: Array) -> int:
    """Return how many bins, the first ones, have all changes, int64 [.., BINS]; at least one."""
    used = np.flatnonzero(changes.reshape(-1, BINS).any(axis=0))
    return 1 + int(used[-1]) if len(used) else 1


def choose_classes(changed: Array, lowest: int = 0) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the lowest class's exponent, int64 [T], and the number of classes, 2 to 16, of tensors.

    The last class has no changes. `changed` and `lowest` are as `Totals` has them.
    """
    below = changed.cumsum(axis=1)
    highest = _highest(changed, lowest)
    lo = np.where(below[:, -1] >= _FEWEST, lowest + np.argmax(below >= _FEWEST, axis=1), highest)
    lo = np.maximum(lo, highest - (MAX_CLASSES - 2))
    return lo, highest - lo + 2


def _highest(changed: Array, lowest: int) -> Array:
    """Return the largest exponent of changes, int64 [T]."""
    highest: Array = lowest + changed.shape[1] - 1 - np.argmax(changed[:, ::-1] > 0, axis=1)
    return highest


def choose_rows(
    num_elements: Array, changes: Array, num_classes: Array, width: Array | int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8], npt.NDArray[np.float64]]:
    """Return the codes of each class of tensors, by least expected length.

    Args:
        num_elements: int64 [T, 16], elements of each class. Those of classes without changes count only
            in their sum, so they may be stated in any of these.
        changes: int64 [T, 16, num_bins], changes of each class by the bin of |d|; see `used_bins`.
        width: bytes of an element, [T] or one for all.

    Returns: K int64 [T]: `num_classes`, or 1 where one class for all is not longer; uint8 [T, 16, 3], with
        the first K rows in use; and the bits of the streams that are expected then, float64 [T].
    """
    num_tensors = len(num_elements)
    width = np.broadcast_to(width, num_tensors)
    used = changes.any(axis=2)
    owner, number = np.nonzero(used)
    silent = np.zeros((MAX_CLASSES, 3), dtype=np.uint8)
    silent[:, 0] = SILENT
    rows = np.tile(silent, (num_tensors, 1, 1))
    rows[owner, number], costs = _best(num_elements[owner, number], changes[owner, number], width[owner])
    apart = np.bincount(owner, weights=costs, minlength=num_tensors)
    joined, cost = _best(num_elements.sum(axis=1), changes.sum(axis=1), width)
    one = cost + ROW_BITS <= apart + ROW_BITS * num_classes
    rows[one] = silent
    rows[one, 0] = joined[one]
    return np.where(one, 1, num_classes), rows, np.where(one, cost, apart)


def runs_bits(runs: Array, num: Array, among: Array) -> npt.NDArray[np.float64]:
    """Return the bits that runs of these lengths are expected to take for `num` events among so many."""
    rate = np.clip(num / np.maximum(among, 1), 1e-9, 1 - 1e-9)
    stay = np.log1p(-rate)
    return np.where(num > 0, _bits_of_event(stay, runs) * num, among / runs)


def rice_bits(
    changes: Array, width: int, less: int, some: Sequence[int] = range(MAX_RICE + 1)
) -> npt.NDArray[np.float64]:
    """Return the bits of the Rice codes of |d| - `less`, 0 or 2, with some k, float64 [.., k], of changes by
    bin.
    """
    # Counts times whole numbers of bits: exact in float64, in whatever order they are summed.
    num_bins = changes.shape[-1]
    table = np.ascontiguousarray(_RICE_BITS[8 * width, less][:num_bins, some])
    flat = changes.reshape(-1, num_bins).astype(np.float64)
    found = np.empty((len(flat), table.shape[1]))
    step = _ON_ONE_THREAD // table.size
    for first in range(0, len(flat), step):
        np.matmul(flat[first : first + step], table, out=found[first : first + step])
    return found.reshape(*changes.shape[:-1], -1)


def valid_rows(rows: Array) -> npt.NDArray[np.bool_]:
    """Return which rows (uint8 [num, 3]) have a meaning."""
    code, runs, rice = rows[:, 0], rows[:, 1], rows[:, 2]
    plain = (runs == 0) & (rice == 0)
    sparse = (code < len(RUNS)) & (plain | ((runs > 0) & (runs <= len(RUNS)) & (rice <= MAX_RICE)))
    dense = (code == DENSE) & (runs == 0) & ((rice <= MAX_RICE) | (rice == SWAP))
    valid: npt.NDArray[np.bool_] = sparse | dense | ((code == SILENT) & plain)
    return valid


def _best(num_elements: Array, changes: Array, width: Array) -> tuple[Array, Array]:
    """Return the best rows, uint8 [num, 3], and the bits they are expected to take, float64 [num]."""
    num = changes.sum(axis=1)
    larger = num - changes[:, 0]
    rows = np.zeros((len(num), 3), dtype=np.uint8)
    rows[:, 0], cost = _best_runs(num, num_elements)
    cost += num
    for bits in (8, 16):
        is_wide = width == bits // 8
        some = np.flatnonzero(is_wide & (larger > 0))
        if len(some):
            steps, steps_cost = _best_runs(larger[some], num[some])
            sparse_rice = rice_bits(changes[some], bits // 8, 2)
            rows[some, 1], rows[some, 2] = steps + 1, np.argmin(sparse_rice, axis=1)
            cost[some] += steps_cost + sparse_rice.min(axis=1)
        # A dense code takes a bit for each element, or more.
        some = np.flatnonzero(is_wide & (cost > num_elements))
        if not len(some):
            continue
        dense_rice = rice_bits(changes[some], bits // 8, 0)
        same = (num_elements[some] - num[some]).astype(np.float64)
        dense_rice += same[:, None] * np.arange(1, MAX_RICE + 2)
        swapped, least = dense_rice[:, 0] + same - changes[some, 0], dense_rice.min(axis=1)
        rice = np.where(swapped < least, SWAP, np.argmin(dense_rice, axis=1))
        dense_cost = num[some] + np.minimum(least, swapped)
        is_dense = dense_cost < cost[some]
        dense = some[is_dense]
        rows[dense, 0], rows[dense, 1], rows[dense, 2] = DENSE, 0, rice[is_dense]
        cost[dense] = dense_cost[is_dense]
    return rows, cost


def _best_runs(num: Array, among: Array) -> tuple[Array, Array]:
    """Return the code of the best length of runs for `num` events among so many, and the bits of all.

    Runs of M without an event cost a bit, and an event a bit and its place in the run.
    """
    rate = np.clip(num / np.maximum(among, 1), 1e-9, 1 - 1e-9)
    stay = np.log1p(-rate)
    middle = _best_codes()[np.rint(_CELLS * (np.log2(-stay) - _FIRST_RATE)).astype(np.int64)]
    best = np.zeros(len(rate), dtype=np.int64)
    least = np.full(len(rate), np.inf)
    for shift in (-1, 0, 1):
        code = np.clip(middle + shift, 0, len(RUNS) - 1)
        cost = _bits_of_event(stay, RUNS[code])
        better = cost < least
        best[better], least[better] = code[better], cost[better]
    return best, least * num


@cache
def _best_codes() -> Array:
    """Return the code that is best, or beside the best, by the logarithm of how rare events are: int64."""
    rates = 2.0 ** np.arange(_FIRST_RATE, _LAST_RATE + 1 / _CELLS, 1 / _CELLS)
    runs = np.broadcast_to(RUNS, (len(rates), len(RUNS)))
    found: Array = _bits_of_event(-rates[:, None], runs).argmin(axis=1)
    return found


def _bits_of_event(stay: Array, runs: Any) -> Array:
    """Return the bits of an event and of the runs before it; `stay` is the logarithm of its absence."""
    low = np.frexp(runs.astype(np.float64))[1] - 1
    short = (2 << low.astype(np.int64)) - runs
    none = np.exp(stay * runs)
    cost: Array = low + (1 + np.exp(stay * short) - none) / (1 - none)
    return cost


def _rice_bits(value: Array, width: int) -> npt.NDArray[np.float64]:
    """Return the lengths of Rice codes, [values, k]."""
    k = np.arange(MAX_RICE + 1)
    ones = value[:, None] >> k
    return np.where(ones >= UNARY_LIMIT, UNARY_LIMIT + width, ones + 1 + k).astype(np.float64)


def _rice_table(width: int, less: int) -> npt.NDArray[np.float64]:
    """Return the bits of |d| - `less` by its bin, [BINS, k]."""
    found = _rice_bits(np.maximum(_VALUES - less, 0), width)
    found[:1] *= less == 0
    return found


_RICE_BITS = {(width, less): _rice_table(width, less) for width in (8, 16) for less in (0, 2)}


@dataclass(frozen=True, slots=True)
class Sets:
    """S row sets, as columns: classes, and the code of each."""

    lo: npt.NDArray[np.int64]
    """[S]: exponents up to this one are in the first class."""
    nums: npt.NDArray[np.int64]
    """[S], classes of each."""
    rows: npt.NDArray[np.uint8]
    """[S, 16, 3], with silent ones behind those of each."""

    @classmethod
    def none(cls) -> "Sets":
        nothing = np.zeros(0, dtype=np.int64)
        return cls(nothing, nothing, np.zeros((0, MAX_CLASSES, 3), dtype=np.uint8))

    @classmethod
    def of(cls, lo: Array, nums: Array, listed: Array) -> "Sets":
        """Take the rows of one set after the other, [num, 3]."""
        rows = np.zeros((len(lo), MAX_CLASSES, 3), dtype=np.uint8)
        rows[:, :, 0] = SILENT
        rows[np.repeat(np.arange(len(lo)), nums), ramps(nums)] = listed
        return cls(lo, nums, rows)

    @classmethod
    def joined(cls, many: Sequence["Sets"]) -> "Sets":
        if len(many) == 1:
            return many[0]
        lo, nums, rows = ([getattr(each, name) for each in many] for name in ("lo", "nums", "rows"))
        return cls(np.concatenate(lo), np.concatenate(nums), np.concatenate(rows))

    def __len__(self) -> int:
        return len(self.lo)

    def at(self, some: Array | slice) -> "Sets":
        """Return some of them, by number."""
        return Sets(self.lo[some], self.nums[some], self.rows[some])

    def put(self, first: int, some: "Sets") -> None:
        """Write over those from a number on."""
        mine = slice(first, first + len(some))
        self.lo[mine], self.nums[mine], self.rows[mine] = some.lo, some.nums, some.rows

    @property
    def bits(self) -> npt.NDArray[np.int64]:
        """int64 [S], what each takes in a table, about."""
        return SET_BITS + ROW_BITS * self.nums

    @property
    def listed(self) -> npt.NDArray[np.uint8]:
        """[num, 3], the rows of one after the other."""
        return self.rows[np.arange(MAX_CLASSES) < self.nums[:, None]]

    def distinct(self) -> tuple["Sets", npt.NDArray[np.int64]]:
        """Return each set once, in the order in which they come first, and of each its number there."""
        # A text of bytes each, which is quicker to sort than columns.
        flat = np.column_stack([self.lo, self.nums, self.rows.reshape(len(self), -1)]).astype(np.uint8)
        texts = np.ascontiguousarray(flat).view(f"V{flat.shape[1]}").reshape(-1)
        _, first, inverse = np.unique(texts, return_index=True, return_inverse=True)
        order = first.argsort()
        ranks = np.empty_like(order)
        ranks[order] = np.arange(len(order))
        return self.at(first[order]), ranks[inverse]


# Without slots, so that what is asked several times is worked out once.
@dataclass(frozen=True, kw_only=True)
class Totals:
    """What of the elements of T parts of one dtype decides on their rows."""

    changed: npt.NDArray[np.int64]
    """[T, exponents], changes by the old exponent; at least one a part."""
    num_elements: npt.NDArray[np.int64]
    """[T, 16], elements by old exponent: of `first_exponent` and below, of the next ones, of the last and
    above."""
    changes: npt.NDArray[np.int64]
    """[T, 16, num_bins], changes in the same way, by the bin of |d|; see `used_bins`."""
    width: int
    """Bytes of an element."""
    lowest: int = 0
    """The first exponent of `changed`: those of most models are a tenth of all that there are."""

    @cached_property
    def base(self) -> npt.NDArray[np.int64]:
        """[T], `first_exponent` of each part."""
        return first_exponent(self.changed, self.lowest)

    def of(self, some: Array | slice) -> "Totals":
        """Return those of some parts, by number; of a slice without a copy."""
        if not isinstance(some, slice) and len(some) == len(self.changed) and (some[1:] > some[:-1]).all():
            return self
        return Totals(
            changed=self.changed[some],
            num_elements=self.num_elements[some],
            changes=self.changes[some],
            width=self.width,
            lowest=self.lowest,
        )


class BestRows(NamedTuple):
    """The rows that take least for each of T parts, if it is alone."""

    sets: Sets
    bits: npt.NDArray[np.float64]
    """[T], that its streams are expected to take, without the rows."""

    def of(self, some: Array | slice) -> "BestRows":
        """Return those of some parts, by number."""
        return BestRows(self.sets.at(some), self.bits[some])


def first_exponent(changed: Array, lowest: int = 0) -> npt.NDArray[np.int64]:
    """Return the first of 16 exponents that `Totals` tell apart: the last has no changes."""
    found: npt.NDArray[np.int64] = np.maximum(_highest(changed, lowest) - (MAX_CLASSES - 2), 0)
    return found


class RowSets:
    """The row sets of a payload, in the order in which they were chosen."""

    def __init__(self) -> None:
        self._room = Sets.none()
        self.keys: list[int] = []
        """What tells each from all others: the part whose own it was, for a caller that says so."""
        self.num_parts = 0
        """How many such parts there were."""

    @property
    def sets(self) -> Sets:
        """Those that were added so far; later ones may be written behind them."""
        return self._room.at(slice(len(self.keys)))

    def last(self) -> tuple[Sets, int]:
        """Return those that parts may take, and the number of the first of them."""
        first = max(0, len(self.keys) - _LAST_SETS)
        return self.sets.at(slice(first, None)), first

    def add(self, some: Sets, keys: Sequence[int] | None = None) -> int:
        """Add sets; return the number of the first. Keys are at least 0."""
        first, end = len(self.keys), len(self.keys) + len(some)
        if end > len(self._room):
            room = Sets.joined([self.sets, some])
            self._room = Sets.joined([room, room])
        else:
            self._room.put(first, some)
        self.keys += range(-1 - first, -1 - end, -1) if keys is None else keys
        return first

    def choose(self, totals: Totals, own_rows: "BestRows | None" = None) -> npt.NDArray[np.int64]:
        """Choose sets for parts, by least expected length; return the number of each part's, int64 [T].

        The result depends on the parts that came before, and on the order. `own_rows` are the best of these
        parts, if they are known.
        """
        own, costs = own_rows or best_rows(totals)
        num_changed = totals.changed.sum(axis=1)
        chosen = np.full(len(own), -1)
        large, small = np.flatnonzero(num_changed > SHARING), np.flatnonzero(num_changed <= SHARING)
        if len(large):
            chosen[large] = self.add(own.at(large)) + np.arange(len(large))
        if not len(small):
            return chosen
        last, first = self.last()
        by_size = small[np.argsort(-num_changed[small], kind="stable")]
        candidates, _ = own.at(by_size[:_CANDIDATES]).distinct()
        its = totals.of(small)
        fresh = Sets.joined([_joint(its), candidates]) if len(small) > 1 else candidates
        bits = Costs(its).of(Sets.joined([last, fresh]))
        num_old = len(last)
        best = bits[:, :num_old].min(axis=1) if num_old else np.full(len(small), np.inf)
        taken = bits[:, :num_old].argmin(axis=1) if num_old else np.zeros(len(small), dtype=np.int64)
        opening = fresh.bits.astype(np.float64)
        # Rows of its own are always an answer.
        alone = costs[small] + own.bits[small]
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
        chosen[small] = first + taken
        # Sets are added in the order in which parts need them.
        joined, is_new = Sets.joined([fresh, own.at(small)]), is_alone | (taken >= num_old)
        which = np.where(is_alone, len(fresh) + np.arange(len(small)), taken - num_old)[is_new]
        distinct, at, inverse = np.unique(which, return_index=True, return_inverse=True)
        order = at.argsort()
        ranks = np.empty_like(order)
        ranks[order] = np.arange(len(order))
        if len(distinct):
            chosen[small[is_new]] = self.add(joined.at(distinct[order])) + ranks[inverse]
        return chosen

    def choose_each(
        self, own: BestRows, ahead: "CostsAhead", parts: Array, keys: Array
    ) -> npt.NDArray[np.int64]:
        """`choose` for parts that are alone in their calls, of at most `SHARING` changes each, one after the
        other; their numbers in `ahead`, where they follow each other, and their keys.
        """
        chosen = np.zeros(len(parts), dtype=np.int64)
        alone = own.bits + own.sets.bits
        at = 0
        while at < len(parts):
            last, first = self.last()
            if len(last):
                bits = ahead.of(parts[at], last, self.keys[first:], first)[: len(parts) - at]
                taken = bits.argmin(axis=1)
                saved = alone[at : at + len(bits)] - bits[np.arange(len(bits)), taken]
                # `choose` sums the bits of its own rows in another order than `best_rows`, which may decide.
                is_tie = np.abs(saved) <= _TIE * alone[at : at + len(bits)]
                num = int(np.argmin(np.append((saved > 0) & ~is_tie, [False])))
                chosen[at : at + num] = first + taken[:num]
                at += num
                if num == len(bits):
                    continue
                if is_tie[num]:
                    of_part = ahead.totals.of(parts[at : at + 1])
                    chosen[at : at + 1] = self.choose(of_part, own.of(slice(at, at + 1)))
                    at += 1
                    continue
            chosen[at] = self.add(own.sets.at(slice(at, at + 1)), [int(keys[at])])
            at += 1
        return chosen


def best_rows(totals: Totals) -> BestRows:
    """Return the best rows of each part; the same for a part in whatever company it is looked at."""
    firsts = range(0, max(len(totals.changed), 1), PARTS_TOGETHER)
    many = [_best_of_some(totals.of(slice(first, first + PARTS_TOGETHER))) for first in firsts]
    return BestRows(Sets.joined([each.sets for each in many]), np.concatenate([each.bits for each in many]))


def _best_of_some(totals: Totals) -> BestRows:
    lo, nums = choose_classes(totals.changed, totals.lowest)
    # Classes ascend with exponents, so each has those from its first one on.
    number = np.arange(MAX_CLASSES + 1)
    begins = np.clip(number + (lo - totals.base)[:, None], 0, MAX_CLASSES)
    begins[:, 0] = 0
    begins[number >= nums[:, None]] = MAX_CLASSES
    num_elements = np.diff(np.take_along_axis(_before(totals.num_elements), begins, axis=1), axis=1)
    changes, num_first = np.zeros_like(totals.changes), begins[:, 1]
    for num in np.unique(num_first).tolist():
        # Each class behind the first has one exponent, but for the last, where nothing changes.
        its = np.flatnonzero(num_first == num)
        some = totals.changes[its]
        changes[its, 0] = some[:, :num].sum(axis=1)
        changes[its, 1 : MAX_CLASSES + 1 - num] = some[:, num:]
    kept, rows, costs = choose_rows(num_elements, changes, nums, totals.width)
    return BestRows(Sets(lo, kept, rows), costs)


def _joint(totals: Totals) -> Sets:
    """Return the best rows of several parts together."""
    changed = totals.changed.sum(axis=0, keepdims=True)
    base = first_exponent(changed, totals.lowest)
    # The class of each of the 16 exponents from a part's own first one on.
    at = np.clip(totals.base[:, None] + np.arange(MAX_CLASSES) - base, 0, MAX_CLASSES - 1)
    changes = np.zeros_like(totals.changes[:1])
    num_elements = np.zeros_like(totals.num_elements[:1])
    np.add.at(changes[0], at, totals.changes)
    np.add.at(num_elements[0], at, totals.num_elements)
    found, _ = best_rows(
        Totals(
            changed=changed,
            num_elements=num_elements,
            changes=changes,
            width=totals.width,
            lowest=totals.lowest,
        )
    )
    return found


class Costs:
    """The bits that the streams of parts are expected to take with any rows."""

    def __init__(self, totals: Totals) -> None:
        self._totals = totals
        self._base = totals.base
        self._lowest = totals.lowest + np.argmax(totals.changed > 0, axis=1)
        num = totals.changes.sum(axis=2)
        # Behind the sums of classes from the first on: that of no class.
        self._elements = _before(totals.num_elements)
        self._changes = _before(num)
        self._ones = _before(totals.changes[:, :, 0])
        self._rice: dict[tuple[int, int], Array] = {}
        """The same of Rice codes, which few sets have, by `less` and k."""

    def of(self, sets: Sets) -> npt.NDArray[np.float64]:
        """Return float64 [T, sets]; infinite where a set cannot say what changes."""
        step = max(1, _TERMS_TOGETHER // (len(self._base) * MAX_CLASSES))
        steps = range(0, len(sets), step)
        return np.concatenate([self._of(sets.at(slice(i, i + step))) for i in steps], axis=1)

    def _of(self, sets: Sets) -> npt.NDArray[np.float64]:
        """Return the same of a few sets: each row of each class once, however many sets have it."""
        lo, num_rows = sets.lo, sets.nums
        # Changes below the first exponent that is told apart must all be in the first class.
        is_lost = (lo < self._base[:, None]) & (self._lowest < self._base)[:, None]
        cost = np.where(is_lost, np.inf, 0.0)
        rows = sets.listed.astype(np.int64)
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
        """Return what rows of classes take, in two summands; a row is the set's `lo` and number of rows, the
        class, and its codes.
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
        its = of_class(self._rice_sums(0, code), dense, code) + same * (code + 1.0) + num[dense]
        first[dense] = np.where(is_swap, its + same - (num[dense] - more[dense]), its)

        sparse = np.flatnonzero((runs != SILENT) & (runs != DENSE))
        first[sparse] = runs_bits(RUNS[runs[sparse]], num[sparse], n[sparse]) + num[sparse]
        lone = sparse[steps[sparse, 0] == 0]
        second[lone] = np.where(more[lone] > 0, np.inf, 0.0)
        larger = sparse[steps[sparse, 0] > 0]
        second[larger] = runs_bits(RUNS[steps[larger] - 1], more[larger], num[larger])
        second[larger] += of_class(self._rice_sums(2, rice[larger]), larger, rice[larger])
        return first, second

    def _rice_sums(self, less: int, codes: Array) -> Array:
        """Return the sums of Rice codes before each class, float64 [T, 17, k], up to the largest of some k;
        those of others are not worked out.
        """
        used = np.unique(codes)
        missing = [k for k in used.tolist() if (less, k) not in self._rice]
        if missing:
            found = _before(rice_bits(self._totals.changes, self._totals.width, less, missing))
            self._rice |= {(less, k): found[:, :, at] for at, k in enumerate(missing)}
        sums = np.empty((len(self._base), MAX_CLASSES + 1, int(used.max(initial=-1)) + 1))
        for k in used.tolist():
            sums[:, :, k] = self._rice[less, k]
        return sums


class CostsAhead:
    """What parts take with row sets, worked out for parts and sets that are asked for next too.

    A call costs half a millisecond, for one part and set as for hundreds.
    """

    def __init__(self, totals: Totals, order: Array, sure: Sets, keys: Array, before: Array) -> None:
        """Take the parts that are asked for, by number, in that order.

        `sure` are sets that will be made, whatever is chosen for these parts, in order; their keys, and
        before which place in `order` each is.
        """
        self.totals = totals
        self._order = order
        self._places = {part: place for place, part in enumerate(order.tolist())}
        self._sure, self._keys, self._before = sure, keys, before
        self._begin = self._end = 0
        self._columns: dict[int, Array] = {}
        """By the key of the set."""
        self._costs: Costs | None = None
        self._asked: tuple[int, int] | None = None
        """Which sets were asked for last: from which on, and how many there were."""
        self._table: Array = np.zeros((0, 0))
        """float64 [parts, sets], of those."""

    def of(self, part: int, sets: Sets, keys: Sequence[int], first: int) -> npt.NDArray[np.float64]:
        """Return the bits of a part, and of some that are asked for next, with each of these sets, which were
        made from the `first` on: [parts, sets].
        """
        place = self._places[part]
        if self._costs is None or not self._begin <= place < self._end:
            self._begin, self._end = place, min(place + PARTS_AHEAD, len(self._order))
            self._costs = Costs(self.totals.of(self._order[self._begin : self._end]))
            self._columns, self._asked = {}, None
            soon = np.flatnonzero((self._begin < self._before) & (self._before < self._end))
            self._work_out(Sets.joined([sets, self._sure.at(soon)]), [*keys, *self._keys[soon].tolist()])
        if self._asked != (first, len(sets)):
            self._work_out(sets, keys)
            self._table = np.stack([self._columns[key] for key in keys], axis=1)
            self._asked = first, len(sets)
        its: npt.NDArray[np.float64] = self._table[place - self._begin :]
        return its

    def _work_out(self, sets: Sets, keys: Sequence[int]) -> None:
        assert self._costs is not None
        if missing := [place for place, key in enumerate(keys) if key not in self._columns]:
            columns = self._costs.of(sets.at(np.array(missing))).T
            self._columns |= zip([keys[place] for place in missing], columns, strict=True)


def _before(values: Array) -> Array:
    """Return the sums of values along axis 1 before each place, and of all."""
    found = np.zeros((values.shape[0], values.shape[1] + 1, *values.shape[2:]), dtype=values.dtype)
    np.cumsum(values, axis=1, out=found[:, 1:])
    return found


def choose_by_group(
    row_sets: RowSets, changed: Array, found: Array, widths: Array, order: Array, bounds: Array
) -> npt.NDArray[np.int64]:
    """Choose rows as `RowSets.choose` does for one group of parts, of one width, after the other.

    Args:
        row_sets: those of the payload so far, which grow by what these parts need.
        changed: int64 [T, 256], as `Totals` has it; so are the other two, of parts of any width.
        found: int64 [T, 16, 1 + BINS], `num_elements` and then `changes`.
        widths: int [T], bytes of an element.
        order: int64 [T], the parts, group after group.
        bounds: int64 [groups + 1], where each group begins in `order`, and the end.

    Returns:
        The number of each part's set, int64 [T].
    """
    first, numbers = row_sets.num_parts, np.zeros(len(changed), dtype=np.int64)
    row_sets.num_parts += len(changed)
    num_elements, changes = found[:, :, 0], found[:, :, 1 : 1 + used_bins(found[:, :, 1:])]
    used = np.flatnonzero(changed.any(axis=0))
    lowest = int(used[0]) if len(used) else 0
    changed = changed[:, lowest : int(used[-1]) + 1 if len(used) else 1]
    every, mine, best = dict[int, Totals](), dict[int, Array](), list[BestRows]()
    place = np.zeros(len(changed), dtype=np.int64)
    for width in np.unique(widths).tolist():
        alike = np.flatnonzero(widths == width)
        place[alike] = np.arange(len(alike))
        every[width], mine[width] = (
            Totals(
                changed=changed[alike],
                num_elements=num_elements[alike],
                changes=changes[alike],
                width=width,
                lowest=lowest,
            ),
            alike,
        )
        # Of all parts at once: each call costs a millisecond, and there may be a group for each part.
        best.append(best_rows(every[width]))
    ranks = np.concatenate([*mine.values()]).argsort()
    own = BestRows(
        Sets.joined([each.sets for each in best]), np.concatenate([each.bits for each in best])
    ).of(ranks)
    firsts = order[bounds[:-1]]
    is_single = np.diff(bounds) == 1
    is_sure = is_single & (changed[firsts].sum(axis=1) > SHARING)
    alone, sure = np.flatnonzero(is_single & ~is_sure), np.flatnonzero(is_sure)
    ahead = {}
    for width in np.unique(widths[firsts[alone]]).tolist():
        its = alone[widths[firsts[alone]] == width]
        sets, before = own.sets.at(firsts[sure]), np.searchsorted(its, sure)
        ahead[width] = CostsAhead(every[width], place[firsts[its]], sets, first + firsts[sure], before)
    # Those that follow each other and are sure are added at once, and those that are alone are looked at so.
    kind = np.where(is_sure, -1, np.where(is_single, widths[firsts], 0))
    begins = np.flatnonzero((kind == 0) | (kind != np.concatenate([[0], kind[:-1]]))).tolist()
    for group, end in zip(begins, [*begins[1:], len(is_sure)], strict=True):
        some = order[bounds[group] : bounds[end]]
        width = int(widths[some[0]])
        if is_sure[group]:
            numbers[some] = row_sets.add(own.sets.at(some), (first + some).tolist()) + np.arange(len(some))
        elif is_single[group]:
            numbers[some] = row_sets.choose_each(own.of(some), ahead[width], place[some], first + some)
        else:
            numbers[some] = row_sets.choose(every[width].of(place[some]), own.of(some))
    return numbers
