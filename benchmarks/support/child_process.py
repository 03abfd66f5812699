"""A process of a benchmark's own, which is told what to do, and answers, in JSON lines.

It ends with whoever started it, also where that one is killed: then its standard input ends.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from benchmarks.support.paths import ROOT


class Child:
    """`python -m MODULE ROLE JOB`, killed at the end of the `with` block."""

    def __init__(
        self, module: str, role: str, job: Mapping[str, Any], environment: Mapping[str, str] | None = None
    ) -> None:
        """Start it.

        Args:
            job: what it is to do, which `arguments` returns there.
            environment: in addition to ours.
        """
        self._name = f"{module} {role}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, role, json.dumps(job)],
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Ctrl-C reaches only us, and we end it.
            start_new_session=True,
        )

    def tell(self, **message: Any) -> None:
        assert self._process.stdin is not None
        try:
            print(json.dumps(message), file=self._process.stdin, flush=True)
        except BrokenPipeError as exc:
            raise self._ended() from exc

    def hear(self) -> dict[str, Any]:
        """Wait for what it says next.

        Raises:
            RuntimeError: it has ended instead; why is on standard error.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        message: dict[str, Any] = json.loads(line)
        return message

    def ask(self, **message: Any) -> dict[str, Any]:
        """Tell it something, and return the answer."""
        self.tell(**message)
        return self.hear()

    def _ended(self) -> RuntimeError:
        return RuntimeError(f"{self._name} ended with status {self._process.wait()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        # What it was not told any more need not be written.
        self._process.communicate()


def arguments() -> tuple[str, dict[str, Any]]:
    """In the child: its role and its job."""
    role, job = sys.argv[1:]
    return role, json.loads(job)


def messages() -> Iterator[dict[str, Any]]:
    """In the child: what it is told, until there is nobody left to tell it anything."""
    for line in sys.stdin:
        yield json.loads(line)


def say(**message: Any) -> None:
    """In the child: answer."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
