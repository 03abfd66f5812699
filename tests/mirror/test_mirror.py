"""A checkpoint folder that is kept at a version."""

import errno
import os
import stat
import threading
from pathlib import Path

import pytest
import torch
from mirrors import Recording, loaded, step

from patchstore import Publisher, replay
from patchstore.errors import (
    ConsumerFailed,
    CorruptObject,
    HostError,
    PatchstoreError,
    StoreReplaced,
    StoreUnavailable,
    UsageError,
    VersionNotFound,
)
from patchstore.format import history
from patchstore.mirror import build, service
from patchstore.mirror.place import Place
from patchstore.mirror.service import Mirror
from patchstore.serve.progress import Progress
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.weights import Run, assert_same_bits


def names(folder: Path) -> set[str]:
    """The folders of a mirror, and whatever was left behind; not its own files."""
    return {each.name for each in folder.iterdir()} - {"mirror.json", ".lock", "current"}


def assert_is(folder: Path, run: Run, version: int) -> None:
    """Fail unless the link leads to this version: its weights, and the other files of a replay."""
    assert_same_bits(loaded(folder / "current"), run.history[version])
    out = folder.parent / f"replayed-{version}-{os.urandom(4).hex()}"
    replay(run.store, version, out=out)
    found, expected = folder / "current", out
    assert {p.name for p in found.iterdir()} == {p.name for p in expected.iterdir()}
    for path in expected.iterdir():
        if not path.name.endswith(".safetensors"):
            assert (found / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_mirror_follows_the_run_bit_for_bit_through_deltas_and_anchors(run: Run, folder, mirrored) -> None:
    mirror = mirrored()
    for version in range(10):
        run.publish(version)
        run.train()
        assert step(mirror) == [("mirrored", version)]
        assert_is(folder, run, version)
        assert step(mirror) == []
        # The present one, and the one before for those who read it still.
        assert len(names(folder)) == min(2, version + 1)
    assert str((folder / "current").readlink()) == "00000009"
    assert len(list((folder / "current").glob("*.safetensors"))) > 1


def test_a_new_version_fetches_the_delta_and_not_the_anchor(run: Run, folder) -> None:
    run.publish_versions(3)
    store = FaultyStore(run.store)
    place = Place(folder)
    mirror = Mirror(store, place)
    list(mirror.work())
    run.publish(3)
    store.calls.clear()
    (event,) = mirror.work()
    manifest = history.read_manifest(run.store, 3)
    assert event.num_bytes == manifest.delta.num_bytes
    assert not [key for _, key in store.calls if key.startswith("anchors/")]
    assert_is(folder, run, 3)
    place.close()


def test_versions_in_between_are_passed_over_in_one_step(run: Run, folder, mirrored) -> None:
    mirror = mirrored()
    run.publish_versions(1)
    step(mirror)
    run.publish_versions(3)
    assert step(mirror) == [("mirrored", 3)]
    assert_is(folder, run, 3)


def test_a_pinned_mirror_stays_and_goes_back(run: Run, folder, mirrored) -> None:
    run.publish_versions(6)
    assert step(mirrored()) == [("mirrored", 5)]
    assert step(mirrored(at=2)) == [("mirrored", 2)]
    assert_is(folder, run, 2)
    # The folder of version 5 is still there, and is verified instead of made.
    (event,) = mirrored().work()
    assert (event.version, event.num_bytes) == (5, 0)
    assert_is(folder, run, 5)
    with pytest.raises(VersionNotFound):
        step(mirrored(at=17))
    assert_is(folder, run, 5)


def test_unchanged_tensors_and_files_are_taken_over(run: Run, folder, mirrored) -> None:
    mirror = mirrored()
    run.publish(0)
    step(mirror)
    before = folder / "00000000"
    run.model["scale"].add_(1.0)
    run.publish(1)
    step(mirror)
    assert_is(folder, run, 1)
    after = folder / "00000001"
    # Hard links, where nothing changed.
    assert (after / "config.json").stat().st_ino == (before / "config.json").stat().st_ino
    assert_same_bits(loaded(before), run.history[0])


def test_a_version_that_changes_nothing_is_mirrored(run: Run, folder, mirrored) -> None:
    mirror = mirrored()
    run.publish(0)
    step(mirror)
    run.publish(1)
    assert step(mirror) == [("mirrored", 1)]
    assert_is(folder, run, 1)


@pytest.mark.parametrize("is_shared", [False, True])
def test_files_are_cloned_where_the_file_system_can(
    run: Run, folder, mirrored, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def share(old: int, new: int) -> bool:
        calls.append(new)
        if is_shared:
            # As the file system would, but with blocks of their own.
            os.pwrite(new, os.pread(old, os.fstat(old).st_size, 0), 0)
        return is_shared

    monkeypatch.setattr(build, "_share", share)
    written: list[tuple[int, int]] = []
    real = build._write

    def write(file: int, at: int, data: memoryview) -> None:
        written.append((at, len(data)))
        real(file, at, data)

    mirror = mirrored()
    run.publish(0)
    step(mirror)
    # Numbers of one digit more, for which the first header has no room.
    for version in range(1, 13):
        run.train(num_changes=1)
        run.publish(10**version)
        calls.clear()
        monkeypatch.setattr(build, "_write", write)
        written.clear()
        step(mirror)
        monkeypatch.setattr(build, "_write", real)
        assert_is(folder, run, version)
    # The last one: whole blocks around one change a tensor, or all of what changed.
    sizes = sum(path.stat().st_size for path in (folder / "current").glob("*.safetensors"))
    assert calls
    assert sum(size for _, size in written) <= sizes


def test_what_is_written_covers_each_difference_and_whole_blocks_at_most(monkeypatch) -> None:
    monkeypatch.setattr(build, "_PIECE_BYTES", 10_000)
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        size, start = int(torch.randint(1, 60_000, (1,), generator=generator)), seed * 24
        old = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
        new = old.clone()
        at = torch.randint(0, size, (seed % 7,), generator=generator)
        new[at] ^= 1
        ranges = list(build._changed(start, old.numpy().data, new.numpy().data))
        patched = old.clone()
        for first, end in ranges:
            assert first < end
            patched[first:end] = new[first:end]
        assert torch.equal(patched, new)
        blocks = {(int(each) + start) // 4096 for each in torch.nonzero(old != new)}
        assert sum(end - first for first, end in ranges) <= 4096 * len(blocks)
        assert ranges == sorted(ranges)


# Killed, spoiled, full.


class Killed(BaseException):
    """The process is gone."""


@pytest.mark.parametrize("at", ["begin", "write", "flush", "rename", "switch", "after switch", "prune"])
def test_killed_at_any_point_it_goes_on_and_readers_see_one_version(
    run: Run, folder, mirrored, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.publish(0)
    run.train()
    step(mirrored())
    run.publish(1)
    mirror = mirrored()
    mirror._look(mirror._run(history.head(run.store)))

    def die(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        match at:
            case "begin":
                patch.setattr(build, "read_sums", die)
            case "write":
                patch.setattr(build, "_write", die)
            case "flush":
                patch.setattr(build, "flush", die)
            case "rename":
                real = Path.rename
                patch.setattr(
                    Path,
                    "rename",
                    lambda self, to: (die if self.name.endswith("partial") else real)(self, to),
                )
            case "switch":
                patch.setattr(Place, "switch", die)
            case "after switch":
                patch.setattr(Mirror, "_take", die)
            case "prune":
                patch.setattr("shutil.rmtree", die)
        # A killed process removes nothing.
        patch.setattr("patchstore.read.unfinished._remove", lambda path: None)
        if at == "prune":
            mirror._keep = 0
        with pytest.raises(Killed):
            step(mirror)
    assert_is(folder, run, 1 if at in {"after switch", "prune"} else 0)
    again = mirrored(keep=0)
    step(again)
    assert_is(folder, run, 1)
    run.train()
    run.publish(2)
    step(again)
    assert_is(folder, run, 2)
    assert names(folder) == {"00000002"}


@pytest.mark.parametrize("what", ["bit", "truncated", "removed", "added", "config", "index"])
def test_a_folder_that_was_spoiled_while_no_process_ran_is_made_anew(
    run: Run, folder, mirrored, what: str
) -> None:
    run.publish_versions(2)
    step(mirrored())
    spoil(folder / "00000001", what)
    accepted = Recording()
    assert step(mirrored(consumers=[accepted])) == [("mirrored", 1)]
    # Under another name, so that no reader that loads the old one sees both.
    assert str((folder / "current").readlink()) == "00000001-1"
    assert accepted.told[0]["folder"] == str(folder / "00000001-1")
    assert_is(folder, run, 1)


def spoil(folder: Path, what: str) -> None:
    path = max(folder.glob("*.safetensors"))
    if what == "config":
        path = folder / "config.json"
    if what == "index":
        path = folder / "model.safetensors.index.json"
    if what == "added":
        (folder / "notes.txt").write_text("hello")
        return
    data = bytearray(path.read_bytes())
    path.chmod(0o644)
    path.unlink()
    if what == "removed":
        return
    if what == "truncated":
        del data[-7:]
    else:
        data[-3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("what", ["bit", "removed", "config"])
def test_a_folder_that_was_changed_meanwhile_is_not_used_further(run: Run, folder, mirrored, what) -> None:
    mirror = mirrored()
    run.publish_versions(2)
    step(mirror)
    spoil(folder / "00000001", what)
    run.publish(2)
    step(mirror)
    assert_is(folder, run, 2)


def test_a_changed_byte_that_time_and_size_do_not_show_is_found_by_the_digest(
    run: Run, folder, mirrored, monkeypatch
) -> None:
    mirror = mirrored()
    run.publish_versions(2)
    step(mirror)
    spoil(folder / "00000001", "bit")
    mirror._stats = dict(service.stats(folder / "00000001"))
    run.publish(2)
    step(mirror)
    assert_is(folder, run, 2)


def test_nobody_writes_to_the_files_of_a_version_by_mistake(run: Run, folder, mirrored) -> None:
    run.publish_versions(2)
    mirror = mirrored()
    step(mirror)
    run.publish(2)
    step(mirror)
    for name in ("00000001", "00000002"):
        assert {stat.S_IMODE(each.stat().st_mode) for each in (folder / name).iterdir()} == {0o444}


def test_a_full_disk_leaves_what_there_was_and_says_so(run: Run, folder, mirrored, monkeypatch) -> None:
    mirror = mirrored()
    run.publish(0)
    run.train()
    step(mirror)
    run.publish(1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(build, "_write", full)
        with pytest.raises(HostError, match="No space left on device; make room there"):
            step(mirror)
    assert_is(folder, run, 0)
    assert names(folder) == {"00000000"}
    step(mirror)
    assert_is(folder, run, 1)


def test_a_corrupt_delta_leaves_what_there_was(run: Run, folder, mirrored) -> None:
    mirror = mirrored()
    run.publish(0)
    run.train()
    step(mirror)
    run.publish(1)
    key = history.read_manifest(run.store, 1).delta.payloads[0].key
    right = run.store.get(key)
    run.store.put(key, right[:-1] + bytes([right[-1] ^ 1]))
    with pytest.raises(CorruptObject):
        step(mirror)
    assert_is(folder, run, 0)
    run.store.put(key, right)
    step(mirror)
    assert_is(folder, run, 1)


@pytest.mark.parametrize("seed", range(6))
def test_over_a_store_that_fails_it_arrives(run: Run, folder, seed: int) -> None:
    store = FaultyStore(
        run.store,
        Fault(verb="get", effect="fail-before", times=None, chance=0.1),
        Fault(verb="get", key="*/*/*", effect="flip", times=None, chance=0.1),
        seed=seed,
    )
    place = Place(folder)
    mirror = Mirror(store, place)
    for version in range(6):
        run.publish(version)
        run.train()
        for _ in range(100):
            try:
                list(mirror.work())
                break
            except (StoreUnavailable, PatchstoreError):
                if version and mirror.version is not None:
                    assert_same_bits(loaded(folder / "current"), run.history[mirror.version])
        assert_is(folder, run, version)
    place.close()


def test_a_reader_of_a_folder_never_sees_a_mixture(run: Run, folder, mirrored) -> None:
    mirror = mirrored(keep=3)
    run.publish(0)
    step(mirror)
    over, wrong, seen = threading.Event(), [], set()

    def read() -> None:
        while not over.is_set():
            real = (folder / "current").resolve()
            found, version = loaded(real), int(real.name)
            seen.add(version)
            try:
                assert_same_bits(found, run.history[version])
            except AssertionError as exc:
                wrong.append(exc)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for each in readers:
        each.start()
    for version in range(1, 20):
        run.train()
        run.publish(version)
        step(mirror)
        # Until a reader has come by, so that folders that are read are not removed.
        while version not in seen:
            over.wait(0.001)
    over.set()
    for each in readers:
        each.join()
    assert wrong == []
    assert len(seen) > 15


# Whom it tells.


def test_consumers_are_told_once_of_each_version_in_their_turn(run: Run, folder, mirrored) -> None:
    run.publish_versions(2)
    one, other = Recording(), Recording()
    mirror = mirrored(consumers=[one, other])
    step(mirror)
    step(mirror)
    (told,) = one.told
    assert told == {
        "folder": str(folder / "00000001"),
        "link": str(folder / "current"),
        "version": "1",
        "step": "1",
        "run_id": run.publisher.run_id,
        "store": "memory://",
    }
    assert other.told == one.told
    # Another process does not tell again what was accepted.
    step(mirrored(consumers=[one, other]))
    assert len(one.told) == 1


def test_a_version_that_is_refused_is_told_again_and_the_accepted_folder_stays(
    run: Run, folder, mirrored
) -> None:
    consumer = Recording()
    run.publish(0)
    step(mirrored(consumers=[consumer]))
    mirror = mirrored(consumers=[consumer])
    consumer.refuse = 3
    for version in (1, 2):
        run.train()
        run.publish(version)
        with pytest.raises(ConsumerFailed):
            step(mirror)
        assert_is(folder, run, version)
        # What the consumer uses, and the present one.
        assert names(folder) == {"00000000", f"{version:08d}"}
    # Killed meanwhile: the next process tells it.
    with pytest.raises(ConsumerFailed):
        step(mirrored(consumers=[consumer]))
    assert step(mirrored(consumers=[consumer])) == []
    assert [told["version"] for told in consumer.told] == ["0", "2"]
    assert names(folder) == {"00000002"}


# What is refused.


def test_a_folder_of_something_else_is_refused_and_left_alone(run: Run, folder) -> None:
    folder.mkdir()
    (folder / "precious").write_text("x")
    with pytest.raises(UsageError, match="is not empty, and no mirror"):
        Place(folder)
    assert {each.name for each in folder.iterdir()} == {"precious"}
    with pytest.raises(UsageError, match="is no folder"):
        Place(folder / "precious")
    with pytest.raises(UsageError, match="is no folder"):
        Place(folder / "precious" / "below")


def test_a_folder_has_one_mirror_at_a_time(run: Run, folder) -> None:
    place = Place(folder)
    with pytest.raises(UsageError, match="another patchstore mirror"):
        Place(folder)
    place.close()
    Place(folder).close()


def test_a_bucket_that_holds_another_run_now_is_refused(run: Run, folder, mirrored) -> None:
    run.publish_versions(2)
    run.close()
    mirror = mirrored()
    step(mirror)
    other = MemoryStore("memory://other")
    with Publisher(other, {"w": torch.zeros(3)}) as publisher:
        publisher.publish_patch(0).result()
    place = mirror._place
    with pytest.raises(StoreReplaced, match="mirrors run"):
        list(Mirror(other, place).work())
    assert_is(folder, run, 1)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"run_id": 1, "store": "", "told": null}', "{" * 5000, "\udcff"]
)
def test_a_record_that_cannot_be_read_is_refused(folder, text: str) -> None:
    folder.mkdir()
    (folder / "mirror.json").write_text(text, errors="surrogateescape")
    with pytest.raises(UsageError, match=r"mirror\.json cannot be read"):
        Place(folder)


def test_a_newest_version_that_is_too_old_is_reported(run: Run, mirrored, caplog) -> None:
    run.publish(0)
    mirror = mirrored(max_head_age_s=3600)
    step(mirror)
    assert not mirror.is_head_old()
    mirror = mirrored(max_head_age_s=1e-9)
    step(mirror)
    step(mirror)
    assert mirror.is_head_old()
    assert sum("--max-head-age" in each.message for each in caplog.records) == 1
    progress = Progress("mirror", run.store, unhealthy_after_s=60)
    assert progress.describe()["problems"] == []
    progress.watch_head(mirror.is_head_old)
    assert progress.describe()["problems"] == [{"problem": "old-head"}]
