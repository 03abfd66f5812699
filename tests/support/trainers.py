"""Trainers that run, end and are killed as processes of their own."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from subprocess import CompletedProcess

RUNNER = """
import json, os, sys
import patchstore.publish.publisher, patchstore.stores.folder, concurrent.futures, multiprocessing

for line in sys.stdin:
    job = json.loads(line)
    if (pid := os.fork()) == 0:
        for name, handle in ("stdout", 1), ("stderr", 2):
            os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT), handle)
        sys.argv = ["trainer", job["bucket"]]
        exec(compile(job["code"], "trainer", "exec"), {"__name__": "__main__"})
        break  # and end as any script does
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
"""Runs each trainer in a fork of its own, so that torch is imported once for all of them."""


class Trainer:
    """Trains into one bucket, each time it is called in a process of its own."""

    def __init__(self, runner: "subprocess.Popen[str]", folder: Path, begin: str) -> None:
        """Begin each trainer's code with the same lines; its bucket is sys.argv[1]."""
        self._runner, self._folder, self._begin = runner, folder, begin
        self.bucket = folder / "bucket"

    def __call__(
        self, code: str, *, interrupt: bool = False, kill_after_s: float | None = None
    ) -> CompletedProcess[str]:
        """Run a trainer to its end; or send SIGINT after it printed "go", or SIGKILL at some time."""
        assert self._runner.stdin is not None and self._runner.stdout is not None
        out, errors = self._folder / "stdout", self._folder / "stderr"
        for file in (out, errors):
            file.write_text("")
        job = {
            "code": self._begin + code,
            "bucket": str(self.bucket),
            "stdout": str(out),
            "stderr": str(errors),
        }
        print(json.dumps(job), file=self._runner.stdin, flush=True)
        pid = int(self._runner.stdout.readline())
        if interrupt:
            while "go" not in out.read_text():
                time.sleep(0.02)
            time.sleep(0.3)
            os.kill(pid, signal.SIGINT)
        if kill_after_s is not None:
            time.sleep(kill_after_s)
            # Its parent has not waited for it, or says its status below: the id is still its own.
            os.kill(pid, signal.SIGKILL)
        status = int(self._runner.stdout.readline())
        return CompletedProcess([], status, out.read_text(), errors.read_text())
