"""The code of the page about trainers runs as it stands."""

import re
from itertools import groupby
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
import torch.distributed as dist

from patchstore import Publisher, verify
from tests.support import stand_in_bridge
from tests.support.pages import ROOT, blocks
from tests.support.ranks import RanksOf

SECTIONS = {
    section: "".join(block.code for block in group)
    for section, group in groupby(blocks("docs/trainers.md", "python"), lambda block: block.section)
}
NUM_STEPS = 3


def train(model: Any) -> None:
    """Take a step of which every parameter changes."""
    tokens = torch.arange(10).reshape(2, 5)
    model(tokens).square().mean().backward()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    optimiser.step()


def build_megatron(rank: int) -> tuple[stand_in_bridge.Bridge, list[dict[str, torch.Tensor]]]:
    """Return a stand-in of a bridge, and what a rank has of its model."""
    torch.manual_seed(rank)
    bridge = stand_in_bridge.Bridge(
        {
            "linear_qkv": stand_in_bridge.qkv("model.qkv", 4, 2),
            "linear_proj": stand_in_bridge.row("model.proj"),
        }
    )
    return bridge, [{"linear_qkv": torch.randn(8, 3), "linear_proj": torch.randn(6, 4)}]


def train_megatron(model: list[dict[str, torch.Tensor]]) -> None:
    for parameter in model[0].values():
        parameter.add_(1)


def run(rank: int, code: str, folder: Path) -> None:
    names = {
        "Publisher": Publisher,
        "base": folder / "base",
        "build_megatron": lambda: build_megatron(rank),
        "build_model": jobs.plain,
        "dist": dist,
        "num_steps": NUM_STEPS,
        "store": str(folder / "store"),
        "torch": torch,
        "train": train,
        "train_megatron": train_megatron,
    }
    exec(code, names)


@pytest.mark.parametrize("title", SECTIONS)
def test_the_code_of_each_section_runs(ranks_of: RanksOf, tmp_path: Path, title: str) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    ranks_of(4 if title == "HSDP" else 2).run(run, SECTIONS[title], tmp_path)
    assert verify(str(tmp_path / "store")).version == NUM_STEPS - 1


def test_every_section_about_a_trainer_publishes() -> None:
    titles = re.findall(r"^## (.*)$", (ROOT / "docs" / "trainers.md").read_text(), re.MULTILINE)
    assert [title for title in titles if "Publisher(" not in SECTIONS.get(title, "")] == [
        "What ranks must know"
    ]
