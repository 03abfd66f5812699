"""`patchstore mirror` as a process: what it prints, whom it tells, how it ends; and the consumers it has."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mirrors import loaded

from patchstore.cli import main
from patchstore.errors import ConsumerFailed, UsageError
from patchstore.mirror.consumers import BODY, FIELDS, Command, Post, Stopped, filled
from patchstore.stores.folder import FolderStore
from patchstore.testing.sglang_stub import ROUTE, SglangStub, serving
from tests.support.weights import Run, assert_same_bits

Call = Callable[..., tuple[int, str, str]]
COMMAND = (sys.executable, "-m", "patchstore", "mirror")
VALUES = {name: f"the {name}" for name in FIELDS}


@pytest.fixture
def bucket(tmp_path: Path) -> tuple[Path, Run]:
    run = Run(FolderStore(tmp_path / "bucket"))
    run.publish_versions(3)
    run.close()
    return tmp_path / "bucket", run


@pytest.fixture
def mirror(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run the command in this process; returns exit code, output, errors, also those of what it starts."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["patchstore", "mirror", *map(str, arguments)])
        monkeypatch.setattr("patchstore.cli.main.signal.signal", lambda *_: None)
        with pytest.raises(SystemExit) as ended:
            main.main()
        out, err = capfd.readouterr()
        return ended.value.code or 0, out, err  # type: ignore[return-value]

    return call


@pytest.fixture
def started() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> "subprocess.Popen[str]":
        command = [*COMMAND, *map(str, arguments)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for each in processes:
        each.kill()
        each.communicate()


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
        (("{bucket}", "{new}", "--version", "-1"), 2, "greater than or equal to 0"),
        (("{bucket}", "{new}", "--then", "x {flder}"), 2, "{flder} is not known"),
        (("{bucket}", "{new}", "--then", "x 'y"), 2, "cannot be split"),
        (("{bucket}", "{new}", "--then", " "), 2, "is empty"),
        (("{bucket}", "{new}", "--post", "127.0.0.1:3000"), 2, "no URL"),
        (("{bucket}", "{new}", "--post", "http://x/y", "--post-body", "{"), 2, "no JSON"),
        (("{bucket}", "{new}", "--post-body", "1"), 2, "only with --post"),
        (("{bucket}", "{new}", "--listen", "0"), 2, "only with --follow"),
    ],
)
def test_an_impossible_call_is_explained(bucket, tmp_path, mirror, arguments, code: int, says: str) -> None:
    names = {"bucket": bucket[0], "new": tmp_path / "new", "none": tmp_path / "none"}
    places = {f"{{{name}}}": str(path) for name, path in names.items()}
    found, _, err = mirror(*(places.get(each, each) for each in arguments))
    assert (found, "Traceback" in err) == (code, False), err
    assert says in err


def test_followed_it_tells_an_sglang_server_of_each_version(bucket, tmp_path: Path, started) -> None:
    folder = tmp_path / "mirror"
    tensors: dict[str, Any] = {}

    def load(path: str) -> None:
        tensors[Path(path).name] = loaded(Path(path))

    with serving(SglangStub(load)) as stub:
        process = started(bucket[0], folder, "--follow", "--post", f"{stub.url}{ROUTE}", "--json")
        assert event(process)["version"] == 2
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
    assert stub.requests[0] == {"model_path": str(folder / "00000002"), "weight_version": "2"}
    for name, found in tensors.items():
        assert_same_bits(found, run.history[int(name)])
    assert {"00000002", "00000004"} <= tensors.keys()


def test_followed_it_outlives_a_server_that_refuses(bucket, tmp_path: Path, started) -> None:
    def refuse(path: str) -> None:
        if len(stub.requests) < 3:
            raise RuntimeError("out of memory")

    with serving(SglangStub(refuse)) as stub:
        process = started(bucket[0], tmp_path / "m", "--follow", "--post", f"{stub.url}{ROUTE}", "--json")
        assert event(process)["event"] == "mirrored"
        failed = event(process)
        assert failed["error"]["kind"] == "consumer-failed"
        assert "status 400: " in failed["error"]["message"] and "out of memory" in failed["error"]["message"]
        while stub.weight_version != "2":
            threading.Event().wait(0.01)
    assert len(stub.requests) == 3


def test_the_end_of_a_mirror_ends_the_command_and_what_that_started(bucket, tmp_path, started) -> None:
    pipe = tmp_path / "pipe"
    # A grandchild that writes when it began, and holds a pipe open while it lives.
    script = f"sh -c 'sleep 600 > {pipe} & echo on > {tmp_path / 'began'}; wait'"
    import os

    os.mkfifo(pipe)
    process = started(bucket[0], tmp_path / "mirror", "--follow", "--then", script)
    with pipe.open("rb") as reader:
        process.send_signal(signal.SIGTERM)
        _, complaints = process.communicate(timeout=60)
        assert process.returncode == 0, complaints
        # The end of the pipe: no process holds it open any more.
        assert reader.read() == b""


# Consumers, in this process.


def test_values_are_filled_into_words_and_not_looked_at_again() -> None:
    values = {**VALUES, "folder": "a b; rm -rf / {version}"}
    assert filled("--path={folder}/x", values) == "--path=a b; rm -rf / {version}/x"
    assert filled('{"a": 1} {}', values) == '{"a": 1} {}'


def test_a_command_gets_values_as_words_and_in_its_environment(tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = f"""sh -c 'printf "%s|" "$@" "$PATCHSTORE_LINK" > {out}' sh {{folder}} v{{version}}"""
    Command(script, timeout_s=60).tell({**VALUES, "folder": "a 'b' $HOME"}, threading.Event())
    assert out.read_text() == "a 'b' $HOME|vthe version|the link|"


def test_a_command_that_takes_too_long_is_ended() -> None:
    with pytest.raises(ConsumerFailed, match="did not end within 0 s"):
        Command("sleep 600", timeout_s=0.1).tell(VALUES, threading.Event())


def test_the_wait_for_a_consumer_can_be_ended() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        Command("sleep 600", timeout_s=600).tell(VALUES, stop)
    held = threading.Event()
    with serving(SglangStub(lambda path: held.wait(60))) as stub:
        with pytest.raises(Stopped):
            Post(stub.url + ROUTE, timeout_s=600).tell(VALUES, stop)
        held.set()


@pytest.mark.parametrize(
    ("status", "answer", "accepted"),
    [
        (200, b'{"success": true}', True),
        (204, b"", True),
        (200, b"fine", True),
        (200, b"[1]", True),
        (200, b'{"success": false, "message": "no"}', False),
        (302, b"", False),
        (404, b"{}", False),
        (500, b"oh", False),
    ],
)
def test_an_answer_accepts_a_version_or_does_not(status: int, answer: bytes, accepted: bool) -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        post = Post(f"http://127.0.0.1:{server.server_port}/x?token=secret", timeout_s=60)
        if accepted:
            post.tell(VALUES, threading.Event())
        else:
            with pytest.raises(ConsumerFailed, match=f"status {status}") as failed:
                post.tell(VALUES, threading.Event())
            assert "secret" not in str(failed.value)
        thread.join()


def test_a_server_that_is_not_there_has_not_accepted() -> None:
    with pytest.raises(ConsumerFailed, match="ConnectError"):
        Post("http://127.0.0.1:9/x", timeout_s=5).tell(VALUES, threading.Event())


def test_a_body_of_ones_own_is_sent_with_its_types(tmp_path: Path) -> None:
    body = '{"model_path": "{folder}", "weight_version": "{version}", "flush_cache": false, "token_step": 3}'
    with serving(SglangStub()) as stub:
        Post(stub.url + ROUTE, body=body, timeout_s=60).tell({**VALUES, "folder": 'a"b'}, threading.Event())
        assert stub.requests == [
            {"model_path": 'a"b', "weight_version": "the version", "flush_cache": False, "token_step": 3}
        ]
        wrong = Post(stub.url + ROUTE, body='{"model_path": 5}', timeout_s=60)
        with pytest.raises(ConsumerFailed, match="status 422"):
            wrong.tell(VALUES, threading.Event())
    assert json.loads(BODY).keys() == {"model_path", "weight_version"}


@pytest.mark.parametrize("url", ["", "x", "ftp://x/y", "http://", "http://[::1", "http:///x"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="no URL"):
        Post(url, timeout_s=1)
