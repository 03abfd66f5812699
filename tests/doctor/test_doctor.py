"""`patchstore doctor`: stores that are well, the packages, the command and its page."""

import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from findings import OF_A_RUN, WRITTEN, found, wrong

from patchstore import open_store
from patchstore.bucket import history, notes
from patchstore.ops.compact.service import Compactor
from patchstore.ops.doctor import KINDS, examine
from patchstore.ops.replicate.replicator import Replicator
from patchstore.stores import layout
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import FaultyStore
from tests.support.commands import Cli
from tests.support.hub import Hub
from tests.support.hub.clients import quick_clients
from tests.support.weights import Run

ROOT = Path(__file__).parents[2]


def test_a_folder_that_is_missing_is_said_examined_and_not_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "typo" / "bucket"
    findings = found(str(path))
    assert wrong(findings) == ["no-folder"]
    assert {*findings} == {"packages", "no-folder", "store", "clock", *WRITTEN, "no-run"}
    assert f"no folder {path}; this user may make it in {tmp_path}" in findings["no-folder"].found
    assert wrong(found(str(path), read_only=True)) == ["no-folder"]
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
    # moto does not compare a body with its checksum.
    assert wrong(findings) == ["body-unchecked"]
    assert {*findings} == {"packages", "store", "clock", "body-unchecked", *WRITTEN, "no-run"}
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


def test_the_command_prints_one_object_a_finding_and_ends_well(tmp_path: Path, patchstore: Cli) -> None:
    code, out, _ = patchstore("doctor", tmp_path, "--json", "--size", 1)
    assert code == 0
    findings = [json.loads(line) for line in out.splitlines()]
    assert [finding["kind"] for finding in findings][:2] == ["packages", "store"]
    assert {finding["level"] for finding in findings} == {"ok"}
    assert {finding["about"] for finding in findings} == {"packages", str(tmp_path)}
    (throughput,) = [finding["found"] for finding in findings if finding["kind"] == "throughput"]
    assert throughput.startswith("1.0 MB")
    assert {finding["kind"] for finding in findings} == {"packages", "store", "clock", *WRITTEN, "no-run"}
    assert [*tmp_path.iterdir()] == []


def test_the_command_shows_a_problem_with_what_to_do_and_ends_with_1(tmp_path: Path, patchstore: Cli) -> None:
    code, out, _ = patchstore("doctor", tmp_path, "--read-only", "--server", "http://127.0.0.1:9")
    assert code == 1
    assert re.search(r"problem\W+server-unreachable", out)
    assert "-> start it" in out


def test_the_page_explains_every_kind_and_no_other() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text()
    explained = re.findall(r"^\| `([a-z-]+)` \| (ok|warning|problem) \|", page, re.MULTILINE)
    assert explained == [*KINDS.items()]


def test_every_kind_is_found_somewhere_in_the_code() -> None:
    folder = ROOT / "patchstore" / "ops" / "doctor"
    source = "".join(path.read_text() for path in folder.glob("*.py") if path.name != "finding.py")
    source += (folder / "finding.py").read_text().partition("class Finding")[2]
    # Options that a server was started without are found by its driver too.
    source += (ROOT / "patchstore" / "follow" / "vllm_protocol.py").read_text()
    assert [kind for kind in KINDS if f'"{kind}"' not in source] == []


# What `patchstore doctor` finds of runs that are damaged.


def test_a_run_of_a_later_format_is_not_understood(run: Run) -> None:
    record = json.loads(run.store.get(layout.HEADER))
    run.store.put(layout.HEADER, json.dumps({**record, "format_version": 99}).encode())
    findings = found(run.store)
    assert wrong(findings) == ["format-unknown"]
    assert "release" in str(findings["format-unknown"].advice)


def test_a_replica_says_that_publishers_are_refused_until_it_is_promoted(run: Run) -> None:
    target = MemoryStore("memory://examined-replica")
    replicator = Replicator(run.store, target)
    replicator.open()
    assert "publishers are refused" in found(target)["replica"].found
    assert len(list(replicator.versions())) == 6
    findings = found(target)
    assert wrong(findings) == []
    assert f"a replica of {run.store.url}: " in findings["replica"].found
    notes.promote(target, "2026-01-31T12:00:00.000Z", dry_run=False)
    assert "promoted at 2026-01-31T12:00:00.000Z: publishers may write" in found(target)["replica"].found
    assert "replica" not in found(run.store)


@pytest.mark.parametrize("key", [layout.HEADER, layout.REPLICA, layout.manifest_key(5)])
def test_a_run_whose_records_are_spoilt_is_unreadable(run: Run, key: str) -> None:
    run.store.put(key, b"{")
    findings = found(run.store)
    assert wrong(findings) == ["run-unreadable"]
    assert key in findings["run-unreadable"].found


def test_a_chain_with_another_parent_in_it_is_broken(run: Run) -> None:
    key = layout.manifest_key(4)
    run.store.put(key, run.store.get(key) + b" ")
    findings = found(run.store)
    assert wrong(findings) == ["lineage-broken"]
    assert "resume='anchor'" in str(findings["lineage-broken"].advice)


def test_a_chain_without_its_anchor_is_broken(run: Run) -> None:
    run.store.delete(layout.manifest_key(4))
    assert wrong(found(run.store)) == ["lineage-broken"]


def test_payloads_that_are_missing_or_cut_are_named(run: Run) -> None:
    anchor, delta = history.read_manifest(run.store, 4).anchor, history.read_manifest(run.store, 5).delta
    gone, cut = anchor.payloads[0], delta.payloads[0]
    run.store.delete(gone.key)
    run.store.put(cut.key, run.store.get(cut.key)[:-1])
    findings = found(run.store)
    assert wrong(findings) == ["payload-missing", "payload-size"]
    assert gone.key in findings["payload-missing"].found
    assert f"{cut.key}: expected {cut.size:,} bytes, found {cut.size - 1:,}" in findings["payload-size"].found
    assert "resume='anchor'" in str(findings["payload-missing"].advice)


def test_a_payload_of_a_shortcut_that_is_missing_is_made_anew() -> None:
    run = Run(MemoryStore())
    run.open(anchor_every=None)
    run.publish_versions(20)
    run.close()
    list(Compactor(run.store, anchor_every=16).compact())
    (key,) = run.store.list("anchors/00000016-")
    run.store.delete(key)
    findings = found(run.store)
    assert wrong(findings) == ["payload-missing"]
    assert "patchstore compact" in str(findings["payload-missing"].advice)
    list(Compactor(run.store, anchor_every=16).compact())
    assert wrong(found(run.store)) == []


def test_payloads_that_the_newest_version_does_not_need_are_not_asked_for(run: Run) -> None:
    old = history.read_manifest(run.store, 0).anchor
    run.store.delete(old.payloads[0].key)
    assert wrong(found(run.store)) == []
