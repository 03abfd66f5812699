"""What the documentation shows is run, and what it names exists."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import patchstore
from patchstore import verify
from patchstore.cli import main
from patchstore.stores.folder import FolderStore
from tests.support.pages import blocks
from tests.support.vllm_stub import StubServer, serving

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TREES = ("patchstore", "vllm_plugin", "tests", "benchmarks", "examples", "requirements")
START, PUBLISH, APPLY = (block.code for block in blocks("README.md", "python"))


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 205


def test_the_trainer_of_the_readme_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = FolderStore(tmp_path / "bucket")
    checkpoint = tmp_path / "base"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    monkeypatch.setattr(patchstore.stores, "open_store", lambda url: folder)
    model = torch.nn.Linear(8, 8)

    def train(model: torch.nn.Module, optimiser: object) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)

    names: dict[str, Any] = {"model": model, "optimiser": None, "train": train, "num_steps": 3}
    exec(PUBLISH.replace("path/of/the/base/checkpoint", str(checkpoint)), names)
    assert verify(folder).version == 2


def test_the_two_minutes_of_the_readme_run_and_print_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["patchstore", "log", "my-run"])
    monkeypatch.delenv("COLUMNS", raising=False)
    exec(START, {})
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert not ended.value.code
    assert f"`{' '.join(sys.argv)}`" in README
    shown = next(block.code for block in blocks("README.md", "text") if "B/change" in block.code)
    printed = capsys.readouterr().out
    # What chance decides: the run's name, ages, sizes of deltas and digests.
    assert [_shape(line) for line in printed.splitlines()] == [_shape(line) for line in shown.splitlines()]


def _shape(line: str) -> list[str]:
    _, colon, about = line.partition(": ")
    if colon:
        return [about]
    version, step, age, *sizes, anchor, state = (cell.strip() for cell in line.split("│"))
    if version == "version":
        return [version, step, age, *sizes, anchor, state]
    return [version, step, *(re.sub(r"[\d.]+", "#", size) for size in sizes), anchor]


def test_the_driver_of_the_readme_runs_as_it_stands() -> None:
    with serving(StubServer()) as stub:
        assert "http://127.0.0.1:8000" in APPLY
        exec(APPLY.replace("http://127.0.0.1:8000", stub.url))
        assert stub.opened["store"] == "s3://bucket/my-run"
        assert stub.held == 12


def test_the_trainer_example_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "examples/trainer.py", str(tmp_path / "bucket")]
    subprocess.run(command, cwd=ROOT, check=True)
    assert verify(FolderStore(tmp_path / "bucket")).version == 8


def test_every_command_in_the_readme_exists() -> None:
    commands = {command.name or command.callback.__name__ for command in main.app.registered_commands}  # type: ignore[union-attr]
    shown = set(re.findall(r"^patchstore (\w+)", README, re.MULTILINE))
    assert shown
    assert shown <= commands


def test_every_make_target_that_is_shown_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = set(re.findall(r"`make ([a-z-]+)`", README + (ROOT / "CONTRIBUTING.md").read_text()))
    assert {"demo", "test", "check"} <= shown <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_named_in_a_page_exist(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (page.parent / link).exists(), link
    for name in re.findall(r"`((?:docs|tests|examples|benchmarks|requirements)/[\w./-]*)`", text):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name != "design"], ids=lambda page: page.name
)
def test_modules_named_in_a_page_exist(page: Path) -> None:
    files = [f"/{path.relative_to(ROOT)}" for top in TREES for path in (ROOT / top).rglob("*.py")]
    for name in re.findall(r"`([\w/]+\.py)`", page.read_text()):
        assert any(path.endswith(f"/{name}") for path in files), name


def test_every_test_that_the_failures_page_names_exists() -> None:
    named = re.findall(r"`(test_\w+)`", (ROOT / "docs" / "failures.md").read_text())
    assert len(named) > 40
    source = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    source += "\n".join(path.read_text() for path in (ROOT / "patchstore" / "testing").glob("*.py"))
    missing = [name for name in named if f"def {name}(" not in source]
    assert missing == []


def test_design_notes_are_numbered_without_gaps() -> None:
    numbers = sorted(int(path.name[:4]) for path in (ROOT / "docs" / "design").glob("0*.md"))
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("index", ["llms.txt", "docs/index.md"])
def test_an_index_has_every_page_and_nothing_else(index: str) -> None:
    path = ROOT / index
    linked = {(path.parent / link).resolve() for link in re.findall(r"\]\(([^)#]+)", path.read_text())}
    assert [str(each) for each in linked if not each.exists()] == []
    pages = {page for page in PAGES if page.parent.name == "docs"} | {ROOT / "docs" / "design" / "README.md"}
    assert pages - {path} <= linked
