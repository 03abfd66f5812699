"""`python -m benchmarks CASE`: measure, and print a table or JSON lines."""

import argparse
import json
import platform
import subprocess
from collections.abc import Iterable
from functools import cache
from itertools import groupby
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.registry import CASES
from patchstore import __version__

_MAX_COLUMNS = 14


def machine() -> dict[str, Any]:
    """Return what figures depend on besides the code."""
    return {
        "patchstore": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "num_threads": torch.get_num_threads(),
        **_gpus(),
    }


@cache
def _gpus() -> dict[str, Any]:
    """Return the GPUs and their software; empty without a GPU. Unlike torch, `nvidia-smi` takes no memory."""
    if not torch.cuda.is_available():
        return {}
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout
        gpu, driver = (each.strip() for each in said.splitlines()[0].rsplit(",", 1))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        gpu, driver = torch.cuda.get_device_name(), "?"
    return {"gpu": gpu, "num_gpus": torch.cuda.device_count(), "driver": driver, "cuda": torch.version.cuda}


def show(title: str, rows: Iterable[dict[str, Any]]) -> None:
    """Print rows as tables, one per group of consecutive rows with equal keys.

    A group of one row, and a table with too many columns, is printed with one line per field.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    for keys, group in groupby(rows, key=tuple):
        several = list(group)
        if len(several) == 1:
            names, lines = ["", ""], [[name, _cell(value)] for name, value in several[0].items()]
            table = Table(title=title, show_header=False)
        else:
            shared = [name for name in keys if all(row[name] == several[0][name] for row in several)]
            names = [name for name in keys if name not in shared]
            lines = [[_cell(row[name]) for name in names] for row in several]
            table = Table(
                title=title, caption=", ".join(f"{name} {_cell(several[0][name])}" for name in shared)
            )
            if len(names) > _MAX_COLUMNS:
                names, *lines = (list(each) for each in zip(names, *lines, strict=True))
        for name in names:
            table.add_column(name, justify="right", no_wrap=True)
        for line in lines:
            table.add_row(*line)
        console.print(table)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}"
    if isinstance(value, (list, dict)):
        return f"{len(value)} values"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    cases = parser.add_subparsers(dest="case", required=True)
    for case in CASES:
        one = cases.add_parser(case.name, help=case.about, description=f"{case.about} Gated by {case.gate}.")
        case.arguments(one)
        one.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    case = next(case for case in CASES if case.name == args.case)
    rows = case.run(args)
    if args.json:
        for row in rows:
            print(json.dumps({"case": case.name, **row, **machine()}), flush=True)
    else:
        show(f"{case.name} on {machine()['machine']}, torch {torch.__version__}", rows)


if __name__ == "__main__":
    main()
