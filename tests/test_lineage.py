"""The plan from a held version to a target."""

import pytest

from patchstore.errors import LineageError
from patchstore.lineage import plan
from patchstore.model import Anchor, Delta, Manifest, Payload, StateDigest, Writer


def version(
    number: int, parent: int | None, *, delta: int | None = None, anchor: int | None = None
) -> Manifest:
    """A manifest with payloads of these sizes."""

    def payload(size: int) -> tuple[Payload, ...]:
        return (Payload(key="k", size=size, digest="blake3:"),)

    return Manifest(
        version=number,
        parent=parent,
        parent_digest=None,
        run_id="r",
        step=number,
        created_at="",
        writer=Writer(id="w", epoch=1, write_id="x"),
        state=StateDigest(total="", sums=payload(0)[0]),
        delta=None if delta is None else Delta(encoding="gap", num_changed=1, payloads=payload(delta)),
        anchor=None if anchor is None else Anchor(payloads=payload(anchor), files=()),
    )


def chain(*manifests: Manifest) -> dict[int, Manifest]:
    return {manifest.version: manifest for manifest in manifests}


LINE = chain(
    version(0, None, anchor=100),
    version(1, 0, delta=10),
    version(2, 1, delta=10, anchor=100),
    version(3, 2, delta=10),
    version(4, 3, delta=10),
)


def steps(
    held: int | None, target: int, manifests: dict[int, Manifest] = LINE
) -> tuple[int | None, list[int]]:
    found = plan(manifests, held, target)
    return (found.anchor.version if found.anchor else None), [m.version for m in found.deltas]


def test_a_newcomer_starts_from_the_nearest_anchor() -> None:
    assert steps(None, 4) == (2, [3, 4])
    assert steps(None, 2) == (2, [])
    assert steps(None, 1) == (0, [1])


def test_a_follower_goes_on_from_what_it_holds_even_across_an_anchor() -> None:
    assert steps(3, 4) == (None, [4])
    assert steps(1, 4) == (None, [2, 3, 4])
    assert steps(0, 4) == (None, [1, 2, 3, 4])


def test_what_is_held_already_needs_nothing() -> None:
    assert steps(4, 4) == (None, [])


def test_a_follower_that_is_ahead_goes_back_through_an_anchor() -> None:
    assert steps(4, 1) == (0, [1])


def test_the_anchor_wins_where_the_deltas_are_larger() -> None:
    heavy = chain(version(0, None, anchor=100), version(1, 0, delta=95), version(2, 1, delta=95, anchor=100))
    assert steps(0, 2, heavy) == (2, [])
    assert steps(1, 2, heavy) == (None, [2])


def test_a_version_without_a_delta_can_only_be_reached_by_its_anchor() -> None:
    healed = chain(version(0, None, anchor=9), version(1, 0, delta=1), version(2, 1, anchor=900))
    assert steps(1, 2, healed) == (2, [])


def test_a_follower_on_an_abandoned_branch_takes_the_anchor() -> None:
    branched = chain(
        version(0, None, anchor=100), version(1, 0, delta=1), version(2, 1, delta=1), version(3, 1, delta=1)
    )
    assert steps(2, 3, branched) == (0, [1, 3])


def test_no_way_is_an_error_that_names_both_ends() -> None:
    with pytest.raises(LineageError, match=r"version 4 .* held version 9"):
        plan({4: LINE[4]}, 9, 4)


def test_a_plan_says_what_it_will_do() -> None:
    assert str(plan(LINE, None, 4)) == "anchor 2 -> 3 -> 4 (120 bytes)"
    assert str(plan(LINE, 3, 4)) == "held 3 -> 4 (10 bytes)"
    assert str(plan(LINE, 4, 4)) == "version 4 is held already"
