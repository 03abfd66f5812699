"""Which checkpoint names a server serves, and from where, as all of its ranks agree.

A rank holds slices, whole tensors or nothing of a name, and others may hold the same slice again. Every
rank says which slices it holds, so all know which names the server holds in full: those can be proved.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from patchstore.digest import Sums
from patchstore.errors import StateMismatch
from patchstore.model import Schema
from vllm_plugin.regions import Region, View, overlap
from vllm_plugin.trace import Trace

Claims = Mapping[str, Sequence[tuple[View, Sums]]]
"""What a rank says of its weights: per name, the digest sums of each slice that it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank tells the others about its map."""

    slices: Mapping[str, tuple[View, ...]]
    """Per name that is copied, the slices of the checkpoint's tensor that this rank holds."""
    computed: tuple[frozenset[str], ...]
    """Groups of names that are calculated here."""


class WeightMap:
    """One rank's trace, after all ranks agreed on what it means."""

    def __init__(self, schema: Schema, trace: Trace, shares: Sequence[Share]) -> None:
        """Agree.

        Args:
            shares: of all ranks, in the same order everywhere, so that all come to the same conclusions.
        """
        self.schema = schema
        self.runtimes = trace.runtimes
        groups = _joined([group for share in shares for group in share.computed])
        self.computed = frozenset(name for group in groups for name in group)
        """Names that some rank calculates: all ranks keep them in full and have the loader load them."""
        self.regions: Mapping[str, Sequence[tuple[int, Region]]] = {
            name: found for name, found in trace.regions.items() if name not in self.computed
        }
        """Per name, where its elements are copied to on this rank: index into `runtimes`, and region."""
        self.groups: Sequence[tuple[frozenset[str], frozenset[int]]] = tuple(
            (group, frozenset(self._written(trace, group))) for group in groups
        )
        """Calculated names that must be loaded together, and the runtimes which that writes on this rank."""
        slices: dict[str, set[View]] = {}
        for share in shares:
            for name, views in share.slices.items():
                slices.setdefault(name, set()).update(views)
        specs = schema.by_name()
        copied = slices.keys() - self.computed
        self.proved = frozenset(
            name
            for name in copied
            if sum(view.num_elements for view in slices[name]) == specs[name].num_elements
            and not overlap(list(slices[name]))
        )
        """Names that the ranks hold entirely, in slices that are equal or apart."""
        self.partial = frozenset(copied - self.proved)
        """Names of which no rank holds some part, so that their digest cannot be told."""
        self.absent = frozenset(specs.keys() - copied - self.computed)
        """Names that no rank has a use for, such as a vision tower that is switched off."""

    def _written(self, trace: Trace, group: frozenset[str]) -> set[int]:
        indices = {index for names, written in trace.computed if names & group for index in written}
        return indices | {index for name in group for index, _ in trace.regions.get(name, ())}

    def total(self, claims: Sequence[Claims]) -> dict[str, Sums]:
        """Add up what all ranks claim, each slice once.

        Returns:
            The sums of every name that can be proved and was claimed.

        Raises:
            StateMismatch: ranks differ in a slice that both hold.
        """
        totals: dict[str, Sums] = {}
        for name in sorted({name for each in claims for name in each} - self.partial):
            slices: dict[View, Sums] = {}
            for each in claims:
                for view, sums in each.get(name, ()):
                    if slices.setdefault(view, sums) != sums:
                        raise StateMismatch(f"copies of {name!r} in this server differ from each other")
            total = Sums()
            for sums in slices.values():
                total = total.plus(sums)
            totals[name] = total
        return totals


def share(trace: Trace) -> Share:
    """Return what the other ranks need to know of this rank's trace."""
    return Share(
        slices={
            name: tuple({region.source: None for _, region in found}) for name, found in trace.regions.items()
        },
        computed=tuple(names for names, _ in trace.computed),
    )


def _joined(groups: Sequence[frozenset[str]]) -> list[frozenset[str]]:
    """Join groups that share a name; ascending by their first names, so that all ranks load in one order."""
    joined: list[frozenset[str]] = []
    for group in groups:
        shared = [each for each in joined if each & group]
        joined = [each for each in joined if not each & group]
        joined.append(group.union(*shared))
    return sorted(joined, key=min)
