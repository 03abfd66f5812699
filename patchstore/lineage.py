"""Which payloads lead from a held version to a target: a pure function of manifests."""

from collections.abc import Mapping

from patchstore.errors import LineageError
from patchstore.model import Manifest, Plan


def plan(manifests: Mapping[int, Manifest], held: int | None, target: int) -> Plan:
    """Return the cheapest way from `held` to `target`.

    Two ways exist: the deltas from `held`, when it is an ancestor of the target and no version
    between them lacks a delta; or the nearest anchor at or before the target and the deltas after
    it. The one with fewer bytes wins, and deltas win a tie.

    Args:
        manifests: at least the target and its ancestors back to `held` or, failing that, back
            to the nearest anchor; see `log.read_lineage`.
        held: the version that the follower has now; None for none.
        target: the version wanted.

    Raises:
        LineageError: neither way exists among `manifests`.
    """
    goal = manifests[target]
    path: list[Manifest] = []
    nearest: Plan | None = None
    at: Manifest | None = goal
    while at is not None:
        deltas = tuple(reversed(path))
        if at.version == held:
            through = Plan(held=held, target=goal, anchor=None, deltas=deltas)
            return through if nearest is None or through.num_bytes <= nearest.num_bytes else nearest
        if nearest is None and at.anchor is not None:
            nearest = Plan(held=held, target=goal, anchor=at, deltas=deltas)
        if at.delta is None or at.parent is None:
            break
        path.append(at)
        at = manifests.get(at.parent)
    if nearest is not None:
        return nearest
    raise LineageError(
        f"version {target} cannot be reached: it does not descend from held version {held}, "
        "and no anchor was found among its ancestors"
    )
