"""The command line: what it prints, how it fails, and with which exit code."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer
from safetensors.torch import load_file

from patchstore import __version__
from patchstore.cli import main
from patchstore.cli.options import parsed
from patchstore.follow.logs import JsonFormatter, TextFormatter
from patchstore.stores.folder import FolderStore
from patchstore.support.printable import escaped, json_line
from patchstore.tensors import state_digest
from tests.format import bucket_edits, surgery
from tests.support.commands import Cli
from tests.support.copies import objects_of
from tests.support.vllm_stub import StubServer, serving
from tests.support.weights import Run, assert_same_bits

PATCHSTORE = f"{sys.executable} -m patchstore"


def shell(command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a line of bash."""
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, **options)


@pytest.fixture
def lines(patchstore: Cli) -> Callable[..., list[dict[str, Any]]]:
    """Run a command that must succeed with --json; returns what it printed."""

    def call(*args: object) -> list[dict[str, Any]]:
        code, out, err = patchstore(*args, "--json")
        assert code == 0, err
        return [json.loads(line) for line in out.splitlines()]

    return call


@pytest.fixture
def bucket(tmp_path: Path) -> tuple[Path, Run]:
    run = Run(FolderStore(tmp_path / "bucket"))
    run.publish_and_close(6)
    return tmp_path / "bucket", run


def test_log_lists_the_newest_versions_first(bucket, lines, patchstore) -> None:
    found = lines("log", bucket[0], "-n", 3)
    assert [version["version"] for version in found] == [5, 4, 3]
    assert found[1]["anchor_bytes"] > 0 and found[0]["anchor_bytes"] is None
    code, out, _ = patchstore("log", bucket[0])
    assert code == 0
    assert "B/change" in out


def test_log_of_a_version_tells_all_about_it(bucket, lines, patchstore) -> None:
    (found,) = lines("log", bucket[0], 4)
    assert (found["version"], found["kind"], found["parent"]) == (4, "anchor", 3)
    assert found["state"]["sums"]["size"] == 16 * len(bucket[1].history[4])
    assert "tensors" not in found["state"]
    (found,) = lines("log", bucket[0], 4, "--tensors")
    assert found["state"]["tensors"] == {
        name: state_digest.of_tensor(tensor).hex() for name, tensor in bucket[1].history[4].items()
    }
    code, out, _ = patchstore("log", bucket[0], 5)
    assert code == 0
    assert "parent_digest" in out
    newest = len(bucket[1].history) - 1
    for name in ("head", "Head"):
        assert [each["version"] for each in lines("log", bucket[0], name)] == [newest]
    code, out, _ = patchstore("log", bucket[0], 5, "--tensors")
    assert code == 0
    assert "layers.0.proj.weight" in out


def test_verify_proves_one_version_or_all(bucket, lines) -> None:
    assert [v["version"] for v in lines("verify", bucket[0])] == [5]
    assert [v["version"] for v in lines("verify", bucket[0], 2)] == [2]
    assert [v["version"] for v in lines("verify", bucket[0], "--all")] == [0, 1, 2, 3, 4, 5]


def test_verify_all_says_of_each_version_whether_it_is_right(bucket, patchstore: Cli) -> None:
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
    # Of neighbours that build on the damaged one the same is said, once.
    assert ("2 to 4" in out, out.count("builds on version 1")) == (True, 1)


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_verify_all_goes_on_past_a_payload_that_is_no_file(bucket, patchstore: Cli, kind: str) -> None:
    payload = next(bucket[0].glob("deltas/00000005*/*"))
    payload.rename(bucket[0] / "elsewhere")
    os.mkfifo(payload) if kind == "pipe" else payload.symlink_to(bucket[0] / "elsewhere")
    code, out, _ = patchstore("verify", bucket[0], "--all")
    assert (code, out.splitlines()[-1]) == (3, "5 of 6 versions verified")


@pytest.mark.parametrize("args", [[], ["--all"]])
def test_verify_notices_that_the_newest_version_was_removed(bucket, patchstore: Cli, args) -> None:
    (bucket[0] / "versions" / "00000005.json").unlink()
    code, _, err = patchstore("verify", bucket[0], *args)
    assert (code, "head.json names version 5" in err) == (3, True)


