"""Runs programs in this folder whose engines are forks of a process that imports vLLM in a way of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def found_by(
    program: str, folder: Path, *names: object, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a program, with `engines` of the conformance suite on its path, and return what it wrote."""
    folder.mkdir(exist_ok=True)
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent / "conformance")])
    done = subprocess.run(
        [sys.executable, str(HERE / program), str(folder), *map(str, names)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def note(folder: Path, cases: Mapping[str, Callable[[Path], Any]]) -> None:
    """In such a program: run each case in a folder of its own, and write what it returned, or its failure."""
    # In a program alone: it forks engines from this process.
    from engines import EngineFailed

    found = {}
    for name, run in cases.items():
        (own := folder / "cases" / name).mkdir(parents=True)
        try:
            found[name] = run(own)
        except EngineFailed as exc:
            # The other cases are not this one's fault.
            found[name] = {"failed": str(exc)}
    (folder / "found.json").write_text(json.dumps(found))
