"""The code blocks of the documentation, and the commands that its shell blocks run."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md")
    for path in sorted(ROOT.glob(pattern))
]
GIVEN = {
    "PATCHSTORE_FOLDER": "/local/my-run/current",
    "PATCHSTORE_VERSION": "12",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "node1",
    "SLURM_NNODES": "2",
}
"""What `patchstore mirror` and Slurm set for scripts."""
_PART = re.compile(r"^#+ (?P<title>.*)$|^```(?P<language>.*)\n(?P<code>(?:.*\n)*?)```$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block."""

    page: str
    section: str
    """The heading above it."""
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def script(self) -> str:
        """A shell block as a script: of `console`, what stands behind the prompts."""
        if self.language != "console":
            return self.code
        return "\n".join(re.findall(r"^\$ (.*)$", self.code, re.MULTILINE))


def blocks(page: str, language: str | None = None) -> list[Block]:
    """Return the blocks of a page, or those in one language."""
    text, section, found = (ROOT / page).read_text(), "", []
    for part in _PART.finditer(text):
        if part["title"] is not None:
            section = part["title"]
        elif language in {None, part["language"]}:
            line = text.count("\n", 0, part.start()) + 1
            found.append(Block(page, section, line, part["language"], part["code"]))
    return found


def code_of(page: str, section: str) -> list[str]:
    """Return the Python blocks below one heading."""
    return [block.code for block in blocks(page, "python") if block.section == section]


@dataclass(frozen=True, slots=True)
class Shell:
    """A folder in which shell blocks run, with stand-ins for some programs that keep how they were called."""

    folder: Path
    """Its `bin` is first on the path."""

    def stand_in(self, programs: Iterable[str], *, runs: Iterable[str] = ()) -> None:
        """Put programs there that only record; `patchstore` runs the commands in `runs` that end."""
        place = self.folder / "bin"
        place.mkdir(exist_ok=True)
        for program in programs:
            stub = place / program
            stub.write_text(
                _STUB.format(python=sys.executable, calls=str(self.folder / "calls"), runs=set(runs))
            )
            stub.chmod(0o755)

    def run(self, script: str) -> list[list[str]]:
        """Run a script, and return how stand-ins were called, each with its name first.

        Raises:
            AssertionError: it ended with an error; the message has its output.
        """
        calls = self.folder / "calls"
        shutil.rmtree(calls, ignore_errors=True)
        calls.mkdir()
        path = f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f"{script}\nwait", "bash", "http://127.0.0.1:30000"],
            cwd=self.folder,
            env=os.environ | GIVEN | {"PATH": path, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        return [json.loads(path.read_text()) for path in sorted(calls.iterdir())]


_STUB = """#!{python}
import json, os, pathlib, sys, time
call = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
pathlib.Path({calls!r}, f"{{time.monotonic_ns():020}}-{{os.getpid()}}").write_text(json.dumps(call))
if call[0] == "patchstore" and call[1] in {runs} and not {{"--server", "--follow"}} & {{*call}}:
    os.execv(sys.executable, [sys.executable, "-m", *call])
"""
