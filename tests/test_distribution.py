"""The wheel and the source distribution as they would be uploaded: their files, and what the wheel does."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from patchstore.bucket import history
from patchstore.bucket.state_sums import by_name, read_sums
from patchstore.stores.folder import FolderStore
from tests.support.vllm_stub import StubServer, serving

ROOT = Path(__file__).parent.parent
RUN = ROOT / "tests" / "golden" / "v1-context"
"""A run of seven versions."""
SENTENCE = "error (usage): this needs torch, which is not installed: pip install 'torch>=2.9'\n"


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=cwd, env={**environment, "COLUMNS": "200"}, capture_output=True, text=True, check=False
    )


def uv(*arguments: str | Path, cwd: Path) -> None:
    done = run(Path(sys.prefix) / "bin" / "uv", *arguments, "--quiet", "--offline", cwd=cwd)
    assert done.returncode == 0, done.stderr


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as file:
        return {name: file.read(name) for name in file.namelist()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, the wheel built from it, and in `tree/` that of the checkout."""
    out, clone = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("clone")
    for path in ROOT.iterdir():
        if path.name in {"patchstore", "vllm_plugin", "tests", "examples", "benchmarks", "docs"}:
            shutil.copytree(path, clone / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.is_file():
            shutil.copy(path, clone)
    how = ("--no-build-isolation", "--python", sys.executable, "--out-dir")
    uv("build", *how, out, cwd=clone)
    uv("build", "--wheel", *how, out / "tree", cwd=clone)
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a fresh environment: the wheel, and what it asks for, linked from this environment."""
    environment = tmp_path_factory.mktemp("installed")
    python = environment / "bin" / "python"
    uv("venv", "--allow-existing", "--python", sys.executable, environment, cwd=environment)
    uv("pip", "install", "--no-deps", "--python", python, wheel, cwd=environment)
    (site,) = environment.glob("lib/python*/site-packages")
    for top in {path.parts[0] for name in asked("patchstore", site) for path in metadata.files(name) or ()}:
        here = metadata.distribution("pytest").locate_file(top)
        if top not in {"..", "__pycache__"} and not (site / top).exists():
            (site / top).symlink_to(Path(str(here)))
    return python.parent


def asked(first: str, site: Path) -> Iterator[str]:
    """Names of all that an installer would bring with a package of `site`, without extras."""
    (found,) = metadata.distributions(name=first, path=[str(site)])
    waiting, seen = [*map(Requirement, found.requires or ())], set()
    while waiting:
        each = waiting.pop()
        wanted = [
            each.marker is None or each.marker.evaluate({"extra": extra}) for extra in ("", *each.extras)
        ]
        name = canonicalize_name(each.name)
        if not any(wanted) or name in seen:
            continue
        seen.add(name)
        yield name
        waiting += map(Requirement, metadata.requires(name) or ())


def test_the_wheel_has_the_packages_their_types_and_the_plugin_and_nothing_else(wheel: Path) -> None:
    found = contents(wheel)
    tops = {name.split("/")[0] for name in found}
    assert tops == {"patchstore", "vllm_plugin", f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"}
    assert {"patchstore/py.typed", "vllm_plugin/py.typed"} <= found.keys()
    (points,) = (data.decode() for name, data in found.items() if name.endswith("/entry_points.txt"))
    assert "[vllm.general_plugins]\npatchstore = vllm_plugin.plugin:load" in points
    assert "[console_scripts]\npatchstore = patchstore.cli.main:main" in points
    sources = {
        str(path.relative_to(ROOT))
        for top in ("patchstore", "vllm_plugin")
        for path in (ROOT / top).rglob("*.py")
    }
    assert sources == {name for name in found if name.endswith(".py")}


def test_the_source_distribution_builds_the_wheel_of_the_checkout(built: Path, wheel: Path) -> None:
    (of_the_tree,) = (built / "tree").glob("*.whl")
    assert contents(of_the_tree) == contents(wheel)
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as file:
        tops = {name.split("/")[1] for name in file.getnames() if "/" in name}
    assert not tops & {"tests", "examples", "benchmarks", "docs"}


@pytest.mark.parametrize("image", ["follow", "server"])
def test_an_image_has_the_files_of_which_the_wheel_is_built(image: str, wheel: Path, tmp_path: Path) -> None:
    stages = (ROOT / "examples" / "deploy" / "Dockerfile").read_text().split("\nFROM ")
    (stage,) = (each for each in stages if each.partition("\n")[0].endswith(f" AS {image}"))
    for sources, into in re.findall(r"^COPY (.*) /(src\S*)$", stage, re.MULTILINE):
        for source in sources.split():
            if (ROOT / source).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / source, tmp_path / into, ignore=ignored)
            else:
                (tmp_path / into).mkdir(exist_ok=True)
                shutil.copy(ROOT / source, tmp_path / into)
    how = ("--no-build-isolation", "--python", sys.executable, "--out-dir")
    uv("build", "--wheel", *how, tmp_path, tmp_path / "src", cwd=tmp_path)
    (built,) = tmp_path.glob("*.whl")
    assert contents(built) == contents(wheel)
    assert "RUN pip install --no-cache-dir /src\n" in stage


def test_the_bill_of_materials_names_what_a_plain_install_brings(installed: Path, tmp_path: Path) -> None:
    written = tmp_path / "dist" / "sbom.json"
    environment = installed.parent
    # The recipe alone, in environments that are here.
    made = [f"--assume-old={environment / '.installed'}", "--assume-old=.venv/.installed"]
    given = [f"RUNTIME={environment}", f"BIN={Path(sys.prefix) / 'bin'}", f"SBOM={written}"]
    done = run("make", *made, "sbom", *given, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    bill = json.loads(written.read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first = bill["metadata"]["component"]
    assert (bill["bomFormat"], first["name"], first["version"]) == (
        "CycloneDX",
        "patchstore",
        project["version"],
    )
    named = {canonicalize_name(each["name"]): each for each in bill["components"]}
    (direct,) = (each["dependsOn"] for each in bill["dependencies"] if each["ref"] == first["bom-ref"])
    for name in map(canonicalize_name, (Requirement(each).name for each in project["dependencies"])):
        assert named[name]["version"] == metadata.version(name)
        assert named[name]["bom-ref"] in direct, name
    assert named.keys() >= set(asked("patchstore", next(environment.glob("lib/python*/site-packages"))))
    assert not named.keys() & {"torch", "vllm", "pytest"}


# Each command in the environment of the wheel, where there is no torch.


def test_the_wheel_runs_without_the_checkout(installed: Path, tmp_path: Path) -> None:
    where = "import patchstore, importlib.util as u; print(patchstore.__file__, u.find_spec('torch'))"
    done = run(installed / "python", "-c", where, cwd=tmp_path)
    assert done.stdout.startswith(str(installed.parent / "lib")), done
    assert done.stdout.endswith(" None\n")
    for arguments in (["--help"], ["log", str(RUN)], ["log", str(RUN), "1"]):
        done = run(installed / "patchstore", *arguments, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert "parent" in done.stdout or "2e6691aa2853" in done.stdout or "replay" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        ("doctor RUN", 0, "without torch"),
        ("tag RUN good 1", 0, "good: version 1"),
        ("prune RUN", 0, "nothing was written"),
        ("replicate RUN COPY", 0, "7 versions copied"),
        ("sign RUN --key none.pem", 2, "pip install cryptography"),
        ("pin 1 --follow http://127.0.0.1:9", 4, "127.0.0.1:9"),
        ("wait 1 --server http://127.0.0.1:9 --timeout 1", 6, "does not answer"),
        ("verify RUN --server http://127.0.0.1:9", 4, "server_info"),
    ],
)
def test_commands_that_compute_with_no_weights_need_no_torch(
    arguments: str, status: int, says: str, installed: Path, tmp_path: Path
) -> None:
    shutil.copytree(RUN, tmp_path / "RUN")
    done = run(installed / "patchstore", *arguments.split(), cwd=tmp_path)
    assert done.returncode == status, done
    assert says in done.stdout + done.stderr


def test_follow_updates_and_verifies_a_server_without_torch(installed: Path, tmp_path: Path) -> None:
    store = FolderStore(RUN)
    header = history.read_header(store)
    assert header is not None
    manifest = history.read_manifest(store, 6)
    recorded = by_name(header.schema, read_sums(store, header.schema, manifest))
    counts = {spec.name: spec.num_elements for spec in header.schema.tensors}
    sums = {name: [[[0, counts[name], 1], each.hex()]] for name, each in recorded.items()}
    with serving(StubServer()) as stub:
        stub.run_id = header.run_id
        stub.sums = [{"num_applied": 1, "next": None, "sums": sums, "computed": [], "unverified": []}]
        often = ("--verify-every", "1", "--max-poll-interval", "0.1")
        command = [installed / "patchstore", "follow", RUN, "--server", stub.url, "--json", *often]
        with subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as program:
            assert program.stdout is not None
            events = []
            for line in program.stdout:
                events.append(json.loads(line).get("event", line))
                if events[-1] in {"verified", "failed", "diverged"}:
                    break
            program.terminate()
    assert events[-1] == "verified", events


@pytest.mark.parametrize(
    "arguments", ["verify RUN", "verify RUN --all", "replay RUN OUT", "mirror RUN OUT", "compact RUN"]
)
def test_commands_that_compute_with_weights_say_that_torch_is_missing(
    arguments: str, installed: Path, tmp_path: Path
) -> None:
    shutil.copytree(RUN, tmp_path / "RUN")
    done = run(installed / "patchstore", *arguments.split(), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, SENTENCE)
    assert not (tmp_path / "OUT").exists()


@pytest.mark.parametrize("name", ["Publisher", "Replica", "replay"])
def test_python_says_that_torch_is_missing(name: str, installed: Path, tmp_path: Path) -> None:
    done = run(installed / "python", "-c", f"from patchstore import {name}", cwd=tmp_path)
    assert "UsageError: this needs torch, which is not installed" in done.stderr


def test_an_older_torch_is_refused_by_name(installed: Path, tmp_path: Path) -> None:
    for version, refused in (("2.8.0+cu128", True), ("2.9.0a0+nv25.9", False), ("2.10.0", False)):
        (tmp_path / "torch.py").write_text(f"__version__ = {version!r}\n")
        done = run(installed / "python", "-c", "import patchstore.tensors", cwd=tmp_path)
        assert ("this needs torch 2.9 or newer, and torch 2.8.0+cu128 is" in done.stderr) == refused, (
            done.stderr
        )
        assert (done.returncode != 0) == refused
