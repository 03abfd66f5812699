"""Start a vLLM server with all that versions of a run need. It ends with this process."""

import ctypes
import importlib.util
import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Self

from patchstore.bucket.records import StoreHeader
from patchstore.errors import ServerUnavailable, UsageError
from patchstore.follow.http_client import LOOK_S, Http, is_port_closed
from patchstore.follow.vllm_protocol import BACKEND, EXTENSION, FUSED_EXPERTS
from patchstore.support.arguments import number_in
from patchstore.support.host import is_any_address, is_loopback

logger = logging.getLogger(__name__)

_BY_HAND = "run vllm serve and patchstore follow as two commands for that (docs/vllm.md)"
_REFUSED = {
    "--config": "arguments in a file are not read here, such as a port",
    "--headless": "a server without an address cannot be followed",
    "--uds": "a server on a socket of Unix cannot be followed",
    "--ssl-certfile": "a server with a certificate of its own is followed by its name",
}
_SECRETS = {"--api-key", "--hf-token"}
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Which `--max-lora-rank` vLLM takes."""
_LOOK_S = 0.5
END_S = 30.0
"""Time that vLLM has to end after SIGTERM, or after it closed its port."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a server is started."""

    command: tuple[str, ...]
    """What runs, with its arguments."""
    environment: Mapping[str, str]
    """In addition to that of this process."""
    host: str
    port: int
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What the server wants to be sent: its first key, if it is started with `--api-key`."""

    @property
    def address(self) -> tuple[str, int]:
        """Where this host reaches the server."""
        return "127.0.0.1" if is_any_address(self.host) else self.host, self.port

    @property
    def url(self) -> str:
        host, port = self.address
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def __str__(self) -> str:
        """The command as a shell takes it, without secrets."""
        words, is_secret = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()], False
        for word in self.command:
            name, equals, _ = word.partition("=")
            if word.startswith("-"):
                is_secret = any(_names(name, each) for each in _SECRETS)
                words.append(f"{name}{equals}{'...' * bool(equals)}" if is_secret else shlex.quote(word))
            else:
                words.append("..." if is_secret else shlex.quote(word))
        return " ".join(words)


def launch_of(
    arguments: Sequence[str], store: str, adapter: str | None = None, header: StoreHeader | None = None
) -> Launch:
    """Return how to start a server for a run.

    Args:
        arguments: the model, and arguments of `vllm serve`.
        store: the run's URL.
        adapter: the name under which the run, of adapters, is to be served; None for whole weights.
        header: of the run, if there is one yet.

    Raises:
        UsageError: vLLM is not installed, or the arguments contradict what the server needs.
    """
    model, *given = arguments or [""]
    if not model or model.startswith("-"):
        raise UsageError("name the MODEL first, and arguments of vllm serve behind it")
    if importlib.util.find_spec("vllm") is None:
        raise UsageError(
            "vLLM is not installed beside this patchstore: pip install vllm, or install patchstore in vLLM's "
            "environment and run the command there"
        )
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and "patchstore" not in plugins.split(","):
        raise UsageError(f"VLLM_PLUGINS is {plugins!r} and leaves out the plugin patchstore: add it there")
    for option, why in _REFUSED.items():
        if _values(given, option):
            raise UsageError(f"{option}: {why}; {_BY_HAND}")
    host = (_values(given, "--host") or ["127.0.0.1"])[-1]
    said = (_values(given, "--port") or ["8000"])[-1]
    port = number_in(said)
    if port is None or not 0 < port < 65_536:
        raise UsageError(f"--port {said!r:.40}: name the port at which the server is to be followed")
    added = [] if _values(given, "--host") else ["--host", host]
    if adapter is None:
        environment = {"VLLM_SERVER_DEV_MODE": "1"}
        added += _for_weights(given)
    else:
        environment = _environment_of_adapters(adapter, store)
        added += _for_adapters(given, header)
    if adapter is None and not is_loopback(host):
        logger.warning(
            "vLLM listens at %s, and its routes that update weights have no authentication: see "
            "docs/security.md",
            host,
        )
    return Launch(
        command=(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, *added, *given),
        environment=environment,
        host=host,
        port=port,
        headers=_headers(given),
    )


def _names(word: str, option: str) -> bool:
    """Whether a word names an option, or a key of its value, to vLLM: it takes underscores, and beginnings of
    names that are of no other option.
    """
    return len(word) > len("--") and option.startswith(word.partition(".")[0].replace("_", "-"))


def _values(given: Sequence[str], option: str) -> list[str]:
    """Return the values that an option of vLLM is given; an empty text for none."""
    found = []
    for word, following in pairwise([*given, ""]):
        name, equals, value = word.partition("=")
        if _names(name, option):
            found.append(value if equals else following)
    return found


def _headers(given: Sequence[str]) -> dict[str, str]:
    """Return the header with which vLLM's routes of adapters are called."""
    key = (_values(given, "--api-key") or [os.environ.get("VLLM_API_KEY", "")])[-1]
    return {"Authorization": f"Bearer {key}"} if key else {}


