"""`patchstore tag`, `retire` and `collect`: what they print, and that nothing happens without `--yes`."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kept_runs import later, new_run

from patchstore.cli import main
from patchstore.compact.service import Compactor
from patchstore.retention import Retention, collect, retire
from patchstore.stores.folder import FolderStore

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """A folder with versions 0 to 6, of which 0 and 4 are anchors."""
    new_run(FolderStore(tmp_path / "bucket"), 7)
    return tmp_path / "bucket"


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run a command in this process; returns exit code, output, errors."""

    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["patchstore", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def records(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_a_tag_is_set_shown_listed_used_moved_and_deleted(call: Call, bucket: Path, tmp_path: Path) -> None:
    assert call("tag", bucket)[:2] == (0, "")
    assert call("tag", bucket, "best", 2)[1].startswith("best: version 2, since ")
    assert call("tag", bucket, "copy", "best")[0] == 0
    assert call("tag", bucket, "best", 3)[0] == 0
    listed = records(call("tag", bucket, "--json")[1])
    assert [(each["tag"], each["version"]) for each in listed] == [("best", 3), ("copy", 2)]
    assert records(call("show", bucket, "best", "--json")[1])[0]["version"] == 3
    assert records(call("verify", bucket, "best", "--json")[1])[0]["version"] == 3
    assert records(call("replay", bucket, tmp_path / "out", "copy", "--json")[1])[0]["version"] == 2
    assert call("tag", bucket, "best", "--delete")[1] == "best: deleted, was version 3\n"
    assert call("tag", bucket, "best")[0] == 2
    for wrong in (("7", 1), ("head", 1), ("best", 99), ("best", "nosuch"), ("", 1), ("best", 1, "--delete")):
        code, out, err = call("tag", bucket, *wrong)
        assert (code, out) == (2, ""), wrong
        assert len(err.splitlines()) == 1


def test_nothing_is_retired_or_deleted_without_yes(call: Call, bucket: Path) -> None:
    before = sorted(path for path in bucket.rglob("*") if path.is_file())
    assert "would be retired: 0-3, 5, 5 versions" in call("retire", bucket, "--keep-last", 1)[1]
    assert "would be deleted: 0 objects" in call("collect", bucket)[1]
    assert sorted(path for path in bucket.rglob("*") if path.is_file()) == before
    assert call("retire", bucket)[0] == 2
    assert call("retire", bucket, "--keep-last", 0)[0] == 2


def test_a_retired_version_is_refused_and_left_out_of_verify_all(call: Call, bucket: Path) -> None:
    (found,) = records(call("retire", bucket, "--keep-last", 1, "--yes", "--json")[1])
    assert (found["retired"], found["kept"]) == ([[0, 3], [5, 5]], [[4, 4], [6, 6]])
    code, out, err = call("verify", bucket, 2, "--json")
    assert code == 2
    assert records(out)[0]["error"]["kind"] == "version-retired"
    assert "nearest kept version is" in err
    code, out, _ = call("verify", bucket, "--all")
    assert code == 0
    assert "are retired" in out.splitlines()[-1]
    assert call("show", bucket, 2)[0] == 0
    assert records(call("collect", bucket, "--yes", "--json")[1])[0]["num_waiting"] > 0


def test_the_log_marks_tags_retired_versions_and_added_anchors(call: Call, bucket: Path) -> None:
    code, out, _ = call("log", bucket)
    assert code == 0 and "marks" not in out
    list(Compactor(FolderStore(bucket), anchor_every=2).compact())
    call("tag", bucket, "best", 3)
    call("tag", bucket, "copy", 3)
    call("retire", bucket, "--keep-last", 1, "--yes")
    found = {each["version"]: each for each in records(call("log", bucket, "--json")[1])}
    assert {v for v, each in found.items() if each["retired"]} == {0, 1, 4, 5}
    assert {v for v, each in found.items() if each["added_anchor"]} == {2, 6}
    assert found[3]["tags"] == ["best", "copy"]
    lines = [[cell.strip() for cell in line.split("│")] for line in call("log", bucket)[1].splitlines()]
    rows = {line[0]: line for line in lines if len(line) > 1}
    assert (rows["3"][-1], rows["0"][-1], rows["6"][-1]) == ("best, copy", "retired", "")
    assert rows["2"][rows["version"].index("anchor")] == "added"


def test_a_record_that_is_damaged_does_not_hide_the_versions(call: Call, bucket: Path) -> None:
    (bucket / "retired").mkdir()
    (bucket / "retired" / "00000000.json").write_text("{}")
    code, out, err = call("log", bucket, "--json")
    assert (code, len(records(out))) == (3, 7)
    assert "retired/00000000.json" in err


def test_a_delta_that_was_deleted_with_its_version_cannot_be_transcoded(call: Call, bucket: Path) -> None:
    store = FolderStore(bucket)
    retire(store, Retention(keep_last=1), dry_run=False)
    collect(store, dry_run=False, clock=later(25))
    # 2 is retired; 4 is kept, but not what its delta builds on.
    for version, retired in ((2, 2), (4, 3)):
        code, _, err = call("transcode", bucket, bucket.parent / "out", version)
        assert code == 2
        assert f"(version-retired): version {retired} of " in err and "nearest kept version is 4" in err
    assert not (bucket.parent / "out").exists()
