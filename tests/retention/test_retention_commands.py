"""`patchstore tag`, `retire` and `collect`: what they print, and that nothing happens without `--yes`."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kept_runs import new_run

from patchstore.cli import main
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
