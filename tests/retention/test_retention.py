"""Which versions are retired, what readers hear of it, and which payloads are deleted."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kept_runs import assert_rebuilt, later, new_run, rebuilt

from patchstore import Replica, verify
from patchstore.bucket import history, lineage, notes, records
from patchstore.bucket.notes import CLOCK_MARGIN
from patchstore.errors import (
    CorruptObject,
    UnsupportedFormat,
    UsageError,
    VersionNotFound,
    VersionRetired,
)
from patchstore.ops import retention
from patchstore.ops.compact.service import Compactor
from patchstore.ops.retention import Retention, collect, delete_tag, retire, tag
from patchstore.stores import layout
from patchstore.stores.folder import FolderStore
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import FaultyStore
from tests.support.commands import Cli
from tests.support.weights import State, assert_same_bits, newest


def objects(store: MemoryStore) -> set[str]:
    return set(store.list(""))


def test_a_store_is_named_by_a_url_or_a_path_too(tmp_path: Path) -> None:
    path = tmp_path / "run"
    new_run(FolderStore(path), 8)
    assert tag(path, "best", 1).version == 1
    assert retire(f"file://{path}", Retention(keep_last=1), dry_run=False).num_retired
    assert collect(str(path), dry_run=False, clock=later(25)).num_objects
    assert delete_tag(store=path, name="best").version == 1  # type: ignore[call-arg]
    for wrong in (None, 3, {"url": str(path)}):
        with pytest.raises(UsageError, match="URL"):
            retire(wrong, Retention(keep_last=1))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="mistyped"):
        collect("s3:/bucket/run")


def test_retiring_writes_only_if_it_is_told_to() -> None:
    run = new_run(MemoryStore(), 6)
    before = objects(run.store)
    found = retire(run.store, Retention(keep_last=1))
    assert found.retired == ((0, 3),)
    assert found.not_before is None
    assert objects(run.store) == before
    again = retire(run.store, Retention(keep_last=1), dry_run=False)
    assert (again.retired, again.num_retired) == (((0, 3),), 4)
    assert objects(run.store) - before == {"retired/00000000.json"}
    assert retire(run.store, Retention(keep_last=1), dry_run=False).num_retired == 0
    assert objects(run.store) - before == {"retired/00000000.json"}


def test_the_head_tagged_versions_and_the_anchors_of_what_is_kept_are_never_retired() -> None:
    run = new_run(MemoryStore(), 15)
    tag(run.store, "best", 6)
    found = retire(run.store, Retention(keep_last=2, keep_every=9), dry_run=False)
    # 14 and 13 with anchor 12; 9 with anchor 8; 0; 6 with anchor 4.
    assert found.kept == ((0, 0), (4, 4), (6, 6), (8, 9), (12, 14))
    assert found.retired == ((1, 3), (5, 5), (7, 7), (10, 11))


def test_versions_of_the_last_days_are_kept() -> None:
    run = new_run(MemoryStore(), 6)
    assert retire(run.store, Retention(keep_days=1), clock=later(25)).num_retired == 0
    assert retire(run.store, Retention(keep_days=1), clock=later(26.5)).retired == ((0, 3),)


def test_a_policy_that_keeps_nothing_or_says_nonsense_is_refused() -> None:
    for rules in ({}, {"keep_last": 0}, {"keep_last": True}, {"keep_every": -1}, {"keep_days": float("nan")}):
        with pytest.raises(UsageError):
            Retention(**rules)  # type: ignore[arg-type]


def test_a_policy_without_tags_refuses_rather_than_retire_a_tagged_version() -> None:
    run = new_run(MemoryStore(), 6)
    tag(run.store, "best", 1)
    with pytest.raises(UsageError, match="best"):
        retire(run.store, Retention(keep_last=1, keep_tags=False), dry_run=False)
    assert notes.retirements(run.store).records == ()


def test_a_retired_version_is_refused_with_the_nearest_one_that_is_kept(tmp_path: Path) -> None:
    run = new_run(MemoryStore(), 14)
    retire(run.store, Retention(keep_last=3), dry_run=False)
    for version, nearest in ((0, 8), (7, 8), (9, 8), (10, 11)):
        with pytest.raises(VersionRetired, match=f"nearest kept version is {nearest}$"):
            rebuilt(run.store, version, tmp_path)
        with pytest.raises(VersionRetired):
            verify(run.store, version)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(VersionRetired):
        tag(run.store, "late", 3)
    assert notes.read_tags(run.store) == {}


def test_what_is_collected_is_what_no_kept_version_needs(tmp_path: Path) -> None:
    run = new_run(MemoryStore(), 14)
    tag(run.store, "best", 6)
    retire(run.store, Retention(keep_last=3), dry_run=False)
    before = objects(run.store)
    assert collect(run.store, dry_run=False, clock=later(23)).num_objects == 0
    found = collect(run.store, dry_run=False, clock=later(24.1))
    assert objects(run.store) == before - set(found.keys)
    gone = {layout.attempt_of(key)[0] for key in found.keys}  # type: ignore[index]
    # 5 is on the way to the tag, 9 and 10 on the way to 11.
    assert gone == {0, 1, 2, 3, 7}
    assert_rebuilt(run, [4, 6, 8, 11, 12, 13], tmp_path)
    for version in (4, 6, 8, 11, 12, 13):
        verify(run.store, version)
    assert {layout.manifest_key(version) for version in range(14)} <= objects(run.store)
    assert collect(run.store, dry_run=False, clock=later(24.1)).num_objects == 0


def test_a_replica_behind_retired_versions_goes_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "REQUEST_BYTES", 0)
    monkeypatch.setattr(records, "REQUEST_BYTES", 0)
    run = new_run(MemoryStore(), 10)
    tensors: State = {}
    replica = Replica(run.store, tensors)
    replica.update(1)
    # The deltas cost less than the anchor of version 8, and most of them are deleted.
    assert replica.stage(9).plan.anchor is None
    retire(run.store, Retention(keep_last=1), dry_run=False)
    collect(run.store, dry_run=False, clock=later(25))
    staged = replica.stage(9)
    assert staged.plan.anchor is not None
    head = replica.update()
    assert_same_bits(tensors, run.history[head.version])
    with pytest.raises(VersionRetired):
        replica.update(2)
    assert replica.held == head.version
    assert_same_bits(tensors, run.history[head.version])


def test_a_payload_that_is_lost_without_a_retirement_is_still_corrupt(tmp_path: Path) -> None:
    run = new_run(MemoryStore(), 14)
    retire(run.store, Retention(keep_last=3), dry_run=False)
    found = history.read_manifest(run.store, 12)
    assert found.anchor is not None
    run.store.delete(found.anchor.payloads[0].key)
    with pytest.raises(CorruptObject):
        rebuilt(run.store, 13, tmp_path)


def test_a_follower_of_the_head_asks_for_no_more_than_before() -> None:
    run = new_run(MemoryStore(), 6)
    retire(run.store, Retention(keep_last=1), dry_run=False)
    watched = FaultyStore(run.store)
    tensors: State = {}
    Replica(watched, tensors).update()
    assert_same_bits(tensors, newest(run.store))
    asked = {key.partition("/")[0] for _, key in watched.calls}
    assert asked.isdisjoint({"retired", "tags", "reservations"})
    assert {key for verb, key in watched.calls if verb == "list"} <= {"shortcuts/"}


def test_head_names_the_newest_version_and_is_no_tag(tmp_path: Path) -> None:
    run = new_run(MemoryStore(), 3)
    assert notes.version_of(run.store, "head") == 2
    assert_same_bits(rebuilt(run.store, "head", tmp_path), run.history[2])
    with pytest.raises(UsageError, match="'head', which stands for the newest"):
        tag(run.store, "head", 1)
    with pytest.raises(VersionNotFound, match=r"no version"):
        notes.version_of(MemoryStore(), "head")


def test_a_tag_stands_for_its_version_and_moves(tmp_path: Path) -> None:
    run = new_run(MemoryStore(), 3)
    tag(run.store, "best", 1)
    assert_same_bits(rebuilt(run.store, "best", tmp_path), run.history[1])
    assert verify(run.store, "best").version == 1
    tag(run.store, "best", 2)
    assert notes.version_of(run.store, "best") == 2
    assert delete_tag(run.store, "best").version == 2
    with pytest.raises(VersionNotFound, match="best"):
        verify(run.store, "best")
    with pytest.raises(VersionNotFound):
        delete_tag(run.store, "best")
    tag(run.store, "best", 0)
    assert {name: each.version for name, each in notes.read_tags(run.store).items()} == {"best": 0}


@pytest.mark.parametrize(
    "name", ["", "12", "-1", "head", "HEAD", "a/b", "a b", "é", ".", "1e5", "x" * 101, "a\n"]
)
def test_a_name_that_could_mean_something_else_is_refused(name: str) -> None:
    run = new_run(MemoryStore(), 1)
    with pytest.raises(UsageError):
        tag(run.store, name, 0)
    assert list(run.store.list("tags/")) == []


def test_a_tag_of_a_version_that_does_not_exist_is_refused() -> None:
    run = new_run(MemoryStore(), 1)
    with pytest.raises(VersionNotFound):
        tag(run.store, "best", 1)
    with pytest.raises(UsageError):
        tag(run.store, "best", "0")  # type: ignore[arg-type]


def test_attempts_that_no_manifest_names_are_noted_and_deleted_in_a_later_pass() -> None:
    run = new_run(MemoryStore(), 4)
    lost = {
        "deltas/00000002-0a57da7a0a57da7a/00001-of-00001.safetensors",
        "states/00000002-0a57da7a0a57da7a.sums",
        "pieces/00000003-0a57da7a0a57da7b/00001.safetensors",
    }
    # A publisher that sleeps may still commit this one.
    coming = {
        "deltas/00000004-cafecafecafecafe/00001-of-00001.safetensors",
        "states/00000004-cafecafecafecafe.sums",
    }
    for key in lost | coming:
        run.store.put(key, b"x")
    assert collect(run.store).num_noted == 3
    assert not list(run.store.list("unnamed/"))
    first = collect(run.store, dry_run=False)
    assert (first.num_objects, first.num_noted) == (0, 3)
    margin_h = CLOCK_MARGIN.total_seconds() / 3600
    assert collect(run.store, dry_run=False, clock=later(23.9 + margin_h)).num_objects == 0
    last = collect(run.store, dry_run=False, clock=later(24.1 + margin_h))
    assert set(last.keys) == lost
    assert last.num_unnamed == 3
    assert coming <= objects(run.store)
    collect(run.store, dry_run=False, clock=later(24.1 + margin_h))
    assert not list(run.store.list("unnamed/"))


@pytest.mark.parametrize(
    ("key", "data"),
    [
        ("retired/00000000.json", b"{}"),
        ("retired/00000000.json", b'{"format_version": 2}'),
        ("retired/00000000.json", b'{"format_version": 1, "kind": "stop", "run_id": "r"}'),
        ("tags/best/00000000.json", b"{}"),
        (f"reservations/{32 * '0'}.json", b'{"format_version": 1, "kind": "promise", "run_id": "r"}'),
        ("unnamed/00000000.json", b"[]"),
    ],
)
def test_a_record_that_cannot_be_understood_stops_the_collector(key: str, data: bytes) -> None:
    run = new_run(MemoryStore(), 6)
    run.store.put(key, data)
    before = objects(run.store)
    with pytest.raises((CorruptObject, UnsupportedFormat)):
        collect(run.store, dry_run=False, clock=later(100))
    assert objects(run.store) == before


def test_a_missing_manifest_stops_both() -> None:
    run = new_run(MemoryStore(), 6)
    run.store.delete(layout.manifest_key(2))
    with pytest.raises(CorruptObject, match="version 2"):
        retire(run.store, Retention(keep_last=1), dry_run=False)
    with pytest.raises(CorruptObject, match="version 2"):
        collect(run.store, dry_run=False)


def test_a_clock_that_is_far_behind_is_refused_and_an_hour_is_not() -> None:
    run = new_run(MemoryStore(), 6)
    retire(run.store, Retention(keep_last=1), dry_run=False, clock=later(-1))
    with pytest.raises(UsageError, match="clock"):
        retire(run.store, Retention(keep_last=1), clock=later(-3))
    with pytest.raises(UsageError, match="clock"):
        collect(run.store, clock=later(-3))


# `patchstore tag` and `prune`: what they print, and that nothing happens without `--yes`.


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """A folder with versions 0 to 6, of which 0 and 4 are anchors."""
    new_run(FolderStore(tmp_path / "bucket"), 7)
    return tmp_path / "bucket"


def printed(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_a_tag_is_set_shown_listed_used_moved_and_deleted(
    patchstore: Cli, bucket: Path, tmp_path: Path
) -> None:
    assert patchstore("tag", bucket)[:2] == (0, "")
    assert patchstore("tag", bucket, "best", 2)[1].startswith("best: version 2, since ")
    assert patchstore("tag", bucket, "copy", "best")[0] == 0
    assert patchstore("tag", bucket, "best", 3)[0] == 0
    listed = printed(patchstore("tag", bucket, "--json")[1])
    assert [(each["tag"], each["version"]) for each in listed] == [("best", 3), ("copy", 2)]
    assert printed(patchstore("log", bucket, "best", "--json")[1])[0]["version"] == 3
    assert printed(patchstore("verify", bucket, "best", "--json")[1])[0]["version"] == 3
    assert printed(patchstore("replay", bucket, tmp_path / "out", "copy", "--json")[1])[0]["version"] == 2
    assert patchstore("tag", bucket, "best", "--delete")[1] == "best: deleted, was version 3\n"
    assert patchstore("tag", bucket, "best")[0] == 2
    for wrong in (("7", 1), ("head", 1), ("best", 99), ("best", "nosuch"), ("", 1), ("best", 1, "--delete")):
        code, out, err = patchstore("tag", bucket, *wrong)
        assert (code, out) == (2, ""), wrong
        assert len(err.splitlines()) == 1


def test_nothing_is_retired_or_deleted_without_yes(patchstore: Cli, bucket: Path) -> None:
    before = sorted(path for path in bucket.rglob("*") if path.is_file())
    out = patchstore("prune", bucket, "--keep-last", 1)[1]
    assert "would be retired: 0-3, 5, 5 versions" in out
    assert "would be deleted: 0 objects" in out
    assert "nothing was written; --yes does it" in out
    assert sorted(path for path in bucket.rglob("*") if path.is_file()) == before
    assert patchstore("prune", bucket, "--keep-last", 0)[0] == 2


def test_prune_without_a_rule_deletes_what_was_retired_a_day_ago(
    patchstore: Cli, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    retire(FolderStore(bucket), Retention(keep_last=1), dry_run=False)
    monkeypatch.setattr(retention, "collect", partial(retention.collect, clock=later(25)))
    (found,) = printed(patchstore("prune", bucket, "--yes", "--keys", "--json")[1])
    assert found["num_versions"] == 4 and "retired" not in found
    assert found["keys"] and not any((bucket / key).exists() for key in found["keys"])
    assert patchstore("verify", bucket, "--all")[0] == 0


def test_a_retired_version_is_refused_and_left_out_of_verify_all(patchstore: Cli, bucket: Path) -> None:
    (found,) = printed(patchstore("prune", bucket, "--keep-last", 1, "--yes", "--json")[1])
    assert (found["retired"], found["kept"]) == ([[0, 3], [5, 5]], [[4, 4], [6, 6]])
    code, out, err = patchstore("verify", bucket, 2, "--json")
    assert code == 2
    assert printed(out)[0]["error"]["kind"] == "version-retired"
    assert "nearest kept version is" in err
    code, out, _ = patchstore("verify", bucket, "--all")
    assert code == 0
    assert "are retired" in out.splitlines()[-1]
    assert patchstore("log", bucket, 2)[0] == 0
    assert found["num_waiting"] == 5


def test_the_log_marks_tags_retired_versions_and_added_anchors(patchstore: Cli, bucket: Path) -> None:
    code, out, _ = patchstore("log", bucket)
    assert code == 0 and "marks" not in out
    list(Compactor(FolderStore(bucket), anchor_every=2).compact())
    patchstore("tag", bucket, "best", 3)
    patchstore("tag", bucket, "copy", 3)
    patchstore("prune", bucket, "--keep-last", 1, "--yes")
    found = {each["version"]: each for each in printed(patchstore("log", bucket, "--json")[1])}
    assert {v for v, each in found.items() if each["retired"]} == {0, 1, 4, 5}
    assert {v for v, each in found.items() if each["added_anchor"]} == {2, 6}
    assert found[3]["tags"] == ["best", "copy"]
    lines = [[cell.strip() for cell in line.split("│")] for line in patchstore("log", bucket)[1].splitlines()]
    rows = {line[0]: line for line in lines if len(line) > 1}
    assert (rows["3"][-1], rows["0"][-1], rows["6"][-1]) == ("best, copy", "retired", "")
    assert rows["2"][rows["version"].index("anchor")] == "added"


def test_a_record_that_is_damaged_does_not_hide_the_versions(patchstore: Cli, bucket: Path) -> None:
    (bucket / "retired").mkdir()
    (bucket / "retired" / "00000000.json").write_text("{}")
    code, out, err = patchstore("log", bucket, "--json")
    assert (code, len(printed(out))) == (3, 7)
    assert "retired/00000000.json" in err
