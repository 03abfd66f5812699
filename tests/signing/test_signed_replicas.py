"""Replicas of which each version that readers use has a signature by a required key."""

import json
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from signed_runs import forge, sign

from patchstore import Replica, replay
from patchstore.bucket import digests, history, notes
from patchstore.errors import (
    CorruptObject,
    PatchstoreError,
    Unsigned,
    VersionNotFound,
    VersionRetired,
    WrongSignature,
)
from patchstore.follow.desired import DesiredVersion, HeadWatcher
from patchstore.ops.replicate import replicator as replicators
from patchstore.ops.replicate import service
from patchstore.ops.replicate.replicator import Replicator
from patchstore.ops.retention import Retention, collect, retire
from patchstore.signing import KeySigner, RequiredKeys
from patchstore.stores import layout, tries
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore
from patchstore.tensors.bits import bits
from patchstore.testing.faults import Fault, FaultyStore
from tests.retention.kept_runs import later
from tests.support.weights import Run, State, assert_same_bits, head, newest


@pytest.fixture
def signed(run: Run, signer: KeySigner) -> Run:
    """Three signed versions, and then two of another program."""
    run.publish_and_close(3, signer=signer)
    forge(run.store)
    return run


@pytest.fixture
def target() -> MemoryStore:
    return MemoryStore("memory://target")


def go_on(run: Run, signer: KeySigner, count: int = 2) -> None:
    run.publish_and_close(count, signer=signer, resume="auto")


def replicate(source: Store, target: Store, required: RequiredKeys) -> list[str | None]:
    return [each.detail for each in service.replicate(source, target, threading.Event(), required=required)]


def newest_signed(store: Store, required: RequiredKeys) -> State:
    tensors: State = {}
    Replica(store, tensors, required_keys=required).update()
    return tensors


def is_same(one: State, other: State) -> bool:
    return all(torch.equal(bits(one[name]), bits(other[name])) for name in other)


def test_versions_of_others_are_passed_and_no_reader_of_the_replica_can_use_them(
    signed: Run, signer: KeySigner, required: RequiredKeys, target: MemoryStore, tmp_path: Path
) -> None:
    with pytest.raises(Unsigned, match="version 4"):
        replicate(signed.store, target, required)
    # As readers of the source that require the key, it stays at the last one that is signed.
    assert head(target).version == 2
    go_on(signed, signer)
    for _ in range(2):
        replicate(signed.store, target, required)
    last = max(signed.history)
    for each in (newest_signed(target, required), newest(target)):
        assert_same_bits(each, signed.history[last])
    forged = history.read_manifest(signed.store, 4)
    assert target.get(layout.manifest_key(4)) == signed.store.get(layout.manifest_key(4))
    assert not {each.key for each in forged.objects} & set(target.list())
    for version in (3, 4):
        with pytest.raises(VersionRetired):
            replay(target, version, out=tmp_path / "forged")
        with pytest.raises((Unsigned, VersionRetired)):
            replay(target, version, out=tmp_path / "forged", required_keys=required)
    # It is a bucket like any other.
    retire(target, Retention(keep_last=1), dry_run=False)
    collect(target, dry_run=False, clock=later(25))
    assert_same_bits(newest_signed(target, required), signed.history[last])


def test_what_a_signed_version_builds_on_is_covered_by_its_signature_and_copied(
    run: Run, signer: KeySigner, required: RequiredKeys, target: MemoryStore, tmp_path: Path
) -> None:
    run.publish_and_close(8, anchor_every=4)
    sign(run.store, signer, 6)
    with pytest.raises(Unsigned, match="version 7"):
        replicate(run.store, target, required)
    assert_same_bits(newest_signed(target, required), run.history[6])
    # From its anchor on; what lies before is not.
    assert notes.retirements(target).up_to(100).keys() == {0, 1, 2, 3}
    assert not list(target.list("deltas/00000003"))
    replay(target, 5, out=tmp_path / "5")
    sign(run.store, signer, 7)
    assert replicate(run.store, target, required) == [None]
    assert_same_bits(newest_signed(target, required), run.history[7])


def test_a_version_that_is_signed_while_later_ones_are_looked_at_is_not_given_up(
    signed: Run, signer: KeySigner, required: RequiredKeys, target: MemoryStore
) -> None:
    class Late(FaultyStore):
        """Version 4 is signed when version 5 is looked for."""

        def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            if key == layout.manifest_key(last) and not list(self.list(layout.signature_prefix(4))):
                sign(signed.store, signer, 4)
            return super().get(key, start, end)

    go_on(signed, signer, 1)
    last = max(signed.history)
    replicate(Late(signed.store), target, required)
    gone = notes.retirements(target).up_to(100).keys()
    # The claim of the other program is what version 4 was built on, so its signature covers that too.
    assert 4 not in gone
    replay_4: State = {}
    Replica(target, replay_4, required_keys=required).update(4)
    assert_same_bits(newest_signed(target, required), signed.history[last])


