"""Staging and prefetching: nothing that is served changes, and what is staged goes away again."""

import gc
import threading
import weakref
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from plain_ranks import Fused, equal, serves

from patchstore.bucket import history
from patchstore.bucket import manifest_json as manifests
from patchstore.errors import CorruptObject, PatchstoreError, StoreReplaced, UsageError
from patchstore.read import host_cache
from patchstore.read.host_cache import HostCache
from patchstore.stores import layout
from vllm_plugin.live.rank_weights import Staged
from vllm_plugin.live.update import Updater


def test_staging_touches_nothing(ranks, module, trainer):
    before = module.state()
    ranks.stage(2)
    assert ranks.one.staged.manifest.version == 2
    assert ranks.held == 0
    assert equal(module.state(), before)
    ranks.one.forget()
    ranks.stage(3)
    assert ranks.one.staged.plan.anchor is not None
    assert equal(module.state(), before)


def test_an_anchor_is_staged_as_a_mapping_of_its_file_not_as_a_copy(trainer, module, open_ranks, monkeypatch):
    # Small files are read instead.
    monkeypatch.setattr("patchstore.read.download.SMALL_BYTES", 0)
    ranks = open_ranks(trainer, module)
    ranks.stage(0)
    staged = ranks.one.staged
    places = [tensor.data_ptr() for tensor in staged.anchor.values()]
    mapped = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(ranks.scratch) in line:
            low, high = (int(end, 16) for end in line.split()[0].split("-"))
            mapped.append(range(low, high))
    assert mapped
    assert all(any(place in each for each in mapped) for place in places)
    assert staged.computed.keys() == {"log_rate"}


@pytest.fixture
def kept(updater, monkeypatch) -> list[Staged]:
    """All that was fetched, so that it is not its end that frees the files."""
    found, prepare = [], updater.prepare

    def keep(*args) -> Staged:
        found.append(prepare(*args))
        return found[-1]

    monkeypatch.setattr(updater, "prepare", keep)
    return found


def wait_for_prefetch(updater: Updater, version: int) -> None:
    while not updater.prefetch(version):
        pass


def test_prefetching_returns_while_the_version_is_being_fetched(ranks, updater, trainer, monkeypatch):
    gate, stage = threading.Event(), updater.prepare
    monkeypatch.setattr(updater, "prepare", lambda *args: gate.wait(60) and stage(*args))
    assert not updater.prefetch(2)
    assert not updater.prefetch(2)
    # Another one has to wait its turn.
    assert not updater.prefetch(3)
    assert serves(ranks, trainer.history[0])
    gate.set()
    ranks.apply(2)
    assert serves(ranks, trainer.history[2])


def test_who_waits_for_a_version_hears_of_its_end_and_not_of_another_ones(updater, monkeypatch):
    gate, stage, heard = threading.Event(), updater.prepare, threading.Event()
    monkeypatch.setattr(updater, "prepare", lambda *args: gate.wait(60) and stage(*args))
    assert not updater.on_fetched(2, heard.set)
    updater.prefetch(2)
    assert not updater.on_fetched(3, heard.set)
    again = threading.Event()
    assert updater.on_fetched(2, heard.set)
    assert updater.on_fetched(2, again.set)
    assert not heard.is_set()
    gate.set()
    assert heard.wait(60) and again.wait(60)
    assert updater.prefetch(2)


def test_who_waits_for_a_version_hears_that_it_was_abandoned(updater, monkeypatch):
    gate, heard = threading.Event(), threading.Event()
    monkeypatch.setattr(updater, "prepare", lambda *args: gate.wait(60) and pytest.fail("of no use"))
    updater.prefetch(2)
    assert updater.on_fetched(2, heard.set)
    updater.abandon()
    gate.set()
    assert heard.wait(60)


def test_a_prefetched_version_is_not_fetched_again(ranks, updater, trainer, monkeypatch):
    wait_for_prefetch(updater, 2)
    assert updater.staged is None
    monkeypatch.setattr(updater, "prepare", lambda *args: pytest.fail("fetched again"))
    ranks.apply(2)
    assert serves(ranks, trainer.history[2])


def test_another_version_than_was_prefetched_can_be_staged(ranks, updater, trainer, kept):
    updater.prefetch(1)
    ranks.apply(3)
    assert serves(ranks, trainer.history[3])
    assert (kept[-1].manifest.version, ranks.spooled()) == (3, [])
    wait_for_prefetch(updater, 1)
    ranks.apply(1)
    assert serves(ranks, trainer.history[1])


def test_what_was_prefetched_for_other_weights_is_staged_anew(ranks, updater, module, trainer, kept):
    wait_for_prefetch(updater, 3)
    updater.mark_half_applied()
    module.norm.data.zero_()
    ranks.apply(3)
    assert serves(ranks, trainer.history[3])
    assert not updater.half_applied
    assert ([each.manifest.version for each in kept], ranks.spooled()) == ([3, 3], [])


def test_a_failed_prefetch_is_said_by_stage_and_tried_again(ranks, updater, trainer):
    wait_for_prefetch(updater, 4)
    with pytest.raises(PatchstoreError):
        updater.stage(4)
    trainer.step()
    wait_for_prefetch(updater, 4)
    ranks.apply(4)
    assert serves(ranks, trainer.history[4])


def test_an_update_that_was_not_finished_gives_way_to_a_prefetch(ranks, updater, trainer):
    updater.stage(1)
    assert updater.prefetch(1)
    wait_for_prefetch(updater, 2)
    assert updater.staged is None
    ranks.apply(2)
    assert serves(ranks, trainer.history[2])


