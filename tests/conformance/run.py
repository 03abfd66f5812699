"""Run all cases, or some, and write a table: `make conformance`."""

# First, since it sets the environment and imports vLLM: each engine is a fork of this process.
import engines  # noqa: F401, I001

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import case
import torch
import vllm
from zoo import ARCHITECTURES, LAYOUTS

Results = Mapping[tuple[str, str], case.Outcome]


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
    parser.add_argument("--keep", type=Path, help="Keep checkpoints, stores and logs in this folder.")
    options = parser.parse_args()
    if unknown := set(options.layouts) - LAYOUTS.keys():
        parser.error(f"unknown layouts {sorted(unknown)}; known are {list(LAYOUTS)}")
    cases = [(name, layout) for name in options.only for layout in options.layouts]
    if options.cases:
        cases = [tuple(each.split(":")) for each in options.cases]
    results = {}
    for name, layout in cases:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            if options.keep is not None:
                folder = options.keep / f"{name}-{layout}"
                folder.mkdir(parents=True)
            outcome = results[name, layout] = case.run(name, layout, folder)
        spent = time.monotonic() - begun
        upstream = f"; upstream: {outcome.upstream}" if outcome.upstream else ""
        sys.stdout.write(f"{name:15} {layout:12} {outcome}{upstream} ({spent:.0f} s)\n")
        sys.stdout.flush()
    if options.out is not None:
        options.out.write_text(table(results, options.layouts))
    return any(each.verdict == "FAILED" for each in results.values())


def table(results: Results, layouts: list[str]) -> str:
    """Return the results as markdown: a line for each architecture, and the reasons below."""
    names = list(dict.fromkeys(name for name, _ in results))
    lines = [
        "# Which architectures were compared",
        "",
        f"vLLM {vllm.__version__}, torch {torch.__version__}, {os.cpu_count()} cores, {_processor()}.",
        "Made by `make conformance`.",
        "",
        "Each model is tiny, with random weights. Its server is brought from version 0 through 3, and must",
        "then have the same bits in every parameter and buffer of every rank as one freshly started from the",
        "replayed folder, and give the same answers. With ep2 and pp2 vLLM's CPU build loads models, but",
        "fails at the first token: there only weights are compared. A number is that of a reason below.",
        "",
        f"| architecture | tensors | {' | '.join(layouts)} | map | upstream's patch loader |",
        "|" + "---|" * (len(layouts) + 4),
    ]
    reasons: dict[str, int] = {}
    for name in names:
        row = [results[name, layout] for layout in layouts]
        cells = [name, str(max(each.num_names for each in row))]
        cells += [_cell(each, reasons) for each in row]
        cells.append(next((_listed(each.map) for each in row if each.map), ""))
        cells.append(next((each.upstream for each in row if each.upstream), ""))
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"{number}. {reason}" for reason, number in reasons.items())]
    return "\n".join(lines).rstrip() + "\n"


def _cell(outcome: case.Outcome, reasons: dict[str, int]) -> str:
    if not outcome.reason:
        return outcome.verdict
    return f"{outcome.verdict} [{reasons.setdefault(outcome.reason, len(reasons) + 1)}]"


def _listed(mapped: Mapping[str, object]) -> str:
    kinds = {kind: mapped.get(f"num_{kind}") for kind in ("computed", "partial", "absent")}
    return ", ".join([f"{mapped.get('mapped')} mapped", *(f"{n} {kind}" for kind, n in kinds.items() if n)])


def _processor() -> str:
    models = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    ]
    return models[0].partition(":")[2].strip() if models else platform.machine()


if __name__ == "__main__":
    sys.exit(main())
