"""Publications that a store, or the system, fails."""

import threading
from contextlib import suppress

import pytest
import torch

from patchstore import Publisher
from patchstore.bucket import history
from patchstore.errors import PublishFailed, StoreUnavailable, UsageError, VersionConflict
from patchstore.publish.snapshot import PlainSnapshot
from patchstore.stores import layout
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore
from patchstore.tensors.columns import Changes
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.copies import before
from tests.support.weights import Run, assert_same_bits, newest, served


@pytest.mark.parametrize("effect", ["fail-before", "truncate"])
def test_what_fails_or_is_cut_off_on_the_way_is_sent_again(store: MemoryStore, effect) -> None:
    model = {"w": torch.zeros(10)}
    faulty = FaultyStore(store, Fault(verb="upload", effect=effect, times=2))
    with Publisher(faulty, model) as publisher:
        assert publisher.publish_patch(0).result().version == 0
    assert_same_bits(newest(store), served(model))


@pytest.mark.parametrize("effect", ["fail-after", "exists"])
def test_a_commit_whose_answer_was_lost_is_settled_as_ones_own(store: MemoryStore, effect) -> None:
    faulty = FaultyStore(store, Fault(verb="put", key="versions/*", effect=effect))
    with Publisher(faulty, {"w": torch.zeros(10)}) as publisher:
        assert publisher.publish_patch(0).result().version == 0
    assert sum(1 for _ in store.list("versions/")) == 1


def outage(store: Store, verb: str, key: str, skip: int = 0) -> FaultyStore:
    """A store on which one operation fails more often than a publisher tries."""
    return FaultyStore(store, Fault(verb=verb, key=key, effect="fail-before", skip=skip, times=5))  # type: ignore[arg-type]


@pytest.mark.parametrize("if_changed", [False, True])
def test_a_publication_that_finally_fails_makes_the_next_one_an_anchor(
    store: MemoryStore, if_changed: bool
) -> None:
    run = Run(outage(store, "upload", "deltas/*"))
    run.publish()
    run.train()
    with pytest.raises(PublishFailed):
        run.publish()
    if not if_changed:
        run.train()
    # With if_changed the weights are still those of the step that is not stored.
    recovered = run.publisher.publish_patch(0, if_changed=if_changed).result()
    assert (recovered.version, recovered.kind, recovered.delta) == (1, "anchor", None)
    assert_same_bits(newest(store), served(run.model))
    run.train()
    assert run.publish().kind == "delta"
    assert_same_bits(newest(store), served(run.model))
    run.close()


