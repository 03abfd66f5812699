"""Objects of others in a run's place: no command reads, deletes or stops at them."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs

from patchstore import verify
from patchstore.bucket import notes
from patchstore.bucket.notes import CLOCK_MARGIN
from patchstore.ops.compact.service import Compactor
from patchstore.ops.replicate.service import replicate
from patchstore.ops.retention import Retention, collect, retire, tag
from patchstore.stores import layout
from patchstore.stores.base import Store
from patchstore.stores.folder import FolderStore
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import FaultyStore
from tests.retention.kept_runs import assert_rebuilt, later, new_run
from tests.stores.s3_server import key_of

NAMED_LIKE_KEYS = (
    "README.md",
    "results.json",
    "notes/2026/january.md",
    "versions/notes.txt",
    "versions/12.json",
    "versions/00000001.json.bak",
    "versions/99999999999999999999.json",
    "anchors/readme",
    "anchors/00000000-before-the-crash/model.safetensors",
    "anchors/00000001-0123456789abcdef/notes/model.safetensors",
    "deltas/00000001/stray",
    "deltas/00000001-0123456789abcdef/notes.txt",
    "deltas/00000001-0123456789ABCDEF/00001-of-00001.safetensors",
    "pieces/00000001-mine/00001.safetensors",
    "states/00000001.sums",
    "states/00000001-mine.sums",
    "shortcuts/notes.json",
    "shortcuts/00000001-from-00000002.json",
    "signatures/key.pub",
    "retired/other.json",
    "retired/99999999999999999999.json",
    "tags/.DS_Store",
    "tags/12/00000000.json",
    "reservations/notes.txt",
    "unnamed/new/00000000.json",
    "probes/mine",
)
ODD = ("my notes.txt", "übung.md", "tags/\x1b[31mRED\x1b[0m.json", "\x1b]0;pwn\x07.txt", "versions/a b.json")
FOLDERS = ("tags", "reservations", "retired", "unnamed", "versions", "shortcuts", "deltas")
MARKERS = ("", "a//b", "/x", *(f"{folder}/" for folder in FOLDERS))
"""Which only object stores can have; web consoles make folders so."""

Put = Callable[[str, bytes], None]
Place = tuple[Store, Put, Callable[[], set[str]]]
of_each_kind = pytest.mark.parametrize(
    "any_store", ["s3fs", "obstore", "fsspec", "folder", "memory"], indirect=True
)


@pytest.fixture
def place(any_store: Store, s3_options: dict[str, Any]) -> Iterator[Place]:
    """A store, how others put objects there under any name, and all names that are there."""
    if isinstance(any_store, MemoryStore):
        yield any_store, any_store.put, lambda: {*any_store.list()}
        return
    if isinstance(any_store, FolderStore):
        yield _of_a_folder(any_store)
        return
    fs = s3fs.S3FileSystem(**s3_options, skip_instance_cache=True)
    prefix = key_of(any_store.url, "")

    def names() -> set[str]:
        page = fs.call_s3("list_objects_v2", Bucket="bucket", Prefix=prefix)
        assert not page["IsTruncated"]
        return {each["Key"].removeprefix(prefix) for each in page["Contents"]}

    yield (
        any_store,
        lambda name, data: fs.call_s3("put_object", Bucket="bucket", Key=prefix + name, Body=data),
        names,
    )
    fs.close_session(fs.loop, fs.s3)


def _of_a_folder(store: FolderStore) -> Place:
    root = Path(store.url)

    def put(name: str, data: bytes) -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def names() -> set[str]:
        files = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
        return {name for name in files if not name.startswith(".tmp/")}

    return store, put, names


def foreign_names(store: Store) -> list[str]:
    if isinstance(store, MemoryStore):
        return [*NAMED_LIKE_KEYS]
    if isinstance(store, FolderStore):
        return [*NAMED_LIKE_KEYS, *ODD, "latin-\udce9.txt"]
    return [*NAMED_LIKE_KEYS, *ODD, *MARKERS]


@of_each_kind
def test_a_listing_has_keys_alone(place: Place) -> None:
    store, put, names = place
    store.put("versions/00000000.json", b"")
    for name in (foreign := foreign_names(store)):
        put(name, b"")
    assert names() == {"versions/00000000.json", *foreign}
    expected = {"versions/00000000.json", *NAMED_LIKE_KEYS}
    assert list(store.list()) == sorted(expected)
    for prefix in ("versions/", "tags/", "a", "m"):
        assert list(store.list(prefix)) == sorted(key for key in expected if key.startswith(prefix))


@of_each_kind
def test_no_command_reads_deletes_or_stops_at_an_object_of_others(place: Place, tmp_path: Path) -> None:
    store, put, names = place
    run = new_run(store, 12)
    foreign = foreign_names(store)
    for name in foreign:
        put(name, b"not JSON" * 200_000 if name == "results.json" else b"{}")
    watched = FaultyStore(store)
    hours = 24.1 + CLOCK_MARGIN.total_seconds() / 3600

    tag(watched, "best", 11)
    retire(watched, Retention(keep_last=1), dry_run=False)
    list(Compactor(watched, anchor_every=4).compact())
    assert collect(watched, dry_run=False).num_objects == 0
    found = collect(watched, dry_run=False, clock=later(hours))
    assert found.num_objects
    assert found.num_unnamed == found.num_noted == 0
    assert collect(watched, dry_run=False, clock=later(2 * hours)).num_objects == 0
    assert notes.read_tags(watched).keys() == {"best"}
    verify(watched)
    list(replicate(watched, MemoryStore("memory://replica"), threading.Event()))
    run.publish_and_close(1, resume="auto")
    assert_rebuilt(run, [11, max(run.history)], tmp_path)

    assert set(foreign) <= names()
    assert {key for verb, key in watched.calls if verb != "list"}.isdisjoint(foreign)


def test_twenty_thousand_objects_of_others_cost_no_read() -> None:
    store = MemoryStore()
    new_run(store, 6)
    for number in range(20_000):
        store.put(f"results/{number:05d}.json", b"{}")
    retire(store, Retention(keep_last=1), dry_run=False)
    watched = FaultyStore(store)
    assert collect(watched, dry_run=False, clock=later(25)).num_objects
    assert len(watched.calls) < 100
    assert sum(key.startswith("results/") for key in store.list()) == 20_000


@of_each_kind
def test_a_place_with_notes_among_the_versions_holds_no_run_yet(place: Place) -> None:
    store, put, _ = place
    put("versions/notes.txt", b"the runs of 2026")
    run = new_run(store, 1)
    assert [*run.history] == [0]
    assert layout.HEADER in set(store.list())
