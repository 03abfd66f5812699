"""The notebook runs from its first cell to its last, and has outputs of such a run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.pages import ROOT

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
CELLS: list[dict[str, Any]] = [
    cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
]


def columns(text: str) -> list[str]:
    """Return the names of the columns that `patchstore log` printed."""
    return re.findall(r"^version │.*$", re.sub(" +", " ", text), re.MULTILINE)


def test_its_cells_run_one_after_the_other(tmp_path: Path) -> None:
    script = "\n\n".join("".join(cell["source"]) for cell in CELLS)
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | {"MPLBACKEND": "agg", "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "version 7 is what the trainer had after step 7; version 11 is whole too" in done.stdout
    stored = "".join(line for cell in CELLS for each in cell["outputs"] for line in each.get("text", ()))
    assert columns(stored) == columns(done.stdout) != []


def test_it_is_stored_as_it_was_run_and_is_small() -> None:
    assert NOTEBOOK.stat().st_size < 100_000
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    outputs = [output for cell in CELLS for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"stream", "display_data"}
    assert [cell for cell in CELLS if "print(" in "".join(cell["source"][-1:]) and not cell["outputs"]] == []
