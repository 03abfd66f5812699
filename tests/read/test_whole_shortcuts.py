"""`verify --all` reads every shortcut, and says which are damaged and what to do."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from patchstore import open_store
from patchstore.bucket import history, shortcuts
from patchstore.bucket.records import Ends
from patchstore.cli.main import app
from patchstore.cli.output import EXIT_CODES
from patchstore.errors import DataError, StoreUnavailable
from patchstore.ops.compact.service import Compactor
from patchstore.read import whole_run
from patchstore.read.whole_run import Verdict, WholeRun
from patchstore.stores import Store
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.copies import long_run
from tests.support.damage import flip, forge, garble, record_of, remove, rename

HEAD, EVERY = 40, 16
ANCHOR, ROLLUP = Ends(16, None), Ends(32, 16)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of versions 0 to 40, of which 0 has the only anchor of its own, and shortcuts."""
    folder = tmp_path_factory.mktemp("made") / "bucket"
    store = open_store(str(folder))
    long_run(store, HEAD + 1, EVERY)
    assert {ANCHOR, ROLLUP} <= shortcuts.listed(store)
    store.close()
    return folder


@pytest.fixture
def bucket(made: Path, tmp_path: Path) -> Path:
    """A copy of them."""
    return Path(shutil.copytree(made, tmp_path / "bucket"))


@pytest.fixture
def store(bucket: Path) -> Store:
    return open_store(str(bucket))


def verified(store: Store) -> tuple[WholeRun, list[Verdict]]:
    header = history.run_header(store)
    whole = WholeRun(store, header, HEAD)
    return whole, list(whole.verify())


@pytest.mark.parametrize("at_once", [3, 64])
def test_shortcuts_that_are_right(store: Store, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(whole_run, "DELTAS_AT_ONCE", at_once)
    watched = FaultyStore(store)
    whole, verdicts = verified(watched)
    assert whole.wrong == {}
    assert whole.num_shortcuts == len(shortcuts.listed(store))
    assert not any(each.error for each in verdicts)
    read = [key for verb, key in watched.calls if verb in {"get", "read"}]
    for ends in shortcuts.listed(store):
        for payload in shortcuts.read(store, ends).payloads:
            assert read.count(payload.key) == 1, payload.key


@pytest.mark.parametrize("at_once", [3, 64])
@pytest.mark.parametrize("damage", [flip, remove, garble, rename, forge], ids=lambda each: each.__name__)
@pytest.mark.parametrize("ends", [ANCHOR, ROLLUP], ids=str)
def test_each_damaged_shortcut_is_named_and_no_version_is(
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    ends: Ends,
    damage: Callable[[Store, Ends], None],
    at_once: int,
) -> None:
    monkeypatch.setattr(whole_run, "DELTAS_AT_ONCE", at_once)
    damage(store, ends)
    whole, verdicts = verified(store)
    assert whole.wrong.keys() == {ends}
    assert isinstance(whole.wrong[ends], DataError)
    assert not any(each.error for each in verdicts)


def test_a_damaged_version_is_not_blamed_on_shortcuts(store: Store) -> None:
    key = history.read_manifest(store, 16).delta.payloads[0].key  # type: ignore[union-attr]
    data = store.get(key)
    store.put(key, data[:-1] + bytes([data[-1] ^ 1]))
    whole, verdicts = verified(store)
    assert {each.version for each in verdicts if each.error} == set(range(16, HEAD + 1))
    assert whole.wrong == {}


def test_a_store_that_does_not_answer_is_no_damage(store: Store) -> None:
    key = shortcuts.read(store, ROLLUP).payloads[0].key
    faulty = FaultyStore(store, Fault(verb="*", key=key, effect="fail-before", times=None))
    with pytest.raises(StoreUnavailable):
        verified(faulty)


def test_the_command_says_what_to_do_and_that_is_enough(bucket: Path, store: Store) -> None:
    flip(store, ANCHOR)
    garble(store, ROLLUP)
    num_all = len(shortcuts.listed(store))
    done = CliRunner().invoke(app, ["verify", str(bucket), "--all"])
    assert done.exit_code == EXIT_CODES[DataError]
    assert f"{HEAD + 1} of {HEAD + 1} versions verified" in done.output
    assert f"{num_all - 2} of {num_all} shortcuts verified" in done.output
    for ends in (ANCHOR, ROLLUP):
        assert record_of(ends) in done.output
    assert "delete this record and run `patchstore compact`" in done.output
    done = CliRunner().invoke(app, ["verify", str(bucket), "--all", "--json"])
    assert done.exit_code == EXIT_CODES[DataError]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    damaged = [each for each in lines if "shortcut" in each]
    assert [each["shortcut"] for each in damaged] == [record_of(ANCHOR), record_of(ROLLUP)]
    assert all(each["error"]["kind"] == "corrupt-object" and not each["verified"] for each in damaged)
    for ends in (ANCHOR, ROLLUP):
        store.delete(record_of(ends))
    list(Compactor(store, anchor_every=EVERY).compact())
    done = CliRunner().invoke(app, ["verify", str(bucket), "--all"])
    assert done.exit_code == 0, done.output
    # Of versions between two anchors no rollup is made again.
    assert shortcuts.listed(store) >= {ANCHOR}
    assert f"{num_all - 1} of {num_all - 1} shortcuts verified" in done.output
