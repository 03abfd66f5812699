"""The command line, in this process or as processes of its own. A conftest imports the fixtures."""

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from patchstore.cli import main

Cli = Callable[..., tuple[int, str, str]]
Started = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def patchstore(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run a command in this process; returns exit code, output, errors, also those of what it starts."""

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["patchstore", *map(str, args)])
        # Some shells hand it on, and tables leave columns out then.
        monkeypatch.delenv("COLUMNS", raising=False)
        monkeypatch.setattr("patchstore.cli.main.signal.signal", lambda *_: None)
        with pytest.raises(SystemExit) as ended:
            main.main()
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out, err

    return call


@pytest.fixture
def started() -> Iterator[Started]:
    """Start a command as a process, which is killed at the end of the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(*args: object) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "patchstore", *map(str, args)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for each in processes:
        each.kill()
        each.communicate()
