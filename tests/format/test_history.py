"""The log of versions: finding the head, and the create that commits."""

import json
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from patchstore import Replica
from patchstore.bucket import history, lineage, manifest_json
from patchstore.bucket.records import (
    Anchor,
    Delta,
    Manifest,
    Payload,
    Schema,
    StateDigest,
    StoreHeader,
    TensorSpec,
)
from patchstore.errors import (
    CorruptObject,
    SchemaMismatch,
    StoreUnavailable,
    UsageError,
    VersionConflict,
    VersionNotFound,
)
from patchstore.stores import layout
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Effect, Fault, FaultyStore
from tests.support.weights import Run

EMPTY = "blake3:" + "0" * 64


def stored(key: str, size: int = 0) -> Payload:
    return Payload(key=key, size=size, digest=EMPTY)


def numbers(found: Manifest | None) -> int | None:
    return None if found is None else found.version


def test_the_head_is_found_with_and_without_hints(run: Run) -> None:
    assert history.head(run.store) is None
    run.publish_versions(5)
    assert numbers(history.head(run.store)) == 4
    assert numbers(history.head(run.store, hint=2)) == 4
    assert numbers(history.head(run.store, hint=99)) == 4
    run.store.delete(layout.HEAD)
    assert numbers(history.head(run.store)) == 4


def test_a_listing_that_lags_behind_does_not_hide_the_head(run: Run) -> None:
    run.publish_versions(3)
    run.store.delete(layout.HEAD)
    stale = FaultyStore(run.store, Fault(verb="list", effect="stale"))
    assert numbers(history.head(stale)) == 2


def test_the_slot_after_the_head_is_nothing_new(run: Run) -> None:
    first, second = run.publish_versions(2)
    assert history.following(run.store, first) == second
    assert history.following(run.store, second) is None


def test_committing_the_same_manifest_again_is_harmless(run: Run) -> None:
    head = run.publish()
    history.commit(run.store, head)
    assert history.read_manifest(run.store, 0) == head


def test_a_slot_that_another_publisher_has_is_a_conflict_and_stays_theirs(run: Run) -> None:
    theirs = run.publish()
    ours = replace(theirs, writer=replace(theirs.writer, id="me", write_id="other"))
    with pytest.raises(VersionConflict, match="stop this one"):
        history.commit(run.store, ours)
    assert history.read_manifest(run.store, 0) == theirs


@pytest.mark.parametrize("effect", ["fail-after", "exists", "fail-before"])
def test_a_lost_answer_is_settled_by_reading_the_slot(run: Run, effect: Effect) -> None:
    new = replace(run.publish(), version=1, parent=0, parent_digest=history.stored_digest(run.store, 0))
    faulty = FaultyStore(run.store, Fault(verb="put", effect=effect))
    # A create that did not happen can be tried again.
    with pytest.raises(StoreUnavailable) if effect == "fail-before" else nullcontext():
        history.commit(faulty, new)
    history.commit(faulty, new)
    assert history.read_manifest(run.store, 1) == new


def test_a_half_uploaded_version_is_invisible(run: Run) -> None:
    run.publish()
    for key in list(run.store.list()):
        if key.startswith("anchors/"):
            run.store.put(key.replace("00000000", "00000001"), run.store.get(key))
    assert numbers(history.head(run.store)) == 0
    with pytest.raises(VersionNotFound):
        history.read_manifest(run.store, 1)


def test_a_manifest_survives_its_own_spelling(run: Run) -> None:
    for found in run.publish_versions(5):
        key = layout.manifest_key(found.version)
        assert manifest_json.from_json(key, manifest_json.to_json(found)) == found
        assert manifest_json.to_json(manifest_json.from_json(key, run.store.get(key))) == run.store.get(key)


@pytest.mark.parametrize(
    "change",
    [
        {"step": 1.0},
        {"step": True},
        {"step": "1"},
        {"step": None},
        {"step": np.int64(1)},
        {"step": 10**5000},
        {"step": float("nan")},
        {"run_id": ""},
        {"run_id": "a\nb"},
        {"created_at": "\ud800"},
        {"parent": 7},
        {"parent_digest": "blake3:"},
        {"parent_digest": None},
        {"anchor": None, "delta": None},
        {"state": StateDigest(total="x", sums=stored("states/00000001-w.sums"))},
        {"state": StateDigest(total=EMPTY, sums=stored("states/1-w.sums"))},
        {"state": StateDigest(total=EMPTY, sums=stored("states/00000001-w.sums", -1))},
        {"anchor": Anchor(payloads=(stored("elsewhere"),), files=())},
        {"anchor": Anchor(payloads=[], files=())},
        {"delta": Delta(encoding="gap", num_changed=1.5, payloads=())},
        {"delta": Delta(encoding="gap", num_changed=-1, payloads=())},
    ],
)
def test_a_manifest_that_readers_would_refuse_is_not_created(run: Run, change: dict[str, Any]) -> None:
    head = run.publish()
    good = replace(head, version=1, parent=0, parent_digest=history.stored_digest(run.store, 0))
    before = list(run.store.list())
    with pytest.raises(UsageError, match="not stored"):
        history.commit(run.store, replace(good, **change))
    assert list(run.store.list()) == before
    history.commit(run.store, good)


