"""The log of versions: finding the head, and the create that commits."""

from dataclasses import replace

import pytest

from patchstore import Follower, layout, log, manifest
from patchstore.errors import (
    CorruptObject,
    StoreUnavailable,
    UnsupportedFormat,
    VersionConflict,
    VersionNotFound,
)
from patchstore.model import Manifest
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.weights import Run


def numbers(found: Manifest | None) -> int | None:
    return None if found is None else found.version


def test_the_head_is_found_with_and_without_hints(run: Run) -> None:
    assert log.head(run.store) is None
    run.publish_versions(5)
    assert numbers(log.head(run.store)) == 4
    assert numbers(log.head(run.store, hint=2)) == 4
    assert numbers(log.head(run.store, hint=99)) == 4
    run.store.delete(layout.HEAD)
    assert numbers(log.head(run.store)) == 4


@pytest.mark.parametrize(
    "hint", [b"", b"[]", b'{"version": 99}', b'{"version": "4"}', b'{"version": 1}', b"\xff"]
)
def test_a_wrong_hint_costs_reads_and_nothing_else(run: Run, hint: bytes) -> None:
    run.publish_versions(3)
    run.store.put(layout.HEAD, hint)
    assert numbers(log.head(run.store)) == 2


def test_a_listing_that_lags_behind_does_not_hide_the_head(run: Run) -> None:
    run.publish_versions(3)
    run.store.delete(layout.HEAD)
    stale = FaultyStore(run.store, Fault(verb="list", effect="stale"))
    assert numbers(log.head(stale)) == 2


def test_the_slot_after_the_head_is_nothing_new(run: Run) -> None:
    first, second = run.publish_versions(2)
    assert log.following(run.store, first) == second
    assert log.following(run.store, second) is None


def test_committing_the_same_manifest_again_is_harmless(run: Run) -> None:
    head = run.publish()
    log.commit(run.store, head)
    assert log.read_manifest(run.store, 0) == head


def test_a_slot_that_somebody_else_has_is_a_conflict_and_stays_theirs(run: Run) -> None:
    theirs = run.publish()
    ours = replace(theirs, writer=replace(theirs.writer, id="me", write_id="other"))
    with pytest.raises(VersionConflict, match="stop this one"):
        log.commit(run.store, ours)
    assert log.read_manifest(run.store, 0) == theirs


@pytest.mark.parametrize("effect", ["fail-after", "exists"])
def test_a_lost_answer_is_settled_by_reading_the_slot(run: Run, effect) -> None:
    head = run.publish()
    new = replace(head, version=1, parent=0, parent_digest=log.stored_digest(run.store, 0))
    log.commit(FaultyStore(run.store, Fault(verb="put", effect=effect)), new)
    assert log.read_manifest(run.store, 1) == new


def test_a_create_that_did_not_happen_is_unavailable_and_can_be_tried_again(run: Run) -> None:
    head = run.publish()
    new = replace(head, version=1, parent=0, parent_digest=log.stored_digest(run.store, 0))
    faulty = FaultyStore(run.store, Fault(verb="put", effect="fail-before"))
    with pytest.raises(StoreUnavailable):
        log.commit(faulty, new)
    log.commit(faulty, new)
    assert log.read_manifest(run.store, 1) == new


def test_a_half_uploaded_version_is_invisible(run: Run) -> None:
    run.publish()
    for key in list(run.store.list()):
        if key.startswith("anchors/"):
            run.store.put(key.replace("00000000", "00000001"), run.store.get(key))
    assert numbers(log.head(run.store)) == 0
    with pytest.raises(VersionNotFound):
        log.read_manifest(run.store, 1)


def test_a_manifest_survives_its_own_spelling(run: Run) -> None:
    for found in run.publish_versions(5):
        key = layout.manifest_key(found.version)
        assert manifest.from_json(key, manifest.to_json(found)) == found
        assert manifest.to_json(manifest.from_json(key, run.store.get(key))) == run.store.get(key)


def test_a_manifest_of_a_later_format_is_refused_by_name(run: Run) -> None:
    run.publish()
    key = layout.manifest_key(0)
    run.store.put(key, run.store.get(key).replace(b'"format_version": 1', b'"format_version": 2'))
    with pytest.raises(UnsupportedFormat):
        log.read_manifest(run.store, 0)


def test_fields_of_later_releases_are_ignored(run: Run) -> None:
    found = run.publish()
    key = layout.manifest_key(0)
    run.store.put(key, run.store.get(key).replace(b"{", b'{"signature": "later",', 1))
    assert log.read_manifest(run.store, 0) == found


def test_a_manifest_under_another_versions_key_is_refused(run: Run) -> None:
    run.publish()
    run.store.put(layout.manifest_key(1), run.store.get(layout.manifest_key(0)))
    with pytest.raises(CorruptObject):
        log.read_manifest(run.store, 1)


def test_an_empty_store_has_no_run() -> None:
    assert log.read_header(MemoryStore()) is None


def test_a_follower_far_behind_does_not_walk_the_whole_way_back(run: Run) -> None:
    run.open(anchor_every=16)
    for step in range(100):
        run.publish(step)
    reads = FaultyStore(run.store)
    tensors = {name: tensor.clone() for name, tensor in run.history[0].items()}
    follower = Follower(reads, tensors, held=0)
    reads.calls.clear()
    follower.update()
    # The anchor is version 96. Nothing changed, so there is nothing but requests to be saved.
    assert len(reads.calls) < 16
    assert follower.held == 99
