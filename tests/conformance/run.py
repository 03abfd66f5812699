"""Run all cases, or some, and write a table: `make conformance`."""

# First, since it sets the environment and imports vLLM: each engine is a fork of this process.
import engines  # noqa: F401, I001

import argparse
import sys
import tempfile
import time
from pathlib import Path

import case
from architecture import LAYOUTS
from table import Table
from zoo import ARCHITECTURES


def main() -> int:
    """Return 1 if any case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=list(ARCHITECTURES), default=list(ARCHITECTURES), metavar="NAME"
    )
    parser.add_argument("--layouts", type=lambda text: text.split(","), default=list(LAYOUTS), metavar="A,B")
    parser.add_argument(
        "--cases", nargs="+", metavar="NAME:LAYOUT", help="Only these, whatever the other options say."
    )
    parser.add_argument("--out", type=Path, help="Write a markdown table there.")
    parser.add_argument(
        "--add", action="store_true", help="Keep what --out has of other cases, and write it after each case."
    )
    parser.add_argument("--keep", type=Path, help="Keep checkpoints, stores and logs in this folder.")
    options = parser.parse_args()
    if unknown := set(options.layouts) - LAYOUTS.keys():
        parser.error(f"unknown layouts {sorted(unknown)}; known are {list(LAYOUTS)}")
    cases = [(name, layout) for name in options.only for layout in options.layouts]
    if options.cases:
        cases = [tuple(each.split(":")) for each in options.cases]
    if options.add and options.out is None:
        parser.error("--add needs --out")
    table = Table()
    if options.add and options.out.exists():
        table = Table.read(options.out.read_text())
    has_failed = False
    for name, layout in cases:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            if options.keep is not None:
                folder = options.keep / f"{name}-{layout}"
                folder.mkdir(parents=True)
            outcome = case.run(name, layout, folder)
        spent = time.monotonic() - begun
        upstream = f"; upstream: {outcome.upstream}" if outcome.upstream else ""
        sys.stdout.write(f"{name:15} {layout:12} {outcome}{upstream} ({spent:.0f} s)\n")
        sys.stdout.flush()
        has_failed |= outcome.verdict == "FAILED"
        table.add(name, layout, outcome)
        if options.add:
            options.out.write_text(str(table))
    if options.out is not None:
        options.out.write_text(str(table))
    return has_failed


if __name__ == "__main__":
    sys.exit(main())
