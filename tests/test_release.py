"""The workflow of a release: what it runs exists, and its parts fit each other."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
FILE = ROOT / ".github" / "workflows" / "release.yml"


@pytest.fixture
def jobs() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(FILE.read_text())["jobs"]
    return found


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def actions(job: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for step in job["steps"] if "uses" in step]


def test_every_target_of_make_exists_and_all_is_checked_before_it_is_built(
    jobs: dict[str, Any],
) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = [each.split()[1:] for job in jobs.values() for each in commands(job) if each.startswith("make ")]
    assert made == [["setup"], ["check"], ["dist"], ["sbom"]]
    assert {target for each in made for target in each} <= targets


def test_a_tag_starts_it_and_must_name_the_version(jobs: dict[str, Any]) -> None:
    # YAML 1.1 takes the key `on` for true.
    assert yaml.safe_load(FILE.read_text())[True] == {"push": {"tags": ["v*"]}}
    first = commands(jobs["build"])[0]
    assert first.startswith('test "$GITHUB_REF_NAME" = "v$(') and "pyproject.toml" in first


def test_every_action_is_pinned_to_a_commit_whose_release_is_named(jobs: dict[str, Any]) -> None:
    used = re.findall(r"uses: (.*)", FILE.read_text())
    assert len(used) == sum(len(actions(job)) for job in jobs.values())
    for each in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each), each


def test_what_may_publish_runs_nothing_of_the_repository(jobs: dict[str, Any]) -> None:
    assert yaml.safe_load(FILE.read_text())["permissions"] == {}
    assert jobs["build"]["permissions"] == {"contents": "read"}
    publish = jobs["publish"]
    assert publish["needs"] == "build"
    assert publish["permissions"] == {"id-token": "write", "attestations": "write"}
    used = {step["uses"].partition("@")[0] for step in actions(publish)}
    assert used == {"actions/download-artifact", "actions/attest"}
    (command,) = commands(publish)
    assert "uv publish --trusted-publishing always" in command
    # Neither PyPI nor uv takes the bill of materials for a distribution.
    assert command.endswith(" dist/*.whl dist/*.tar.gz")


def test_what_is_attested_is_what_was_built(jobs: dict[str, Any]) -> None:
    attested = [step["with"] for step in actions(jobs["publish"]) if "attest@" in step["uses"]]
    assert [each["subject-path"].split() for each in attested] == [["dist/*.whl", "dist/*.tar.gz"]] * 2
    sbom = re.search(r"^SBOM := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert sbom is not None
    assert [each.get("sbom-path") for each in attested] == [None, sbom[1]]
    (kept,) = (step["with"] for step in actions(jobs["build"]) if "upload-artifact@" in step["uses"])
    (got,) = (step["with"] for step in actions(jobs["publish"]) if "download-artifact@" in step["uses"])
    assert (kept["name"], kept["path"]) == (got["name"], got["path"]) == ("dist", "dist/")
