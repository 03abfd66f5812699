"""The command line: what it prints, how it fails, and with which exit code."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from patchstore import __version__
from patchstore.cli import main
from patchstore.cli.options import parsed
from patchstore.stores.folder import FolderStore
from patchstore.tensors import state_digest
from tests.format import bucket_edits, surgery
from tests.support.weights import Run, assert_same_bits

Command = Callable[..., tuple[int, str, str]]
PATCHSTORE = f"{sys.executable} -m patchstore"


def shell(command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a line of bash."""
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, **options)


@pytest.fixture
def patchstore(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run the command line in this process; returns exit code, output, errors."""

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["patchstore", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main.main()
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
        name: state_digest.of_tensor(tensor).hex() for name, tensor in bucket[1].history[4].items()
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


def test_verify_all_says_of_each_version_whether_it_is_right(bucket, patchstore: Command) -> None:
    next(bucket[0].glob("deltas/00000001*/*")).unlink()
    code, out, err = patchstore("verify", bucket[0], "--all", "--json")
    found = {line["version"]: line for line in map(json.loads, out.splitlines())}
    assert code == 3
    # 4 is an anchor, but those who hold 3 take its delta, which leads from 1 to it.
    verdicts = {version: line["verified"] for version, line in found.items()}
    assert verdicts == {0: True, 1: False, 2: False, 3: False, 4: False, 5: True}
    assert found[1]["error"]["kind"] == "corrupt-object"
    assert "version 1" in err
    _, out, _ = patchstore("verify", bucket[0], "--all")
    assert out.splitlines()[-1] == "2 of 6 versions verified"


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_verify_all_goes_on_past_a_payload_that_is_no_file(bucket, patchstore: Command, kind: str) -> None:
    payload = next(bucket[0].glob("deltas/00000005*/*"))
    payload.rename(bucket[0] / "elsewhere")
    os.mkfifo(payload) if kind == "pipe" else payload.symlink_to(bucket[0] / "elsewhere")
    code, out, _ = patchstore("verify", bucket[0], "--all")
    assert (code, out.splitlines()[-1]) == (3, "5 of 6 versions verified")


@pytest.mark.parametrize("args", [[], ["--all"]])
def test_verify_notices_that_the_newest_version_was_removed(bucket, patchstore: Command, args) -> None:
    (bucket[0] / "versions" / "00000005.json").unlink()
    code, _, err = patchstore("verify", bucket[0], *args)
    assert (code, "head.json names version 5" in err) == (3, True)


def test_a_closed_standard_output_is_no_success(bucket) -> None:
    done = shell(f"{PATCHSTORE} log {bucket[0]} >&-")
    assert done.returncode == 1
    assert done.stderr.startswith("error (os): standard output is closed")


def test_a_run_that_does_not_begin_at_version_0_is_refused_for_one_version_as_for_all(
    tmp_path: Path, patchstore: Command
) -> None:
    objects = surgery.load(Path(__file__).parents[1] / "golden" / "v1-gap")
    bucket_edits.begin_at(objects, 5)
    bucket = surgery.lay_out(objects, tmp_path / "bucket")
    for args in ([], ["5"], ["--all"]):
        code, out, _ = patchstore("verify", bucket, *args, "--json")
        kinds = {json.loads(line)["error"]["kind"] for line in out.splitlines()}
        # Of the versions that are not there, --all says that too.
        assert (code, kinds - {"version-not-found"}) == (3, {"corrupt-object"})


def test_log_shows_a_parent_that_is_not_the_version_before(tmp_path: Path, bucket, patchstore) -> None:
    assert "parent" not in patchstore("log", bucket[0])[1]
    run = Run(FolderStore(tmp_path / "other"))
    run.publish_versions(2)
    weights = {name: tensor.clone() for name, tensor in run.model.items()}
    run.publish()
    run.train()
    run.publish()
    run.close()
    for name, tensor in weights.items():
        run.model[name].copy_(tensor)
    run.open(resume=2)
    run.close()
    code, out, _ = patchstore("log", tmp_path / "other")
    header, *rows = [_cells(line) for line in out.splitlines() if "│" in line]
    assert code == 0
    assert [row[header.index("parent")] for row in rows] == ["2", "", "", "", ""]


@pytest.mark.parametrize("broken", [0, 3, 5])
def test_log_names_what_cannot_be_read_and_lists_the_rest(bucket, patchstore, broken: int) -> None:
    (bucket[0] / "versions" / f"{broken:08}.json").write_text("{")
    code, out, err = patchstore("log", bucket[0], "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert code == 3
    assert [version["version"] for version in found] == [5, 4, 3, 2, 1, 0]
    errors = {version["version"]: version["error"]["kind"] for version in found if "error" in version}
    assert errors == {broken: "corrupt-object"}
    code, out, err = patchstore("log", bucket[0])
    _, *rows = [_cells(line) for line in out.splitlines() if "│" in line]
    assert code == 3
    assert [row[0] for row in rows] == ["5", "4", "3", "2", "1", "0"]
    assert [row[0] for row in rows if "unreadable" in row] == [str(broken)]
    assert f"error (corrupt-object): versions/{broken:08}.json" in err


def test_log_names_a_version_that_is_missing_between_others(bucket, patchstore) -> None:
    (bucket[0] / "versions" / "00000002.json").unlink()
    code, out, _ = patchstore("log", bucket[0], "--json")
    kinds = [json.loads(line).get("error", {}).get("kind") for line in out.splitlines()]
    assert (code, kinds) == (3, [None, None, None, "version-not-found", None, None])


@pytest.mark.parametrize("columns", [34, 60])
def test_log_leaves_out_columns_rather_than_digits_where_a_terminal_is_narrow(bucket, columns: int) -> None:
    out = shell(f"COLUMNS={columns} {PATCHSTORE} log {bucket[0]}").stdout
    header, *rows = [_cells(line) for line in out.splitlines() if "│" in line]
    assert max(map(len, out.splitlines())) <= columns
    assert "…" not in out
    assert [row[header.index("version")] for row in rows] == ["5", "4", "3", "2", "1", "0"]
    # In the header, or below the table in the list of those that are left out.
    assert all(name in out for name in ("version", "step", "changed", "delta", "B/change", "anchor", "state"))


def test_a_table_in_a_pipe_has_whole_digests(bucket, lines) -> None:
    (found,) = lines("show", bucket[0])
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    out = shell(f"{PATCHSTORE} show {bucket[0]} | cat", env=environment).stdout
    assert found["state"]["total"] in out
    assert found["delta"]["payloads"][0]["key"] in out


def _cells(line: str) -> list[str]:
    """What stands in the columns of a line of the log."""
    return [cell.strip() for cell in line.split("│")]


def test_replay_writes_a_version(bucket, lines, tmp_path: Path) -> None:
    lines("replay", bucket[0], tmp_path / "out", 3)
    assert_same_bits(load_file(tmp_path / "out" / "model.safetensors"), bucket[1].history[3])


@pytest.mark.parametrize(
    ("args", "code", "kind"),
    [
        (("log", "{empty}"), 2, "version-not-found"),
        (("show", "{bucket}", "77"), 2, "version-not-found"),
        (("replay", "{bucket}", "{empty}"), 2, "usage"),
        (("log", "nosuch://place"), 2, "usage"),
        (("log", "{bucket}", "--option", "key=value"), 2, "usage"),
        (("log", "{bucket}", "--option", "novalue"), 2, "usage"),
        (("log", "{bucket}", "--limit", "0"), 2, "usage"),
        (("log", "{bucket}", "--verbose"), 2, "usage"),
        (("log",), 2, "usage"),
        (("nosuch",), 2, "usage"),
        (("log", "{bucket}/none"), 2, "version-not-found"),
        (("show", "{bucket}", "-1"), 2, "usage"),
        (("show", "{bucket}", "newest"), 2, "version-not-found"),
        (("show", "{bucket}", "head"), 2, "usage"),
        (("show", "{bucket}", "1_000"), 2, "usage"),
        (("verify", "{bucket}", "77"), 2, "version-not-found"),
        (("verify", "{bucket}", "1", "--all"), 2, "usage"),
        (("verify", "--server", "localhost"), 2, "usage"),
        (("verify", "--server", "http://127.0.0.1:9"), 4, "server-unavailable"),
        (("replay", "{empty}", "{empty}/out"), 2, "version-not-found"),
        (("replay", "{bucket}", "{empty}/out", "77"), 2, "version-not-found"),
        (("replay", "{bucket}", "3"), 2, "usage"),
        (("replay", "{bucket}", "{file}"), 2, "usage"),
        (("replay", "{bucket}", "{file}/out"), 2, "usage"),
        (("replay", "{bucket}", "/proc/out"), 2, "usage"),
        (("replay", "{bucket}", "{empty}/out", "--version", "3"), 2, "usage"),
        (("transcode", "{bucket}", "{empty}/out", "77"), 2, "version-not-found"),
        (("transcode", "{bucket}", "{empty}/out/more", "0"), 2, "usage"),
        (("transcode", "{bucket}", "{file}/out", "3"), 2, "usage"),
        (("transcode", "{bucket}", "3"), 2, "usage"),
        (("follow", "{bucket}"), 2, "usage"),
        (("doctor", "{bucket}", "--server", "localhost"), 2, "usage"),
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
    (tmp_path / "file").write_text("")
    places = {"bucket": bucket[0], "empty": tmp_path / "empty", "file": tmp_path / "file"}
    filled = [arg.format(**places) for arg in args]
    found, out, err = patchstore(*filled, "--json")
    assert found == code, err
    assert json.loads(out)["error"]["kind"] == kind
    found, out, err = patchstore(*filled)
    assert (found, out) == (code, "")
    assert err.startswith(f"error ({kind}): ") and err.count("\n") == 1
    assert [*(tmp_path / "empty").iterdir()] == []


def test_a_wrong_call_names_what_is_missing_and_how_to_call(patchstore) -> None:
    _, _, err = patchstore("replay", "x")
    assert "Missing argument 'OUT'" in err and "VERSION" in err
    assert "patchstore replay STORE OUT 12" in patchstore("replay", "x", "y", "--version", 3)[2]
    assert "versions count from 0" in patchstore("show", "x", "-1")[2]
    assert "patchstore --verbose doctor" in patchstore("doctor", "x", "--verbose")[2]


def test_without_arguments_the_help_is_shown(patchstore) -> None:
    code, out, err = patchstore()
    assert (code, err) == (2, "")
    assert "transcode" in out


def test_every_command_takes_a_version_after_its_places(bucket, lines, tmp_path: Path) -> None:
    for number, version in enumerate(([], [3])):
        out = [tmp_path / f"replayed-{number}", tmp_path / f"transcoded-{number}"]
        found = [
            *lines("show", bucket[0], *version),
            *lines("verify", bucket[0], *version),
            *lines("replay", bucket[0], out[0], *version),
            *lines("transcode", bucket[0], out[1], *version),
        ]
        assert {each["version"] for each in found} == {3 if version else 5}
        assert len(found) == 4


def test_what_a_bucket_and_a_path_say_is_no_markup(bucket, patchstore, tmp_path: Path) -> None:
    key = bucket[0] / "versions" / "00000005.json"
    record = json.loads(key.read_text())
    record["writer"]["id"] = "trainer[/bold]"
    key.write_text(json.dumps(record))
    code, out, _ = patchstore("show", bucket[0])
    assert code == 0
    assert "trainer[/bold]" in out
    code, out, _ = patchstore("replay", bucket[0], tmp_path / "step[red]", 3)
    assert code == 0
    assert str(tmp_path / "step[red]") in out


def test_a_name_that_the_output_cannot_show_is_no_failure(bucket, tmp_path: Path) -> None:
    for option in ("", "--json"):
        out = tmp_path / f"schr\u00f6dinger{option}"
        done = shell(f"PYTHONIOENCODING=ascii {PATCHSTORE} replay {bucket[0]} {out} {option}")
        assert (done.returncode, done.stderr) == (0, "")
        if option:
            assert json.loads(done.stdout)["out"] == str(out)


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
    assert parsed(options) == {
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
    for command in ("log", "show", "verify", "replay", "transcode", "follow", "doctor"):
        assert command in out
        assert patchstore(command, "--help")[0] == 0


_IN_THE_ANCHOR = """
import sys, time
from patchstore.cli import main
from patchstore.stores.folder import FolderStore

def slowly(read):
    def wait(store, key, *args, **kwargs):
        time.sleep(60 if key.startswith("anchors/") else 0)
        return read(store, key, *args, **kwargs)
    return wait

FolderStore.get, FolderStore.read = slowly(FolderStore.get), slowly(FolderStore.read)
main.main()
"""
"""Runs a command that waits in the payload of an anchor, so that it can be ended there."""


def replaying(bucket: Path, out: Path) -> subprocess.Popen[str]:
    """Begin a replay, and return when it has made its folder."""
    out.mkdir()
    command = [sys.executable, "-c", _IN_THE_ANCHOR, "replay", str(bucket), str(out / "v")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not list(out.iterdir()):
        assert process.poll() is None
    return process


def test_a_terminated_replay_leaves_nothing(bucket, tmp_path: Path) -> None:
    process = replaying(bucket[0], tmp_path / "out")
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert list((tmp_path / "out").iterdir()) == []


def test_an_interrupted_replay_leaves_nothing(bucket, tmp_path: Path) -> None:
    process = replaying(bucket[0], tmp_path / "out")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("arguments", ["log {}", "log {} --json", "show {}", "--help"])
def test_a_reader_that_stops_reading_ends_the_command_quietly(bucket, arguments: str) -> None:
    done = shell(f"{PATCHSTORE} {arguments.format(bucket[0])} | true; exit ${{PIPESTATUS[0]}}")
    # What is not read is neither done nor wrong; shells know this code.
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_an_examination_whose_reader_goes_away_leaves_nothing(tmp_path: Path) -> None:
    shell(f"{PATCHSTORE} doctor {tmp_path}/typo --json --size 1 | head -n 8")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("option", ["", "--json"])
def test_output_that_cannot_be_written_is_an_error_and_no_traceback(bucket, option: str) -> None:
    done = shell(f"{PATCHSTORE} show {bucket[0]} {option} > /dev/full")
    assert done.returncode == 1
    assert done.stderr.startswith("error (os): ") and "Traceback" not in done.stderr


# Completion.


def test_completion_installs_itself_for_the_command_and_completes(tmp_path: Path) -> None:
    program = tmp_path / "patchstore"
    program.write_text(f"#!{sys.executable}\nfrom patchstore.cli.main import main\nmain()\n")
    program.chmod(0o755)
    environment = os.environ | {"HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    # The shell is looked for among the parents, and bash replaces itself with a command that is its last.
    installed = shell(f"{PATCHSTORE} --install-completion; exit $?", env=environment)
    assert installed.returncode == 0, installed.stderr
    assert "patchstore.sh" in (tmp_path / ".bashrc").read_text()
    asked = (
        "COMP_WORDS=(patchstore follow --prefix-cache ''); COMP_CWORD=3; _patchstore_completion patchstore"
    )
    found = shell(f'source "$HOME/.bashrc"; {asked}; echo "${{COMPREPLY[@]}}"', env=environment)
    assert (found.returncode, found.stdout.split()) == (0, ["reset", "version", "keep"]), found.stderr
    asked = "COMP_WORDS=(patchstore ver); COMP_CWORD=1; _patchstore_completion patchstore"
    found = shell(f'source "$HOME/.bashrc"; {asked}; echo "${{COMPREPLY[@]}}"', env=environment)
    assert (found.returncode, found.stdout.split()) == (0, ["verify"]), found.stderr


def test_the_package_runs_as_a_module_under_the_commands_name() -> None:
    found = shell(f"{PATCHSTORE} --version && {PATCHSTORE} log --help")
    assert found.returncode == 0, found.stderr
    assert __version__ in found.stdout
    assert "Usage: patchstore log" in found.stdout
