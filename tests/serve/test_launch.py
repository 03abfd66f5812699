"""How `patchstore serve` starts vLLM: what it adds to the arguments, what it refuses, and how it ends."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from examples.processes import free_port
from patchstore import Publisher
from patchstore.bucket import history
from patchstore.errors import UsageError
from patchstore.follow import launch
from patchstore.follow.launch import Launch, VllmProcess, launch_of
from patchstore.stores.memory import MemoryStore

EXTENSION = ("--worker-extension-cls", "vllm_plugin.DeltaWorkerExtension")
BACKEND = ("--weight-transfer-config", '{"backend": "delta"}')


@pytest.fixture(autouse=True)
def _with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    for name in ("VLLM_PLUGINS", "PATCHSTORE_ADAPTERS"):
        monkeypatch.delenv(name, raising=False)


def given(*arguments: str) -> tuple[str, ...]:
    """What vLLM is started with for the model `tiny`."""
    found = launch_of(["tiny", *arguments], "s3://bucket/run")
    assert found.command[:5] == (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "tiny")
    assert found.environment == {"VLLM_SERVER_DEV_MODE": "1"}
    return found.command[5:]


def test_what_updates_need_is_added_and_arguments_are_passed_on() -> None:
    assert given("-tp", "2", "--port=81") == (
        "--host",
        "127.0.0.1",
        *EXTENSION,
        *BACKEND,
        "-tp",
        "2",
        "--port=81",
    )


def test_what_the_user_gives_is_not_given_twice() -> None:
    for mine in ((*EXTENSION, *BACKEND), ("--worker_extension_cls=" + EXTENSION[1], "=".join(BACKEND))):
        assert given("--host", "::1", *mine) == ("--host", "::1", *mine)


@pytest.mark.parametrize(
    ("arguments", "url"),
    [
        ((), "http://127.0.0.1:8000"),
        (("--host", "0.0.0.0", "--port", "81"), "http://127.0.0.1:81"),
        (("--host=10.0.0.1", "--port=81", "--port=82"), "http://10.0.0.1:82"),
        (("--host", "::1"), "http://[::1]:8000"),
        (("--hos", "10.0.0.1", "--por=81"), "http://10.0.0.1:81"),
    ],
)
def test_the_server_is_followed_where_it_listens(arguments: tuple[str, ...], url: str) -> None:
    assert launch_of(["tiny", *arguments], "s3://bucket/run").url == url


def test_an_address_that_others_reach_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    given("--host", "localhost")
    assert not caplog.records
    # vLLM takes beginnings of names too.
    assert given("--hos", "0.0.0.0")[:2] == EXTENSION
    assert "no authentication" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name the MODEL first"),
        (["-tp", "2", "tiny"], "name the MODEL first"),
        (["tiny", "--worker-extension-cls", "mine.Extension"], r"mine\.Extension: updates need vllm_plugin"),
        (["tiny", "--worker_extension_cls=mine.Extension"], r"mine\.Extension: updates need"),
        (["tiny", "--worker-ext", "mine.Extension"], r"mine\.Extension: updates need"),
        (["tiny", "--weight-transfer-config", '{"backend": "nccl"}'], "nccl.*applied by the backend delta"),
        (["tiny", "--weight-transfer-config={"], "applied by the backend delta"),
        (["tiny", "--weight-transfer-config.backend", "nccl"], "applied by the backend delta"),
        (["tiny", "--config", "file.yaml"], "--config: .*two commands"),
        (["tiny", "--uds", "/tmp/x"], "--uds: .*two commands"),
        (["tiny", "--port", "0"], "--port '0'"),
        (["tiny", "--port"], "--port ''"),
    ],
)
def test_what_contradicts_updates_is_refused_with_a_sentence(arguments: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        launch_of(arguments, "s3://bucket/run")


def test_without_vllm_or_the_plugin_a_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(UsageError, match="leaves out the plugin patchstore"):
        given()
    monkeypatch.setenv("VLLM_PLUGINS", "other,patchstore")
    given()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UsageError, match="vLLM is not installed"):
        given()


def test_a_run_of_adapters_is_configured_and_no_backend(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = MemoryStore()
    names = [f"base_model.model.layers.{n}.lora_{part}.weight" for n in range(2) for part in "AB"]
    tensors = {name: torch.zeros((12, 40) if "lora_A" in name else (40, 12)) for name in names}
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 12}')
    # Where all experts of a layer are one parameter, PEFT has their ranks side by side.
    experts = "base_model.model.layers.0.mlp.experts.lora_{}.weight"
    tensors |= {experts.format("A"): torch.zeros(48, 40), experts.format("B"): torch.zeros(40, 48)}
    with Publisher(store, tensors, adapter="default", files=tmp_path):
        header = history.run_header(store)
    found = launch_of(["tiny"], "s3://bucket/run", "policy", header)
    assert found.command[5:] == (
        *("--host", "127.0.0.1", "--enable-lora", "--max-loras", "2", "--max-cpu-loras", "4"),
        *("--max-lora-rank", "16"),
    )
    assert found.environment == {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "PATCHSTORE_ADAPTERS": "policy=s3://bucket/run",
    }
    monkeypatch.setenv("PATCHSTORE_ADAPTERS", "judge=/runs/judge, policy=/runs/old")
    mine = ("--enable-lora", "--max-loras", "8", "--max-lora-rank", "64")
    found = launch_of(["tiny", *mine], "s3://bucket/run", "policy", header)
    assert found.command[5:] == ("--host", "127.0.0.1", *mine)
    assert found.environment["PATCHSTORE_ADAPTERS"] == "judge=/runs/judge, policy=s3://bucket/run"
    with pytest.raises(UsageError, match="cannot be configured"):
        launch_of(["tiny"], "/runs/a,b", "policy")


def test_what_is_printed_is_a_command_without_secrets() -> None:
    secrets = ("--api-key", "one", "two", "--hf_tok=three", "--api", "four", "--hf", "five")
    found = launch_of(["a model", *secrets, "--seed", "1"], "s3://b/r")
    assert str(found).startswith(
        f"VLLM_SERVER_DEV_MODE=1 {sys.executable} -m vllm.entrypoints.cli.main serve 'a model'"
    )
    assert str(found).endswith("--api-key ... ... --hf_tok=... --api ... --hf ... --seed 1")


def test_a_server_with_keys_is_followed_with_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch_of(["tiny"], "s3://b/r").headers == {}
    monkeypatch.setenv("VLLM_API_KEY", "a")
    assert launch_of(["tiny"], "s3://b/r").headers == {"Authorization": "Bearer a"}
    # As of argparse, the last of them counts.
    for given in (["--api-key", "b", "c"], ["--api_key=b"], ["--api", "a", "--api-key", "b"]):
        found = launch_of(["tiny", *given], "s3://b/r")
        assert found.headers == {"Authorization": "Bearer b"}
        assert "Bearer" not in repr(found)


# The process.


def program(code: str, port: int = 1) -> Launch:
    return Launch(
        command=(sys.executable, "-c", code), environment={"ADDED": "x"}, host="127.0.0.1", port=port
    )


def test_a_server_that_ends_by_itself_says_how_and_stops_what_follows_it() -> None:
    for code, expected in (
        ("import os; raise SystemExit(3 if os.environ['ADDED'] == 'x' else 4)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL),
    ):
        stop = threading.Event()
        with VllmProcess(program(code), stop) as process:
            assert not process.wait_until_healthy()
        assert (process.code, stop.is_set()) == (expected, True)


def test_a_server_is_ended_with_the_block_also_if_it_does_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "END_S", 0.2)
    said, saying = os.pipe()
    deaf = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"os.write({saying}, str(os.getpid()).encode()); time.sleep(600)"
    )
    monkeypatch.setattr(subprocess, "Popen", _inheriting(subprocess.Popen, saying))
    with VllmProcess(program(deaf), threading.Event()) as process:
        pid = int(os.read(said, 20))
    assert process.code is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_server_that_closed_its_port_and_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "END_S", 0.5)
    monkeypatch.setattr(launch, "LOOK_S", 0.2)
    port, stop = free_port(), threading.Event()
    closing = (
        "import http.server as h, threading, time\n"
        "class Handler(h.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200); self.end_headers()\n"
        f"server = h.HTTPServer(('127.0.0.1', {port}), Handler)\n"
        "threading.Timer(3, server.shutdown).start()\n"
        "server.serve_forever(); server.server_close(); time.sleep(600)"
    )
    with VllmProcess(program(closing, port), stop) as process:
        assert process.wait_until_healthy()
        assert stop.wait(60)
    assert (process.code, process.was_killed) == (128 + signal.SIGKILL, True)


def test_a_server_ends_also_if_the_command_is_killed(tmp_path: Path) -> None:
    command = (
        "import sys, threading, time; from patchstore.follow.launch import Launch, VllmProcess;"
        "launch = Launch(command=(sys.executable, '-c', 'import os, time; print(os.getpid(), flush=True); "
        "time.sleep(600)'), environment={}, host='127.0.0.1', port=1)\n"
        "with VllmProcess(launch, threading.Event()): time.sleep(600)"
    )
    killed = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE)
    assert killed.stdout is not None
    assert killed.stdout.readline()
    killed.kill()
    killed.wait()
    # The server has the other end too, so this ends once it has ended.
    assert killed.stdout.read() == b""
    killed.stdout.close()


def _inheriting(popen: type, descriptor: int) -> object:
    return lambda *args, **options: popen(*args, **options, pass_fds=(descriptor,))


def test_an_address_that_is_taken_is_refused_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        found = program("raise SystemExit(5)", other.getsockname()[1])
        with (
            pytest.raises(UsageError, match="another program listens"),
            VllmProcess(found, threading.Event()),
        ):
            pass
