"""Followers: proved before a write, whole afterwards, and undone when something fails."""

import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from patchstore import Publisher, Replica, replay
from patchstore.apply import replica as replicas
from patchstore.bucket import history
from patchstore.errors import (
    CorruptObject,
    SchemaMismatch,
    StateMismatch,
    StoreReplaced,
    UsageError,
    VersionNotFound,
    WrongParent,
)
from patchstore.stores import layout
from patchstore.stores.memory import MemoryStore
from patchstore.tensors.columns import Group, Located
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.interrupts import Interrupter
from tests.support.weights import Run, State, assert_same_bits, lie, small_model


def copies(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}


def test_a_replica_reaches_any_version_from_any_other(run: Run) -> None:
    run.publish_versions(9)
    replica = Replica(run.store, {})
    for version in (3, 8, 0, 5, 4, 8, 7):
        replica.update(version)
        assert replica.held == version
        assert_same_bits(dict(replica.tensors), run.history[version])


def test_staging_writes_nothing(run: Run) -> None:
    run.publish_versions(3)
    replica = Replica(run.store, copies(run.history[0]), held=0)
    staged = replica.stage(2)
    assert_same_bits(dict(replica.tensors), run.history[0])
    assert (replica.held, staged.manifest.version) == (0, 2)


def test_tensors_keep_their_memory_through_updates_and_anchors(run: Run) -> None:
    run.publish_versions(6)
    replica = Replica(run.store, copies(run.history[0]), held=0)
    places = {name: tensor.data_ptr() for name, tensor in replica.tensors.items()}
    replica.update(2)
    replica.update(0)
    replica.update()
    assert {name: tensor.data_ptr() for name, tensor in replica.tensors.items()} == places
    assert_same_bits(dict(replica.tensors), run.history[5])


def test_rolling_back_restores_bits_and_version(run: Run) -> None:
    run.publish_versions(6)
    replica = Replica(run.store, copies(run.history[1]), held=1)
    for version in (3, 5, 0):
        undo = replica.apply(replica.stage(version))
        assert_same_bits(dict(replica.tensors), run.history[version])
        undo.rollback()
        assert replica.held == 1
        assert_same_bits(dict(replica.tensors), run.history[1])
    replica.update(2)
    assert_same_bits(dict(replica.tensors), run.history[2])


def test_rolling_back_a_first_anchor_leaves_no_tensors(run: Run) -> None:
    run.publish()
    replica = Replica(run.store, {})
    replica.apply(replica.stage(0)).rollback()
    assert (replica.held, dict(replica.tensors)) == (None, {})


def test_a_tensor_that_took_anothers_place_is_written_and_the_other_is_free(run: Run) -> None:
    run.publish_versions(5)
    tensors = copies(run.history[0])
    replica = Replica(run.store, tensors, held=0)
    replica.update(1)
    memory = np.empty(tensors["embed.weight"].shape, dtype=np.int16)
    other = weakref.ref(memory)
    tensors["embed.weight"] = torch.from_numpy(memory).view(torch.bfloat16).copy_(tensors["embed.weight"])
    replica.update(2)
    del memory
    assert other() is not None
    tensors["embed.weight"] = tensors["embed.weight"].clone()
    assert other() is None
    replica.update(3)
    assert_same_bits(tensors, run.history[3])
    staged = replica.stage(4)
    # The same tensor, elsewhere.
    tensors["embed.weight"].data = tensors["embed.weight"].clone()
    replica.apply(staged)
    assert_same_bits(tensors, run.history[4])


