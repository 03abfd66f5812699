"""The plan from a held version to a target."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchstore.errors import WrongParent
from patchstore.format import layout, lineage, planning
from patchstore.format.hashing import digest
from patchstore.format.manifest_json import to_json
from patchstore.format.planning import plan
from patchstore.format.records import REQUEST_BYTES, Anchor, Delta, Manifest, Payload, StateDigest, Writer
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import FaultyStore


def version(
    number: int, parent: int | None, *, delta: int | None = None, anchor: int | None = None
) -> Manifest:
    """A manifest with payloads of these sizes, in MiB; a delta of 0 changes nothing, and has no payload."""

    def payload(size: int) -> tuple[Payload, ...]:
        return (Payload(key="k", size=size << 20, digest="blake3:"),) if size else ()

    return Manifest(
        version=number,
        parent=parent,
        parent_digest=None,
        run_id="r",
        step=number,
        created_at="",
        writer=Writer(id="w", epoch=1, write_id="x"),
        state=StateDigest(total="", sums=Payload(key="s", size=0, digest="")),
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
    with pytest.raises(WrongParent, match=r"version 4 .* descend from version 9"):
        plan({4: LINE[4]}, 9, 4)


def test_a_plan_says_what_it_will_do() -> None:
    assert str(plan(LINE, None, 4)) == "anchor 2 -> 3 -> 4 (125,829,120 bytes, 6 requests)"
    assert str(plan(LINE, 3, 4)) == "held 3 -> 4 (10,485,760 bytes, 3 requests)"
    assert str(plan(LINE, 4, 4)) == "version 4 is held already"


def test_versions_that_change_nothing_cost_requests_all_the_same() -> None:
    quiet = chain(
        version(0, None, anchor=1),
        *(version(n, n - 1, delta=0, anchor=1 if n == 100 else None) for n in range(1, 103)),
    )
    assert steps(0, 102, quiet) == (100, [101, 102])
    assert steps(98, 102, quiet) == (None, [99, 100, 101, 102])


@st.composite
def lineages(draw: st.DrawFn) -> dict[int, Manifest]:
    """Versions of any sizes, some of them on abandoned branches, or without a delta."""
    found = [version(0, None, anchor=draw(st.integers(0, 9)))]
    for number in range(1, draw(st.integers(1, 25))):
        has_anchor = draw(st.booleans())
        found.append(
            version(
                number,
                draw(st.integers(max(0, number - 3), number - 1)),
                delta=None if has_anchor and draw(st.booleans()) else draw(st.integers(0, 3)),
                anchor=draw(st.integers(0, 9)) if has_anchor else None,
            )
        )
    return chain(*found)


def ways(manifests: dict[int, Manifest], held: int | None, target: int) -> list[tuple[int, int | None]]:
    """Every way to a version: what it costs, counted one object at a time, and the anchor it starts from."""
    found, at, spent = [], manifests[target], REQUEST_BYTES
    while True:
        if at.version == held:
            found.append((spent, None))
        elif at.anchor is not None:
            sizes = [each.size for each in at.anchor.payloads]
            found.append((spent + sum(sizes) + len(sizes) * REQUEST_BYTES, at.version))
        if at.delta is None or at.parent is None:
            return found
        for each in at.delta.payloads:
            spent += each.size + REQUEST_BYTES
        spent += REQUEST_BYTES
        at = manifests[at.parent]


@given(manifests=lineages(), data=st.data())
def test_no_way_is_cheaper_than_the_plan(manifests: dict[int, Manifest], data: st.DataObject) -> None:
    held = data.draw(st.none() | st.sampled_from(sorted(manifests)))
    target = data.draw(st.sampled_from(sorted(manifests)))
    found = plan(manifests, held, target)
    cheapest = min(cost for cost, _ in ways(manifests, held, target))
    start = found.anchor.version if found.anchor else None
    assert found.cost == cheapest
    assert (found.cost, start) in ways(manifests, held, target)
    if held is not None and (cheapest, None) in ways(manifests, held, target):
        assert found.anchor is None


def stored(manifests: dict[int, Manifest]) -> MemoryStore:
    """A bucket with these manifests, spelled as the format wants them."""
    store = MemoryStore()
    for number, each in sorted(manifests.items()):
        parent = None if each.parent is None else digest(store.get(layout.manifest_key(each.parent)))
        record = replace(
            each,
            parent_digest=parent,
            created_at="2026-01-01T00:00:00Z",
            state=StateDigest(
                total=digest(b""),
                sums=Payload(key=layout.sums_key(number, "x"), size=0, digest=digest(b"")),
            ),
        )
        delta, anchor = each.delta, each.anchor
        if delta is not None:
            record = replace(record, delta=replace(delta, payloads=_named(delta.payloads, "deltas", number)))
        if anchor is not None:
            record = replace(
                record, anchor=replace(anchor, payloads=_named(anchor.payloads, "anchors", number))
            )
        store.put(layout.manifest_key(number), to_json(record))
    return store


def _named(payloads: tuple[Payload, ...], folder: str, number: int) -> tuple[Payload, ...]:
    key = f"{folder}/{number:08d}-x/model.safetensors"
    return tuple(replace(each, key=key, digest=digest(b"")) for each in payloads)


@given(manifests=lineages(), data=st.data())
def test_what_is_read_of_a_lineage_suffices_and_ends_where_it_cannot_pay(
    manifests: dict[int, Manifest], data: st.DataObject
) -> None:
    # All anchors of a run hold the same tensors.
    equal = Anchor(payloads=(Payload(key="k", size=5 << 20, digest=""),), files=())
    manifests = {n: replace(m, anchor=m.anchor and equal) for n, m in manifests.items()}
    held = data.draw(st.none() | st.sampled_from(sorted(manifests)))
    target = data.draw(st.sampled_from(sorted(manifests)))
    store = FaultyStore(stored(manifests))
    read = lineage.read(store, target, held)
    found = read.ways
    asked = [key for _, key in store.calls]
    assert {layout.manifest_key(number) for number in found} <= set(asked)
    # Some are read ahead: fewer than were taken. Shortcuts are looked for once.
    assert len(asked) <= 2 * len(found) + 1
    best = plan(manifests, held, target)
    assert read.plan().cost == best.cost
    # Each step back beyond the nearest anchor was still cheaper than that anchor.
    spent, nearest = 0, None
    for number in found:
        if nearest is not None:
            assert spent <= nearest
        each = found[number]
        if nearest is None and each.anchor is not None:
            nearest = spent + planning.anchor_cost(each)
        if each.delta is not None:
            spent += planning.delta_cost(each)