def test_a_closed_standard_output_is_no_success(bucket) -> None:
    done = shell(f"{PATCHSTORE} log {bucket[0]} >&-")
    assert done.returncode == 1
    assert done.stderr.startswith("error (os): standard output is closed")


def test_a_run_that_does_not_begin_at_version_0_is_refused_for_one_version_as_for_all(
    tmp_path: Path, patchstore: Cli
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
    run.publish_and_close(4)
    run.go_back(2)
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
    (found,) = lines("log", bucket[0], 5)
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    out = shell(f"{PATCHSTORE} log {bucket[0]} 5 | cat", env=environment).stdout
    assert found["state"]["total"] in out
    assert found["delta"]["payloads"][0]["key"] in out


def _cells(line: str) -> list[str]:
    """What stands in the columns of a line of the log."""
    return [cell.strip() for cell in line.split("│")]


@pytest.mark.parametrize(("version", "expected"), [([], 5), ([3], 3)])
def test_replay_writes_a_version(bucket, lines, tmp_path: Path, version: list[int], expected: int) -> None:
    (found,) = lines("replay", bucket[0], tmp_path / "out", *version)
    assert found["version"] == expected
    assert_same_bits(load_file(tmp_path / "out" / "model.safetensors"), bucket[1].history[expected])


@pytest.mark.parametrize(
    ("args", "code", "kind"),
    [
        (("log", "{empty}"), 2, "version-not-found"),
        (("log", "{bucket}", "77"), 2, "version-not-found"),
        (("replay", "{bucket}", "{empty}"), 2, "usage"),
        (("log", "nosuch://place"), 2, "usage"),
        (("log", "{bucket}", "--option", "key=value"), 2, "usage"),
        (("log", "{bucket}", "--option", "novalue"), 2, "usage"),
        (("log", "{bucket}", "--limit", "0"), 2, "usage"),
        (("log", "{bucket}", "--verbose"), 2, "usage"),
        (("log",), 2, "usage"),
        (("nosuch",), 2, "usage"),
        (("log", "{bucket}/none"), 2, "version-not-found"),
        (("log", "{bucket}", "-1"), 2, "usage"),
        (("log", "{bucket}", "--tensors"), 2, "usage"),
        (("log", "{bucket}", "1", "--limit", "3"), 2, "usage"),
        (("log", "{bucket}", "newest"), 2, "version-not-found"),
        (("log", "{bucket}", "1_000"), 2, "usage"),
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
    assert "versions count from 0" in patchstore("log", "x", "-1")[2]
    assert "patchstore --verbose doctor" in patchstore("doctor", "x", "--verbose")[2]


@pytest.mark.parametrize("digits", [19, 20, 5000])
def test_a_number_too_large_for_a_version_ends_in_a_sentence(
    bucket, patchstore, tmp_path, digits: int
) -> None:
    for args in (("log",), ("verify",), ("replay", tmp_path / "out")):
        code, _, err = patchstore(args[0], bucket[0], *args[1:], "9" * digits)
        assert (code, err.count("\n")) == (2, 1) and "version must be from 0 to" in err
    assert "has no version 12345678901" in patchstore("log", bucket[0], "00012345678901")[2]


def test_without_arguments_the_help_is_shown(patchstore) -> None:
    code, out, err = patchstore()
    assert (code, err) == (2, "")
    assert "replicate" in out


def edit_newest(bucket: Path, edit: Callable[[Any], object]) -> None:
    path = bucket / "versions" / "00000005.json"
    record = json.loads(path.read_text())
    edit(record)
    path.write_text(json.dumps(record))


def test_what_a_bucket_and_a_path_say_is_no_markup(bucket, patchstore, tmp_path: Path) -> None:
    edit_newest(bucket[0], bucket_edits.put("writer.id", "trainer[/bold]"))
    code, out, _ = patchstore("log", bucket[0], 5)
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
    meant = {
        "anon=false": False,
        "max_concurrency=4": 4,
        'config_kwargs={"a": 1}': {"a": 1},
        "key=abc": "abc",
        'secret="12"': '"12"',
        "gateway_secret=12345e67": "12345e67",
        "url=http://x": "http://x",
    }
    assert parsed(list(meant)) == {option.partition("=")[0]: value for option, value in meant.items()}


def test_a_manifest_of_other_tensors_is_an_error_and_no_traceback(bucket, patchstore) -> None:
    edit_newest(bucket[0], lambda record: record["state"]["sums"].update(size=16))
    code, out, _ = patchstore("log", bucket[0], 5, "--tensors", "--json")
    assert (code, json.loads(out)["error"]["kind"]) == (3, "corrupt-object")


def test_help_lists_every_command_in_its_group(patchstore) -> None:
    code, out, _ = patchstore("--help")
    assert code == 0
    for panel, commands in main.PANELS.items():
        assert panel in out
        for command in commands:
            assert command.__name__ in out
            assert patchstore(command.__name__, "--help")[0] == 0


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


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_terminated_or_interrupted_replay_leaves_nothing(bucket, tmp_path: Path, sent, code: int) -> None:
    out = tmp_path / "out"
    out.mkdir()
    command = [sys.executable, "-c", _IN_THE_ANCHOR, "replay", str(bucket[0]), str(out / "v")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not list(out.iterdir()):
            assert process.poll() is None
        process.send_signal(sent)
        _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in err
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("arguments", ["log {}", "log {} --json", "log {} 5", "--help"])
def test_a_reader_that_stops_reading_ends_the_command_quietly(bucket, arguments: str) -> None:
    done = shell(f"{PATCHSTORE} {arguments.format(bucket[0])} | true; exit ${{PIPESTATUS[0]}}")
    # What is not read is neither done nor wrong; shells know this code.
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_an_examination_whose_reader_goes_away_leaves_nothing(tmp_path: Path) -> None:
    shell(f"{PATCHSTORE} doctor {tmp_path}/typo --json --size 1 | head -n 8")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("option", ["", "--json"])
def test_output_that_cannot_be_written_is_an_error_and_no_traceback(bucket, option: str) -> None:
    done = shell(f"{PATCHSTORE} log {bucket[0]} 5 {option} > /dev/full")
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


# What a store or a server says is shown, also where a terminal would obey it or a log would gain a line.

# A title, a C1 introducer, DEL, and an override of the direction.
HOSTILE = "\x1b]0;mine\x07\x9b31m\x7f\u202e made-up"
SHOWN = r"\x1b]0;mine\x07\x9b31m\x7f\u202e made-up"
FORGED = "\n2026-01-01T00:00:00.000Z INFO patchstore.follow: all is well"

Command = Callable[..., tuple[int, str]]


def is_clean(text: str) -> bool:
    return all(
        each == "\n" or not (each < " " or "\x7f" <= each < "\xa0" or "\u202a" <= each <= "\u202e")
        for each in text
    )


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of S3 with a run at `bucket/run`, one whose records are hostile at `bucket/lost`, and at
    `bucket/none` no run. All have objects of hostile names.
    """
    store = FolderStore(tmp_path_factory.mktemp("run") / "bucket")
    Run(store).publish_and_close(2)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
    client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys)
    client.create_bucket(Bucket="bucket")
    hostile = {f"{kind}/{HOSTILE}.json": b"{}" for kind in ("versions", "tags", "retired", "signatures")}
    says = dict.fromkeys(("tags/best/00000000.json", "store.json"), json.dumps({"format_version": HOSTILE}))
    whole = objects_of(store) | hostile
    for place, objects in {"run": whole, "lost": whole | says, "none": hostile}.items():
        for key, data in objects.items():
            client.put_object(Bucket="bucket", Key=f"{place}/{key}", Body=data)
    client.close()
    yield url
    server.stop()


@pytest.fixture
def of_server(endpoint: str) -> Command:
    """Run a command of a store of that server; returns its exit code, and all that it wrote."""

    def call(*args: str) -> tuple[int, str]:
        options = ("-o", f"endpoint_url={endpoint}", "-o", "key=test", "-o", "secret=test")
        command = [sys.executable, "-m", "patchstore", *args, *options]
        done = subprocess.run(command, capture_output=True, check=False, timeout=120)
        return done.returncode, done.stdout.decode() + done.stderr.decode()

    return call


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("log", "s3://bucket/lost"), 3),
        (("verify", "s3://bucket/lost"), 3),
        (("doctor", "s3://bucket/lost"), 1),
        (("prune", "s3://bucket/lost"), 3),
    ],
)
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_record_of_a_store_commands_no_terminal(
    of_server: Command, args: tuple[str, ...], code: int, form: tuple[str, ...]
) -> None:
    found, text = of_server(*args, *form)
    assert found == code
    assert "mine" in text
    assert is_clean(text)
    if args[0] != "doctor":
        assert SHOWN in text


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("log", "s3://bucket/none"), 2),
        (("verify", "s3://bucket/none"), 2),
        (("log", "s3://bucket/run"), 0),
        (("prune", "s3://bucket/run", "--keys"), 0),
        (("tag", "s3://bucket/run"), 0),
    ],
)
def test_a_name_that_is_no_key_is_never_shown(of_server: Command, args: tuple[str, ...], code: int) -> None:
    found, text = of_server(*args)
    assert found == code
    assert "made-up" not in text
    assert is_clean(text)


@pytest.mark.parametrize("form", [(), ("--json",), ("--log-format", "text"), ("--log-format", "json")])
def test_an_error_of_a_server_commands_no_terminal_and_forges_no_line(
    tmp_path: Path, form: tuple[str, ...]
) -> None:
    run = Run(FolderStore(tmp_path / "bucket"))
    run.publish_versions(1)
    run_id = run.publisher.run_id
    run.close()
    with serving(StubServer()) as stub:
        stub.run_id = run_id
        stub.failures["delta_prove"] = [f"[load-failed] {HOSTILE}{FORGED}"] * 100
        args = [*PATCHSTORE.split(), "follow", tmp_path / "bucket", "--server", stub.url, *form]
        with (tmp_path / "said").open("wb") as said:
            process = subprocess.Popen(args, stdout=said, stderr=said)
            try:
                while "made-up" not in (text := (tmp_path / "said").read_text()):
                    assert process.poll() is None, text
                    time.sleep(0.05)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(timeout=60)
    text = (tmp_path / "said").read_text()
    assert is_clean(text)
    assert not re.search(f"^{re.escape(FORGED[1:])}", text, re.MULTILINE)
    if "--json" in form:
        kinds = [json.loads(line)["event"] for line in text.splitlines() if line.startswith("{")]
        assert "failed" in kinds


def test_each_character_that_a_terminal_may_obey_is_shown() -> None:
    ranges = (range(0x20), range(0x7F, 0xA0), range(0x200B, 0x2010), range(0x2028, 0x202F))
    for code in (each for some in ranges for each in some):
        assert escaped(f"a{chr(code)}b").isprintable()
        assert json.loads(json_line({"a": chr(code)}, ensure_ascii=False)) == {"a": chr(code)}
        assert is_clean(json_line({"a": chr(code)}, ensure_ascii=False))
    assert escaped("a\r\n\tb\x00\x9b\u202e\udc80") == r"a\r\n\tb\x00\x9b\u202e\udc80"
    plain = "Größe 模型 │ C:\\new [red] 🙂"
    assert escaped(plain) == plain


@pytest.fixture
def record() -> logging.LogRecord:
    """A record whose message and exception begin another line each."""
    try:
        raise ValueError(HOSTILE + FORGED)
    except ValueError:
        return logging.LogRecord(
            "patchstore", logging.ERROR, "file", 1, "%s", (HOSTILE + FORGED,), sys.exc_info()
        )


def test_each_line_of_a_text_log_is_a_record_or_indented(record: logging.LogRecord) -> None:
    first, *rest = TextFormatter().format(record).split("\n")
    assert SHOWN in first and first.endswith(r"all is well")
    assert any("ValueError" in line for line in rest)
    assert all(line.startswith("    ") for line in rest)
    assert is_clean("\n".join([first, *rest]))


def test_a_record_of_a_json_log_is_one_line_and_keeps_what_was_said(record: logging.LogRecord) -> None:
    line = JsonFormatter().format(record)
    assert is_clean(line) and "\n" not in line
    found = json.loads(line)
    assert found["message"] == HOSTILE + FORGED
    assert found["traceback"].endswith(HOSTILE + FORGED)
