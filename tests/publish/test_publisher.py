"""What a publisher puts into a store, and when."""

import errno
import os
import shutil
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from patchstore import Publisher, Replica, replay, verify
from patchstore.encodings import CHOICES
from patchstore.errors import (
    CorruptObject,
    PublishFailed,
    ResumeMismatch,
    RunExists,
    RunLost,
    SchemaMismatch,
    StoreUnavailable,
    UsageError,
    VersionConflict,
    VersionNotFound,
)
from patchstore.format import history, layout
from patchstore.payloads.tensor_file import open_buffer
from patchstore.publish import pipeline, snapshot
from patchstore.stores.base import Store
from patchstore.stores.folder import FolderStore
from patchstore.stores.memory import MemoryStore
from patchstore.tensors import diff
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.weights import Run, assert_same_bits, served


def newest(store: Store) -> dict[str, torch.Tensor]:
    """What a follower that starts from nothing ends up with."""
    tensors: dict[str, torch.Tensor] = {}
    Replica(store, tensors).update()
    return tensors


def test_the_first_version_is_an_anchor_and_the_next_ones_are_deltas(run: Run) -> None:
    kinds = [manifest.kind for manifest in run.publish_versions(6)]
    assert kinds == ["anchor", "delta", "delta", "delta", "anchor", "delta"]


def test_an_anchor_that_has_a_parent_keeps_its_delta(run: Run) -> None:
    anchor = run.publish_versions(5)[4]
    assert anchor.anchor is not None
    assert anchor.delta is not None and anchor.delta.num_changed > 0


def test_a_delta_holds_exactly_the_elements_whose_bf16_bits_changed(run: Run) -> None:
    before = run.publish()
    old = run.history[before.version]
    run.train()
    after = run.publish()
    new = run.history[after.version]
    changed = sum(int((old[n].view(-1) != new[n].view(-1)).sum()) for n in old)
    assert after.delta is not None
    assert after.delta.num_changed == changed > 0


def test_a_bool_with_another_byte_than_0_and_1_is_not_published(store: MemoryStore) -> None:
    mask = torch.tensor([True, False, True])
    with Publisher(store, {"mask": mask, "w": torch.zeros(3)}) as publisher:
        publisher.publish_patch(0).result()
        mask.view(torch.uint8)[1] = 2
        with pytest.raises(PublishFailed, match="mask"):
            publisher.publish_patch(1).result()
        mask.view(torch.uint8)[1] = 1
        publisher.publish_patch(2).result()
    assert newest(store)["mask"].view(torch.uint8).tolist() == [1, 1, 1]


def test_masters_that_moved_less_than_bf16_can_see_change_nothing(run: Run) -> None:
    run.publish()
    run.model["layers.0.norm.weight"] += 1e-6
    manifest = run.publish()
    assert manifest.delta is not None
    assert (manifest.delta.num_changed, manifest.delta.payloads) == (0, ())


def test_small_moves_add_up_until_bf16_sees_them(run: Run) -> None:
    run.publish()
    counts = []
    for step in range(40):
        run.model["layers.0.norm.weight"] += 2e-4
        delta = run.publish(step).delta
        counts.append(delta.num_changed if delta else 0)
    assert 0 < sum(counts) < 40 * 33
    assert_same_bits(newest(run.store), served(run.model))


def test_several_optimiser_steps_between_publications_are_all_in_the_next(run: Run) -> None:
    run.publish()
    for _ in range(5):
        run.train()
    run.publish()
    assert_same_bits(newest(run.store), served(run.model))


def test_unchanged_tensors_are_absent_from_a_delta(run: Run) -> None:
    run.open(encoding="gap")
    run.publish()
    run.model["scale"].fill_(0.25)
    manifest = run.publish()
    assert manifest.delta is not None
    _, tensors = open_buffer("", bytearray(run.store.get(manifest.delta.payloads[0].key)))
    assert tensors.keys() == {"scale.idx", "scale.val"}


def test_nan_and_negative_zero_are_changes_and_arrive(run: Run) -> None:
    run.model["layers.0.norm.weight"].fill_(0.0)
    run.publish()
    run.model["layers.0.norm.weight"][3] = -0.0
    run.model["layers.0.norm.weight"][4] = float("nan")
    manifest = run.publish()
    assert manifest.delta is not None and manifest.delta.num_changed == 2
    assert_same_bits(newest(run.store), served(run.model))


def test_a_nan_that_stays_is_no_change(run: Run) -> None:
    run.model["layers.0.norm.weight"][4] = float("nan")
    run.publish()
    manifest = run.publish()
    assert manifest.delta is not None and manifest.delta.num_changed == 0


def test_a_tied_tensor_is_stored_and_changed_once(run: Run) -> None:
    run.publish()
    header = history.read_header(run.store)
    assert header is not None
    assert header.schema.tied == {"head.weight": "embed.weight"}
    assert "head.weight" not in header.schema.by_name()
    run.model["head.weight"][0, 0] = 9.0
    manifest = run.publish()
    assert manifest.delta is not None and manifest.delta.num_changed == 1
    assert newest(run.store)["embed.weight"][0, 0] == 9.0


def test_untying_a_tensor_is_refused(run: Run) -> None:
    run.publish()
    run.model["head.weight"] = run.model["head.weight"].clone()
    with pytest.raises(SchemaMismatch):
        run.publish()


def test_a_module_is_published_by_its_state_dict(store: MemoryStore) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1)
    with Publisher(store, model) as publisher:
        publisher.publish_patch(0).result()
        model(torch.ones(8)).sum().backward()
        optimiser.step()
        publisher.publish_patch(1).result()
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    assert_same_bits(newest(store), expected)


def test_without_a_dtype_tensors_keep_their_own(store: MemoryStore) -> None:
    model = {
        "a": torch.randn(5),
        "b": torch.randn(5).to(torch.float16),
        "c": torch.randn(5).to(torch.float8_e4m3fn),
    }
    with Publisher(store, model, dtype=None) as publisher:
        publisher.publish_patch(0).result()
    assert_same_bits(newest(store), model)


