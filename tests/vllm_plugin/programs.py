"""Runs programs in this folder whose engines are forks of a process that imports vLLM in a way of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
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