def schema(*tensors: tuple[str, str, tuple[int, ...]], **tied: str) -> Schema:
    return Schema(tensors=tuple(TensorSpec(name=n, dtype=d, shape=s) for n, d, s in tensors), tied=tied)


@pytest.mark.parametrize(
    "wrong",
    [
        schema(("b", "F32", ()), ("a", "F32", ())),
        schema(("a", "F32", ()), ("a", "F32", ())),
        schema(("a", "C64", ())),
        schema(("a", "F32", (-1,))),
        schema(("a", "F32", (2.0,))),  # type: ignore[arg-type]
        schema(("a", "F32", (2**30, 2**30))),
        schema(("a", "F32", ()), b="c"),
        schema(("a", "F32", ()), a="a"),
    ],
    ids=str,
)
def test_a_header_that_readers_would_refuse_is_not_created(store: MemoryStore, wrong: Schema) -> None:
    with pytest.raises(SchemaMismatch):
        history.create_header(store, StoreHeader(run_id="r", created_at="now", schema=wrong))
    assert list(store.list()) == []


def test_versions_are_read_back_in_order_whatever_their_parents_are(run: Run) -> None:
    published = run.publish_versions(21)
    assert [*history.read_back(run.store, 20)] == published[::-1]
    assert [*history.read_back(run.store, 7, 5)] == [published[7], published[6], published[5]]
    run.store.delete(layout.manifest_key(6))
    versions = history.read_back(run.store, 20)
    assert [next(versions).version for _ in range(14)] == [*range(20, 6, -1)]
    with pytest.raises(VersionNotFound):
        next(versions)


def test_one_version_is_not_read_ahead_of(run: Run) -> None:
    run.publish_versions(3)
    reads = FaultyStore(run.store)
    with closing(history.read_back(reads, 2)) as versions:
        next(versions)
    assert reads.calls == [("get", layout.manifest_key(2))]


def test_ancestry_goes_where_a_trainer_went_back(run: Run) -> None:
    run.publish_and_close(6, anchor_every=100)
    run.go_back(2)
    run.open(resume=2, anchor_every=100)
    run.train()
    run.publish()
    run.train()
    newest = run.publish()
    assert [found.version for found in history.ancestry(run.store, newest.version)] == [8, 7, 6, 2, 1, 0]
    assert lineage.read(run.store, 8).ways.keys() == {8, 7, 6, 2, 1, 0}
    assert lineage.read(run.store, 8, held=1).ways.keys() == {8, 7, 6, 2, 1}
    assert lineage.read(run.store, 8, held=4).ways.keys() == {8, 7, 6, 2, 1, 0}


def test_a_number_of_any_size_is_looked_for(run: Run) -> None:
    run.publish_versions(1)
    for version in (10**8, 10**16, 2**63 - 1):
        with pytest.raises(VersionNotFound, match=str(version)):
            lineage.read(run.store, version)


def test_a_key_with_more_digits_than_an_integer_may_have_is_no_slot(run: Run) -> None:
    run.publish_versions(2)
    run.store.delete(layout.HEAD)
    run.store.put(f"versions/{'9' * 200}.json", b"{}")
    run.store.put(f"shortcuts/{'9' * 200}-anchor.json", b"{}")
    assert numbers(history.head(run.store)) == 1
    assert lineage.read(run.store, 1).target.version == 1


@pytest.mark.parametrize("parent", [1, 2, 10**9, -1])
def test_a_version_that_does_not_descend_from_an_older_one_ends_the_way(run: Run, parent: int) -> None:
    run.publish_versions(2)
    key = layout.manifest_key(1)
    found = json.loads(run.store.get(key))
    run.store.delete(key)
    run.store.put(key, json.dumps(found | {"parent": parent}).encode())
    with pytest.raises(CorruptObject, match="parent"):
        list(history.ancestry(run.store, 1))


def test_a_follower_far_behind_does_not_walk_the_whole_way_back(run: Run) -> None:
    run.open(anchor_every=16)
    for step in range(100):
        run.publish(step)
    reads = FaultyStore(run.store)
    tensors = {name: tensor.clone() for name, tensor in run.history[0].items()}
    follower = Replica(reads, tensors, held=0)
    reads.calls.clear()
    follower.update()
    # The anchor is version 96. Nothing changed, so there is nothing but requests to be saved.
    assert len(reads.calls) < 16
    assert follower.held == 99
