"""`patchstore doctor`: stores that are well, the packages, the command and its page."""

import json
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from findings import OF_A_RUN, WRITTEN, found, wrong

from patchstore import open_store
from patchstore.cli import main
from patchstore.doctor import KINDS, examine
from patchstore.format import history
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import FaultyStore
from patchstore.testing.hub import Hub
from patchstore.testing.hub.clients import quick_clients
from tests.support.weights import Run

ROOT = Path(__file__).parents[2]


def test_a_folder_that_is_missing_is_said_examined_and_not_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "typo" / "bucket"
    findings = found(str(path))
    assert wrong(findings) == ["no-folder"]
    assert {*findings} == {"packages", "no-folder", "store", "clock", *WRITTEN, "no-run"}
    assert f"no folder {path}; this user may make it in {tmp_path}" in findings["no-folder"].found
    assert [*tmp_path.iterdir()] == []


def test_an_empty_folder_is_well_and_left_empty(tmp_path: Path) -> None:
    findings = found(str(tmp_path))
    assert wrong(findings) == []
    assert {*findings} == {"packages", "store", "clock", *WRITTEN, "no-run"}
    assert [*tmp_path.iterdir()] == []


def test_a_reader_is_told_that_a_folder_is_missing_and_makes_none(tmp_path: Path) -> None:
    findings = found(str(tmp_path / "typo"), read_only=True)
    assert wrong(findings) == ["no-folder"]
    assert [*tmp_path.iterdir()] == []


def test_a_folder_in_which_a_run_was_begun_meanwhile_stays(tmp_path: Path) -> None:
    for finding in examine(str(tmp_path / "bucket"), num_bytes=1_000_000):
        if finding.kind == "throughput":
            open_store(tmp_path / "bucket").put("store.json", b"{}")
    assert [*open_store(tmp_path / "bucket").list()] == ["store.json"]


def test_an_interrupted_examination_leaves_nothing(tmp_path: Path) -> None:
    examination = examine(str(tmp_path / "bucket"), num_bytes=1_000_000)
    for finding in examination:
        if finding.kind == "latency":
            break
    assert (tmp_path / "bucket").exists()
    examination.close()
    assert [*tmp_path.iterdir()] == []


def test_a_store_in_memory_is_well_and_its_run_is_described(run: Run) -> None:
    before = [*run.store.list()]
    findings = found(run.store)
    assert wrong(findings) == []
    assert {*findings} == {"packages", "store", "clock", *WRITTEN, *OF_A_RUN}
    head = history.read_manifest(run.store, 5)
    assert head.run_id in findings["run"].found
    assert "6 versions, the newest is 5" in findings["run"].found
    assert f"by {head.writer.id} (epoch {head.writer.epoch})" in findings["run"].found
    assert findings["dtypes"].found.startswith("serves ")
    assert "1 delta leads from anchor 4" in findings["lineage"].found
    assert [*run.store.list()] == before


def test_a_bucket_is_well_and_left_empty(s3_options: dict[str, Any], s3_url: str) -> None:
    # More than a part, so that it goes up and comes back in several.
    findings = found(s3_url, storage_options=s3_options, num_bytes=9_000_000)
    assert wrong(findings) == []
    assert {*findings} == {"packages", "store", "clock", *WRITTEN, "no-run"}
    assert "9.0 MB" in findings["throughput"].found
    store = open_store(s3_url, **s3_options)
    assert [*store.list()] == []
    store.close()


def test_a_bucket_of_the_hub_is_left_empty(tmp_path: Path) -> None:
    with quick_clients(tmp_path), Hub() as hub:
        hub.create_bucket("user/bucket")
        url, options = "hf://buckets/user/bucket/typo", hub.options("user")
        assert wrong(found(url, storage_options=options)) == []
        store = open_store(url, **options)
        assert [*store.list()] == []
        store.close()


def test_a_reader_writes_nothing_and_says_what_it_left_out(run: Run) -> None:
    store = FaultyStore(run.store)
    findings = found(store, read_only=True)
    assert {verb for verb, _ in store.calls} <= {"get", "size", "list"}
    assert {*findings} == {"packages", "store", "clock-unknown", *OF_A_RUN, "not-tried"}
    assert "creating only once" in findings["not-tried"].found


def versions(monkeypatch: pytest.MonkeyPatch, **pretended: str | None) -> None:
    real = metadata.version

    def version(name: str) -> str:
        found = pretended[name] if name in pretended else real(name)
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)


def test_an_s3fs_without_conditional_writes_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    # The release that a resolver once went back to.
    versions(monkeypatch, s3fs="0.4.2", blake3=None, vllm="0.25.0", obstore=None)
    findings = found(MemoryStore())
    assert wrong(findings) == ["package-missing", "package-version", "package-version-server"]
    assert findings["package-version"].advice == "pip install 's3fs>=2024.12'"
    assert findings["package-missing"].advice == "pip install 'blake3>=0.4'"
    assert findings["package-version-server"].level == "warning"
    assert "s3fs" not in findings["packages"].found and "torch" in findings["packages"].found


def test_a_folder_that_was_never_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", not_installed)
    findings = found(MemoryStore())
    assert wrong(findings) == ["packages-unknown"]
    assert "pip install" in str(findings["packages-unknown"].advice)


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["patchstore", "doctor", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return int(ended.value.code or 0)


def test_the_command_prints_one_object_a_finding_and_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, tmp_path, "--json", "--size", 1) == 0
    findings = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [finding["kind"] for finding in findings][:2] == ["packages", "store"]
    assert {finding["level"] for finding in findings} == {"ok"}
    assert {finding["about"] for finding in findings} == {"packages", str(tmp_path)}
    (throughput,) = [finding["found"] for finding in findings if finding["kind"] == "throughput"]
    assert throughput.startswith("1.0 MB")


def test_the_command_shows_a_problem_with_what_to_do_and_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, tmp_path, "--read-only", "--server", "http://127.0.0.1:9") == 1
    out = capsys.readouterr().out
    assert re.search(r"problem\W+server-unreachable", out)
    assert "-> start it" in out


def test_the_page_explains_every_kind_and_no_other() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text()
    explained = re.findall(r"^\| `([a-z-]+)` \| (ok|warning|problem) \|", page, re.MULTILINE)
    assert explained == [*KINDS.items()]


def test_every_kind_is_found_somewhere_in_the_code() -> None:
    folder = ROOT / "patchstore" / "doctor"
    source = "".join(path.read_text() for path in folder.glob("*.py") if path.name != "finding.py")
    source += (folder / "finding.py").read_text().partition("class Finding")[2]
    # Options that a server was started without are found by its driver too.
    source += (folder.parent / "serve" / "vllm_configuration.py").read_text()
    assert [kind for kind in KINDS if f'"{kind}"' not in source] == []
