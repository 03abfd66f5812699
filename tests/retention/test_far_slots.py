"""The newest version has a forged number, and a record retires any range: work depends on what is stored."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kept_runs import new_run

from patchstore import Replica
from patchstore.bucket import history, kept, notes
from patchstore.bucket.manifest_json import MAX_INTEGER, to_json
from patchstore.cli import main
from patchstore.errors import CorruptObject, VersionRetired
from patchstore.ops.replicate.replicator import Replicator
from patchstore.ops.retention import Retention, collect, retire
from patchstore.stores import layout, open_store
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import FaultyStore


def forge(store: Store) -> None:
    """Store a version with the largest number, a hint at it, and a record that retires all before it."""
    found = history.read_manifest(store, 5)
    store.put(layout.manifest_key(MAX_INTEGER), to_json(replace(found, version=MAX_INTEGER)))
    history.write_hint(store, MAX_INTEGER)
    record = notes.Retired(
        run_id=found.run_id,
        versions=((1, 3), (5, MAX_INTEGER)),
        created_at="2026-01-01T00:00:00Z",
        not_before="2026-01-02T00:00:00Z",
    )
    store.put("retired/00000000.json", notes.to_json(record))


@pytest.fixture
def store() -> FaultyStore:
    run = new_run(MemoryStore(), 6)
    forge(run.store)
    return FaultyStore(run.store)


def test_what_is_retired_is_counted_among_the_versions_that_are_stored(store: FaultyStore) -> None:
    assert notes.retirements(store).up_to(MAX_INTEGER).keys() == {1, 2, 3, 5, MAX_INTEGER}
    assert kept.retired_versions(store, MAX_INTEGER) == {1, 2, 3, 5}
    for version, nearest in ((1, 0), (3, 4), (5, 4), (10**9, 4)):
        with pytest.raises(VersionRetired, match=f"nearest kept version is {nearest}$"):
            kept.check(store, version)
    assert len(store.calls) < 100


@pytest.mark.parametrize("act", [lambda s: retire(s, Retention(keep_last=1), dry_run=False), collect])
def test_versions_are_neither_retired_nor_collected_before_a_gap(
    store: FaultyStore, act: Callable[[Store], object]
) -> None:
    before = set(store.list(""))
    with pytest.raises(CorruptObject):
        act(store)
    assert set(store.list("")) == before
    assert len(store.calls) < 100


def test_a_copy_goes_over_what_was_collected_and_ends_at_the_gap(store: FaultyStore) -> None:
    lost = history.read_manifest(store, 2).delta
    assert lost is not None
    store.delete(lost.payloads[0].key)
    target = MemoryStore("memory://copy")
    replicator = Replicator(store, target)
    replicator.open()
    assert [each.manifest.version for each in replicator.versions()] == [0, 1, 2, 3, 4, 5]
    replicator.copy_records()
    replicator.copy_shortcuts()
    assert len(store.calls) < 300
    tensors: dict[str, torch.Tensor] = {}
    assert Replica(target, tensors).update().version == 5


@pytest.mark.parametrize("options", [["--all"], ["--sample", "3"]])
def test_verifying_reports_the_gap_and_ends(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = str(tmp_path / "bucket")
    run = new_run(open_store(url), 6)
    forge(run.store)
    monkeypatch.setattr(sys, "argv", ["patchstore", "verify", url, *options])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code
    assert str(MAX_INTEGER) in "".join(capsys.readouterr())
