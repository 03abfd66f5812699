"""Digest sums as ranks tell them: by the names of tensors, as hex digits. Sums of parts add up."""

from collections.abc import Mapping, Sequence

from patchstore.format.records import Part
from patchstore.format.state_sums import Sums


def by_name(parts: Sequence[Part], sums: Mapping[str, Sums]) -> dict[str, str]:
    """Add up the digest sums of a rank's parts.

    Args:
        sums: by key; parts without sums are left out.
    """
    found: dict[str, Sums] = {}
    for part in parts:
        if part.key in sums:
            add_one(found, part.spec.name, sums[part.key])
    return {name: each.hex() for name, each in found.items()}


def add(totals: dict[str, Sums], told: Mapping[str, str]) -> None:
    """Add what a rank told to the sums of whole tensors."""
    for name, digits in told.items():
        add_one(totals, name, Sums.from_hex(digits))


def add_one(totals: dict[str, Sums], name: str, sums: Sums) -> None:
    totals[name] = totals.get(name, Sums()).plus(sums)
