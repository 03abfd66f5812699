"""A checkpoint folder that is kept at a version."""

import errno
import os
import shutil
import stat
import threading
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest
import torch

from patchstore import Publisher, replay
from patchstore.bucket import history
from patchstore.errors import (
    ConsumerFailed,
    HostError,
    PatchstoreError,
    StoreReplaced,
    StoreUnavailable,
    UsageError,
    VersionNotFound,
)
from patchstore.follow.loop import Loop, LoopSettings
from patchstore.ops.mirror import build, service
from patchstore.ops.mirror.place import Place
from patchstore.ops.mirror.service import Command, Mirror
from patchstore.read import download
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.weights import Run, assert_same_bits, loaded


def names(folder: Path) -> set[str]:
    """The folders of a mirror, and whatever was left behind; not its own files."""
    return {each.name for each in folder.iterdir()} - {"mirror.json", ".lock", "current"}


def step(mirror: Mirror) -> list[tuple[str, int | None]]:
    return [(event.outcome, event.version) for event in mirror.work()]


class Recording(Command):
    """Remembers what it was told, and refuses as often as told."""

    def __init__(self, refuse: int = 0) -> None:
        super().__init__("true", timeout_s=1)
        self.told: list[dict[str, str]] = []
        self.refuse = refuse

    def tell(self, values: Mapping[str, str], stop: threading.Event) -> None:
        if self.refuse:
            self.refuse -= 1
            raise ConsumerFailed("refused")
        self.told.append(dict(values))


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
        # Version 5 changes nothing, and one step passes over 6 and 7.
        if version != 5:
            run.train()
        run.publish(version)
        if version in {6, 7}:
            continue
        assert step(mirror) == [("mirrored", version)]
        assert_is(folder, run, version)
        assert step(mirror) == []
        # No one writes to it by mistake.
        modes = {stat.S_IMODE(each.stat().st_mode) for each in (folder / "current").iterdir()}
        assert modes == {0o444}
        # The present one, and the one before for those who read it still.
        assert len(names(folder)) == min(2, version + 1)
    assert str((folder / "current").readlink()) == "00000009"
    assert len(list((folder / "current").glob("*.safetensors"))) > 1


def test_a_new_version_fetches_the_delta_and_not_the_anchor(run: Run, folder, mirrored) -> None:
    run.publish_versions(3)
    store = FaultyStore(run.store)
    mirror = mirrored(store=store)
    step(mirror)
    run.publish(3)
    store.calls.clear()
    (event,) = mirror.work()
    manifest = history.read_manifest(run.store, 3)
    assert event.num_bytes == manifest.delta.num_bytes
    assert not [key for _, key in store.calls if key.startswith("anchors/")]
    assert_is(folder, run, 3)


