"""`patchstore follow` as a process."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


class Following:
    """The process, and what it says."""

    def __init__(self, bucket: Path, *options: object) -> None:
        command = [sys.executable, "-m", "patchstore", "follow", str(bucket), *map(str, options)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def event(self) -> dict:
        """The next object on standard output."""
        return json.loads(self.process.stdout.readline())

    def logged(self, is_wanted: Callable[[dict], bool]) -> dict:
        """The next object on standard error that is wanted."""
        for line in self.process.stderr:
            if is_wanted(found := json.loads(line)):
                return found
        raise AssertionError("it ended")

    def end(self, how: signal.Signals = signal.SIGTERM) -> tuple[int, str, str]:
        self.process.send_signal(how)
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err
