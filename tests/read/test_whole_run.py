"""All versions of a run in one pass: the same verdicts as one version after the other, for less work."""

import errno
import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from patchstore import Manifest, verify
from patchstore.bucket import history
from patchstore.errors import HostError, PatchstoreError, StoreUnavailable
from patchstore.read import whole_run
from patchstore.read.deltas import Deltas, open_deltas
from patchstore.read.whole_run import Verdict, WholeRun
from patchstore.signing import KeySigner, RequiredKeys
from patchstore.stores import Store, layout, open_store
from patchstore.stores.folder import FolderStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.commands import Cli
from tests.support.keys import key_pair
from tests.support.weights import Run, lie


def verdicts(store: Store, newest: int, **options: Any) -> dict[int, Verdict]:
    header = history.run_header(store)
    return {each.version: each for each in WholeRun(store, header, newest, **options).verify()}


def kinds(found: dict[int, Verdict]) -> dict[int, str | None]:
    return {version: each.error and each.error.kind for version, each in found.items()}


def one_by_one(store: Store, newest: int) -> dict[int, str | None]:
    found: dict[int, str | None] = {}
    for version in range(newest + 1):
        try:
            verify(store, version)
        except PatchstoreError as exc:
            found[version] = exc.kind
        else:
            found[version] = None
    return found


@pytest.fixture
def forked(run: Run) -> Run:
    """Versions 0 to 5, then three that build on version 2, and anchors at 0, 4 and a later one."""
    run.publish_versions(6)
    run.close()
    run.go_back(3)
    run.open(resume=3)
    run.publish_versions(4)
    run.close()
    return run


@pytest.mark.parametrize("encoding", ["raw", "gap", "context"])
@pytest.mark.parametrize("at_once", [1, 2, 64])
def test_a_run_that_is_right(run: Run, monkeypatch: pytest.MonkeyPatch, encoding: str, at_once: int) -> None:
    monkeypatch.setattr(whole_run, "DELTAS_AT_ONCE", at_once)
    run.open(encoding=encoding, anchor_every=5)
    run.publish_versions(12)
    found = verdicts(run.store, 11)
    assert kinds(found) == dict.fromkeys(range(12))
    assert not any(each.is_fork or each.is_known for each in found.values())


def test_a_fork_is_reported_and_each_branch_is_proved(forked: Run) -> None:
    newest = history.head(forked.store)
    assert newest is not None
    found = verdicts(forked.store, newest.version)
    assert set(kinds(found).values()) == {None}
    assert [version for version, each in found.items() if each.is_fork] == [6]


