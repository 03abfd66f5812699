"""Programs that run beside an example, each the leader of a process group that ends with the example."""

import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

_PATIENCE_S = 5.0
_START_S = 600.0
_PORTS = range(20_000, 32_000)
"""Linux gives 32768 and above to who does not ask for a port, macOS and Windows 49152 and above."""


class Program:
    """A running program and all that it starts. Leaving the `with` block ends all of it."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        piped: bool = False,
        owned: bool = False,
    ) -> None:
        """Start it.

        Args:
            log: file that takes what it prints.
            environment: in addition to ours.
            piped: standard output goes to `process.stdout` as text instead.
            owned: standard input stays open for as long as we run, for a program that ends with it.
        """
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.PIPE if owned else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else output,
                stderr=output,
                text=True,
                # A group of its own: one signal reaches its children too, and Ctrl-C reaches only us.
                start_new_session=True,
            )

    def check_alive(self) -> None:
        """Raise RuntimeError with the end of its log, if it has ended."""
        if self.process.poll() is not None:
            lines = self.log.read_text(errors="replace").splitlines()[-20:]
            said = "\n".join(lines)
            raise RuntimeError(
                f"{self.log.stem} ended with status {self.process.returncode}; {self.log}:\n{said}"
            )

    def kill(self) -> None:
        """End the group at once, as a crash would."""
        _kill_group(self.process.pid)
        self.process.wait()

    def stop(self) -> None:
        """End the group: politely, and then for certain."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(_PATIENCE_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass
        finally:
            # Children may outlive the leader.
            _kill_group(self.process.pid)
            self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def free_port() -> int:
    """Return a port of 127.0.0.1 on which nothing listens now.

    It is of those that the system gives to nobody who does not ask for them. A server listens seconds after
    its port was chosen, and until then the system would give any other port to a client that connects.
    """
    while True:
        port = secrets.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def wait_for(program: Program, url: str) -> None:
    """Wait until a URL answers with success.

    Raises:
        RuntimeError: the program ended.
        TimeoutError: ten minutes have passed.
    """
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        program.check_alive()
        try:
            if httpx.get(url, timeout=5).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.25)
    raise TimeoutError(f"{url} does not answer after {_START_S:.0f} s; see {program.log}")
