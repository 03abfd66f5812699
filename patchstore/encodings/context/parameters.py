"""Choose classes and their codes from a tensor's totals, for many tensors at once.

Every encoder chooses here, so all of them make the same bytes of the same change.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from patchstore.encodings.context.classes import MAX_CLASSES

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
_ROW_BITS = 24
_NEAR = 4  # codes tried on either side of the length of runs that theory gives

Array = npt.NDArray[Any]


def bin_of(magnitudes: Array) -> npt.NDArray[np.int64]:
    """Return the bins of |d| of 1 to 32,768, int64."""
    magnitudes = np.asarray(magnitudes, dtype=np.int64)
    powers = np.frexp(magnitudes.astype(np.float64))[1] - 6  # 32 to 63 give 0
    return np.where(magnitudes <= _EXACT, magnitudes - 1, _EXACT + powers)


def used_bins(changes: Array) -> int:
    """Return how many bins, the first ones, have all changes: where steps are small, one or two of 42.

    Args:
        changes: int64 [.., BINS]; at least one bin is kept.
    """
    used = np.flatnonzero(changes.reshape(-1, BINS).any(axis=0))
    return 1 + int(used[-1]) if len(used) else 1


def choose_classes(changed: Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the lowest class's exponent and the number of classes of tensors.

    Args:
        changed: int64 [T, 256], changes by the old exponent; at least one a tensor.

    Returns: lo int64 [T], 0 to 255, and K int64 [T], 2 to 16; the last class has no changes.
    """
    below = changed.cumsum(axis=1)
    highest = 255 - np.argmax(changed[:, ::-1] > 0, axis=1)
    lo = np.where(below[:, -1] >= _FEWEST, np.argmax(below >= _FEWEST, axis=1), highest)
    lo = np.maximum(lo, highest - (MAX_CLASSES - 2))
    return lo, highest - lo + 2


def choose_rows(
    num_elements: Array, changes: Array, num_classes: Array, width: Array | int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8], npt.NDArray[np.float64]]:
    """Return the codes of each class of tensors, by least expected length.

    Args:
        num_elements: int64 [T, 16], elements of each class. Those of classes without changes count only
            in their sum, so they may be stated in any of these.
        changes: int64 [T, 16, num_bins], changes of each class by the bin of |d|; see `used_bins`.
        num_classes: int64 [T], as `choose_classes` gave it.
        width: bytes of an element, [T] or one for all.

    Returns: K int64 [T]: `num_classes`, or 1 where one class for all is not longer; uint8 [T, 16, 3], with
        the first K rows in use; and the bits of the streams that are expected then, float64 [T].
    """
    num_tensors = len(num_elements)
    width = np.broadcast_to(width, num_tensors)
    used = changes.any(axis=2)
    owner, number = np.nonzero(used)
    rows = np.zeros((num_tensors, MAX_CLASSES, 3), dtype=np.uint8)
    rows[:, :, 0] = SILENT
    rows[owner, number], costs = _best(num_elements[owner, number], changes[owner, number], width[owner])
    apart = np.bincount(owner, weights=costs, minlength=num_tensors)
    joined, cost = _best(num_elements.sum(axis=1), changes.sum(axis=1), width)
    one = cost + _ROW_BITS <= apart + _ROW_BITS * num_classes
    rows[one] = (SILENT, 0, 0)
    rows[one, 0] = joined[one]
    return np.where(one, 1, num_classes), rows, np.where(one, cost, apart)


def runs_bits(runs: Array, num: Array, among: Array) -> npt.NDArray[np.float64]:
    """Return the bits that runs of these lengths are expected to take for `num` events among so many."""
    rate = np.clip(num / np.maximum(among, 1), 1e-9, 1 - 1e-9)
    stay = np.log1p(-rate)
    return np.where(num > 0, _bits_of_event(stay, runs) * num, among / runs)


def rice_bits(changes: Array, width: int) -> tuple[Array, Array]:
    """Return the bits of the Rice codes of |d| - 2 and of |d|, float64 [.., k].

    Args:
        changes: int64 [.., num_bins], see `used_bins`.
        width: bytes of an element.
    """
    # Counts times whole numbers of bits: exact in float64, in whatever order they are summed. Not a product
    # of matrices, for which NumPy starts a thread on every core: that took two seconds of CPU time.
    table = _RICE_BITS[8 * width][: changes.shape[-1]]
    both = np.einsum("...b,br->...r", changes.astype(np.float64), table)
    first, second = np.split(both, 2, axis=-1)
    return first, second


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
    runs, cost = _best_runs(num, num_elements)
    steps, steps_cost = _best_runs(larger, num)
    sparse_rice, dense_rice = np.empty((2, len(num), MAX_RICE + 1))
    for bits in (8, 16):
        at = np.flatnonzero(width == bits // 8)
        if not len(at):
            continue
        sparse_rice[at], dense_rice[at] = rice_bits(changes[at], bits // 8)
    same = (num_elements - num).astype(np.float64)
    dense_rice += same[:, None] * np.arange(1, MAX_RICE + 2)
    swapped = dense_rice[:, 0] + same - changes[:, 0]
    rice = np.argmin(sparse_rice, axis=1)
    some = larger > 0
    cost += num + np.where(some, steps_cost + sparse_rice.min(axis=1), 0.0)
    rows = np.stack([runs, np.where(some, steps + 1, 0), np.where(some, rice, 0)], axis=1)

    rice = np.argmin(dense_rice, axis=1)
    dense_cost = num + np.minimum(dense_rice.min(axis=1), swapped)
    rice = np.where(swapped < dense_rice.min(axis=1), SWAP, rice)
    dense = dense_cost < cost
    rows[dense] = np.stack([np.full_like(rice, DENSE), np.zeros_like(rice), rice], axis=1)[dense]
    return rows.astype(np.uint8), np.where(dense, dense_cost, cost)


def _best_runs(num: Array, among: Array) -> tuple[Array, Array]:
    """Return the code of the best length of runs for `num` events among so many, and the bits of all.

    Runs of M without an event cost a bit, and an event a bit and its place in the run.
    """
    rate = np.clip(num / np.maximum(among, 1), 1e-9, 1 - 1e-9)
    stay = np.log1p(-rate)
    middle = np.searchsorted(RUNS, np.log(0.5) / stay)
    best = np.zeros(len(rate), dtype=np.int64)
    least = np.full(len(rate), np.inf)
    for shift in range(-_NEAR, _NEAR + 1):
        code = np.clip(middle + shift, 0, len(RUNS) - 1)
        cost = _bits_of_event(stay, RUNS[code])
        better = cost < least
        best[better], least[better] = code[better], cost[better]
    return best, least * num


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


def _both_rice_bits(width: int) -> npt.NDArray[np.float64]:
    """Return the bits of each |d| for each k, less two and then as it is."""
    less_two = _rice_bits(np.maximum(_VALUES - 2, 0), width)
    less_two[0] = 0
    return np.hstack([less_two, _rice_bits(_VALUES, width)])


_RICE_BITS = {width: _both_rice_bits(width) for width in (8, 16)}
