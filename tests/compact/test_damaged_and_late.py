"""What is damaged is made anew, and a record never names payloads that a collector deleted."""

from datetime import UTC, datetime, timedelta

import pytest

from patchstore.bucket import history, lineage, shortcuts
from patchstore.bucket.notes import Began
from patchstore.bucket.records import Ends
from patchstore.bucket.shortcuts import TooLate
from patchstore.errors import AlreadyExists
from patchstore.ops.compact import build
from patchstore.ops.compact.service import Compactor
from patchstore.ops.retention import Retention, collect, retire
from patchstore.read.rebuild import check_anchor
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import FaultyStore
from tests.support.copies import before, copy_of, copy_of_run, long_run
from tests.support.damage import Damage, flip, garble, payload_of, record_of, remove, rename, truncate
from tests.support.weights import Run

HEAD, EVERY = 40, 16
ANCHOR, OLD_ANCHOR = Ends(32, None), Ends(16, None)


@pytest.fixture(scope="module")
def made() -> Run:
    return long_run(MemoryStore(), HEAD + 1)


@pytest.fixture
def plain(made: Run) -> Run:
    """Versions 0 to 40 without shortcuts, in a store of its own."""
    return copy_of_run(made)


@pytest.fixture
def run(plain: Run) -> Run:
    compacted(plain.store)
    return plain


def compacted(store: Store) -> list[Ends]:
    return [each for done in Compactor(store, anchor_every=EVERY).compact() for each in done.added]


def assert_anchor(run: Run, ends: Ends) -> None:
    header = history.read_header(run.store)
    assert header is not None
    check_anchor(run.store, header, shortcuts.read(run.store, ends).way)


def assert_readers(run: Run) -> None:
    for held in (None, 3, 17):
        run.assert_reached(HEAD, held)


# Damage.


ROLLUPS = [Ends(16, 0), Ends(24, 16)]


