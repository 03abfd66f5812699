"""`patchstore mirror` as a process: what it prints, what it runs, how it ends."""

import json
import signal
import subprocess
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from patchstore.errors import ConsumerFailed
from patchstore.ops.mirror.service import FIELDS, Command, Stopped
from patchstore.ops.retention import tag
from patchstore.stores.folder import FolderStore
from tests.support.commands import Cli
from tests.support.sglang_stub import ROUTE, SglangStub, serving
from tests.support.weights import Run, assert_same_bits, loaded

VALUES = {name: f"the {name}" for name in FIELDS}


@pytest.fixture
def bucket(tmp_path: Path) -> tuple[Path, Run]:
    run = Run(FolderStore(tmp_path / "bucket"))
    run.publish_versions(3)
    run.close()
    return tmp_path / "bucket", run


@pytest.fixture
def mirror(patchstore: Cli) -> Cli:
    return partial(patchstore, "mirror")


def event(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    found: dict[str, Any] = json.loads(process.stdout.readline())
    return found


def test_the_command_makes_a_folder_runs_what_follows_and_does_it_once(bucket, tmp_path, mirror) -> None:
    folder, heard = tmp_path / "mirror", tmp_path / "heard"
    then = f"sh -c 'echo told {{version}} {{folder}} $PATCHSTORE_STEP; echo {{version}} >> {heard}'"
    code, out, err = mirror(bucket[0], folder, "--then", then, "--json")
    assert code == 0, err
    (line,) = map(json.loads, out.splitlines())
    assert (line["event"], line["version"], line["detail"]) == ("mirrored", 2, str(folder / "00000002"))
    assert f"told 2 {folder / '00000002'} 2" in err
    assert_same_bits(loaded(folder / "current"), bucket[1].history[2])
    code, out, _ = mirror(bucket[0], folder, "--then", then)
    assert (code, out) == (0, f"{folder} has that version already, and it was verified\n")
    assert heard.read_text() == "2\n"
    assert mirror(bucket[0], folder, "--version", 0)[0] == 0
    assert_same_bits(loaded(folder / "current"), bucket[1].history[0])
    tag(bucket[0], "best", 1)
    assert mirror(bucket[0], folder, "--version", "best")[0] == 0
    assert_same_bits(loaded(folder / "current"), bucket[1].history[1])


@pytest.mark.parametrize(
    ("then", "says"),
    [
        ("false", "false ended with status 1"),
        ("sh -c 'kill -9 $$'", "signal SIGKILL"),
        ("/does/not/exist {folder}", "cannot be started"),
    ],
)
def test_a_command_that_fails_is_the_failure_of_the_mirror(bucket, tmp_path, mirror, then, says) -> None:
    code, _, err = mirror(bucket[0], tmp_path / "mirror", "--then", then)
    assert code == 1
    assert "consumer-failed" in err and says in err
    # The folder is there, and a later call tells the command again.
    assert_same_bits(loaded(tmp_path / "mirror" / "current"), bucket[1].history[2])
    assert mirror(bucket[0], tmp_path / "mirror", "--then", "true")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("{bucket}", "{bucket}"), 2, "is not empty, and no mirror"),
        (("{none}", "{new}"), 2, "is no folder; check the URL"),
        (("{bucket}", "{new}", "--version", "9"), 2, "has no version 9"),
        (
            ("{bucket}", "{new}", "--version", "-1"),
            2,
            "'-1' is no version: give a number from 0 on, or a tag",
        ),
        (("{bucket}", "{new}", "--version", "1" * 5000), 2, "version must be from 0 to"),
        (("{bucket}", "{new}", "--version", "latest"), 2, "has no tag 'latest'"),
        (("{bucket}", "{new}", "--then", "x {flder}"), 2, "{flder} is not known"),
        (("{bucket}", "{new}", "--then", "x 'y"), 2, "cannot be split"),
        (("{bucket}", "{new}", "--then", " "), 2, "is empty"),
        (("{bucket}", "{new}", "--listen", "0"), 2, "only with --follow"),
    ],
)
def test_an_impossible_call_is_explained(bucket, tmp_path, mirror, arguments, code: int, says: str) -> None:
    names = {"bucket": bucket[0], "new": tmp_path / "new", "none": tmp_path / "none"}
    places = {f"{{{name}}}": str(path) for name, path in names.items()}
    found, _, err = mirror(*(places.get(each, each) for each in arguments))
    assert (found, "Traceback" in err) == (code, False), err
    assert says in err