def _for_weights(given: Sequence[str]) -> list[str]:
    """Return what is missing of the worker extension and the backend; refuse others."""
    extensions = _values(given, "--worker-extension-cls")
    backends = _values(given, "--weight-transfer-config")
    if set(extensions) - {EXTENSION}:
        raise UsageError(
            f"--worker-extension-cls {extensions[-1]}: updates need {EXTENSION}, and vLLM takes one class; "
            f"leave it out, or derive a class from both, and {_BY_HAND}"
        )
    if any(not _is_delta(each) for each in backends):
        raise UsageError(
            f"--weight-transfer-config {backends[0]}: versions are applied by the backend delta; leave it out"
        )
    added = [] if extensions else ["--worker-extension-cls", EXTENSION]
    return added if backends else [*added, "--weight-transfer-config", BACKEND]


def _is_delta(config: str) -> bool:
    try:
        return bool(json.loads(config) == json.loads(BACKEND))
    except ValueError:
        return False


def _environment_of_adapters(adapter: str, store: str) -> dict[str, str]:
    if "," in store or "@" in store.rpartition("/")[2]:
        raise UsageError(f"{store} has a comma, or @ in its last part, and cannot be configured; {_BY_HAND}")
    before = os.environ.get("PATCHSTORE_ADAPTERS", "")
    pairs = [each.strip() for each in before.split(",") if each.strip()]
    pairs = [each for each in pairs if each.partition("=")[0].strip() != adapter]
    return {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "PATCHSTORE_ADAPTERS": ", ".join([*pairs, f"{adapter}={store}"]),
    }


def _for_adapters(given: Sequence[str], header: StoreHeader | None) -> list[str]:
    """Return what is missing to serve two versions at once, in the rank that the run has."""
    added = [] if _values(given, "--enable-lora") else ["--enable-lora"]
    if not _values(given, "--max-loras") and not _values(given, "--max-cpu-loras"):
        # Old answers end while new ones begin.
        added += ["--max-loras", "2", "--max-cpu-loras", "4"]
    found = [
        spec.shape[0]
        for spec in (() if header is None else header.schema.tensors)
        if {"lora_A", "lora_embedding_A"} & {*spec.name.split(".")}
        and spec.shape
        and not FUSED_EXPERTS.search(spec.name)
    ]
    if found and not _values(given, "--max-lora-rank"):
        rank = max(found)
        added += ["--max-lora-rank", str(next((each for each in _RANKS if each >= rank), rank))]
    return added


class VllmProcess:
    """A server that is started, and ended when the block ends. Ctrl-C on a terminal is for this process."""

    def __init__(self, launch: Launch, stop: threading.Event) -> None:
        """Prepare; `stop` is set when the server ends by itself."""
        self._launch, self._stop = launch, stop
        self.code: int | None = None
        """The exit code of a server that ended by itself, or was killed."""
        self.was_killed = False
        """It had closed its port, and did not end."""

    def __enter__(self) -> Self:
        """Start the server.

        Raises:
            UsageError: another program listens at the address.
        """
        launch = self._launch
        with suppress(OSError), socket.create_connection((launch.host, launch.port), timeout=1):
            raise UsageError(
                f"another program listens at {launch.url} already: end it, or name another --port"
            )
        libc = ctypes.CDLL(None) if sys.platform == "linux" else None

        def end_with_parent() -> None:
            if libc is not None:
                libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

        self._process = subprocess.Popen(  # noqa: S603 -- the caller's own arguments, without a shell
            launch.command,
            env={**os.environ, **launch.environment},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            # Also if this process is killed. The child does nothing else before it becomes vLLM.
            preexec_fn=end_with_parent,  # noqa: PLW1509
        )
        threading.Thread(target=self._watch, name="serve-vllm", daemon=True).start()
        return self

    def _watch(self) -> None:
        code = self._process.wait()
        if not self._stop.is_set():
            self.code = code if code >= 0 else 128 - code
            self._stop.set()

    def wait_until_healthy(self) -> bool:
        """Wait until the server answers; return False if it ended, or the end was asked for, before that."""
        with closing(Http(self._launch.url, timeout_s=5, keep_alive=False)) as http:
            while not self._stop.wait(_LOOK_S):
                with suppress(ServerUnavailable):
                    if http.request("GET", "/health").is_success:
                        threading.Thread(target=self._look, name="serve-look", daemon=True).start()
                        return True
        return False

    def _look(self) -> None:
        """Kill a server that closed its port and does not end: one whose engine died waits for its answer."""
        closed_at: float | None = None
        while not self._stop.wait(LOOK_S):
            if not is_port_closed(self._launch.address):
                closed_at = None
            elif closed_at is None:
                closed_at = time.monotonic()
            elif time.monotonic() - closed_at > END_S:
                self.was_killed = True
                self._kill()
                return

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the server."""
        self._stop.set()
        if self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
