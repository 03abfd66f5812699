"""What `patchstore doctor` finds of runs that are damaged."""

import json

import pytest
from findings import found, wrong

from patchstore.format import history, layout
from tests.support.weights import Run


def test_a_run_of_a_later_format_is_not_understood(run: Run) -> None:
    record = json.loads(run.store.get(layout.HEADER))
    run.store.put(layout.HEADER, json.dumps({**record, "format_version": 99}).encode())
    findings = found(run.store)
    assert wrong(findings) == ["format-unknown"]
    assert "release" in str(findings["format-unknown"].advice)


@pytest.mark.parametrize("key", [layout.HEADER, layout.manifest_key(5)])
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
