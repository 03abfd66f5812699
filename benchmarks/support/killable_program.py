"""Programs that are killed at any moment, with all their children, and started again."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from examples.processes import Program


class Part:
    """A program under one name, of which one process runs at a time."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        *,
        life_s: float,
        environment: Mapping[str, str],
        hear: Callable[[int, dict[str, Any]], None] | None = None,
    ) -> None:
        """Prepare; nothing is started yet.

        Args:
            folder: takes a log of each process.
            life_s: seconds after which a process ends by itself, even if this process was killed.
            hear: called on a thread with the process's number and each JSON object that the process prints.
        """
        self.name = name
        self.number = -1
        """The number of the present process: how many came before it."""
        # Otherwise it would run on for `life_s` after this process is killed.
        orphaned = ["setpriv", "--pdeathsig", "TERM"]
        self._command = [*orphaned, "timeout", "--kill-after=10", str(life_s), *command]
        self._folder, self._environment, self._hear = folder, environment, hear
        self._program: Program | None = None
        self._reader: threading.Thread | None = None

    def start(self) -> None:
        assert self._program is None
        self.number += 1
        self._program = Program(
            self._command,
            log=self._folder / f"{self.name}-{self.number}.log",
            environment=self._environment,
            piped=self._hear is not None,
        )
        if self._hear is not None:
            self._reader = threading.Thread(target=self._read, args=(self.number, self._program), daemon=True)
            self._reader.start()

    def _read(self, number: int, program: Program) -> None:
        assert self._hear is not None and program.process.stdout is not None
        with program.process.stdout as lines:
            for line in lines:
                # A kill may have cut off the last line.
                with suppress(ValueError):
                    self._hear(number, json.loads(line))

    def check_alive(self) -> None:
        """Raise RuntimeError with the end of its log, if it has ended without a kill."""
        assert self._program is not None
        self._program.check_alive()

    def ask_to_end(self) -> None:
        """Send SIGTERM; returns at once."""
        assert self._program is not None
        self._program.process.terminate()

    def wait(self, timeout_s: float) -> int:
        """Wait for the end, and return the exit status."""
        assert self._program is not None
        return self._program.process.wait(timeout_s)

    def kill(self) -> None:
        """Kill the process and all its children, and return when all have ended."""
        if self._program is None:
            return
        session = self._program.process.pid
        shared = {path for member in _members(session) for path in _shared(member)}
        with suppress(ProcessLookupError):
            # Kills the whole group at once; the loop below kills children in groups of their own.
            os.killpg(session, signal.SIGKILL)
        while members := _members(session):
            for member in members:
                with suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
            time.sleep(0.01)
        self._program.process.wait()
        for path in shared:
            # The killed processes can no longer unlink it, and it would last until the machine restarts.
            path.unlink(missing_ok=True)
        if self._reader is not None:
            self._reader.join()
        self._program = None


def _members(session: int) -> list[int]:
    """Return the processes of a session that have not ended."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        # It may end meanwhile. State, parent, group and session follow the name, which may have spaces.
        with suppress(FileNotFoundError, ProcessLookupError):
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            if fields[0] not in "ZX" and int(fields[3]) == session:
                found.append(int(place.name))
    return found


def _shared(process: int) -> set[Path]:
    """Return the shared memory that a process has mapped by name."""
    with suppress(FileNotFoundError, ProcessLookupError):
        mapped = Path(f"/proc/{process}/maps").read_text().splitlines()
        # A removed file has " (deleted)" after its name, so unlinking that path finds nothing.
        return {Path(line[line.index("/dev/shm/") :]) for line in mapped if "/dev/shm/" in line}
    return set()
