"""The plan from a held version to a target."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchstore.bucket import lineage
from patchstore.bucket.digests import digest
from patchstore.bucket.lineage import Plan, plan
from patchstore.bucket.manifest_json import to_json
from patchstore.bucket.records import REQUEST_BYTES, Anchor, Delta, Manifest, Payload, StateDigest, Writer
from patchstore.errors import WrongParent
from patchstore.stores import layout
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


HEAVY = chain(version(0, None, anchor=100), version(1, 0, delta=95), version(2, 1, delta=95, anchor=100))
HEALED = chain(version(0, None, anchor=9), version(1, 0, delta=1), version(2, 1, anchor=900))
BRANCHED = chain(
    version(0, None, anchor=100), version(1, 0, delta=1), version(2, 1, delta=1), version(3, 1, delta=1)
)
QUIET = chain(
    version(0, None, anchor=1),
    *(version(n, n - 1, delta=0, anchor=1 if n == 100 else None) for n in range(1, 103)),
)
"""Versions that change nothing: they cost requests all the same."""


@pytest.mark.parametrize(
    ("manifests", "held", "target", "expected"),
    [
        pytest.param(LINE, None, 4, (2, [3, 4]), id="a newcomer starts from the nearest anchor"),
        pytest.param(LINE, None, 2, (2, []), id="which may be the target"),
        pytest.param(LINE, None, 1, (0, [1]), id="or an older one"),
        pytest.param(LINE, 3, 4, (None, [4]), id="a follower goes on from what it holds"),
        pytest.param(LINE, 1, 4, (None, [2, 3, 4]), id="also across an anchor"),
        pytest.param(LINE, 4, 4, (None, []), id="what is held needs nothing"),
        pytest.param(LINE, 4, 1, (0, [1]), id="going back leads through an anchor"),
        pytest.param(HEAVY, 0, 2, (2, []), id="the anchor wins where deltas are larger"),
        pytest.param(HEAVY, 1, 2, (None, [2]), id="and deltas win a tie"),
        pytest.param(HEALED, 1, 2, (2, []), id="a version may have no delta"),
        pytest.param(BRANCHED, 2, 3, (0, [1, 3]), id="an abandoned branch leads through an anchor"),
        pytest.param(QUIET, 0, 102, (100, [101, 102]), id="many deltas of nothing"),
        pytest.param(QUIET, 98, 102, (None, [99, 100, 101, 102]), id="few deltas of nothing"),
    ],
)
def test_the_plan(
    manifests: dict[int, Manifest], held: int | None, target: int, expected: tuple[int | None, list[int]]
) -> None:
    found = plan(manifests, held, target)
    assert (found.anchor and found.anchor.version, [each.version for each in found.deltas]) == expected


def test_no_way_is_an_error_that_names_both_ends() -> None:
    with pytest.raises(WrongParent, match=r"version 4 .* descend from version 9"):
        plan({4: LINE[4]}, 9, 4)


def test_a_plan_says_what_it_will_do() -> None:
    assert str(plan(LINE, None, 4)) == "anchor 2 -> 3 -> 4 (125,829,120 bytes, 6 requests)"
    assert str(plan(LINE, 3, 4)) == "held 3 -> 4 (10,485,760 bytes, 3 requests)"
    assert str(plan(LINE, 4, 4)) == "version 4 is held already"


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


def assert_leads(found: Plan, held: int | None, target: int) -> None:
    """Fail unless a plan's steps are a path from what is held, or from an anchor, to the target."""
    steps = [each.version for each in found.deltas]
    start = held if found.anchor is None else found.anchor.version
    assert found.anchor is None or found.anchor.anchor is not None
    assert [each.parent for each in found.deltas] == [start, *steps][:-1]
    assert [start, *steps][-1] == target


@given(manifests=lineages(), data=st.data())
def test_no_way_is_cheaper_than_the_plan(manifests: dict[int, Manifest], data: st.DataObject) -> None:
    held = data.draw(st.none() | st.sampled_from(sorted(manifests)))
    target = data.draw(st.sampled_from(sorted(manifests)))
    found = plan(manifests, held, target)
    assert_leads(found, held, target)
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
    assert_leads(read.plan(), held, target)
    # Each step back beyond the nearest anchor was still cheaper than that anchor.
    spent, nearest = 0, None
    for number in found:
        if nearest is not None:
            assert spent <= nearest
        each = found[number]
        if nearest is None and each.anchor is not None:
            nearest = spent + lineage.anchor_cost(each)
        if each.delta is not None:
            spent += lineage.delta_cost(each)
