"""The command line: what it prints, how it fails, and with which exit code."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from patchstore import cli, digest
from patchstore.stores.folder import FolderStore
from tests.format import bad_buckets, surgery
from tests.weights import Run, assert_same_bits

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def patchstore(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run the command line in this process; returns exit code, output, errors."""

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["patchstore", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err  # type: ignore[return-value]

    return call


@pytest.fixture
def lines(patchstore: Command) -> Callable[..., list[dict[str, Any]]]:
    """Run a command that must succeed with --json; returns what it printed."""

    def call(*args: object) -> list[dict[str, Any]]:
        code, out, err = patchstore(*args, "--json")
        assert code == 0, err
        return [json.loads(line) for line in out.splitlines()]

    return call


@pytest.fixture
def bucket(tmp_path: Path) -> tuple[Path, Run]:
    run = Run(FolderStore(tmp_path / "bucket"))
    run.publish_versions(6)
    run.close()
    return tmp_path / "bucket", run


def test_log_lists_the_newest_versions_first(bucket, lines, patchstore) -> None:
    found = lines("log", bucket[0], "-n", 3)
    assert [version["version"] for version in found] == [5, 4, 3]
    assert found[1]["anchor_bytes"] > 0 and found[0]["anchor_bytes"] is None
    code, out, _ = patchstore("log", bucket[0])
    assert code == 0
    assert "B/change" in out


def test_show_tells_all_about_a_version(bucket, lines, patchstore) -> None:
    (found,) = lines("show", bucket[0], 4)
    assert (found["version"], found["kind"], found["parent"]) == (4, "anchor", 3)
    assert found["state"]["sums"]["size"] == 16 * len(bucket[1].history[4])
    assert "tensors" not in found["state"]
    (found,) = lines("show", bucket[0], 4, "--tensors")
    assert found["state"]["tensors"] == {
        name: digest.of_tensor(tensor).hex() for name, tensor in bucket[1].history[4].items()
    }
    code, out, _ = patchstore("show", bucket[0])
    assert code == 0
    assert "parent_digest" in out
    code, out, _ = patchstore("show", bucket[0], "--tensors")
    assert code == 0
    assert "layers.0.proj.weight" in out


def test_verify_proves_one_version_or_all(bucket, lines) -> None:
    assert [v["version"] for v in lines("verify", bucket[0])] == [5]
    assert [v["version"] for v in lines("verify", bucket[0], 2)] == [2]
    assert [v["version"] for v in lines("verify", bucket[0], "--all")] == [0, 1, 2, 3, 4, 5]


def test_a_run_that_does_not_begin_at_version_0_is_refused_for_one_version_as_for_all(
    tmp_path: Path, patchstore: Command
) -> None:
    objects = surgery.load(Path(__file__).parent / "golden" / "v1-gap")
    bad_buckets.begin_at(objects, 5)
    bucket = surgery.lay_out(objects, tmp_path / "bucket")
    for args in ([], ["5"], ["--all"]):
        code, out, _ = patchstore("verify", bucket, *args, "--json")
        assert (code, json.loads(out)["error"]["kind"]) == (3, "corrupt-object")


def test_replay_writes_a_version(bucket, lines, tmp_path: Path) -> None:
    lines("replay", bucket[0], tmp_path / "out", "--version", 3)
    assert_same_bits(load_file(tmp_path / "out" / "model.safetensors"), bucket[1].history[3])


@pytest.mark.parametrize(
    ("args", "code", "kind"),
    [
        (("log", "{empty}"), 2, "unknown-version"),
        (("show", "{bucket}", "77"), 2, "unknown-version"),
        (("replay", "{bucket}", "{empty}"), 2, "usage"),
        (("log", "nosuch://place"), 2, "usage"),
        (("log", "{bucket}", "--option", "key=value"), 2, "usage"),
        (("verify", "{bucket}", "1"), 3, "corrupt-object"),
    ],
)
def test_errors_are_one_line_with_a_kind_and_an_exit_code(
    bucket, patchstore, tmp_path: Path, args, code: int, kind: str
) -> None:
    (tmp_path / "empty").mkdir()
    if code == 3:
        path = next(bucket[0].glob("deltas/00000001*/*"))
        path.write_bytes(path.read_bytes()[:-1])
    places = {"bucket": bucket[0], "empty": tmp_path / "empty"}
    filled = [arg.format(**places) for arg in args]
    found, out, err = patchstore(*filled, "--json")
    assert found == code, err
    assert json.loads(out)["error"]["kind"] == kind
    found, out, err = patchstore(*filled)
    assert (found, out) == (code, "")
    assert kind in err


def test_wrong_arguments_are_explained(patchstore) -> None:
    code, _, err = patchstore("log")
    assert code == 2
    assert "STORE" in err
    assert patchstore("log", "x", "--option", "novalue")[0] == 2
    assert patchstore("verify", "x", "1", "--all")[0] == 2


def test_option_values_are_json_where_they_can_be() -> None:
    options = [
        "anon=false",
        "max_concurrency=4",
        'config_kwargs={"a": 1}',
        "key=abc",
        'secret="12"',
        "gateway_secret=12345e67",
        "url=http://x",
    ]
    assert cli._parsed(options) == {
        "anon": False,
        "max_concurrency": 4,
        "config_kwargs": {"a": 1},
        "key": "abc",
        "secret": '"12"',
        "gateway_secret": "12345e67",
        "url": "http://x",
    }


def test_a_manifest_of_other_tensors_is_an_error_and_no_traceback(bucket, patchstore) -> None:
    path = bucket[0] / "versions" / "00000005.json"
    record = json.loads(path.read_text())
    record["state"]["sums"]["size"] -= 16
    path.write_text(json.dumps(record))
    code, out, _ = patchstore("show", bucket[0], "--tensors", "--json")
    assert (code, json.loads(out)["error"]["kind"]) == (3, "corrupt-object")


def test_help_lists_every_command(patchstore) -> None:
    code, out, _ = patchstore("--help")
    assert code == 0
    for command in ("log", "show", "verify", "replay", "follow"):
        assert command in out


def test_a_terminated_replay_leaves_nothing(bucket, tmp_path: Path) -> None:
    # A pipe in the payload's place: the replay waits in it until it is told to end.
    payload = next((bucket[0] / "anchors").glob("00000004-*")) / "model.safetensors"
    payload.unlink()
    os.mkfifo(payload)
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-m", "patchstore.cli", "replay", str(bucket[0]), str(tmp_path / "out" / "v")]
    replaying = subprocess.Popen(command)
    while not list((tmp_path / "out").iterdir()):
        assert replaying.poll() is None
    replaying.terminate()
    assert replaying.wait(60) == 143
    assert list((tmp_path / "out").iterdir()) == []


def test_a_reader_that_stops_reading_is_no_error(bucket) -> None:
    command = f"{sys.executable} -m patchstore.cli log {bucket[0]} --json | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == ""
