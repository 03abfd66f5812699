"""`python -m benchmarks CASE`: measure, and print a table or JSON lines."""

import argparse
import json
import platform
from collections.abc import Iterable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.cases import CASES
from patchstore import __version__


def machine() -> dict[str, Any]:
    """What a figure depends on besides the code."""
    return {
        "patchstore": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "num_threads": torch.get_num_threads(),
    }


def show(title: str, rows: Iterable[dict[str, Any]]) -> None:
    """Print rows of equal keys as a table."""
    rows = list(rows)
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            *(
                f"{v:,.3f}" if isinstance(v, float) else f"{v:,}" if isinstance(v, int) else str(v)
                for v in row.values()
            )
        )
    Console().print(table)


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
