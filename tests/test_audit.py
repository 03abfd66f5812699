"""`make audit`: what counts as a finding, and what as a machine that cannot ask."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "requirements" / "audit.py"
VULNERABLE = {"name": "jinja2", "version": "2.4.1", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.7.2"]}]}
CLEAN = {"name": "numpy", "version": "2.4.1", "vulns": []}
SKIPPED = {"name": "local", "skip_reason": "Dependency not found on PyPI"}

Answer = tuple[int, list[dict[str, Any]] | None, str]
KNOWN: Answer = (1, [VULNERABLE], "")


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run the script with the answers of pip-audit; return its status, what it printed, and how it asked."""
    spec = importlib.util.spec_from_file_location("audit", SCRIPT)
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*answers: Answer) -> tuple[int, str, list[tuple[str, ...]]]:
        coming, asked = list(answers), []

        def answer(*options: str) -> Answer:
            asked.append(options)
            return coming.pop(0)

        monkeypatch.setattr(module, "audit", answer)
        status = module.main()
        assert not coming
        return status, capsys.readouterr().out, asked

    return run


@pytest.mark.parametrize(
    "probe",
    [
        (1, None, "requests.exceptions.ConnectionError: no route"),
        (1, None, ""),
        (0, [{"name": "jinja2", "skip_reason": "Dependency not found on PyPI"}], ""),
        (0, [{"name": "jinja2", "version": "2.4.1", "vulns": []}], ""),
        (0, [], ""),
    ],
)
def test_a_machine_that_cannot_ask_says_so_and_succeeds(audit: Callable[..., Any], probe: Answer) -> None:
    status, said, asked = audit(probe)
    assert (status, len(asked)) == (0, 1)
    assert said.startswith("audit: no advisory service can be asked from here") and said.count("\n") == 1
    assert probe[1] is None or "an old release with known advisories that is not installed" in said


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ((0, [CLEAN, SKIPPED], ""), 0, "1 packages, 0 with advisories"),
        ((1, [CLEAN, VULNERABLE], ""), 1, "jinja2 2.4.1: PYSEC-1, fixed in 2.7.2"),
        # Also if pip-audit's own status said otherwise, and the reverse.
        ((0, [VULNERABLE], ""), 1, "PYSEC-1"),
        ((1, [CLEAN], ""), 1, "0 with advisories"),
        ((1, None, "the connection was reset"), 1, "the connection was reset"),
        ((0, [SKIPPED], ""), 1, "no package was audited"),
        ((0, [], ""), 1, "no package was audited"),
    ],
)
def test_once_the_service_answers_nothing_is_forgiven(
    audit: Callable[..., Any], answer: Answer, status: int, words: str
) -> None:
    found, said, asked = audit(KNOWN, answer)
    assert (found, len(asked)) == (status, 2)
    assert words in said
