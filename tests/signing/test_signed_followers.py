"""What goes on as versions appear, and requires signatures: `follow`, `mirror` and `replicate`."""

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from patchstore import Publisher, Replica
from patchstore.cli import main
from patchstore.compact.service import Compactor
from patchstore.errors import CorruptObject, Unsigned, UsageError, VersionNotFound
from patchstore.format import history, layout, manifest_json
from patchstore.mirror.place import Place
from patchstore.mirror.service import Mirror
from patchstore.replicate.replicator import Replicator
from patchstore.serve.desired import DesiredVersion, HeadWatcher
from patchstore.serve.reconcile import Reconciler, StepResult
from patchstore.serve.service import follow
from patchstore.serve.settings import Settings
from patchstore.serve.vllm_server import VllmServer
from patchstore.signing import KeySigner, RequiredKeys, stored
from patchstore.stores import open_store
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import FaultyStore
from patchstore.testing.vllm_stub import StubServer, serving
from tests.support.keys import key_pair
from tests.support.weights import Run, assert_same_bits, small_model


@pytest.fixture
def signer(tmp_path: Path) -> KeySigner:
    return KeySigner(key_pair(tmp_path)[0])


@pytest.fixture
def required(signer: KeySigner) -> RequiredKeys:
    return RequiredKeys([signer.public_key])


@pytest.fixture
def signed(run: Run, signer: KeySigner) -> Run:
    """A run with three signed versions, whose trainer goes on."""
    run.open(signer=signer)
    run.publish_versions(3)
    return run


def forge(run: Run) -> None:
    """Publish weights of one's own, as somebody does who may write to the bucket."""
    run.close()
    with Publisher(run.store, small_model(), resume="anchor") as forger:
        forger.publish_patch(9).result()


def sign(run: Run, signer: KeySigner, version: int) -> None:
    header = history.read_header(run.store)
    assert header is not None
    stored.sign_version(run.store, signer, header, version)


# Which version is desired.


def test_only_a_signed_version_is_desired_and_the_one_before_stays(
    signed: Run, required: RequiredKeys, signer: KeySigner
) -> None:
    desired = DesiredVersion(HeadWatcher(signed.store), required=required)
    found = desired.refresh()
    assert found is not None and found.version == 2
    forge(signed)
    newest = history.head(signed.store)
    assert newest is not None
    for _ in range(2):
        with pytest.raises(Unsigned):
            desired.refresh()
        assert desired.head == found
    sign(signed, signer, newest.version)
    assert desired.refresh() == newest


def test_a_pin_needs_a_signature_and_an_unsigned_head_does_not_disturb_it(
    signed: Run, required: RequiredKeys
) -> None:
    forge(signed)
    newest = history.head(signed.store)
    assert newest is not None
    desired = DesiredVersion(HeadWatcher(signed.store), required=required, at=1)
    found = desired.refresh()
    assert found is not None and (found.version, desired.head) == (1, None)
    with pytest.raises(Unsigned):
        desired.pin(newest.version)
    assert desired.refresh() == found
    other = DesiredVersion(HeadWatcher(signed.store), required=required, at=newest.version)
    with pytest.raises(Unsigned):
        other.refresh()
    desired.close()


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
    with pytest.raises(CorruptObject):
        desired.refresh()
    signed.store.delete(layout.HEADER)
    with pytest.raises((VersionNotFound, CorruptObject)):
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
    forge(signed)
    refused = until(events, lambda step: step.outcome == "failed")
    assert isinstance(refused.error, Unsigned)
    assert (stub.held, stub.history) == (2, [2])
    newest = history.head(signed.store)
    assert newest is not None
    sign(signed, signer, newest.version)
    until(events, lambda step: step.outcome == "applied" and step.version == newest.version)
    stop.set()
    list(events)
    assert stub.history == [2, newest.version]


def test_a_server_that_requires_no_key_itself_is_not_driven(
    signed: Run, required: RequiredKeys, stub: StubServer
) -> None:
    stub.run_id = signed.publisher.run_id
    with VllmServer(stub.url, timeout_s=30) as server:
        reconciler = Reconciler(signed.store, server, is_signed=True)
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
    forge(signed)
    for _ in range(2):
        with pytest.raises(Unsigned):
            list(mirror.work())
        mirror = mirrored(required)
    assert present(tmp_path / "mirror") == "00000003"
    sign(signed, signer, 5)
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
    forge(signed)
    newest = history.head(signed.store)
    assert newest is not None
    near = FaultyStore(MemoryStore("memory://near"))
    replicator = Replicator(signed.store, near, required=required)
    replicator.open()
    with pytest.raises(Unsigned):
        list(replicator.versions())
    forged = newest.version - 1
    assert history.head(near).version == forged - 1  # type: ignore[union-attr]
    assert not any(layout.manifest_version(key) == forged for verb, key in near.calls if verb == "put")
    assert replicator.copy_shortcuts() == 0
    assert not list(near.list(layout.SHORTCUTS))
    replica = Replica(near, {}, required_keys=required)
    replica.update()
    assert_same_bits(dict(replica.tensors), signed.history[forged - 1])


# The commands.


def test_each_command_takes_the_keys(
    tmp_path: Path, signer: KeySigner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(open_store(tmp_path / "bucket"))
    run.publish_versions(2)
    run.close()
    monkeypatch.setattr("patchstore.cli.main.signal.signal", lambda *_: None)

    def command(*arguments: object) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["patchstore", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main.main()
        return ended.value.code or 0, capsys.readouterr().err

    follow = ("follow", tmp_path / "bucket", "--server", "http://127.0.0.1:9")
    mirror = ("mirror", tmp_path / "bucket", tmp_path / "mirror")
    replicate = ("replicate", tmp_path / "bucket", tmp_path / "near")
    for each in (follow, mirror, replicate):
        code, said = command(*each, "--require-signature", tmp_path / "none")
        assert code == 2 and "none" in said
    keys = ("--require-signature", tmp_path / "trainer.pub")
    for each in (mirror, replicate):
        code, said = command(*each, *keys)
        assert code == 3 and "unsigned" in said
    assert not (tmp_path / "mirror" / "current").exists()
    for version in range(2):
        sign(run, signer, version)
    for each in (mirror, replicate):
        assert command(*each, *keys)[0] == 0