def post(url: str) -> str:
    """The command of docs/mirror.md, which posts each version to an SGLang server."""
    body = '{"model_path": "$PATCHSTORE_FOLDER", "weight_version": "$PATCHSTORE_VERSION"}'
    body = body.replace('"', '\\"')
    return f"""sh -c 'curl -sS --fail-with-body --json "{body}" {url}'"""


def test_followed_it_tells_an_sglang_server_of_each_version(bucket, tmp_path: Path, started) -> None:
    folder = tmp_path / "mirror"
    tensors: dict[str, Any] = {}

    def load(path: str) -> None:
        tensors[Path(path).name] = loaded(Path(path))
        if len(stub.requests) < 3:
            raise RuntimeError("out of memory")

    with serving(SglangStub(load)) as stub:
        process = started("mirror", bucket[0], folder, "--follow", "--then", post(stub.url + ROUTE), "--json")
        assert event(process)["version"] == 2
        failed = event(process)
        assert failed["error"]["kind"] == "consumer-failed"
        while stub.weight_version != "2":
            threading.Event().wait(0.01)
        run = bucket[1]
        run.open(resume="anchor")
        # The claim has version 3, and the weights of version 2.
        run.history[3] = run.history[2]
        run.publish()
        while event(process)["version"] != 4:
            pass
        while stub.weight_version != "4":
            threading.Event().wait(0.01)
        process.send_signal(signal.SIGTERM)
        _, complaints = process.communicate(timeout=60)
        assert process.returncode == 0, complaints
    assert "out of memory" in complaints
    assert stub.requests[0] == {"model_path": str(folder / "00000002"), "weight_version": "2"}
    for name, found in tensors.items():
        assert_same_bits(found, run.history[int(name)])
    assert {"00000002", "00000004"} <= tensors.keys()


def test_the_end_of_a_mirror_ends_the_command_and_what_that_started(bucket, tmp_path, started) -> None:
    pipe = tmp_path / "pipe"
    # A grandchild that writes when it began, and holds a pipe open while it lives.
    script = f"sh -c 'sleep 600 > {pipe} & echo on > {tmp_path / 'began'}; wait'"
    import os

    os.mkfifo(pipe)
    process = started("mirror", bucket[0], tmp_path / "mirror", "--follow", "--then", script)
    with pipe.open("rb") as reader:
        process.send_signal(signal.SIGTERM)
        _, complaints = process.communicate(timeout=60)
        assert process.returncode == 0, complaints
        # The end of the pipe: no process holds it open any more.
        assert reader.read() == b""


# The command, in this process.


def test_a_command_gets_values_as_words_and_in_its_environment(tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = f"""sh -c 'printf "%s|" "$@" "$PATCHSTORE_LINK" > {out}' sh {{folder}} v{{version}}"""
    values = {**VALUES, "folder": "a 'b' $HOME; rm {version}"}
    Command(script, timeout_s=60).tell(values, threading.Event())
    assert out.read_text() == "a 'b' $HOME; rm {version}|vthe version|the link|"


def test_a_command_that_takes_too_long_is_ended() -> None:
    with pytest.raises(ConsumerFailed, match="did not end within 0 s"):
        Command("sleep 600", timeout_s=0.1).tell(VALUES, threading.Event())


def test_the_wait_for_a_command_can_be_ended() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        Command("sleep 600", timeout_s=600).tell(VALUES, stop)