def test_a_mirror_of_adapters_is_a_folder_of_peft(tmp_path: Path) -> None:
    config, store = tmp_path / "config", MemoryStore()
    config.mkdir()
    (config / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    tensors = {f"base_model.model.q.lora_{name}.weight": torch.randn(300, 40) for name in "AB"}
    with (
        Publisher(store, tensors, adapter="default", files=config) as publisher,
        closing(Place(tmp_path / "mirror")) as place,
    ):
        mirror = Mirror(store=store, place=place)
        for version in range(2):
            publisher.publish_patch(version).result()
            assert step(mirror) == [("mirrored", version)]
            assert_same_bits(loaded(tmp_path / "mirror" / "current"), tensors)
            found = {each.name for each in (tmp_path / "mirror" / "current").iterdir()}
            assert found == {"adapter_config.json", "adapter_model.safetensors"}
            tensors["base_model.model.q.lora_A.weight"][3] += 1


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


# Killed, spoiled, full.


class Killed(BaseException):
    """The process is gone."""


@pytest.mark.parametrize(
    "at", ["begin", "write", "full", "flush", "rename", "switch", "after switch", "prune"]
)
def test_killed_at_any_point_or_without_room_it_goes_on_and_readers_see_one_version(
    run: Run, folder, mirrored, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.publish(0)
    run.train()
    mirror = mirrored(keep=0 if at == "prune" else None)
    step(mirror)
    run.publish(1)

    def die(*_: object, **__: object) -> None:
        raise Killed

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    rename, switch = Path.rename, Place.switch
    points = {
        "begin": (build, "unfinished", die),
        "write": (build, "write_at", die),
        "full": (build, "write_at", full),
        "flush": (download, "flush", die),
        "rename": (Path, "rename", lambda path, to: (die if "partial" in path.name else rename)(path, to)),
        "switch": (Place, "switch", die),
        "after switch": (Place, "switch", lambda place, to: (switch(place, to), die())),
        "prune": (shutil, "rmtree", die),
    }
    with monkeypatch.context() as patch:
        if at != "full":
            # A killed process removes nothing.
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        patch.setattr(*points[at])
        says = "No space left.*; make room" if at == "full" else None
        with pytest.raises(HostError if at == "full" else Killed, match=says):
            step(mirror)
    assert_is(folder, run, 1 if at in {"after switch", "prune"} else 0)
    assert at != "full" or names(folder) == {"00000000"}
    again = mirror if at == "full" else mirrored(keep=0)
    step(again)
    assert_is(folder, run, 1)
    run.train()
    run.publish(2)
    step(again)
    assert_is(folder, run, 2)
    assert names(folder) == ({"00000001", "00000002"} if at == "full" else {"00000002"})


@pytest.mark.parametrize("what", ["bit", "truncated", "removed", "added", "config", "index"])
def test_a_folder_that_was_spoiled_while_no_process_ran_is_made_anew(
    run: Run, folder, mirrored, what: str
) -> None:
    run.publish_versions(2)
    step(mirrored())
    spoil(folder / "00000001", what)
    accepted = Recording()
    assert step(mirrored(commands=[accepted])) == [("mirrored", 1)]
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


@pytest.mark.parametrize(
    ("what", "is_hidden"), [("bit", False), ("removed", False), ("config", False), ("bit", True)]
)
def test_a_folder_that_was_changed_meanwhile_is_not_used_further(
    run: Run, folder, mirrored, monkeypatch, what: str, is_hidden: bool
) -> None:
    if is_hidden:
        # Time and size do not show it, and the digest does.
        monkeypatch.setattr(service, "stats", lambda _: {})
    mirror = mirrored()
    run.publish_versions(2)
    step(mirror)
    spoil(folder / "00000001", what)
    run.publish(2)
    step(mirror)
    assert_is(folder, run, 2)


@pytest.mark.parametrize("seed", range(6))
def test_over_a_store_that_fails_it_arrives(run: Run, folder, mirrored, seed: int) -> None:
    store = FaultyStore(
        run.store,
        Fault(verb="get", effect="fail-before", times=None, chance=0.1),
        Fault(verb="get", key="*/*/*", effect="flip", times=None, chance=0.1),
        seed=seed,
    )
    mirror = mirrored(store=store)
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
    mirror = mirrored(commands=[one, other])
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
    step(mirrored(commands=[one, other]))
    assert len(one.told) == 1


def test_a_version_that_is_refused_is_told_again_and_the_accepted_folder_stays(
    run: Run, folder, mirrored
) -> None:
    consumer = Recording()
    run.publish(0)
    step(mirrored(commands=[consumer]))
    mirror = mirrored(commands=[consumer])
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
        step(mirrored(commands=[consumer]))
    assert step(mirrored(commands=[consumer])) == []
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


def test_a_bucket_that_holds_another_run_now_is_refused(run: Run, folder) -> None:
    run.publish_versions(2)
    run.close()
    with closing(Place(folder)) as place:
        list(Mirror(run.store, place).work())
    other = MemoryStore("memory://other")
    with Publisher(other, {"w": torch.zeros(3)}) as publisher:
        publisher.publish_patch(0).result()
    with (
        closing(Place(folder)) as place,
        pytest.raises(StoreReplaced, match=f"{folder} was left as it was: name another folder"),
    ):
        list(Mirror(other, place).work())
    assert_is(folder, run, 1)


def test_where_the_version_that_it_has_was_replaced_it_takes_the_newest_from_its_anchor(
    run: Run, folder, mirrored
) -> None:
    run.publish_versions(2)
    before = {key: run.store.get(key) for key in run.store.list()}
    run.publish(2)
    run.close()
    mirror = mirrored()
    assert step(mirror) == [("mirrored", 2)]
    # The bucket is set back to version 1, and the run goes on from there.
    for key in list(run.store.list()):
        run.store.delete(key)
    for key, data in before.items():
        run.store.put(key, data)
    run.go_back(1)
    run.open(resume=True)
    run.train()
    run.publish(3)
    assert step(mirror) == [("mirrored", 3)]
    assert_is(folder, run, 3)


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
    loop = Loop("mirror", run.store, LoopSettings())
    assert loop.describe()["problems"] == []
    loop.watch_head(mirror.is_head_old)
    assert loop.describe()["problems"] == [{"problem": "old-head"}]
