"""A child process of a benchmark, which takes and answers messages in JSON lines.

It ends with its parent. If the parent is killed, the child's standard input ends, and so the child does.
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
            job: its task, which `arguments` returns in the child.
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
            # Ctrl-C reaches the parent alone, which ends the child.
            start_new_session=True,
        )

    def tell(self, **message: Any) -> None:
        assert self._process.stdin is not None
        try:
            print(json.dumps(message), file=self._process.stdin, flush=True)
        except BrokenPipeError as exc:
            raise self._ended() from exc

    def hear(self) -> dict[str, Any]:
        """Wait for its next message.

        Raises:
            RuntimeError: it has ended; its standard error has the reason.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        message: dict[str, Any] = json.loads(line)
        return message

    def ask(self, **message: Any) -> dict[str, Any]:
        """Send a message, and return the answer."""
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
        # Closes the pipes; messages that were not delivered are dropped.
        self._process.communicate()


def arguments() -> tuple[str, dict[str, Any]]:
    """Return the role and the job, in the child."""
    role, job = sys.argv[1:]
    return role, json.loads(job)


def messages() -> Iterator[dict[str, Any]]:
    """Yield the parent's messages, in the child, until the parent ends."""
    for line in sys.stdin:
        yield json.loads(line)


def say(**message: Any) -> None:
    """Send a message to the parent, in the child."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