def test_autograd_does_not_go_back_through_what_an_update_overwrote(run: Run) -> None:
    run.publish_versions(2)
    tensors = copies(run.history[0])
    replica = Replica(run.store, tensors, held=0)
    weight = tensors["embed.weight"].requires_grad_()
    loss = weight.square().sum()
    replica.update(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Interrupted(dict[str, torch.Tensor]):
    """Tensors of which one access fails."""

    left = -1

    def __getitem__(self, name: str) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            raise KeyError(name)
        return super().__getitem__(name)


def test_a_write_that_fails_midway_is_undone(run: Run) -> None:
    run.publish_versions(2)
    num_failed, is_done = 0, False
    while not is_done:
        tensors = Interrupted(copies(run.history[0]))
        replica = Replica(run.store, tensors, held=0)
        staged = replica.stage(1)
        tensors.left = num_failed + 1
        try:
            replica.apply(staged)
            is_done = True
        except KeyError:
            num_failed += 1
        tensors.left = -1
        assert replica.held == int(is_done)
        assert_same_bits(tensors, run.history[int(is_done)])
    assert num_failed == staged.num_tensors


def test_of_a_write_that_fails_within_a_group_nothing_is_left(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.publish_versions(2)
    tensors = copies(run.history[0])
    replica = Replica(run.store, tensors, held=0)
    write, written = Located.write, list[Group]()

    def first_alone(self: Located, group: Group) -> None:
        written.append(group)
        if len(written) > 1:
            write(self, group)
            return
        write(self, group.of(group.numbers[:1]))
        raise MemoryError

    monkeypatch.setattr(Located, "write", first_alone)
    with pytest.raises(MemoryError):
        replica.update(1)
    assert len(written) == 2
    assert_same_bits(tensors, run.history[0])
    replica.update(1)
    assert_same_bits(tensors, run.history[1])


@pytest.mark.parametrize(
    ("anchor_every", "start"), [(100, 1), (1, 1), pytest.param(1, None, id="tensors are made")]
)
def test_after_an_interrupt_at_any_point_the_version_that_is_held_is_there(
    anchor_every: int, start: int | None
) -> None:
    model, states = {"a": torch.ones(8).bfloat16(), "b": torch.ones(4)}, list[State]()
    store = MemoryStore()
    with Publisher(store, model, dtype=None, anchor_every=anchor_every) as publisher:
        for version in range(3):
            publisher.publish_patch(version).result()
            states.append(copies(model))
            for tensor in model.values():
                tensor[0] += 1
    for point in count(1):
        # With an update before, whose undo is another one.
        replica = Replica(
            store, {} if start is None else copies(states[0]), held=None if start is None else 0
        )
        if start is not None:
            replica.update(start)
        at = Interrupter(point, within=("apply/replica.py", "apply/update.py"))
        is_interrupted = at.during(replica.apply, replica.stage(2))
        assert replica.held in {start, 2}
        assert_same_bits(dict(replica.tensors), {} if replica.held is None else states[replica.held])
        if not is_interrupted:
            break
    assert point > 30
    assert replica.held == 2


def test_of_an_undo_that_fails_no_version_is_held(run: Run) -> None:
    run.publish_versions(2)
    replica = Replica(run.store, tensors := copies(run.history[0]), held=0)
    for name in ("embed.weight", "position_ids"):
        undo = replica.apply(replica.stage(1 - (replica.held or 0)))
        before, tensors[name] = tensors[name], torch.zeros(3)
        with pytest.raises(SchemaMismatch, match=name):
            undo.rollback()
        assert replica.held is None
        tensors[name] = before
        replica.update(1)
        assert_same_bits(tensors, run.history[1])


@pytest.mark.parametrize("version", [0, 2])
def test_what_an_update_replaced_is_free_once_nothing_can_put_it_back(
    run: Run, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.publish_versions(3)
    replica = Replica(run.store, copies(run.history[1]), held=1)
    kept = list[weakref.ref[replicas.Replaced]]()

    class Noted(replicas.Replaced):
        __slots__ = ("__weakref__",)

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            kept.append(weakref.ref(self))

    monkeypatch.setattr(replicas, "Replaced", Noted)

    def is_kept() -> bool:
        return any(each is not None and each.old for each in [it() for it in kept])

    undo = replica.apply(replica.stage(version))
    assert is_kept()
    del undo
    assert not is_kept()


def test_an_anchor_is_not_put_back_into_what_is_no_longer_contiguous() -> None:
    store, model = MemoryStore(), {"a": torch.ones(8, 8).bfloat16()}
    with Publisher(store, model, anchor_every=1) as publisher:
        for version in range(2):
            publisher.publish_patch(version).result()
            model["a"][0, 1] += 1
    replica = Replica(store, held := {"a": torch.ones(8, 8).bfloat16()}, held=0)
    undo = replica.apply(replica.stage(1))
    held["a"] = held["a"].t()
    with pytest.raises(SchemaMismatch, match="not contiguous"):
        undo.rollback()
    assert replica.held is None


def test_an_update_staged_on_another_version_is_refused(run: Run) -> None:
    run.publish_versions(3)
    replica = Replica(run.store, copies(run.history[0]), held=0)
    stale = replica.stage(1)
    replica.update(2)
    with pytest.raises(UsageError):
        replica.apply(stale)
    assert_same_bits(dict(replica.tensors), run.history[2])


def test_claiming_a_version_that_the_tensors_do_not_have_is_refused(run: Run) -> None:
    run.publish_versions(2)
    with pytest.raises(StateMismatch):
        Replica(run.store, copies(run.history[0]), held=1)
    with pytest.raises(StateMismatch):
        Replica(run.store, {}, held=1)


def test_weights_changed_behind_the_replicas_back_are_noticed_before_a_write(run: Run) -> None:
    run.publish_versions(2)
    tensors = copies(run.history[0])
    replica = Replica(run.store, tensors, held=0)
    place = replica.header.schema.places["embed.weight"]
    group = next(each for each in replica.stage(1).changes if place in each.numbers)
    changed = int(group.of(np.array([place])).positions[0])
    tensors["embed.weight"].view(-1)[changed] = 5.0
    with pytest.raises(StateMismatch):
        replica.stage(1)


def test_other_tensors_than_the_runs_are_refused(run: Run) -> None:
    run.publish()
    with pytest.raises(SchemaMismatch):
        Replica(run.store, small_model())
    with pytest.raises(SchemaMismatch):
        Replica(run.store, {"embed.weight": torch.zeros(3)})
    strided = copies(run.history[0])
    strided["embed.weight"] = strided["embed.weight"].T.contiguous().T
    with pytest.raises(SchemaMismatch):
        Replica(run.store, strided)


def test_tensors_that_share_memory_are_refused_unless_they_are_tied(run: Run, store: MemoryStore) -> None:
    run.publish()
    tied = copies(run.history[0])
    tied["head.weight"] = tied["embed.weight"]
    Replica(run.store, tied).update()
    assert_same_bits({n: t for n, t in tied.items() if n != "head.weight"}, run.history[0])
    untied = copies(run.history[0])
    untied["head.weight"] = untied["embed.weight"].clone()
    with pytest.raises(SchemaMismatch):
        Replica(run.store, untied)


def test_two_tensors_in_one_memory_are_refused(store: MemoryStore) -> None:
    with Publisher(store, {"a": torch.zeros(8), "b": torch.ones(8)}) as publisher:
        publisher.publish_patch(0).result()
    memory = torch.zeros(12, dtype=torch.bfloat16)
    for start in (0, 4):
        with pytest.raises(SchemaMismatch):
            Replica(store, {"a": memory[:8], "b": memory[start : start + 8]})


def test_an_undo_that_is_no_longer_the_last_is_refused(run: Run) -> None:
    run.publish_versions(3)
    replica = Replica(run.store, copies(run.history[0]), held=0)
    first = replica.apply(replica.stage(1))
    second = replica.apply(replica.stage(2))
    with pytest.raises(UsageError):
        first.rollback()
    assert_same_bits(dict(replica.tensors), run.history[2])
    second.rollback()
    first.rollback()
    assert_same_bits(dict(replica.tensors), run.history[0])


def test_a_store_without_a_run_or_a_version_is_named(store: MemoryStore, run: Run) -> None:
    with pytest.raises(VersionNotFound):
        Replica(store, {})
    run.open()
    replica = Replica(store, {})
    assert replica.head() is None
    with pytest.raises(VersionNotFound):
        replica.update()


def test_an_unknown_version_changes_nothing(run: Run) -> None:
    run.publish()
    replica = Replica(run.store, copies(run.history[0]), held=0)
    with pytest.raises(VersionNotFound):
        replica.update(5)
    assert_same_bits(dict(replica.tensors), run.history[0])


def test_a_delta_is_never_applied_to_another_base_than_its_parent(run: Run) -> None:
    run.publish_versions(3)
    # A bucket that lost its anchor: version 2 is reachable from 1 alone.
    manifest = run.store.get(layout.manifest_key(0))
    run.store.delete(layout.manifest_key(0))
    replica = Replica(run.store, copies(run.history[1]), held=1)
    replica.update(2)
    assert_same_bits(dict(replica.tensors), run.history[2])
    stranger = Replica(run.store, {})
    with pytest.raises((WrongParent, VersionNotFound)):
        stranger.update(2)
    run.store.put(layout.manifest_key(0), manifest)
    stranger.update(2)
    assert_same_bits(dict(stranger.tensors), run.history[2])


@pytest.mark.parametrize("sums", ["there", "missing", "spoiled", "unreachable"])
def test_a_manifest_that_promises_other_weights_is_refused_before_a_write_and_tensors_named_if_they_can_be(
    run: Run, sums: str
) -> None:
    run.publish_versions(2)
    lie(run.store, 1, "scale")
    stored = history.read_manifest(run.store, 1).state.sums
    faults = []
    if sums == "missing":
        run.store.delete(stored.key)
    elif sums == "spoiled":
        run.store.put(stored.key, bytes(stored.size))
    elif sums == "unreachable":
        faults.append(Fault(verb="get", key=stored.key, effect="fail-before", times=None))
    replica = Replica(FaultyStore(run.store, *faults), copies(run.history[0]), held=0)
    says = "1 tensors differ: scale" if sums == "there" else "cannot be told"
    with pytest.raises(StateMismatch, match=says):
        replica.update(1)
    assert_same_bits(dict(replica.tensors), run.history[0])


def test_replicas_and_replays_need_no_digest_sums(run: Run, tmp_path) -> None:
    run.publish_versions(3)
    store = FaultyStore(run.store)
    Replica(store, {}).update()
    Replica(store, copies(run.history[0]), held=0).update()
    replay(store, out=tmp_path / "out")
    assert not [key for _, key in store.calls if key.startswith("states/")]


def test_temporary_files_are_gone_after_success_and_failure(run: Run, tmp_path) -> None:
    run.publish_versions(2)
    replica = Replica(run.store, copies(run.history[0]), held=0, scratch=tmp_path)
    replica.update()
    assert list(tmp_path.iterdir()) == []
    key = next(run.store.list("deltas/"))
    run.store.put(key, b"short")
    replica = Replica(run.store, copies(run.history[0]), held=0, scratch=tmp_path)
    with pytest.raises(CorruptObject):
        replica.update()
    assert list(tmp_path.iterdir()) == []


# A store that is not what it was.


def emptied(store: MemoryStore) -> None:
    for key in list(store.list()):
        store.delete(key)


def assert_refused(replica: Replica, version: int | None, match: str) -> None:
    """Fail unless an update is refused because of the store, with the replica as it was."""
    before, held = copies(dict(replica.tensors)), replica.held
    with pytest.raises(StoreReplaced, match=match):
        replica.update(version)
    assert replica.held == held
    assert_same_bits(dict(replica.tensors), before)


@pytest.mark.parametrize("num_versions", [1, 3, 5])
@pytest.mark.parametrize("is_asked_by_number", [False, True])
def test_another_run_in_the_buckets_place_is_noticed_at_any_version_number(
    run: Run, store: MemoryStore, num_versions: int, is_asked_by_number: bool
) -> None:
    run.publish_versions(3)
    replica = Replica(store, copies(run.history[2]), held=2)
    run.close()
    emptied(store)
    other = Run(store)
    other.publish_versions(num_versions)
    other.close()
    assert_refused(replica, num_versions - 1 if is_asked_by_number else None, "run")
    # Also where the number that is asked for is one that the other run does not have.
    assert_refused(replica, 2, "run")
    replica = Replica(store, replica.tensors)
    replica.update()
    assert_same_bits(dict(replica.tensors), other.history[num_versions - 1])


@pytest.mark.parametrize("version", [None, 1, 2])
@pytest.mark.parametrize("held", [None, 1])
def test_a_bucket_that_was_emptied_is_noticed(
    run: Run, store: MemoryStore, version: int | None, held: int | None
) -> None:
    run.publish_versions(2)
    replica = Replica(store, copies(run.history[1]), held=held)
    emptied(store)
    assert_refused(replica, version, "no version|no run|no longer has version 1")


def test_versions_that_end_before_the_held_one_are_noticed_but_going_back_is_allowed(
    run: Run, store: MemoryStore
) -> None:
    run.publish_versions(4)
    replica = Replica(store, copies(run.history[3]), held=3)
    store.delete(layout.manifest_key(3))
    assert_refused(replica, None, "ends with version 2, but version 3")
    assert_refused(replica, 3, "no longer has version 3")
    with pytest.raises(StoreReplaced):
        replica.head()
    replica.update(2)
    assert_same_bits(dict(replica.tensors), run.history[2])


@pytest.mark.parametrize("version", [None, 1])
def test_another_manifest_of_the_held_number_is_noticed(
    run: Run, store: MemoryStore, version: int | None
) -> None:
    run.publish_versions(2)
    replica = Replica(store, copies(run.history[1]), held=1)
    key = layout.manifest_key(1)
    store.put(key, store.get(key).replace(b'"step": 1', b'"step": 7'))
    assert_refused(replica, version, "another version 1")


def test_another_history_is_noticed_before_its_deltas_are_applied(run: Run, store: MemoryStore) -> None:
    """Version 1 was published twice: by the run that is held, and again after the bucket was set back."""
    run.publish_versions(1)
    run.close()
    saved = {key: store.get(key) for key in store.list()}
    run.open(resume="anchor")
    run.publish_versions(2)
    run.close()
    replica = Replica(store, copies(run.history[2]), held=2)
    emptied(store)
    for key, data in saved.items():
        store.put(key, data)
    run.open(resume="anchor")
    run.publish_versions(4)
    header = history.run_header(store)
    assert header.run_id == replica.header.run_id
    assert_refused(replica, None, "another version 2")


def test_a_version_of_another_run_cannot_be_claimed(run: Run, store: MemoryStore) -> None:
    run.publish()
    key = layout.manifest_key(0)
    manifest = store.get(key)
    emptied(store)
    other = Run(store)
    other.publish()
    other.close()
    store.put(key, manifest)
    with pytest.raises(StoreReplaced):
        Replica(store, copies(run.history[0]), held=0)


@pytest.mark.parametrize("tensors", [None, torch.nn.Linear(2, 2), [torch.zeros(2)], {"embed.weight": [1.0]}])
def test_what_is_no_dict_of_tensors_is_refused(run: Run, tensors: Any) -> None:
    run.publish()
    with pytest.raises(UsageError, match="dict of names to tensors"):
        Replica(run.store, tensors)


@pytest.mark.parametrize("held", ["0", -1, 1.0, True])
def test_a_held_version_that_is_no_number_is_refused(run: Run, held: Any) -> None:
    run.publish()
    with pytest.raises(UsageError, match="version"):
        Replica(run.store, copies(run.history[0]), held=held)


def test_a_tensor_that_was_taken_out_is_named(run: Run) -> None:
    run.publish_versions(2)
    replica = Replica(run.store, copies(run.history[0]), held=0)
    del replica.tensors["embed.weight"]
    with pytest.raises(SchemaMismatch, match=r"'embed\.weight' was taken out"):
        replica.update()


@pytest.mark.parametrize("anchor_every", [1, 100])
@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize(
    ("replace", "what"),
    [
        (lambda held: torch.zeros(8, 8, dtype=torch.float8_e4m3fn), "is F8_E4M3"),
        (lambda held: held.float(), "is F32"),
        (lambda held: held.t(), "not contiguous"),
        (lambda held: held[:4].clone(), r"is BF16 \[4, 8\]"),
        (lambda held: None, "is a NoneType"),
    ],
)
def test_a_tensor_that_replaced_another_is_checked_before_anything_is_written(
    anchor_every: int, is_staged: bool, replace: Callable[[torch.Tensor], Any], what: str
) -> None:
    store, model = MemoryStore(), {name: torch.ones(8, 8, dtype=torch.bfloat16) for name in ("a", "b", "c")}
    with Publisher(store, model, dtype=None, anchor_every=anchor_every) as publisher:
        for version in range(2):
            publisher.publish_patch(version).result()
            for tensor in model.values():
                tensor[0, 1] += 1
    held = {name: torch.ones(8, 8, dtype=torch.bfloat16) for name in model}
    replica = Replica(store, held, held=0)
    staged = replica.stage(1) if is_staged else None
    before, held["b"] = held["b"], replace(held["b"])
    with pytest.raises(SchemaMismatch, match=f"'b'.*{what}"):
        replica.update(1) if staged is None else replica.apply(staged)
    assert replica.held == 0
    assert all((held[name] == 1).all() for name in ("a", "c"))
    held["b"] = before
    replica.update(1)
    assert all(tensor[0, 1] == 2 for tensor in held.values())


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda held: held.t_(), r"is BF16 \[8, 4\]"),
        (lambda held: setattr(held, "data", held.data.view(torch.float16)), "is F16"),
        (lambda held: held.resize_(2, 8), r"is BF16 \[2, 8\]"),
    ],
)
def test_a_tensor_that_became_another_in_its_memory_is_refused(
    change: Callable[[torch.Tensor], Any], what: str
) -> None:
    store, model = MemoryStore(), {"a": torch.ones(4, 8, dtype=torch.bfloat16)}
    with Publisher(store, model, dtype=None) as publisher:
        for version in range(3):
            publisher.publish_patch(version).result()
            model["a"][0, 1] += 1
    held = {"a": torch.ones(4, 8, dtype=torch.bfloat16)}
    replica = Replica(store, held, held=0)
    replica.update(1)
    change(held["a"])
    with pytest.raises(SchemaMismatch, match=what):
        replica.update(2)
    assert replica.held == 1


@pytest.mark.parametrize("anchor_every", [1, 100])
def test_a_tensor_that_took_anothers_memory_is_refused(anchor_every: int) -> None:
    store, model = MemoryStore(), {name: torch.ones(4, 8, dtype=torch.bfloat16) for name in ("a", "b")}
    with Publisher(store, model, anchor_every=anchor_every) as publisher:
        for version in range(3):
            publisher.publish_patch(version).result()
            model["a"][0, 1] += 1
            model["b"][0, 1] += 2
    held = {name: torch.ones(4, 8, dtype=torch.bfloat16) for name in model}
    replica = Replica(store, held, held=0)
    replica.update(1)
    before = {name: tensor.clone() for name, tensor in held.items()}
    own, held["b"] = held["b"], held["a"]
    for _ in range(2):
        with pytest.raises(SchemaMismatch, match="share memory"):
            replica.update(2)
        assert_same_bits({"a": held["a"], "b": own}, before)
    held["b"] = own
    replica.update(2)
    assert (held["a"][0, 1], held["b"][0, 1]) == (3, 5)
