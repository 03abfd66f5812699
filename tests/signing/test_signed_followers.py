"""What goes on as versions appear, and requires signatures: `follow`, `mirror` and `replicate`."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from signed_runs import forge, sign

from patchstore import Replica
from patchstore.bucket import manifest_json
from patchstore.errors import CorruptObject, HostError, RollbackRefused, StoreReplaced, Unsigned, UsageError
from patchstore.follow.desired import DesiredVersion, HeadWatcher
from patchstore.follow.reconcile import Reconciler, StepResult
from patchstore.follow.service import follow
from patchstore.follow.settings import Settings
from patchstore.follow.vllm_server import VllmServer
from patchstore.ops.compact.service import Compactor
from patchstore.ops.mirror.place import Place
from patchstore.ops.mirror.service import Mirror
from patchstore.ops.replicate.replicator import Replicator
from patchstore.signing import KeySigner, RequiredKeys
from patchstore.signing.required import Floor
from patchstore.stores import layout, open_store
from patchstore.stores.memory import MemoryStore
from patchstore.support.host import replace_text
from patchstore.testing.faults import FaultyStore
from tests.support.commands import Cli
from tests.support.copies import objects_of, put_back
from tests.support.keys import key_pair
from tests.support.manifests import begin_run, commit
from tests.support.vllm_stub import StubServer, serving
from tests.support.weights import Run, assert_same_bits, head


@pytest.fixture
def signed(run: Run, signer: KeySigner) -> Run:
    """A run with three signed versions, whose trainer goes on."""
    run.open(signer=signer)
    run.publish_versions(3)
    return run


# Which version is desired.


def test_only_a_signed_version_is_desired_and_the_one_before_stays(
    signed: Run, required: RequiredKeys, signer: KeySigner
) -> None:
    desired = DesiredVersion(HeadWatcher(signed.store), required=required)
    found = desired.refresh()
    assert found is not None and found.version == 2
    signed.close()
    forge(signed.store)
    newest = head(signed.store)
    for _ in range(2):
        with pytest.raises(Unsigned):
            desired.refresh()
        assert desired.head == found
    sign(signed.store, signer, newest.version)
    assert desired.refresh() == newest


def test_a_pin_needs_a_signature_and_an_unsigned_head_does_not_disturb_it(
    signed: Run, required: RequiredKeys
) -> None:
    signed.close()
    forge(signed.store)
    newest = head(signed.store)
    desired = DesiredVersion(HeadWatcher(signed.store), required=required, at=1)
    found = desired.refresh()
    assert found is not None and (found.version, desired.head) == (1, None)
    with pytest.raises(Unsigned):
        desired.pin(newest.version)
    assert desired.refresh() == found
    other = DesiredVersion(HeadWatcher(signed.store), required=required, at=newest.version)
    with pytest.raises(Unsigned):
        other.refresh()


def test_a_look_that_finds_nothing_new_costs_no_more_than_without_keys(
    signed: Run, required: RequiredKeys
) -> None:
    watched = FaultyStore(signed.store)
    desired = DesiredVersion(HeadWatcher(watched), required=required)
    desired.refresh()
    watched.calls.clear()
    desired.refresh()
    assert watched.calls == [("get", layout.manifest_key(3))]


def test_a_version_that_is_replaced_between_two_looks_is_refused(signed: Run, required: RequiredKeys) -> None:
    watcher = HeadWatcher(signed.store)
    found = watcher.refresh()
    assert found is not None
    desired = DesiredVersion(watcher, required=required)
    signed.store.put(layout.manifest_key(2), manifest_json.to_json(replace(found, step=77)))
    with pytest.raises(StoreReplaced):
        desired.refresh()
    signed.store.delete(layout.HEADER)
    with pytest.raises(CorruptObject):
        desired.refresh()


# `follow`.


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with serving(StubServer()) as stub:
        yield stub


def until(events: Iterator[object], is_so: Callable[[StepResult], bool]) -> StepResult:
    for event in events:
        if is_so(event.step):  # type: ignore[attr-defined]
            return event.step  # type: ignore[attr-defined,no-any-return]
    raise AssertionError("it ended")


def test_follow_leaves_servers_at_the_last_signed_version(
    signed: Run, required: RequiredKeys, signer: KeySigner, stub: StubServer
) -> None:
    stub.run_id, stub.required_keys = signed.publisher.run_id, required.names
    stop = threading.Event()
    settings = Settings(servers=[stub.url], required_keys=required, max_poll_interval_s=0.05)
    events = follow(signed.store, settings, stop)
    until(events, lambda step: step.outcome == "applied" and step.version == 2)
    signed.close()
    forge(signed.store)
    refused = until(events, lambda step: step.outcome == "failed")
    assert isinstance(refused.error, Unsigned)
    assert (stub.held, stub.history) == (2, [2])
    newest = head(signed.store)
    sign(signed.store, signer, newest.version)
    until(events, lambda step: step.outcome == "applied" and step.version == newest.version)
    stop.set()
    list(events)
    assert stub.history == [2, newest.version]


def test_a_server_that_requires_no_key_itself_is_not_driven(
    signed: Run, required: RequiredKeys, stub: StubServer
) -> None:
    stub.run_id = signed.publisher.run_id
    with VllmServer(stub.url, timeout_s=30) as server:
        reconciler = Reconciler(signed.store, server, Settings(required_keys=required))
        done = reconciler.step()
        assert isinstance(done.error, UsageError) and "PATCHSTORE_REQUIRED_KEYS" in str(done.error)
        assert not stub.opened
        stub.required_keys = required.names
        assert reconciler.step().outcome == "initialised"


# `mirror`.


@pytest.fixture
def mirrored(signed: Run, tmp_path: Path) -> Iterator[Callable[..., Mirror]]:
    places: list[Place] = []

    def open_(required: RequiredKeys | None, folder: str = "mirror") -> Mirror:
        for each in places:
            each.close()
        places.append(Place(tmp_path / folder))
        return Mirror(signed.store, places[-1], required=required)

    yield open_
    for each in places:
        each.close()


def present(folder: Path) -> str:
    return str((folder / "current").readlink())


def test_a_mirror_has_signed_versions_alone(
    signed: Run, required: RequiredKeys, signer: KeySigner, mirrored: Callable[..., Mirror], tmp_path: Path
) -> None:
    mirror = mirrored(required)
    assert [event.version for event in mirror.work()] == [2]
    signed.publish(3)
    assert [event.version for event in mirror.work()] == [3]
    signed.close()
    forge(signed.store)
    for _ in range(2):
        with pytest.raises(Unsigned):
            list(mirror.work())
        mirror = mirrored(required)
    assert present(tmp_path / "mirror") == "00000003"
    sign(signed.store, signer, 5)
    assert [event.version for event in mirror.work()] == [5]


def test_a_mirror_uses_no_folder_that_was_made_without_keys(
    required: RequiredKeys, mirrored: Callable[..., Mirror]
) -> None:
    list(mirrored(None).work())
    with pytest.raises(UsageError, match="without --require-signature"):
        mirrored(required)
    list(mirrored(required, "signed").work())
    with pytest.raises(UsageError, match="with --require-signature"):
        mirrored(None, "signed")
    assert list(mirrored(required, "signed").work()) == []


# `replicate`.


def test_a_replicator_copies_signed_versions_and_no_shortcuts(
    signed: Run, required: RequiredKeys, signer: KeySigner
) -> None:
    signed.close()
    signed.open(signer=signer, resume="auto", anchor_every=1000)
    signed.publish_versions(40)
    for _ in Compactor(signed.store, anchor_every=16).compact():
        pass
    signed.close()
    forge(signed.store)
    newest = head(signed.store)
    near = FaultyStore(MemoryStore("memory://near"))
    replicator = Replicator(signed.store, near, required=required)
    replicator.open()
    with pytest.raises(Unsigned):
        list(replicator.versions())
    forged = newest.version - 1
    assert head(near).version == forged - 1
    assert not any(layout.manifest_version(key) == forged for verb, key in near.calls if verb == "put")
    assert replicator.copy_shortcuts() == 0
    assert not list(near.list(layout.SHORTCUTS))
    replica = Replica(near, {}, required_keys=required)
    replica.update()
    assert_same_bits(dict(replica.tensors), signed.history[forged - 1])


# The commands.


def test_each_command_takes_the_keys(tmp_path: Path, signer: KeySigner, patchstore: Cli) -> None:
    run = Run(open_store(tmp_path / "bucket"))
    run.publish_and_close(2)
    follow = ("follow", tmp_path / "bucket", "--server", "http://127.0.0.1:9")
    mirror = ("mirror", tmp_path / "bucket", tmp_path / "mirror")
    replicate = ("replicate", tmp_path / "bucket", tmp_path / "near")
    for each in (follow, mirror, replicate):
        code, _, said = patchstore(*each, "--require-signature", tmp_path / "none")
        assert code == 2 and "none" in said
    keys = ("--require-signature", tmp_path / "trainer.pub")
    for each in (mirror, replicate):
        code, _, said = patchstore(*each, *keys)
        assert code == 3 and "unsigned" in said
    assert not (tmp_path / "mirror" / "current").exists()
    sign(run.store, signer, 0, 1)
    for each in (mirror, replicate):
        assert patchstore(*each, *keys)[0] == 0


# Readers that require signatures never go back to an older version by themselves.


class Signed:
    """A run of versions without payloads, all signed."""

    def __init__(self, folder: Path) -> None:
        self.store = MemoryStore("memory://signed")
        self.signer = KeySigner(key_pair(folder)[0])
        self.required = RequiredKeys([self.signer.public_key])
        begin_run(self.store, "run")

    def commit(self, *versions: int, run_id: str = "run", created_at: str | None = None) -> None:
        for version in versions:
            commit(self.store, version, run_id, created_at)
            sign(self.store, self.signer, version)

    def desired(self, **options: object) -> DesiredVersion:
        """What another process wants of servers."""
        return DesiredVersion(HeadWatcher(self.store), required=self.required, **options)  # type: ignore[arg-type]


@pytest.fixture
def bucket(tmp_path: Path) -> Signed:
    return Signed(tmp_path)


def look(desired: DesiredVersion) -> tuple[str, int] | None:
    found = desired.refresh()
    return None if found is None else (found.run_id, found.version)


def test_an_old_state_of_the_bucket_is_refused_by_the_next_process(bucket: Signed, tmp_path: Path) -> None:
    path = tmp_path / "floor.json"
    bucket.commit(0, 1)
    old = objects_of(bucket.store)
    bucket.commit(2, 3)
    assert look(bucket.desired(floor=Floor(path))) == ("run", 3)
    put_back(bucket.store, old)
    again = bucket.desired(floor=Floor(path))
    for _ in range(2):
        with pytest.raises(RollbackRefused, match="version 3 was used before"):
            again.refresh()
    assert again.head is None
    # The trainer goes on where it was.
    bucket.commit(2, 3, 4)
    assert look(again) == ("run", 4)


def test_the_operator_may_accept_it_once(bucket: Signed, tmp_path: Path) -> None:
    path = tmp_path / "floor.json"
    bucket.commit(0)
    older = objects_of(bucket.store)
    bucket.commit(1)
    old = objects_of(bucket.store)
    bucket.commit(2, 3)
    look(bucket.desired(floor=Floor(path)))
    put_back(bucket.store, old)
    accepting = bucket.desired(floor=Floor(path), allow_rollback=True)
    assert (look(accepting), accepting.allows_rollback) == (("run", 1), True)
    put_back(bucket.store, older)
    with pytest.raises(RollbackRefused):
        bucket.desired(floor=Floor(path)).refresh()
    put_back(bucket.store, old)
    assert look(bucket.desired(floor=Floor(path))) == ("run", 1)


def test_another_run_must_be_named_and_younger(bucket: Signed, tmp_path: Path) -> None:
    floor = Floor(tmp_path / "floor.json")
    bucket.commit(0, created_at="2026-05-01T00:00:00.000Z")
    before = bucket.desired(floor=floor)
    look(before)
    for run_id, created_at, is_older in (
        ("before", "2026-04-30T23:59:59.999Z", True),
        ("after", "2026-05-01T00:00:00.001Z", False),
    ):
        put_back(bucket.store, {})
        begin_run(bucket.store, run_id)
        bucket.commit(0, 1, run_id=run_id, created_at=created_at)
        # One key may sign several runs: the signature does not say which of them is meant.
        for each in (before, bucket.desired(floor=Floor(tmp_path / "floor.json"))):
            with pytest.raises(StoreReplaced, match=f"has run {run_id} now, and had run run"):
                each.refresh()
        watcher = HeadWatcher(bucket.store, run_id=run_id)
        named = DesiredVersion(watcher, required=bucket.required, floor=floor)
        if is_older:
            with pytest.raises(RollbackRefused, match="of run before, created at"):
                named.refresh()
        else:
            assert look(named) == (run_id, 1)


def test_a_pin_to_an_older_version_needs_the_word(bucket: Signed, tmp_path: Path) -> None:
    bucket.commit(0, 1, 2, 3)
    floor, pin_file = Floor(tmp_path / "floor.json"), tmp_path / "pin.json"
    desired = bucket.desired(floor=floor, pin_file=pin_file)
    assert look(desired) == ("run", 3)
    with pytest.raises(RollbackRefused):
        desired.pin(1)
    assert (desired.pinned, look(desired)) == (None, ("run", 3))
    assert desired.pin(1, allow_rollback=True) == 1
    assert (look(desired), desired.allows_rollback) == (("run", 1), True)
    # The next process keeps the pin, and its word.
    again = bucket.desired(floor=Floor(tmp_path / "floor.json"), pin_file=pin_file)
    assert (look(again), again.allows_rollback) == (("run", 1), True)
    again.unpin()
    assert (look(again), again.allows_rollback) == (("run", 3), False)
    with pytest.raises(RollbackRefused):
        bucket.desired(floor=floor, at=2).refresh()
    assert look(bucket.desired(floor=floor, at=2, allow_rollback=True)) == ("run", 2)
    assert floor.newest is not None and floor.newest.version == 3


def test_without_keys_nothing_is_remembered(bucket: Signed, tmp_path: Path) -> None:
    bucket.commit(0, 1, 2)
    floor = Floor(tmp_path / "floor.json")
    desired = DesiredVersion(HeadWatcher(bucket.store), floor=floor)
    assert look(desired) == ("run", 2)
    desired.pin(0)
    assert (look(desired), floor.newest) == (("run", 0), None)


FLOOR = {"run_id": "run", "version": 1, "created_at": "2026-01-01T00:00:00.000Z"}
WRONG = ({"version": -1}, {"version": True}, {"run_id": 3}, {"created_at": "yesterday"}, {"created_at": 7})


@pytest.mark.parametrize(
    "content", ["", "{}", '{"floor": null}', *(json.dumps({"floor": FLOOR | each}) for each in WRONG)]
)
def test_a_file_that_says_nothing_ends_the_start_and_is_not_replaced(tmp_path: Path, content: str) -> None:
    path = tmp_path / "floor.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"floor\.json"):
        Floor(path)
    assert path.read_text() == content
    with pytest.raises(UsageError):
        Floor(tmp_path / "none" / "floor.json")


def test_a_version_that_cannot_be_remembered_is_not_desired(
    bucket: Signed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.commit(0)
    desired = bucket.desired(floor=Floor(tmp_path / "floor.json"))
    look(desired)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    bucket.commit(1)
    with monkeypatch.context() as patched:
        patched.setattr("patchstore.signing.required.replace_text", full)
        with pytest.raises(HostError):
            desired.refresh()
    assert look(desired) == ("run", 1)


def test_a_link_with_the_name_of_a_draft_is_not_written_through(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "floor.json"
    victim.write_text("thesis")
    # What a version that draws no names would have used.
    (tmp_path / f"floor.json.{os.getpid()}.tmp").symlink_to(victim)
    (tmp_path / "floor.json.tmp").symlink_to(victim)
    replace_text(path, "new")
    assert (path.read_text(), victim.read_text()) == ("new", "thesis")


# Servers.


def test_a_server_tells_a_process_that_remembers_nothing(bucket: Signed) -> None:
    bucket.commit(0, 1)
    old = objects_of(bucket.store)
    bucket.commit(2)
    with serving(StubServer()) as stub, VllmServer(stub.url, timeout_s=30) as server:
        stub.required_keys = bucket.required.names

        def following(**options: object) -> Reconciler:
            desired = bucket.desired(**options)
            return Reconciler(
                bucket.store,
                server,
                Settings(required_keys=bucket.required),
                desired=desired.refresh,
                allow_rollback=lambda: desired.allows_rollback,
            )

        first = following()
        assert [first.step().outcome for _ in range(2)] == ["initialised", "applied"]
        put_back(bucket.store, old)
        refused = following().step()
        assert isinstance(refused.error, RollbackRefused) and "serves version 2" in str(refused.error)
        # A driver that does not ask is refused by the server itself.
        with pytest.raises(RollbackRefused):
            server.apply(1)
        assert (stub.held, stub.paused) == (2, False)
        assert following(allow_rollback=True).step().outcome == "applied"
        assert stub.history == [2, 1]


# Mirrors.


def test_a_mirror_goes_back_only_when_told(run: Run, tmp_path: Path) -> None:
    signer = KeySigner(key_pair(tmp_path)[0])
    required = RequiredKeys([signer.public_key])
    run.publish_and_close(3, signer=signer)

    def mirrored(**options: object) -> list[int | None]:
        place = Place(tmp_path / "mirror")
        try:
            return [event.version for event in Mirror(run.store, place, required=required, **options).work()]  # type: ignore[arg-type]
        finally:
            place.close()

    assert mirrored() == [2]
    run.store.delete(layout.manifest_key(2))
    with pytest.raises(RollbackRefused):
        mirrored()
    with pytest.raises(RollbackRefused):
        mirrored(at=0)
    assert str((tmp_path / "mirror" / "current").readlink()) == "00000002"
    assert mirrored(at=0, allow_rollback=True) == [0]
    with pytest.raises(RollbackRefused):
        mirrored()
    assert mirrored(allow_rollback=True) == [1]
    assert mirrored() == []