@pytest.mark.parametrize("encoding", ["raw", "gap"])
def test_an_outlier_far_away_arrives_in_either_encoding(store: MemoryStore, encoding: str) -> None:
    model = {"w": torch.zeros(300_000)}
    with Publisher(store, model, encoding=encoding) as publisher:
        publisher.publish_patch(0).result()
        model["w"][7] = 1.0
        model["w"][299_999] = 2.0
        manifest = publisher.publish_patch(1).result()
    assert manifest.delta is not None and manifest.delta.num_changed == 2
    assert_same_bits(newest(store), served(model))


def test_an_unknown_encoding_is_refused(store: MemoryStore) -> None:
    with pytest.raises(UsageError, match="raw, gap, context, auto"):
        Publisher(store, {"w": torch.zeros(3)}, encoding="zip")


def test_what_is_not_a_whole_tensor_is_refused(store: MemoryStore) -> None:
    with pytest.raises(SchemaMismatch):
        Publisher(store, {"w": torch.zeros(3, device="meta")})


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.pop("scale"),
        lambda model: model.update(extra=torch.zeros(3)),
        lambda model: model.update(scale=torch.zeros(2)),
        lambda model: model.update(position_ids=model["position_ids"].to(torch.int32)),
    ],
)
def test_a_source_whose_schema_changes_is_refused_until_it_is_back(run: Run, change) -> None:
    run.publish()
    good = dict(run.model)
    change(run.model)
    with pytest.raises(SchemaMismatch):
        run.publish()
    run.model.clear()
    run.model.update(good)
    run.train()
    assert run.publish().kind == "delta"
    assert_same_bits(newest(run.store), served(run.model))


