"""What `patchstore doctor` finds of runs that are damaged."""

import json

import pytest
from findings import found, wrong

from patchstore.format import history, layout, replica_mark
from patchstore.replicate.replicator import Replicator
from patchstore.stores.memory import MemoryStore
from tests.support.weights import Run


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
    replica_mark.promote(target, "2026-01-31T12:00:00.000Z")
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
    assert anchor is not None and delta is not None
    gone, cut = anchor.payloads[0], delta.payloads[0]
    run.store.delete(gone.key)
    run.store.put(cut.key, run.store.get(cut.key)[:-1])
    findings = found(run.store)
    assert wrong(findings) == ["payload-missing", "payload-size"]
    assert gone.key in findings["payload-missing"].found
    assert f"{cut.key}: expected {cut.size:,} bytes, found {cut.size - 1:,}" in findings["payload-size"].found
    assert "resume='anchor'" in str(findings["payload-missing"].advice)


def test_payloads_that_the_newest_version_does_not_need_are_not_asked_for(run: Run) -> None:
    old = history.read_manifest(run.store, 0).anchor
    assert old is not None
    run.store.delete(old.payloads[0].key)
    assert wrong(found(run.store)) == []