def test_a_failed_stage_leaves_nothing_staged(updater):
    updater.stage(1)
    with pytest.raises(PatchstoreError):
        updater.stage(9)
    assert updater.staged is None


def test_a_version_of_another_run_is_refused(updater, trainer):
    other = replace(history.read_manifest(trainer.store, 0), run_id="another")
    trainer.store.put(layout.manifest_key(0), manifests.to_json(other))
    updater.forget()
    with pytest.raises(StoreReplaced, match="has run another now"):
        updater.stage(0)


@pytest.mark.parametrize("version", [1, 2])
def test_another_version_of_the_held_number_is_refused(updater, trainer, module, version):
    before, key = module.state(), layout.manifest_key(updater.held.version)
    stored = trainer.store.get(key)
    other = replace(history.read_manifest(trainer.store, updater.held.version), step=99)
    trainer.store.put(key, manifests.to_json(other))
    with pytest.raises((StoreReplaced, CorruptObject)) as error:
        updater.stage(version + updater.held.version - 1)
    assert error.type is (StoreReplaced if version == 1 else CorruptObject)
    assert all(torch.equal(before[name], now) for name, now in module.state().items())
    trainer.store.put(key, stored)
    updater.stage(2)
    assert updater.staged.manifest.version == 2


def test_parameters_that_moved_are_refused_before_and_after_staging(ranks, updater, module, trainer):
    ranks.stage(1)
    module.norm.data = module.norm.data.clone()
    with pytest.raises(UsageError, match=r"0\.norm"):
        updater.apply()
    updater.roll_back()
    with pytest.raises(UsageError, match=r"0\.norm"):
        updater.stage(1)
    assert serves(ranks, trainer.history[0])


@pytest.mark.usefixtures("is_elsewhere")
@pytest.mark.parametrize(
    "end", ["accept", "drop", "roll_back", "close", "mark_half_applied", "prefetch of another", "unused"]
)
@pytest.mark.parametrize("version", [0, 2])
def test_payloads_are_on_disk_while_staged_or_prefetched_and_no_longer(ranks, updater, kept, version, end):
    if version == 0:
        updater.forget()
    wait_for_prefetch(updater, version) if end == "unused" else ranks.stage(version)
    assert ([each.manifest.version for each in kept], len(ranks.spooled()) > 0) == ([version], True)
    if end in {"accept", "roll_back"}:
        ranks.write()
    if end == "prefetch of another":
        wait_for_prefetch(updater, 9)
    else:
        getattr(updater, "close" if end == "unused" else end)()
    assert ranks.spooled() == []


@pytest.mark.usefixtures("is_elsewhere")
def test_what_comes_after_its_caller_was_interrupted_is_let_go(ranks, updater, trainer, kept, monkeypatch):
    is_fetched, gate, prepare = threading.Event(), threading.Event(), updater.prepare

    def late(*args) -> Staged:
        found = prepare(*args)
        is_fetched.set()
        gate.wait(60)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(updater, "prepare", late)
        updater.prefetch(2)
        assert is_fetched.wait(60)
        patched.setattr(Future, "result", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            updater.stage(2)
    gate.set()
    # It comes, and is let go after that.
    ranks.spooled()
    assert (len(kept), ranks.spooled()) == (1, [])
    ranks.apply(2)
    assert serves(ranks, trainer.history[2])


@pytest.mark.usefixtures("is_elsewhere")
def test_two_servers_of_a_host_download_each_payload_once(trainer, open_ranks, tmp_path, monkeypatch):
    keys = []
    download = host_cache.download

    def counting(store, wanted, path) -> None:
        keys.append(wanted.key)
        download(store, wanted, path)

    monkeypatch.setattr(host_cache, "download", counting)
    servers = [open_ranks(trainer, Fused(0, 2), Fused(1, 2)) for _ in range(2)]
    for each in servers:
        for updater in each.updaters:
            updater.weights.cache = HostCache(tmp_path / "shared")
            updater.forget()
    # What they read to find out which version they serve.
    keys.clear()
    for version in (0, 1, 3):
        # The second one lags: the first has let go of the version when it begins.
        for each in servers:
            each.apply(version)
            each.spooled()
            assert serves(each, trainer.history[version])
    assert len(keys) == len(set(keys))
    assert sorted(key.partition("/")[0] for key in keys) == ["anchors", *["deltas"] * 3, *["states"] * 3]


def test_deltas_of_a_folder_on_this_host_are_not_copied_to_another(ranks, updater, trainer):
    ranks.stage(2)
    kept = updater.staged
    assert ranks.spooled() == []
    # What is staged is of no file: the folder may change.
    for each in (1, 2):
        for payload in history.read_manifest(trainer.store, each).delta.payloads:
            trainer.store.put(payload.key, b"")
    ranks.write()
    updater.accept()
    assert kept.manifest.version == 2
    assert serves(ranks, trainer.history[2])
    ranks.one.forget()
    with pytest.raises(CorruptObject, match="has 0"):
        ranks.stage(2)


@pytest.mark.parametrize("is_written", [True, False])
def test_what_was_staged_is_let_go_also_while_another_version_is_being_fetched(ranks, updater, is_written):
    fetched = threading.Event()
    updater.background.submit(fetched.wait, 60)
    try:
        ranks.stage(2)
        change = updater.staged.change
        parts = [each for _, each in change.parts] if hasattr(change, "parts") else change.scatters.values()
        held = [weakref.ref(each.new) for each in parts]
        assert held
        del change, parts
        if is_written:
            ranks.write()
            updater.accept()
        else:
            updater.drop()
        gc.collect()
        assert not any(each() is not None for each in held)
    finally:
        fetched.set()