@pytest.mark.parametrize("seed", range(12))
def test_damage_is_found_where_one_version_after_the_other_finds_it(
    forked: Run, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Flip, cut or remove one or two objects that versions name."""
    chance = random.Random(seed)
    monkeypatch.setattr(whole_run, "DELTAS_AT_ONCE", chance.choice([1, 2, 64]))
    store = forked.store
    newest = history.head(store)
    assert newest is not None
    keys = [key for key in store.list() if key.startswith(("anchors/", "deltas/", "states/", "versions/"))]
    for key in chance.sample(keys, chance.choice([1, 1, 2])):
        data = store.get(key)
        at = chance.randrange(len(data))
        match chance.choice(["flip", "cut", "remove"]):
            case "flip":
                store.put(key, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            case "cut":
                store.put(key, data[:at])
            case _:
                store.delete(key)
    expected = one_by_one(store, newest.version)
    found = kinds(verdicts(store, newest.version))
    assert {version for version, kind in found.items() if kind} == {
        version for version, kind in expected.items() if kind
    }
    wrong = [kind for kind in found.values() if kind]
    assert wrong and set(wrong) <= {"corrupt-object", "version-not-found", "state-mismatch"}


def test_weights_other_than_the_manifest_says_are_found(run: Run) -> None:
    run.publish_versions(3)
    lie(run.store, 2, "embed.weight")
    assert kinds(verdicts(run.store, 2)) == {0: None, 1: None, 2: "state-mismatch"}


@pytest.mark.parametrize("at_once", [1, 64])
def test_each_damaged_object_is_named(run: Run, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(whole_run, "DELTAS_AT_ONCE", at_once)
    run.publish_versions(4)
    named = {}
    for version in (1, 3):
        found = history.read_manifest(run.store, version)
        assert found.delta is not None
        named[version] = found.delta.payloads[0].key
        run.store.delete(named[version])
    found = verdicts(run.store, 3)
    assert [version for version, each in found.items() if each.error] == [1, 2, 3]
    for version, key in named.items():
        assert key in str(found[version].error)
    assert "builds on version 1" in str(found[2].error)


def test_each_payload_is_read_once(run: Run) -> None:
    run.open(anchor_every=8)
    run.publish_versions(30)
    watched = FaultyStore(run.store)
    assert set(kinds(verdicts(watched, 29)).values()) == {None}
    read = [key for verb, key in watched.calls if verb == "get" and key.startswith(("anchors/", "deltas/"))]
    assert len(read) == len(set(read))
    assert len([key for verb, key in watched.calls if verb == "get" and key.startswith("versions/")]) == 30


def test_of_many_deltas_behind_an_anchor_64_are_open_at_a_time(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or memory, temporary disk and mappings would grow with the versions between two anchors."""
    is_open: list[int] = []
    most: list[int] = []

    @contextmanager
    def watched(store: Store, manifests: tuple[Manifest, ...], *rest: Any) -> Iterator[Deltas]:
        with open_deltas(store, manifests, *rest) as found:
            is_open.append(manifests[0].version)
            most.append(len(is_open))
            yield found
            is_open.remove(manifests[0].version)

    monkeypatch.setattr(whole_run, "open_deltas", watched)
    run.open(anchor_every=None)
    run.publish_versions(140)
    assert set(kinds(verdicts(run.store, 139)).values()) == {None}
    assert (len(most), max(most), is_open) == (139, 64, [])


def test_no_room_for_the_weights_between_rounds_is_no_damage(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(FileIO):
        def write(self, _: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(whole_run, "DELTAS_AT_ONCE", 2)
    monkeypatch.setattr(whole_run, "TemporaryFile", lambda **_: Full(os.devnull, "r+"))
    run.publish_versions(4)
    with pytest.raises(HostError, match="keeping weights in a temporary file failed on this host: No space"):
        verdicts(run.store, 3)


def test_a_store_that_does_not_answer_ends_it_and_what_was_verified_is_noted(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_run, "AT_ONCE", 1)
    run.open(anchor_every=3)
    run.publish_versions(10)
    key = history.read_manifest(run.store, 8).delta.payloads[0].key  # type: ignore[union-attr]
    broken = FaultyStore(run.store, Fault(verb="get", key=key, effect="fail-before", times=None))
    header = history.run_header(broken)
    noted: list[dict[int, str]] = []
    with pytest.raises(StoreUnavailable):
        list(WholeRun(broken, header, 9).verify(lambda found: noted.append(dict(found))))
    assert 8 not in noted[-1] and len(noted[-1]) > 0
    # Only what is not known is read again.
    watched = FaultyStore(run.store)
    found = verdicts(watched, 9, known=noted[-1])
    assert set(kinds(found).values()) == {None}
    assert any(each.is_known for each in found.values())
    read = {key for _, key in watched.calls}
    assert key in read
    for version, each in found.items():
        named = history.read_manifest(run.store, version)
        if each.is_known and named.anchor is None:
            assert named.delta is not None and named.delta.payloads[0].key not in read


def test_a_version_that_was_replaced_is_verified_again_though_it_is_known(run: Run) -> None:
    run.publish_versions(3)
    first = verdicts(run.store, 2)
    known = {version: each.digest for version, each in first.items()}
    lie(run.store, 2, "embed.weight")
    found = verdicts(run.store, 2, known=known)
    assert found[2].error is not None and not found[2].is_known


def test_every_version_must_be_signed_and_a_path_leads_through_one_that_is_not(
    run: Run, tmp_path: Path
) -> None:
    private, public = key_pair(tmp_path)
    run.open(signer=KeySigner(private), anchor_every=64)
    run.publish_versions(4)
    (signature,) = run.store.list(layout.signature_prefix(2))
    run.store.delete(signature)
    found = verdicts(run.store, 3, required=RequiredKeys.of(public))
    assert kinds(found) == {0: None, 1: None, 2: "unsigned", 3: None}


# The command.


Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(patchstore: Cli) -> Command:
    return lambda *args: patchstore("verify", *args)[:2]


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    run = Run(FolderStore(tmp_path / "bucket"))
    run.publish_versions(6)
    run.close()
    return tmp_path / "bucket"


def test_the_command_goes_on_from_its_file(bucket: Path, tmp_path: Path, command: Command) -> None:
    note = tmp_path / "note.json"
    code, out = command(bucket, "--all", "--resume", note)
    assert (code, out.splitlines()) == (0, ["6 of 6 versions verified"])
    code, out = command(bucket, "--all", "--resume", note)
    assert (code, len(out.splitlines())) == (0, 2)
    assert "were verified before" in out
    # What was added since is verified.
    run = Run(open_store(bucket))
    run.open(resume="anchor").close()
    code, out = command(bucket, "--all", "--resume", note, "--json")
    assert code == 0
    assert [json.loads(line)["verified"] for line in out.splitlines()] == [True] * 7


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b'{"format_version":1,"run_id":"x","verified":{}}', b"\xff"]
)
def test_a_file_that_is_not_of_this_run_is_refused(
    bucket: Path, tmp_path: Path, command: Command, content: bytes
) -> None:
    note = tmp_path / "note.json"
    note.write_bytes(content)
    assert command(bucket, "--all", "--resume", note)[0] == 2
    assert note.read_bytes() == content


def test_wrong_calls_of_the_command(bucket: Path, tmp_path: Path, command: Command) -> None:
    for arguments in (
        ["--resume", tmp_path / "note"],
        ["--all", "--sample", 2],
        ["1", "--sample", 2],
        ["--sample", 0],
        ["--all", "--resume", tmp_path / "no" / "folder"],
        ["--all", "--require-signature", tmp_path / "none"],
    ):
        assert command(bucket, *arguments)[0] == 2, arguments


def test_a_sample_has_the_newest_version(bucket: Path, command: Command) -> None:
    code, out = command(bucket, "--sample", 3, "--json")
    found = [json.loads(line)["version"] for line in out.splitlines()]
    assert (code, len(found), found[-1]) == (0, 3, 5)
    assert command(bucket, "--sample", 100)[1].splitlines()[-1] == "6 of 6 versions verified, chosen from 6"
    next(bucket.glob("deltas/00000005*/*")).unlink()
    assert command(bucket, "--sample", 1)[0] == 3
    assert command(bucket, "--all", "--require-signature", bucket / "store.json")[0] == 2
