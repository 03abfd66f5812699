"""Plan which payloads lead from the version that a reader has to a target: a pure function of manifests."""

from collections.abc import Mapping

from patchstore.errors import WrongParent
from patchstore.format.records import REQUEST_BYTES, Manifest, Plan


def plan(manifests: Mapping[int, Manifest], held: int | None, target: int) -> Plan:
    """Return the cheapest plan from `held` to `target`, as `Plan.cost` counts.

    Possible plans: the deltas from `held`, if it is an ancestor of the target and no version between them
    lacks a delta; or an anchor at or before the target and the deltas after it. Deltas win a tie.

    Args:
        manifests: at least the target and its ancestors back to `held` or, failing that, back
            to the nearest anchor; see `lineage.read`.
        held: the version that the reader has now; None for none.
        target: the version wanted.

    Raises:
        WrongParent: no way exists among `manifests`.
    """
    goal = manifests[target]
    path: list[Manifest] = []
    ways: list[Plan] = []
    at: Manifest | None = goal
    while at is not None:
        deltas = tuple(reversed(path))
        if at.version == held:
            ways.insert(0, Plan(held=held, target=goal, anchor=None, deltas=deltas))
            break
        if at.anchor is not None:
            ways.append(Plan(held=held, target=goal, anchor=at, deltas=deltas))
        if at.delta is None or at.parent is None:
            break
        path.append(at)
        at = manifests.get(at.parent)
    if not ways:
        raise WrongParent(
            f"version {target} cannot be reached: it does not descend from version {held}, which is "
            "here, and no anchor was found among its ancestors"
        )
    return min(ways, key=lambda way: way.cost)


def delta_cost(manifest: Manifest) -> int:
    """Cost of reaching a version from its parent: the delta, and the parent's manifest."""
    assert manifest.delta is not None
    return manifest.delta.num_bytes + (1 + len(manifest.delta.payloads)) * REQUEST_BYTES


def anchor_cost(manifest: Manifest) -> int:
    """Additional cost of starting from a version's anchor, instead of having that version."""
    assert manifest.anchor is not None
    return manifest.anchor.num_bytes + len(manifest.anchor.payloads) * REQUEST_BYTES
