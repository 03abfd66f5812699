"""The table of results as markdown, which can be read again to add to it."""

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import case
import torch
import vllm
from architecture import LAYOUTS
from zoo import ARCHITECTURES

_INTRODUCTION = """\
Each model is tiny, with random weights. Its server is brought from version 0 through 3, and must
then have the same bits in every parameter and buffer of every rank as one freshly started from the
replayed folder, and give the same answers. With ep2 and pp2 vLLM's CPU build loads models, but
fails at the first token: there only weights are compared, as with a model whose name has a star.
A number is that of a reason below."""


@dataclass(slots=True)
class _Row:
    """What is known of one architecture."""

    tensors: int = 0
    cells: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By layout: the verdict and its reason."""
    map: str = ""
    upstream: str = ""


class Table:
    """Results with one vLLM and one torch, by architecture."""

    def __init__(self) -> None:
        self.rows: dict[str, _Row] = {}
        self.machines: list[str] = []

    @classmethod
    def read(cls, text: str) -> "Table":
        """Read what `str` wrote.

        Raises:
            ValueError: it is of other versions.
        """
        made = next((line for line in text.splitlines() if line.startswith(_versions())), None)
        if made is None:
            raise ValueError(f"its results are not of {_versions()}")
        table = cls()
        table.machines = made.removeprefix(_versions()).strip(" .").split("; ")
        reasons = dict(re.findall(r"^(\d+)\. (.+)$", text, re.MULTILINE))
        lines = [
            [cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line[:1] == "|"
        ]
        layouts = lines[0][2:-2]
        for name, tensors, *cells, mapped, upstream in lines[2:]:
            row = _Row(tensors=int(tensors), map=mapped, upstream=upstream)
            for layout, cell in zip(layouts, cells, strict=True):
                verdict, _, number = cell.rstrip("]").partition(" [")
                if verdict:
                    row.cells[layout] = verdict, reasons.get(number, "")
            table.rows[name.rstrip("*")] = row
        return table

    def add(self, name: str, layout: str, outcome: case.Outcome) -> None:
        """Add a result, in the place of one that is there of the same case."""
        if _machine() not in self.machines:
            self.machines.append(_machine())
        row = self.rows.setdefault(name, _Row())
        row.tensors = outcome.num_names or row.tensors
        row.cells[layout] = outcome.verdict, outcome.reason
        row.upstream = outcome.upstream or row.upstream
        if outcome.map and (layout == "tp1" or (not row.map and layout != "int8")):
            row.map = _listed(outcome.map)

    def __str__(self) -> str:
        layouts = [each for each in LAYOUTS if any(each in row.cells for row in self.rows.values())]
        lines = [
            "# Which architectures were compared",
            "",
            f"{_versions()} {'; '.join(self.machines)}.",
            "Made by `make conformance`.",
            "",
            *_INTRODUCTION.splitlines(),
            "",
            f"| architecture | tensors | {' | '.join(layouts)} | map | upstream's patch loader |",
            "|" + "---|" * (len(layouts) + 4),
        ]
        reasons: dict[str, int] = {}
        for name, row in sorted(self.rows.items(), key=lambda each: _order(each[0])):
            star = "" if name not in ARCHITECTURES or ARCHITECTURES[name].generates else "*"
            cells = [name + star, str(row.tensors)]
            cells += [_cell(*row.cells.get(layout, ("", "")), reasons) for layout in layouts]
            lines.append(f"| {' | '.join([*cells, row.map, row.upstream])} |")
        lines += ["", *(f"{number}. {reason}" for reason, number in reasons.items())]
        return "\n".join(lines).rstrip() + "\n"


def _order(name: str) -> tuple[int, str]:
    names = list(ARCHITECTURES)
    return names.index(name) if name in names else len(names), name


def _cell(verdict: str, reason: str, reasons: dict[str, int]) -> str:
    return f"{verdict} [{reasons.setdefault(reason, len(reasons) + 1)}]" if reason else verdict


def _listed(mapped: Mapping[str, object]) -> str:
    kinds = {kind: mapped.get(f"num_{kind}") for kind in ("computed", "partial", "absent")}
    return ", ".join([f"{mapped.get('mapped')} mapped", *(f"{n} {kind}" for kind, n in kinds.items() if n)])


def _versions() -> str:
    return f"vLLM {vllm.__version__}, torch {torch.__version__}."


def _machine() -> str:
    return f"{os.cpu_count()} cores, {_processor()}"


def _processor() -> str:
    models = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    ]
    return models[0].partition(":")[2].strip() if models else platform.machine()