@pytest.mark.parametrize("what", ["parent", "wrong signature", "epoch", "run"])
def test_a_forged_manifest_stops_nothing(
    run: Run, signer: KeySigner, required: RequiredKeys, target: MemoryStore, what: str, tmp_path: Path
) -> None:
    run.open(signer=signer)
    run.publish_versions(3)
    key = layout.manifest_key(3)
    values = json.loads(run.store.get(layout.manifest_key(2))) | {"version": 3, "parent": 2}
    values["parent_digest"] = digests.digest(run.store.get(layout.manifest_key(1 if what == "parent" else 2)))
    if what == "run":
        values["run_id"] = "another"
    if what == "epoch":
        values["writer"]["epoch"] += 5
    run.close()
    data = json.dumps(values).encode()
    run.store.put(key, data)
    if what == "wrong signature":
        (stray,) = run.store.list(layout.signature_prefix(1))
        key = layout.signature_key(3, digests.digest(data), signer.public_key.name)
        run.store.put(key, run.store.get(stray))
    watcher = HeadWatcher(run.store, recheck_s=0)
    desired = DesiredVersion(watcher, required=required)
    with pytest.raises((Unsigned, WrongSignature, CorruptObject)):
        replicate(run.store, target, required)
    with suppress(Unsigned, WrongSignature):
        desired.refresh()
    go_on(run, signer)
    replicate(run.store, target, required)
    assert_same_bits(newest_signed(target, required), run.history[max(run.history)])
    assert 3 in notes.retirements(target).up_to(100)
    found = desired.refresh()
    assert found is not None and found.version == max(run.history)


@pytest.mark.parametrize("effect", ["fail-before", "fail-after"])
def test_killed_at_any_call_no_reader_gets_weights_that_nobody_signed(
    signed: Run,
    signer: KeySigner,
    required: RequiredKeys,
    effect: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tries, "FIRST_PAUSE_S", 0.0)
    go_on(signed, signer)
    for skip in range(0, 1000, 4):
        target = MemoryStore("memory://target")
        fault = Fault(verb="*", effect=effect, skip=skip, times=None)  # type: ignore[arg-type]
        try:
            replicate(signed.store, FaultyStore(target, fault), required)
        except PatchstoreError:
            with suppress(CorruptObject, VersionNotFound):
                # For the moment between two commits, one without payloads may be the newest.
                found = newest(target)
                assert any(is_same(found, each) for each in signed.history.values())
            replicate(signed.store, target, required)
        else:
            break
        assert_same_bits(newest_signed(target, required), signed.history[max(signed.history)])
        assert {3, 4} <= notes.retirements(target).up_to(100).keys()
    assert skip > 40


def test_a_replica_that_has_an_unsigned_newest_version_is_an_error_until_a_signed_one_comes(
    signed: Run, signer: KeySigner, required: RequiredKeys, target: MemoryStore
) -> None:
    list(service.replicate(signed.store, target, threading.Event()))
    with pytest.raises(Unsigned, match="version 4"):
        replicate(signed.store, target, required)
    go_on(signed, signer)
    replicate(signed.store, target, required)
    assert_same_bits(newest_signed(target, required), signed.history[max(signed.history)])


def test_replicas_of_signed_runs_keep_the_publishers_own_anchors(
    run: Run, signer: KeySigner, required: RequiredKeys, target: MemoryStore
) -> None:
    """A trainer goes back to a version that the replica gave up."""
    run.publish_and_close(10, signer=signer, anchor_every=4)
    replicate(run.store, target, required)
    retire(target, Retention(keep_last=2), dry_run=False)
    assert collect(target, dry_run=False, clock=later(25)).num_objects > 0
    run.go_back(6)
    run.publish_and_close(3, signer=signer, resume=6, anchor_every=100)
    replicate(run.store, target, required)
    for each in (newest_signed(target, required), newest(target)):
        assert_same_bits(each, run.history[max(run.history)])


def test_many_unsigned_versions_are_not_read_at_each_look(
    run: Run,
    signer: KeySigner,
    required: RequiredKeys,
    target: MemoryStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run.publish_and_close(20)
    source = FaultyStore(run.store)
    replicator = Replicator(source, target, required=required)

    def look() -> int:
        """Look for signed versions once, and return how many signatures that read."""
        source.calls.clear()
        replicator.open()
        with pytest.raises(Unsigned):
            list(replicator.versions())
        # Not all calls: manifests are read ahead, and how far depends on the threads.
        return sum(name.startswith("signatures/") for _, name, *_ in source.calls)

    assert look() == 20
    assert look() == 0
    # After a while one looks again, and so it does at once when a version comes.
    monkeypatch.setattr(replicators, "REFUSED_S", 0.0)
    assert look() == 20
    monkeypatch.setattr(replicators, "REFUSED_S", 1e9)
    assert look() == 0
    go_on(run, signer, 1)
    replicator.open()
    list(replicator.versions())
    assert_same_bits(newest_signed(target, required), run.history[max(run.history)])