def test_a_comparison_that_breaks_off_makes_the_next_version_whole(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.publish()
    run.train()
    changed = diff.changed

    def out_of_memory(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        if new.dim() == 1:
            raise RuntimeError("out of memory")
        return changed(new, old)

    with monkeypatch.context() as patched:
        patched.setattr(diff, "changed", out_of_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            run.publish()
    assert run.publish().kind == "delta"
    assert_same_bits(newest(run.store), served(run.model))


@pytest.mark.parametrize("where", ["Publication", "_Job", "_Stage"])
@pytest.mark.parametrize("anchor_every", [1, 100])
def test_an_interrupt_after_the_comparison_loses_no_change(
    run: Run, monkeypatch: pytest.MonkeyPatch, where: str, anchor_every: int
) -> None:
    run.open(anchor_every=anchor_every)
    run.publish()
    run.train()

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.publish()
    run.train()
    manifest = run.publish()
    assert (manifest.version, manifest.kind) == (1, "anchor" if anchor_every == 1 else "delta")
    assert manifest.delta is not None
    assert_same_bits(newest(run.store), served(run.model))
    run.train()
    assert run.publish().delta is not None
    assert_same_bits(newest(run.store), served(run.model))


def test_the_snapshot_does_not_move_while_an_anchor_is_uploaded_from_it() -> None:
    gate, uploading = threading.Event(), threading.Event()

    class Waiting(MemoryStore):
        def upload(self, key, chunks):  # type: ignore[no-untyped-def]
            uploading.set()
            gate.wait(30)
            super().upload(key, chunks)

    store, model = Waiting(), {"w": torch.zeros(1000)}
    publisher = Publisher(store, model, max_pending=5)
    first = publisher.publish_patch(0)
    uploading.wait(30)
    model["w"].fill_(1.0)
    # Compared at once; its changes are applied to the snapshot when the anchor is stored.
    second = publisher.publish_patch(1)
    model["w"].fill_(2.0)
    third = threading.Thread(target=publisher.publish_patch, args=(2,))
    third.start()
    third.join(0.2)
    assert third.is_alive()
    gate.set()
    third.join(30)
    publisher.close()
    version_1: dict[str, torch.Tensor] = {}
    Replica(store, version_1).update(second.result().version)
    assert_same_bits(version_1, {"w": torch.ones(1000, dtype=torch.bfloat16)})
    version_0: dict[str, torch.Tensor] = {}
    Replica(store, version_0).update(first.result().version)
    assert_same_bits(version_0, {"w": torch.zeros(1000, dtype=torch.bfloat16)})
    assert_same_bits(newest(store), served(model))


class Interrupter:
    """Raises KeyboardInterrupt at the n-th point of a call at which Python might handle a signal."""

    FINELY = (
        "patchstore/publish/publisher.py",
        "patchstore/publish/pipeline.py",
        "patchstore/support/worker.py",
        "threading.py",
        "contextlib.py",
    )

    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self, frame: FrameType, event: str, argument: object) -> "Interrupter":
        frame.f_trace_opcodes = frame.f_code.co_filename.endswith(self.FINELY)
        # Not where a generator is left: that may be its destructor, out of which nothing is raised.
        if event in {"opcode", "line"}:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self

    def during(self, call: Callable[..., object], *arguments: object) -> bool:
        """Make a call; return whether it was interrupted."""
        sys.settrace(self)
        try:
            call(*arguments)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False


@pytest.mark.exhaustive
@pytest.mark.parametrize("encoding", ["gap", "context"])
@pytest.mark.parametrize("anchor_every", [1, 3])
def test_an_interrupt_at_any_point_loses_nothing_and_stops_nothing(encoding: str, anchor_every: int) -> None:
    model, point, step, interrupts = {"w": torch.zeros(64), "v": torch.zeros(8)}, 1, 0, 0
    store = MemoryStore()
    publisher = Publisher(store, model, encoding=encoding, anchor_every=anchor_every, max_pending=1)
    publisher.publish_patch(0).result()
    while True:
        step += 1
        model["w"][step % 64] = step
        if not Interrupter(point).during(publisher.publish_patch, step):
            break
        interrupts += 1
        point += 3
        for _ in range(2):
            model["v"][step % 8] += 1
            manifest = publisher.publish_patch(step).result(timeout_s=30)
        if step % 25 == 0:
            assert_same_bits(newest(store), served(model))
            assert manifest.anchor is None or anchor_every == 1 or manifest.delta is not None
    publisher.close()
    assert interrupts > 200
    assert_same_bits(newest(store), served(model))
    for version in range(0, manifest.version + 1, 10):
        verify(store, version)


def test_an_interrupt_while_a_result_is_awaited_stops_nothing(store: MemoryStore) -> None:
    model = {"w": torch.zeros(64)}
    with Publisher(store, model, anchor_every=1) as publisher:
        for point in range(1, 200):
            model["w"][0] = point
            publication = publisher.publish_patch(point)
            Interrupter(point).during(publication.result)
            assert publication.result(timeout_s=30).step == point


def test_an_interrupt_while_a_publisher_is_closed_leaves_it_to_be_closed_again(store: MemoryStore) -> None:
    model, point = {"w": torch.zeros(64)}, 1
    while True:
        publisher = Publisher(store, model, resume="auto")
        model["w"][0] = point
        publisher.publish_patch(point)
        if not Interrupter(point).during(publisher.close):
            break
        point += 11
        publisher.close()
        assert_same_bits(newest(store), served(model))
    assert point > 100


def test_a_hint_that_cannot_be_written_does_not_unmake_versions(store: MemoryStore) -> None:
    class NoOverwriting(MemoryStore):
        def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
            if key == "head.json":
                raise UsageError("this bucket admits new objects only")
            super().put(key, data, if_absent=if_absent)

    strict = NoOverwriting()
    run = Run(strict)
    kinds = [manifest.kind for manifest in run.publish_versions(3)]
    run.close()
    assert kinds == ["anchor", "delta", "delta"]
    assert history.head(strict) is not None


def test_the_caller_may_change_weights_as_soon_as_publish_returns(store: MemoryStore) -> None:
    slow = threading.Event()

    class Waiting(MemoryStore):
        def upload(self, key, chunks):  # type: ignore[no-untyped-def]
            slow.wait(30)
            super().upload(key, chunks)

    waiting = Waiting()
    model = {"w": torch.zeros(1000)}
    with Publisher(waiting, model) as publisher:
        first = publisher.publish_patch(0)
        model["w"].fill_(1.0)
        assert not first.done()
        slow.set()
        first.result()
        delta = publisher.publish_patch(1)
        model["w"].fill_(2.0)
        delta.result()
    assert_same_bits(newest(waiting), {"w": torch.ones(1000, dtype=torch.bfloat16)})


def test_no_more_publications_are_under_way_than_allowed() -> None:
    gate = threading.Event()
    started = threading.Semaphore(0)

    class Waiting(MemoryStore):
        def upload(self, key, chunks):  # type: ignore[no-untyped-def]
            started.release()
            gate.wait(30)
            super().upload(key, chunks)

    model = {"w": torch.zeros(10)}
    store = Waiting()
    gate.set()
    publisher = Publisher(store, model, max_pending=2)
    publisher.publish_patch(0).result()
    gate.clear()
    for step in (1, 2):
        model["w"] += 1
        publisher.publish_patch(step)
    third = threading.Thread(target=publisher.publish_patch, args=(3,))
    third.start()
    third.join(0.2)
    assert third.is_alive()
    gate.set()
    third.join(30)
    publisher.close()
    assert history.head(store) is not None and history.head(store).version == 3  # type: ignore[union-attr]


def test_a_passing_outage_is_waited_out(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchstore.publish.committer.FIRST_PAUSE_S", 0.001)
    model = {"w": torch.zeros(10)}
    faulty = FaultyStore(store, Fault(verb="upload", effect="fail-before", times=2))
    with Publisher(faulty, model) as publisher:
        assert publisher.publish_patch(0).result().version == 0


@pytest.mark.parametrize("effect", ["fail-after", "exists"])
def test_a_commit_whose_answer_was_lost_is_settled_as_ones_own(store: MemoryStore, effect) -> None:
    faulty = FaultyStore(store, Fault(verb="put", key="versions/*", effect=effect))
    with Publisher(faulty, {"w": torch.zeros(10)}) as publisher:
        assert publisher.publish_patch(0).result().version == 0
    assert sum(1 for _ in store.list("versions/")) == 1


def test_a_truncated_upload_is_found_before_the_commit(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patchstore.publish.committer.FIRST_PAUSE_S", 0.001)
    model = {"w": torch.zeros(10)}
    faulty = FaultyStore(store, Fault(verb="upload", effect="truncate", times=1))
    with Publisher(faulty, model) as publisher:
        publisher.publish_patch(0).result()
    assert_same_bits(newest(store), served(model))


def outage(store: Store, verb: str, key: str, skip: int = 0) -> FaultyStore:
    """A store on which one operation fails more often than a publisher tries."""
    return FaultyStore(store, Fault(verb=verb, key=key, effect="fail-before", skip=skip, times=5))  # type: ignore[arg-type]


def test_a_publication_that_finally_fails_makes_the_next_one_an_anchor(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patchstore.publish.committer.FIRST_PAUSE_S", 0.001)
    run = Run(outage(store, "upload", "deltas/*"))
    run.publish()
    run.train()
    with pytest.raises(PublishFailed):
        run.publish()
    run.train()
    recovered = run.publish()
    assert (recovered.version, recovered.kind, recovered.delta) == (1, "anchor", None)
    assert_same_bits(newest(store), served(run.model))
    run.train()
    assert run.publish().kind == "delta"
    assert_same_bits(newest(store), served(run.model))
    run.close()


def test_a_failure_nobody_asked_about_surfaces_in_the_next_call(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patchstore.publish.committer.FIRST_PAUSE_S", 0.001)
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


def test_a_failure_nobody_asked_about_surfaces_at_close(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patchstore.publish.committer.FIRST_PAUSE_S", 0.001)
    publisher = Publisher(outage(store, "put", "versions/*"), {"w": torch.zeros(10)})
    publisher.publish_patch(0)
    with pytest.raises(PublishFailed):
        publisher.close()


def test_a_store_that_refuses_fails_the_publication_without_retries(store: MemoryStore) -> None:
    model = {"w": torch.zeros(10)}

    class Refusing(FaultyStore):
        refusing = False

        def upload(self, key, chunks):  # type: ignore[no-untyped-def]
            if self.refusing:
                raise UsageError("no right to write")
            super().upload(key, chunks)

    refusing = Refusing(store)
    with Publisher(refusing, model) as publisher:
        publisher.publish_patch(0).result()
        model["w"] += 1
        refusing.refusing = True
        with pytest.raises(PublishFailed, match="no right to write"):
            publisher.publish_patch(1).result()
        refusing.refusing = False
        assert publisher.publish_patch(2).result().kind == "anchor"
    assert_same_bits(newest(store), served(model))


def test_publications_behind_a_failed_one_do_not_commit_on_its_base(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patchstore.publish.committer.FIRST_PAUSE_S", 0.001)
    gate = threading.Event()

    class Waiting(FaultyStore):
        def upload(self, key, chunks):  # type: ignore[no-untyped-def]
            if key.startswith("deltas/"):
                gate.wait(30)
            super().upload(key, chunks)

    model = {"w": torch.zeros(10)}
    faulty = Waiting(store, Fault(verb="upload", key="deltas/*", effect="fail-before", times=5))
    publisher = Publisher(faulty, model, max_pending=3)
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


def test_a_commit_that_takes_place_after_it_was_given_up_is_adopted(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patchstore.publish.committer.FIRST_PAUSE_S", 0.001)
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


def test_the_first_of_two_commits_without_answers_is_recognised_as_ones_own(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patchstore.publish.committer.FIRST_PAUSE_S", 0.001)
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


def test_resuming_with_other_ties_is_refused(store: MemoryStore) -> None:
    tensor = torch.zeros(4)
    with Publisher(store, {"x": tensor}) as publisher:
        publisher.publish_patch(0).result()
    with pytest.raises(SchemaMismatch):
        Publisher(store, {"x": tensor, "z": tensor}, resume=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"resume": "anchr"},
        {"resume": None},
        {"resume": "3"},
        {"resume": 1.0},
        {"resume": -1},
        {"dtype": torch.int8},
        {"dtype": "int8"},
        {"dtype": "brainfloat"},
        {"dtype": "auto"},
        {"dtype": "nn"},
        {"dtype": 16},
        {"files": "/nonexistent"},
        {"files": 3},
        {"files": ["config.json"]},
        {"files": __file__},
        {"max_pending": 0},
        {"max_pending": 1.5},
        {"max_pending": None},
        {"anchor_every": True},
        {"anchor_every": "64"},
        {"anchor_every": -1},
        {"max_shard_bytes": 5e9},
        {"max_shard_bytes": torch.tensor(True)},
        {"encoding": None},
        {"encoding": 3},
        {"encoding": ["gap"]},
        {"snapshot": "typo"},
        {"snapshot": None},
        {"snapshot": ["device"]},
        {"snapshot": Path("/nonexistent")},
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_before_the_store_is_asked(
    store: MemoryStore, wrong: dict[str, Any]
) -> None:
    watched = FaultyStore(store)
    (name,) = wrong
    with pytest.raises(UsageError, match=name):
        Publisher(watched, {"w": torch.zeros(3)}, **wrong)
    assert watched.calls == []


@pytest.mark.parametrize("value", [2, np.int64(2), np.uint8(2), torch.tensor(2)])
def test_all_integers_do_as_arguments(store: MemoryStore, value: Any) -> None:
    with Publisher(store, {"w": torch.zeros(3)}, anchor_every=value, max_pending=value) as publisher:
        kinds = [publisher.publish_patch(step).result().kind for step in range(3)]
    assert kinds == ["anchor", "delta", "anchor"]


@pytest.mark.parametrize(
    "step",
    [
        1.0,
        True,
        None,
        "7",
        b"7",
        [1],
        2**63,
        -(2**63) - 1,
        2**53,
        -(2**53),
        np.float64(1),
        np.bool_(True),
        torch.tensor(1.0),
        torch.tensor(True),
        torch.tensor([1, 2]),
        torch.tensor(1, device="meta"),
    ],
    ids=repr,
)
def test_a_step_that_is_no_integer_is_refused_before_anything_is_compared(run: Run, step: Any) -> None:
    run.publish(3)
    run.train()
    before = list(run.store.list())
    with pytest.raises(UsageError, match="step"):
        run.publisher.publish_patch(step)
    assert list(run.store.list()) == before
    assert run.publish(4).kind == "delta"
    assert_same_bits(newest(run.store), served(run.model))


@pytest.mark.parametrize("step", [7, np.int32(7), np.uint64(7), torch.tensor(7)], ids=repr)
def test_a_step_may_be_of_any_integer_type(run: Run, step: Any) -> None:
    manifest = run.publish(step)
    assert type(manifest.step) is int
    assert history.read_manifest(run.store, 0) == manifest and manifest.step == 7
    assert verify(run.store).step == 7


def test_a_step_may_be_negative(run: Run) -> None:
    run.publish(-1)
    assert verify(run.store).step == -1


@pytest.mark.parametrize("dtype", ["float16", "torch.float16", "half", torch.float16])
def test_a_dtype_may_be_given_by_its_name(store: MemoryStore, dtype: Any) -> None:
    model = {"w": torch.randn(9)}
    with Publisher(store, model, dtype=dtype) as publisher:
        publisher.publish_patch(0).result()
    assert_same_bits(newest(store), served(model, torch.float16))


def test_a_store_may_be_given_by_its_path_or_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(FolderStore, "close", lambda self: closed.append(self.url))
    model = {"w": torch.randn(9)}
    for place in (tmp_path / "a", str(tmp_path / "b"), f"file://{tmp_path}/c"):
        path = str(place).removeprefix("file://")
        with Publisher(place, model) as publisher:
            publisher.publish_patch(0).result()
            assert closed == []
        assert closed == [path]
        assert verify(place).version == 0
        replay(place, out=tmp_path / f"out-{Path(path).name}")
        assert closed == [path] * 3
        tensors: dict[str, torch.Tensor] = {}
        follower = Replica(place, tensors)
        follower.update()
        assert closed == [path] * 3
        follower.close()
        assert closed == [path] * 4
        assert_same_bits(tensors, served(model))
        closed.clear()


def test_a_store_that_a_publisher_opened_is_closed_where_opening_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []
    monkeypatch.setattr(FolderStore, "close", lambda self: closed.append(self.url))
    threads = threading.active_count()
    with pytest.raises(ResumeMismatch):
        Publisher(tmp_path, {"w": torch.zeros(3)}, resume=True)
    with pytest.raises(VersionNotFound):
        Replica(tmp_path, {})
    assert closed == [str(tmp_path)] * 2
    assert threading.active_count() == threads


def test_a_store_that_the_caller_opened_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(FolderStore, "close", lambda self: closed.append(self.url))
    store = FolderStore(tmp_path)
    with Publisher(store, {"w": torch.zeros(3)}) as publisher:
        publisher.publish_patch(0)
    verify(store)
    Replica(store, {}).close()
    assert closed == []


@pytest.mark.parametrize(
    "wrong", [None, 3, {"w": torch.zeros(3)}, torch.nn.Linear(2, 2), b"/tmp/x"], ids=type
)
def test_what_is_no_store_is_refused(tmp_path: Path, wrong: Any) -> None:
    for use in (
        lambda: Publisher(wrong, {"w": torch.zeros(3)}),
        lambda: Replica(wrong, {}),
        lambda: verify(wrong),
        lambda: replay(wrong, out=tmp_path / "out"),
    ):
        with pytest.raises(UsageError, match=r"URL.*open_store"):
            use()


def test_publishing_in_inference_mode_or_without_gradients_changes_nothing(store: MemoryStore) -> None:
    model = torch.nn.Linear(8, 8)
    modes = [torch.inference_mode, torch.enable_grad, torch.no_grad, torch.inference_mode, torch.enable_grad]
    for encoding in CHOICES:
        for opened_in in (torch.inference_mode, torch.no_grad, torch.enable_grad):
            store = MemoryStore()
            with opened_in():
                publisher = Publisher(store, model, encoding=encoding, anchor_every=3)
            tensors: dict[str, torch.Tensor] = {}
            with opened_in():
                follower = Replica(store, tensors)
            for step, mode in enumerate(modes):
                with torch.no_grad():
                    model.weight[step] += 1
                with mode():
                    publisher.publish_patch(step).result()
                with modes[-1 - step]():
                    follower.update()
                assert_same_bits(tensors, served(model.state_dict()))
            publisher.close()


def test_weights_that_were_made_in_inference_mode_are_published_and_followed(store: MemoryStore) -> None:
    with torch.inference_mode():
        model = {"w": torch.randn(64)}
        tensors = {"w": torch.zeros(64, dtype=torch.bfloat16)}
    publisher, follower = Publisher(store, model), Replica(store, tensors)
    for step in range(3):
        publisher.publish_patch(step).result()
        follower.update()
        assert_same_bits(tensors, served(model))
        with torch.inference_mode():
            model["w"][step] = step + 0.5
    publisher.close()


@pytest.mark.parametrize("encoding", CHOICES)
@pytest.mark.parametrize("place", ["device", "host", "file"])
def test_another_default_device_or_dtype_changes_nothing(
    store: MemoryStore, tmp_path: Path, encoding: str, place: str
) -> None:
    run = Run(store)
    tensors: dict[str, torch.Tensor] = {}
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            run.open(encoding=encoding, snapshot=tmp_path if place == "file" else place)
            follower = Replica(store, tensors)
        for step in range(4):
            with torch.device("meta"):
                run.publish(step)
                run.model["scale"].mul_(1.5)
                run.model["layers.0.norm.weight"][step] = 2.5
                run.publish(step)
                follower.update()
            assert_same_bits(tensors, served(run.model))
            run.train()
        with torch.device("meta"):
            assert_same_bits(newest(store), run.history[max(run.history)])
            verify(store)
            verify(store, 3)
            replay(store, out=tmp_path / "out")
    finally:
        torch.set_default_dtype(before)
        run.close()


RANKS = [
    ({"RANK": "3"}, "rank 3"),
    ({"LOCAL_RANK": "1"}, "rank 1"),
    ({"RANK": "3", "WORLD_SIZE": "4"}, "rank 3 of 4"),
    ({"RANK": "0", "WORLD_SIZE": "1"}, None),
    ({"RANK": "0", "LOCAL_RANK": "0"}, None),
    ({"RANK": "x"}, None),
    ({}, None),
]


@pytest.mark.parametrize(("environment", "said"), RANKS)
def test_a_second_rank_is_told_to_leave_publishing_to_one(
    run: Run, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], said: str | None
) -> None:
    run.publish()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunExists) as caught:
        Publisher(run.store, run.model)
    if said is None:
        assert "rank" not in str(caught.value)
    else:
        assert f"{said}, and a run is published from one rank" in str(caught.value)


def test_the_rank_of_an_initialised_group_comes_before_the_environment(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.publish()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    with pytest.raises(RunExists, match="rank 5 of 8"):
        Publisher(run.store, run.model)
    # The others may have been first.
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    with pytest.raises(RunExists, match="rank 0 of 8: if the others open a Publisher too, let only this one"):
        Publisher(run.store, run.model)


def test_an_upload_whose_threads_cannot_start_fails_one_publication(store: MemoryStore) -> None:
    class Threaded(MemoryStore):
        is_full = False

        def upload(self, key, chunks):  # type: ignore[no-untyped-def]
            if self.is_full:
                raise RuntimeError("can't start new thread")
            super().upload(key, chunks)

    store, model = Threaded(), {"w": torch.zeros(8)}
    with Publisher(store, model) as publisher:
        publisher.publish_patch(0).result()
        model["w"] += 1
        store.is_full = True
        with pytest.raises(PublishFailed, match="can't start new thread"):
            publisher.publish_patch(1).result()
        store.is_full = False
        assert publisher.publish_patch(2).result().kind == "anchor"
    assert_same_bits(newest(store), served(model))


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

    model, threads = {"w": torch.zeros(8)}, threading.active_count()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", limited)
        refused = pytest.raises(UsageError, match="cannot start the threads")
        # It has two, and the probe eight at a time: fewer where those are quick.
        with refused if num_started <= 2 else suppress(UsageError):
            Publisher(store, model).close()
    if history.read_header(store) is None:
        assert list(store.list()) == []
    assert threading.active_count() == threads


@pytest.fixture(params=["folder", "memory"])
def lasting(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store that can be emptied behind a publisher's back; what is missing is not looked for as long."""
    monkeypatch.setattr("patchstore.publish.committer.FIRST_PAUSE_S", 0.001)
    return FolderStore(tmp_path / "bucket") if request.param == "folder" else MemoryStore()


def empty(store: Store) -> None:
    if isinstance(store, FolderStore):
        shutil.rmtree(store.url)
    else:
        for key in [*store.list()]:
            store.delete(key)


def contents(store: Store) -> dict[str, bytes]:
    return {key: store.get(key) for key in store.list()}


def assert_stopped(publisher: Publisher) -> None:
    """Fail unless this publication, and every later call, says that the run is lost."""
    with pytest.raises(RunLost):
        publisher.publish_patch(7).result()
    for _ in range(2):
        with pytest.raises(RunLost):
            publisher.publish_patch(8)


@pytest.mark.parametrize("num_versions", [0, 1, 2, 3])
def test_a_bucket_that_disappears_stops_its_publisher_and_stays_empty(
    lasting: Store, num_versions: int
) -> None:
    run = Run(lasting)
    run.open(anchor_every=3)
    run.publish_versions(num_versions)
    empty(lasting)
    run.train()
    assert_stopped(run.publisher)
    run.close()
    assert contents(lasting) == {}
    if isinstance(lasting, FolderStore):
        # At most the folder that every upload begins in, and nothing in it.
        assert {path.name for path in Path(lasting.url).rglob("*")} <= {".tmp"}


@pytest.mark.parametrize("num_versions", [0, 1, 2])
def test_a_bucket_that_another_run_took_over_stops_its_first_publisher_and_is_left_alone(
    lasting: Store, num_versions: int
) -> None:
    run, other = Run(lasting), Run(lasting)
    run.open()
    run.publish_versions(num_versions)
    empty(lasting)
    other.open()
    other.publish_versions(3 if num_versions else 0)
    before = contents(lasting)
    assert_stopped(run.publisher)
    run.close()
    assert contents(lasting) == before
    other.publish()
    assert_same_bits(newest(lasting), served(other.model))
    other.close()


def test_a_manifest_that_was_exchanged_stops_the_publisher_that_builds_on_it(run: Run) -> None:
    run.publish_versions(2)
    key = layout.manifest_key(1)
    run.store.put(key, run.store.get(key).replace(b'"step": 1', b'"step": 5'))
    assert_stopped(run.publisher)


def test_an_anchor_is_not_uploaded_to_where_its_run_is_no_more(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patchstore.publish.committer.FIRST_PAUSE_S", 0.001)
    watched = FaultyStore(run.store)
    with suppress(RunLost), Publisher(watched, run.model, anchor_every=1) as publisher:
        publisher.publish_patch(0).result()
        empty(run.store)
        watched.calls.clear()
        publisher.publish_patch(1).result()
    assert not [call for call in watched.calls if call[0] == "upload"]


def test_a_parent_that_a_store_does_not_show_at_once_is_waited_for(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patchstore.publish.committer.FIRST_PAUSE_S", 0.001)
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


def test_a_manifest_is_as_small_for_thousands_of_tensors_as_for_one(store: MemoryStore) -> None:
    model = {f"experts.{i}.weight": torch.zeros(2) for i in range(5_000)}
    with Publisher(store, model) as publisher:
        publisher.publish_patch(0).result()
        for tensor in model.values():
            tensor.add_(1)
        manifest = publisher.publish_patch(1).result()
    assert manifest.state.sums.size == len(store.get(manifest.state.sums.key)) == 16 * 5_000
    assert max(len(store.get(key)) for key in store.list("versions/")) < 1_500


def test_a_version_with_its_parents_weights_names_its_parents_sums(run: Run) -> None:
    first = run.publish()
    second = run.publish()
    run.close()
    with Publisher(run.store, run.model, resume=True):
        claim = history.head(run.store)
    assert claim is not None
    assert first.state == second.state == claim.state
    assert [*run.store.list("states/")] == [first.state.sums.key]


def test_an_anchor_has_sums_of_its_own(run: Run) -> None:
    first = run.publish()
    with Publisher(run.store, run.model, resume="anchor") as publisher:
        second = publisher.publish_patch(1).result()
    assert first.state.total == second.state.total
    assert first.state.sums.key != second.state.sums.key
    assert run.store.get(first.state.sums.key) == run.store.get(second.state.sums.key)


@pytest.mark.parametrize("name", ["", "a\nb", "__metadata__", "\x7f", "\ud800"])
def test_a_name_that_no_reader_takes_is_refused_before_a_run_is_created(
    store: MemoryStore, name: str
) -> None:
    with pytest.raises(SchemaMismatch):
        Publisher(store, {"w": torch.zeros(3), name: torch.zeros(3)})
    tied = torch.zeros(3)
    with pytest.raises(SchemaMismatch):
        Publisher(store, {"w": tied, name: tied})
    assert list(store.list()) == []


def test_of_two_publishers_on_one_run_exactly_one_goes_on(run: Run) -> None:
    run.publish()
    first = run.publisher
    second = Publisher(run.store, run.model, resume=True)
    run.train()
    with pytest.raises(VersionConflict):
        first.publish_patch(1).result()
    with pytest.raises(VersionConflict):
        first.publish_patch(2)
    first.close()
    run._publisher = None
    manifest = second.publish_patch(1).result()
    second.close()
    assert (manifest.version, manifest.writer.epoch) == (2, 2)
    assert_same_bits(newest(run.store), served(run.model))


def test_a_second_run_cannot_open_the_same_prefix_by_accident(run: Run) -> None:
    run.publish()
    with pytest.raises(RunExists):
        Publisher(run.store, run.model)


def test_two_publishers_that_create_a_run_at_once_leave_one(store: MemoryStore) -> None:
    opened, errors = [], []
    barrier = threading.Barrier(4)

    def create() -> None:
        barrier.wait()
        try:
            opened.append(Publisher(store, {"w": torch.zeros(4)}))
        except RunExists as exc:
            errors.append(exc)

    threads = [threading.Thread(target=create) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(opened), len(errors)) == (1, 3)
    opened[0].close()


def test_resuming_continues_from_the_version_that_has_these_weights(run: Run) -> None:
    run.publish_versions(3)
    run.close()
    run.model.update(
        {name: tensor.float() for name, tensor in run.history[1].items() if tensor.is_floating_point()}
    )
    run.model["head.weight"] = run.model["embed.weight"]
    publisher = run.open(resume=True)
    claim = history.head(run.store)
    assert claim is not None and (claim.version, claim.parent, claim.writer.epoch) == (3, 1, 2)
    run.train()
    manifest = publisher.publish_patch(9).result()
    assert (manifest.version, manifest.parent) == (4, 3)
    assert_same_bits(newest(run.store), served(run.model))


def test_resuming_from_a_named_version_proves_it_first(run: Run) -> None:
    run.publish_versions(3)
    run.close()
    with pytest.raises(ResumeMismatch):
        run.open(resume=0)
    with pytest.raises(ResumeMismatch):
        run.open(resume=True)


def test_weights_of_no_version_can_resume_as_an_anchor(run: Run) -> None:
    run.publish_versions(3)
    run.close()
    publisher = run.open(resume="anchor")
    manifest = publisher.publish_patch(7).result()
    assert (manifest.kind, manifest.delta) == ("anchor", None)
    assert_same_bits(newest(run.store), served(run.model))


def test_an_empty_prefix_has_nothing_to_resume(store: MemoryStore) -> None:
    with pytest.raises(ResumeMismatch):
        Publisher(store, {"w": torch.zeros(3)}, resume=True)


@pytest.mark.parametrize("resume", [False, True, "auto", "anchor"])
def test_a_store_whose_run_lost_its_header_is_refused_and_left_alone(run: Run, resume: Any) -> None:
    run.publish_versions(3)
    run.close()
    run.store.delete("store.json")
    before = list(run.store.list())
    with pytest.raises(CorruptObject, match=r"no store\.json"):
        run.open(resume=resume)
    assert list(run.store.list()) == before


@pytest.mark.parametrize("resume", [True, "auto", "anchor", 0])
@pytest.mark.parametrize("lost", [(2,), (0, 1, 2)])
def test_numbers_of_versions_that_were_removed_are_not_used_again(
    run: Run, resume: Any, lost: tuple[int, ...]
) -> None:
    run.publish_versions(3)
    run.close()
    for version in lost:
        run.store.delete(f"versions/{version:08}.json")
    with pytest.raises(CorruptObject, match=r"head\.json names version 2"):
        run.open(resume=resume)


def test_resuming_with_other_tensors_is_refused(run: Run) -> None:
    run.publish()
    run.close()
    run.model["scale"] = torch.zeros(2)
    with pytest.raises(SchemaMismatch):
        run.open(resume=True)


def test_config_and_tokenizer_files_go_into_every_anchor(store: MemoryStore, tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("[]")
    (tmp_path / "model.safetensors").write_text("not me")
    with Publisher(store, {"w": torch.zeros(10)}, files=tmp_path, anchor_every=1) as publisher:
        for step in range(2):
            manifest = publisher.publish_patch(step).result()
            assert manifest.anchor is not None
            names = [payload.key.rsplit("/", 1)[1] for payload in manifest.anchor.files]
            assert names == ["config.json", "tokenizer.json"]


UNFIT = [
    ("not JSON", "is not JSON"),
    ("[]", "not a JSON object"),
    ('{"quantization_config": {"quant_method": "fp8"}}', "quantization_config"),
    ('{"tie_word_embeddings": false}', "'lm_head.weight' and 'model.embed_tokens.weight' are one tensor"),
    ('{"text_config": {"tie_word_embeddings": false}}', "one tensor"),
    ('{"vocab_size": 11}', "its vocab_size is 11, and that of the model to publish is 10"),
    ('{"vocab_size": 10, "model_type": "unknown", "tie_word_embeddings": true}', None),
]


class Configured(torch.nn.Module):
    """A model whose output layer is its embedding, with a config as Transformers' models have."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(10, 4)})
        self.lm_head = torch.nn.Linear(4, 10, bias=False)
        self.lm_head.weight = self.model["embed_tokens"].weight
        self.config = SimpleNamespace(to_dict=lambda: {"vocab_size": 10})


@pytest.mark.parametrize(("config", "error"), UNFIT)
def test_a_config_with_which_a_replay_would_be_another_model_is_refused(
    store: MemoryStore, tmp_path: Path, config: str, error: str | None
) -> None:
    (tmp_path / "config.json").write_text(config)
    if error is None:
        Publisher(store, Configured(), files=tmp_path).close()
        return
    with pytest.raises(UsageError, match=error):
        Publisher(store, Configured(), files=tmp_path)
    assert list(store.list()) == []


def test_a_quantised_checkpoints_config_goes_with_quantised_weights(
    store: MemoryStore, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {}}')
    model = {"w": torch.zeros(4, dtype=torch.int8), "w_scale": torch.ones(1)}
    Publisher(store, model, files=tmp_path).close()


@pytest.mark.parametrize("kind", ["adapter", "pipe", "link to nothing"])
def test_what_is_no_file_of_a_base_checkpoint_is_refused(
    store: MemoryStore, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    if kind == "adapter":
        (tmp_path / "adapter_config.json").write_text("{}")
    elif kind == "pipe":
        os.mkfifo(tmp_path / "tokenizer.json")
    else:
        (tmp_path / "tokenizer.json").symlink_to(tmp_path / "gone")
    with pytest.raises(UsageError, match=r"adapter_config\.json|tokenizer\.json"):
        Publisher(store, {"w": torch.zeros(10)}, files=tmp_path)


def test_numbers_that_a_dtype_cannot_hold_are_refused(store: MemoryStore) -> None:
    model = {"ok": torch.tensor([float("inf"), 1.0]), "w": torch.tensor([1.0, 70_000.0])}
    with pytest.raises(
        SchemaMismatch, match=r"'w' has 1 numbers beyond the range of torch\.float16, such as 70000"
    ):
        Publisher(store, model, dtype="float16")
    assert list(store.list()) == []
    del model["w"]
    Publisher(store, model, dtype="fp16").close()


def test_a_source_that_never_changes_is_asked_about_once(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    model = {"w": torch.zeros(10)}
    with Publisher(store, model) as publisher:
        for step in range(3):
            publisher.publish_patch(step).result()
        assert "no weight has changed" not in caplog.text
        for step in range(3, 9):
            publisher.publish_patch(step).result()
    assert caplog.text.count("no weight has changed in the last 3 publications") == 1


@pytest.mark.parametrize("files", ["", "missing", "here"])
def test_a_folder_that_is_no_checkpoint_is_refused_and_nothing_of_it_uploaded(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    for folder in (tmp_path, tmp_path / "here"):
        (folder / "secrets.json").write_text("{}")
    with pytest.raises(UsageError, match="checkpoint folder"):
        Publisher(store, {"w": torch.zeros(10)}, files=files)
    assert list(store.list()) == []


def test_a_closed_publisher_refuses_to_publish(run: Run) -> None:
    publisher = run.open()
    publisher.close()
    publisher.close()
    with pytest.raises(UsageError):
        publisher.publish_patch(0)


@pytest.mark.parametrize("place", ["device", "host", "file"])
@pytest.mark.parametrize("encoding", CHOICES)
def test_every_snapshot_publishes_the_same(
    store: MemoryStore, tmp_path: Path, place: str, encoding: str
) -> None:
    run = Run(store)
    run.open(snapshot=tmp_path if place == "file" else place, encoding=encoding)
    kinds = [manifest.kind for manifest in run.publish_versions(6)]
    assert kinds == ["anchor", "delta", "delta", "delta", "anchor", "delta"]
    assert_same_bits(newest(store), run.history[5])
    run.close()


def test_a_snapshot_in_a_file_leaves_no_file_behind(store: MemoryStore, tmp_path: Path) -> None:
    with Publisher(store, {"w": torch.zeros(1000)}, snapshot=tmp_path):
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["disk", "/tmp", Path("/nonexistent"), None])
def test_a_place_that_no_snapshot_can_have_is_refused(store: MemoryStore, place: object) -> None:
    with pytest.raises(UsageError, match="snapshot"):
        Publisher(store, {"w": torch.zeros(3)}, snapshot=place)  # type: ignore[arg-type]
    assert list(store.list()) == []


def test_a_snapshot_that_does_not_fit_is_refused_before_anything_is_written(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UsageError, match=r"snapshot=.* 2,000 bytes"):
        Publisher(store, {"w": torch.zeros(1000)}, snapshot=tmp_path)
    assert list(store.list()) == list(tmp_path.iterdir()) == []


def test_kernels_are_not_needed_and_not_used_where_they_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = torch.device("cuda", 0), torch.device("cuda", 1)
    assert snapshot.kernels_for({torch.device("cpu")}) is None
    assert snapshot.kernels_for({one, torch.device("cpu")}) is None
    assert snapshot.kernels_for({one, other}) is None
    assert snapshot.kernels_for(set()) is None
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "patchstore.kernels.compare", raising=False)
    monkeypatch.delattr("patchstore.kernels.compare", raising=False)
    assert snapshot.kernels_for({one}) is None


def test_what_was_published_whole_was_not_compared(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.open(anchor_every=100)

    def compared(*args: object) -> None:
        raise AssertionError("compared")

    with monkeypatch.context() as patched:
        patched.setattr(diff, "changed", compared)
        assert run.publish().delta is None
    assert_same_bits(newest(run.store), served(run.model))


def test_tensors_that_share_an_address_are_tied_only_if_they_are_one(store: MemoryStore) -> None:
    memory = torch.randn(12)
    model = {
        "a": memory,
        "b": memory[:6],
        "c": memory.view(3, 4),
        "d": memory,
        "e": memory[:6],
        "none": memory[:0],
    }
    with Publisher(store, model) as publisher:
        publisher.publish_patch(0).result()
    header = history.read_header(store)
    assert header is not None
    assert header.schema.tied == {"d": "a", "e": "b"}
    assert newest(store).keys() == {"a", "b", "c", "none"}
