"""The checkpoint of the tiny Qwen3."""

import subprocess
import sys
from pathlib import Path

from benchmarks.support.paths import ROOT


def save_checkpoint(folder: Path) -> None:
    """Write it from a process of its own, so that this process does not import transformers."""
    code = "import sys, pathlib; from tests.support import tiny_qwen; "
    code += "tiny_qwen.save(tiny_qwen.build(), pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, check=True)