def test_a_snapshot_that_could_not_be_updated_makes_the_next_publication_an_anchor(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(store)
    run.publish()

    def failing(snapshot: PlainSnapshot, changes: Changes) -> None:
        for tensor in snapshot.tensors.values():
            tensor.view(-1)[:1] = 7
        raise MemoryError("made to fail")

    run.train()
    with monkeypatch.context() as patched:
        patched.setattr(PlainSnapshot, "apply", failing)
        # It was encoded against the snapshot as it was, and is stored meanwhile.
        assert run.publish().kind == "delta"
        assert_same_bits(newest(store), served(run.model))
        run.train()
        recovered = run.publish()
    assert (recovered.version, recovered.kind, recovered.delta) == (2, "anchor", None)
    assert "will be an anchor, as the snapshot could not be updated" in caplog.text
    assert_same_bits(newest(store), served(run.model))
    run.train()
    assert run.publish().kind == "delta"
    assert_same_bits(newest(store), served(run.model))
    run.close()


def test_shards_of_an_anchor_are_stored_at_once_and_one_that_fails_fails_them_all(store: MemoryStore) -> None:
    met = threading.Barrier(2)

    model = {str(i): torch.full((10,), float(i)) for i in range(6)}
    # Raises unless two shards are under way.
    together = before(MemoryStore(), "upload", "*model-0000*", lambda: met.broken or met.wait(30))
    with Publisher(together, model, max_shard_bytes=20) as publisher:
        assert len(publisher.publish_patch(0).result().anchor.payloads) == 6
    assert_same_bits(newest(together), served(model))

    faulty = outage(store, "upload", "*model-00003-*")
    with Publisher(faulty, model, max_shard_bytes=20) as publisher:
        with pytest.raises(PublishFailed, match="model-00003-of-00006"):
            publisher.publish_patch(0).result()
        assert publisher.publish_patch(1).result().version == 0
    assert_same_bits(newest(store), served(model))


def test_a_failure_that_was_not_asked_about_surfaces_in_the_next_call(store: MemoryStore) -> None:
    model = {"w": torch.zeros(10)}
    publisher = Publisher(outage(store, "put", "versions/*"), model)
    failed = publisher.publish_patch(0)
    while not failed.done():
        pass
    with pytest.raises(PublishFailed):
        publisher.publish_patch(1)
    model["w"] += 1
    assert publisher.publish_patch(2).result().kind == "anchor"
    publisher.close()
    assert_same_bits(newest(store), served(model))


def test_a_failure_that_was_not_asked_about_surfaces_at_close(store: MemoryStore) -> None:
    publisher = Publisher(outage(store, "put", "versions/*"), {"w": torch.zeros(10)})
    publisher.publish_patch(0)
    with pytest.raises(PublishFailed):
        publisher.close()


@pytest.mark.parametrize(
    "error", [UsageError("no right to write"), RuntimeError("can't start new thread")], ids=repr
)
def test_a_store_that_refuses_fails_the_publication_without_retries(
    store: MemoryStore, error: Exception
) -> None:
    model = {"w": torch.zeros(10)}

    def refuse() -> None:
        raise error

    refusing = before(store, "upload", "deltas/*", refuse)
    with Publisher(refusing, model) as publisher:
        publisher.publish_patch(0).result()
        model["w"] += 1
        with pytest.raises(PublishFailed, match=str(error)):
            publisher.publish_patch(1).result()
        assert publisher.publish_patch(2).result().kind == "anchor"
    uploads = [key for verb, key in refusing.calls if verb == "upload"]
    assert len(uploads) == len(set(uploads))
    assert_same_bits(newest(store), served(model))


def test_publications_behind_a_failed_one_do_not_commit_on_its_base(store: MemoryStore) -> None:
    gate = threading.Event()

    def fail() -> None:
        gate.wait(30)
        raise StoreUnavailable("no answer")

    model = {"w": torch.zeros(10)}
    publisher = Publisher(before(store, "upload", "deltas/*", fail, times=5), model, max_pending=3)
    publisher.publish_patch(0).result()
    waiting = []
    for step in (1, 2):
        model["w"][step] = step
        waiting.append(publisher.publish_patch(step))
    gate.set()
    for publication in waiting:
        with pytest.raises(PublishFailed):
            publication.result()
    assert publisher.publish_patch(3).result().kind == "anchor"
    publisher.close()
    assert_same_bits(newest(store), served(model))


def test_a_commit_that_takes_place_after_it_was_given_up_is_adopted(store: MemoryStore) -> None:
    model = {"w": torch.zeros(10)}
    # Every put of version 1 is carried out late: the answer is lost, and so is every look at the slot.
    faulty = FaultyStore(
        store,
        Fault(verb="put", key="versions/00000001.json", effect="fail-after", times=5),
        Fault(verb="get", key="versions/00000001.json", effect="fail-before", times=5),
    )
    publisher = Publisher(faulty, model)
    publisher.publish_patch(0).result()
    model["w"] += 1
    with pytest.raises(PublishFailed):
        publisher.publish_patch(1).result()
    assert [history.read_manifest(store, version).step for version in (0, 1)] == [0, 1]
    model["w"] += 1
    recovered = publisher.publish_patch(2).result()
    publisher.close()
    assert (recovered.version, recovered.parent, recovered.kind) == (2, 1, "anchor")
    assert_same_bits(newest(store), served(model))


def test_the_first_of_two_commits_without_answers_is_recognised_as_ones_own(store: MemoryStore) -> None:
    model = {"w": torch.zeros(10)}
    slot, late = "versions/00000001.json", []

    class Late(MemoryStore):
        """Loses puts of version 1, of which the first takes place when it is told to."""

        def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
            if key == slot and len(late) < 10:
                late.append(data)
                raise StoreUnavailable("timed out")
            super().put(key, data, if_absent=if_absent)

    store = Late()
    publisher = Publisher(store, model)
    publisher.publish_patch(0).result()
    for step in (1, 2):
        model["w"] += 1
        with pytest.raises(PublishFailed):
            publisher.publish_patch(step).result()
    MemoryStore.put(store, slot, late[0])
    model["w"] += 1
    manifest = publisher.publish_patch(3).result()
    publisher.close()
    assert (manifest.version, manifest.parent, history.read_manifest(store, 1).step) == (2, 1, 1)
    assert_same_bits(newest(store), served(model))


def test_a_slot_taken_by_a_later_release_is_a_conflict_too(run: Run) -> None:
    run.publish()
    run.store.put("versions/00000001.json", b'{"format_version": 2}')
    run.train()
    with pytest.raises(VersionConflict):
        run.publish()


@pytest.mark.parametrize("num_started", range(12))
def test_threads_that_cannot_start_are_a_typed_error_and_no_run(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, num_started: int
) -> None:
    start, left = threading.Thread.start, num_started

    def limited(thread: threading.Thread) -> None:
        nonlocal left
        if not left:
            raise RuntimeError("can't start new thread")
        left -= 1
        start(thread)

    model, threads = {"w": torch.zeros(8)}, set(threading.enumerate())
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", limited)
        refused = pytest.raises(UsageError, match="cannot start the threads")
        # It has two, and the probe eight at a time: fewer where those are quick.
        with refused if num_started <= 2 else suppress(UsageError):
            Publisher(store, model).close()
    if history.read_header(store) is None:
        assert list(store.list()) == []
    assert not set(threading.enumerate()) - threads


def test_a_parent_that_a_store_does_not_show_at_once_is_waited_for(store: MemoryStore) -> None:
    model = {"w": torch.zeros(10)}
    slow = FaultyStore(store, Fault(verb="get", key="versions/*", effect="stale", times=3))
    with Publisher(slow, model) as publisher:
        publisher.publish_patch(0).result()
        model["w"] += 1
        assert publisher.publish_patch(1).result().kind == "delta"


def test_the_parent_is_looked_for_and_the_sums_are_uploaded_while_the_delta_is(store: MemoryStore) -> None:
    seen, both = set(), threading.Event()

    class Waiting(FaultyStore):
        def saw(self, what: str) -> None:
            seen.add(what)
            if {"parent", "sums"} <= seen:
                both.set()

        def get(self, key, start=0, end=None):  # type: ignore[no-untyped-def]
            if key == layout.manifest_key(0):
                self.saw("parent")
            return super().get(key, start, end)

        def upload(self, key, chunks):  # type: ignore[no-untyped-def]
            if key.startswith("states/00000001-"):
                self.saw("sums")
            if key.startswith("deltas/"):
                assert both.wait(60), "the delta is uploaded alone"
            super().upload(key, chunks)

    model = {"w": torch.zeros(10)}
    with Publisher(Waiting(store), model) as publisher:
        publisher.publish_patch(0).result()
        model["w"] += 1
        publisher.publish_patch(1).result()