@pytest.mark.parametrize(
    ("damage", "damaged"),
    [
        *((each, [ANCHOR]) for each in (flip, truncate, remove, garble, rename)),
        *((each, ROLLUPS) for each in (truncate, remove, garble)),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_what_is_damaged_is_made_anew(
    run: Run, damage: Damage, damaged: list[Ends], caplog: pytest.LogCaptureFixture
) -> None:
    for ends in damaged:
        damage(run.store, ends)
    there = shortcuts.listed(run.store)
    assert sorted(compacted(run.store), key=str) == sorted(damaged, key=str)
    for ends in damaged:
        assert f"{record_of(ends)} of memory:// is damaged" in caplog.text
    assert shortcuts.listed(run.store) == there
    assert_anchor(run, ANCHOR)
    assert lineage.read(run.store, HEAD).plan().over >= {ANCHOR}
    assert_readers(run)
    assert compacted(run.store) == []


def test_a_damaged_rollup_that_is_not_made_again_is_deleted(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "WORTH", 0.0)
    remove(run.store, Ends(24, 16))
    assert compacted(run.store) == []
    assert Ends(24, 16) not in shortcuts.listed(run.store)
    assert_readers(run)


def test_an_older_anchor_is_found_damaged_when_something_is_made_from_it(run: Run) -> None:
    flip(run.store, OLD_ANCHOR)
    assert compacted(run.store) == []
    # The segment from 16 to 32 lacks a rollup.
    run.store.delete(record_of(Ends(32, 16)))
    run.store.delete(record_of(ANCHOR))
    assert {OLD_ANCHOR, ANCHOR, Ends(32, 16)} <= set(compacted(run.store))
    assert_anchor(run, OLD_ANCHOR)


def test_each_shortcut_is_looked_at_once(run: Run) -> None:
    store = FaultyStore(run.store)
    compactor = Compactor(store, anchor_every=EVERY)
    assert list(compactor.compact()) == []
    assert [key for verb, key in store.calls if verb == "get" and key.startswith("anchors/")]
    store.calls.clear()
    assert list(compactor.compact()) == []
    assert not [key for _, key in store.calls if key.startswith(("anchors/", "deltas/")) or "-from-" in key]


def test_a_damaged_anchor_that_cannot_be_replaced_stays(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    retire(run.store, Retention(keep_last=3), dry_run=False)
    collect(run.store, dry_run=False, clock=lambda: datetime.now(UTC) + timedelta(hours=25))
    assert shortcuts.listed(run.store) == {ANCHOR}
    record = run.store.get(record_of(ANCHOR))
    key = payload_of(run.store, ANCHOR)
    data = run.store.get(key)
    flip(run.store, ANCHOR)
    assert compacted(run.store) == []
    assert "is damaged" in caplog.text
    assert run.store.get(record_of(ANCHOR)) == record
    # A backup of the object is all that it takes.
    run.store.put(key, data)
    assert_anchor(run, ANCHOR)


# Too late.


class Slept:
    """A clock that jumps, and a store where a process sleeps before it creates a record."""

    def __init__(self, inner: Store, key: str, *, before_put: bool) -> None:
        self.hours = 0
        self.num_deleted = 0
        slept = self

        class Sleeps(FaultyStore):
            def upload(self, wanted: str, *args: object, **options: object) -> None:
                super().upload(wanted, *args, **options)  # type: ignore[arg-type]
                if not before_put and wanted.startswith("anchors/00000032"):
                    slept.sleep(inner)

            def put(self, wanted: str, data: bytes, *, if_absent: bool = False) -> None:
                if before_put and wanted == key:
                    slept.sleep(inner)
                super().put(wanted, data, if_absent=if_absent)

        self.store = Sleeps(inner)

    def clock(self) -> datetime:
        return datetime.now(UTC) + timedelta(hours=self.hours)

    def sleep(self, inner: Store) -> None:
        """Two days pass, on each of which a collector runs."""
        if self.hours:
            return
        for _ in range(2):
            self.hours += 27
            self.num_deleted += collect(inner, dry_run=False, clock=self.clock).num_unnamed


@pytest.mark.parametrize("before_put", [True, False], ids=["in-the-put", "before-the-look"])
def test_a_compactor_that_slept_stores_its_anchor_anew(plain: Run, before_put: bool) -> None:
    slept = Slept(plain.store, record_of(ANCHOR), before_put=before_put)
    done = list(Compactor(slept.store, anchor_every=EVERY, clock=slept.clock).compact())
    assert slept.num_deleted
    assert ANCHOR in {each for some in done for each in some.added}
    for ends in shortcuts.listed(plain.store):
        assert not shortcuts.absent(plain.store, shortcuts.read(plain.store, ends).payloads)
    assert_anchor(plain, ANCHOR)
    assert_readers(plain)


def test_a_record_is_not_created_for_payloads_of_yesterday(plain: Run) -> None:
    source = copy_of(plain.store)
    compacted(source)
    hours = 0
    began = Began(lambda: datetime.now(UTC) + timedelta(hours=hours))
    record = source.get(record_of(ANCHOR))
    for payload in shortcuts.read(source, ANCHOR).payloads:
        plain.store.put(payload.key, source.get(payload.key))
    hours = 24
    with pytest.raises(TooLate, match="more than a day ago"):
        shortcuts.put(plain.store, ANCHOR, record, began)
    assert not shortcuts.listed(plain.store)
    hours = 23
    assert shortcuts.put(plain.store, ANCHOR, record, began)


def test_a_clock_that_was_set_back_hides_no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    began = Began(lambda: datetime(2026, 1, 1, tzinfo=UTC))
    assert not began.is_too_old
    import time

    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 24 * 3600 + 1)
    assert began.is_too_old


def test_a_record_of_another_process_is_not_withdrawn(run: Run) -> None:
    """Its payloads serve as well, and this one's are deleted."""

    def taken() -> None:
        raise AlreadyExists(record_of(ANCHOR))

    record = run.store.get(record_of(ANCHOR))
    store = before(run.store, "put", record_of(ANCHOR), taken)
    assert not shortcuts.put(store, ANCHOR, record + b" ", Began())
    assert run.store.get(record_of(ANCHOR)) == record
