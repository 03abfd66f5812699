"""A shortcut that is damaged, lost or forged costs readers time, and never a version."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from safetensors.torch import load_file

from patchstore import Replica, replay, verify
from patchstore.bucket import history, lineage, shortcuts
from patchstore.bucket.records import Ends
from patchstore.errors import CorruptObject, PatchstoreError, StoreUnavailable
from patchstore.ops.retention import Retention, collect, retire
from patchstore.read.host_cache import HostCache
from patchstore.read.run import Run as StoredRun
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.copies import copy_of_run, long_run
from tests.support.damage import (
    Damage,
    edit_record,
    flip,
    forge,
    garble,
    payload_of,
    put_payload,
    record_of,
    remove,
    truncate,
)
from tests.support.weights import Run, State, assert_same_bits, rebuilt
from vllm_plugin.live.identify import read_contents

EVERY, HEAD = 32, 60
ANCHOR, ROLLUP = Ends(32, None), Ends(48, 32)
"""Both are on the way of a reader without weights to the newest version."""


@pytest.fixture(scope="module")
def made() -> Run:
    """Versions 0 to 60, of which 0 has the only anchor of its own, and shortcuts."""
    run = long_run(MemoryStore(), HEAD + 1, EVERY)
    assert lineage.read(run.store, HEAD).plan().over == {ANCHOR, ROLLUP}
    return run


@pytest.fixture
def run(made: Run) -> Run:
    """The same in a store of its own."""
    return copy_of_run(made)


def in_a_day() -> datetime:
    return datetime.now(UTC) + timedelta(hours=25)


def empty(store: Store, ends: Ends) -> None:
    store.put(payload_of(store, ends), b"")


def break_header(store: Store, ends: Ends) -> None:
    put_payload(store, ends, b"\xff" * 100)


def name_another_digest(store: Store, ends: Ends) -> None:
    text = store.get(record_of(ends)).decode()
    digest = shortcuts.read(store, ends).payloads[0].digest
    store.put(record_of(ends), text.replace(digest, f"blake3:{'0' * 64}").encode())


def name_another_version(store: Store, ends: Ends) -> None:
    edit_record(store, ends, lambda record: record.update(manifest=record["manifest"] + " "))


def name_another_parent(store: Store, ends: Ends) -> None:
    edit_record(store, ends, lambda record: record.update(parent_digest=f"blake3:{'1' * 64}"))


DAMAGES = [
    *(flip, truncate, remove, empty, break_header, garble),
    *(name_another_digest, name_another_version, name_another_parent, forge),
]


def readers(run: Run, folder: Path) -> Iterator[tuple[str, Callable[[], State]]]:
    """Ways to come to the newest version."""
    target = history.read_manifest(run.store, HEAD)

    def replayed() -> State:
        replay(run.store, HEAD, out=folder / "out")
        return load_file(folder / "out" / "model.safetensors")

    def updated(held: int | None) -> State:
        tensors = {} if held is None else {name: each.clone() for name, each in run.history[held].items()}
        replica = Replica(run.store, tensors, held=held)
        assert replica.update(HEAD) == target
        return tensors

    def read_by_a_server() -> State:
        cache = HostCache(folder / "cache", max_bytes=0)
        return dict(read_contents(StoredRun.open(run.store), HEAD, run.history[HEAD], cache).tensors)

    yield "replay", replayed
    yield "read_contents", read_by_a_server
    for held in (None, 0, 20, 32, 40):
        yield f"replica at {held}", lambda held=held: updated(held)  # type: ignore[misc]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda each: each.__name__)
@pytest.mark.parametrize("ends", [ANCHOR, ROLLUP], ids=str)
def test_each_reader_goes_round_a_damaged_shortcut(
    run: Run,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    ends: Ends,
    damage: Damage,
) -> None:
    if damage is name_another_parent and ends.parent is None:
        pytest.skip("an anchor has no parent")
    damage(run.store, ends)
    for name, reader in readers(run, tmp_path):
        caplog.clear()
        found = reader()
        assert_same_bits({each: found[each] for each in run.history[HEAD]}, run.history[HEAD])
        if name in {"replay", "replica at None"}:
            assert record_of(ends) in caplog.text, name
    assert verify(run.store, HEAD).version == HEAD


def test_other_shortcuts_are_used_still(run: Run) -> None:
    for damage in (flip, garble):
        damage(run.store, ROLLUP)
        store = FaultyStore(run.store)
        assert_same_bits(rebuilt(store, HEAD), run.history[HEAD])
        read = {key for _, key in store.calls}
        assert payload_of(run.store, ANCHOR) in read
        assert not any(key.startswith("anchors/00000000") for key in read)


@pytest.mark.parametrize("damage", [flip, remove, garble, forge], ids=lambda each: each.__name__)
def test_all_shortcuts_may_be_damaged(run: Run, tmp_path: Path, damage: Damage) -> None:
    for ends in shortcuts.listed(run.store):
        damage(run.store, ends)
    for _, reader in readers(run, tmp_path):
        found = reader()
        assert_same_bits({each: found[each] for each in run.history[HEAD]}, run.history[HEAD])


def test_the_error_names_the_object_of_the_plain_way(run: Run, tmp_path: Path) -> None:
    for ends in shortcuts.listed(run.store):
        flip(run.store, ends)
    key = history.read_manifest(run.store, 3).delta.payloads[0].key  # type: ignore[union-attr]
    data = run.store.get(key)
    run.store.put(key, data[:-1] + bytes([data[-1] ^ 1]))
    for name, reader in readers(run, tmp_path):
        if name in {"replica at 20", "replica at 32", "replica at 40"}:
            # The plain way from there is whole.
            assert_same_bits(reader(), run.history[HEAD])
            continue
        with pytest.raises(CorruptObject, match=key):
            reader()
    assert not (tmp_path / "out").exists()


def test_a_store_that_does_not_answer_is_no_damage(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    store = FaultyStore(
        run.store, Fault(verb="*", effect="fail-before", key=payload_of(run.store, ANCHOR), times=None)
    )
    with pytest.raises(StoreUnavailable):
        Replica(store, {}).update(HEAD)
    assert "another way" not in caplog.text


@pytest.mark.parametrize("damage", [flip, remove, forge, garble], ids=lambda each: each.__name__)
def test_where_the_plain_way_was_deleted_the_error_names_the_shortcut(
    run: Run, tmp_path: Path, damage: Damage
) -> None:
    retire(run.store, Retention(keep_last=3), dry_run=False)
    collect(run.store, dry_run=False, clock=in_a_day)
    assert shortcuts.listed(run.store) == {ANCHOR}
    key = payload_of(run.store, ANCHOR)
    damage(run.store, ANCHOR)
    with pytest.raises(PatchstoreError) as caught:
        Replica(run.store, {}).update(HEAD)
    # A record that cannot be read, or weights that are wrong, name no object of the anchor.
    assert damage in {garble, forge} or key in str(caught.value)


def test_a_damaged_rollup_costs_no_anchor_that_is_needed(run: Run) -> None:
    """What an added anchor replaces may be deleted, so it is left out only if it is damaged itself."""
    retire(run.store, Retention(keep_last=29), dry_run=False)
    collect(run.store, dry_run=False, clock=in_a_day)
    assert {ANCHOR, ROLLUP} <= shortcuts.listed(run.store)
    for damage in (forge, flip, remove):
        damage(run.store, ROLLUP)
        assert_same_bits(rebuilt(run.store, HEAD), run.history[HEAD])
