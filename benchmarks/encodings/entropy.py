"""Entropy of a step's changes: the lower bound of positions and values, by counts of the step itself.

A change is its position and d = k(new) - k(old) modulo 2**16, signed, where k orders bf16
bit patterns as numbers (docs/design/0008-runs-through-classes.md). Each tensor of each step has counts
of its own (a plug-in estimate, from which a code that must learn or state them has to differ):

- Given the exponent, a position costs the binary entropy of the share of changed elements among all
  that have the same old exponent, and a value the order-0 entropy of d among their changes.
- Plain, both are the same over all elements at once.

Nothing else conditions either: no sign, mantissa, neighbour or earlier step. Classes with few changes
make the estimate a little too low.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint16]
"""[num_elements], bit patterns of a flattened bf16 tensor."""

Numbers = npt.NDArray[np.int64]

Step = Mapping[str, tuple[Bits, Bits]]
"""Bits of every tensor before and after, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entropy:
    """Bytes per change over all tensors and steps."""

    num_changed: int
    positions: float
    """Given the old exponent, as are `values`."""
    values: float
    plain_positions: float
    plain_values: float

    @property
    def given_exponent(self) -> float:
        return self.positions + self.values

    @property
    def plain(self) -> float:
        return self.plain_positions + self.plain_values


def entropy(steps: Iterable[Step]) -> Entropy:
    """Return the entropy over all tensors and steps.

    Example: of four elements with exponent 127 two go up by one, and four with exponent 128 stay. Given the
    exponent that is 4 bits for positions and none for values: 0.25 bytes per change. Plain it is 8 times
    the binary entropy of 2/8, 6.49 bits: 0.406 bytes per change.
    """
    num_changed, total = 0, np.zeros(4)
    for step in steps:
        for old, new in step.values():
            indices = np.flatnonzero(old != new)
            differences = difference(old[indices], new[indices])
            classes = exponents(old)
            total += [
                *split_bits(classes, indices, differences),
                *split_bits(np.zeros_like(classes), indices, differences),
            ]
            num_changed += indices.size
    if num_changed == 0:
        raise SystemExit("nothing changed in this trace: its figures would mean nothing")
    positions, values, plain_positions, plain_values = (total / 8 / num_changed).tolist()
    return Entropy(
        num_changed=num_changed,
        positions=positions,
        values=values,
        plain_positions=plain_positions,
        plain_values=plain_values,
    )


def exponents(bits: Bits) -> Numbers:
    """Return the 8 bits of the exponent: 127 for 1.0."""
    return ((bits >> 7) & 0xFF).astype(np.int64)


def difference(old: Bits, new: Bits) -> Numbers:
    """Return the distance in bf16 patterns in numerical order: 1 from -0.0 to 0.0, -1 from 0.0 to -0.0."""
    return (_key(new) - _key(old)).view(np.int16).astype(np.int64)


def apply_difference(old: Bits, differences: Numbers) -> Bits:
    """Return the new bits from the old ones and `difference`."""
    keys = _key(old) + differences.astype(np.uint16)
    return np.where(keys >> 15, keys ^ 0x8000, ~keys).astype(np.uint16)


def _key(bits: Bits) -> Bits:
    return np.where(bits >> 15, ~bits, bits | 0x8000).astype(np.uint16)


def split_bits(classes: Numbers, indices: Numbers, differences: Numbers) -> tuple[float, float]:
    """Return the bits of the positions, given the class of each element, and the bits of the differences."""
    of = classes[indices]
    num, num_changed = np.bincount(classes, minlength=256), np.bincount(of, minlength=256)
    pairs, counts = np.unique((of << 16) | (differences & 0xFFFF), return_counts=True)
    return (
        _bits_of(num_changed, num) + _bits_of(num - num_changed, num),
        _bits_of(counts, num_changed[pairs >> 16]),
    )


def _bits_of(counts: Numbers, totals: Numbers) -> float:
    """Return the sum of counts * log2(totals / counts)."""
    some = counts > 0
    return float((counts[some] * np.log2(totals[some] / counts[some])).sum())
