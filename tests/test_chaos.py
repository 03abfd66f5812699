"""The benchmark `chaos` with a stand-in for vLLM: real processes, real kills, and what it must notice."""

import argparse
import json
import queue
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.cases import chaos
from benchmarks.cases.chaos import Chaos
from benchmarks.chaos.journal import Journal
from benchmarks.chaos.log_chain import is_one_chain
from benchmarks.support.killable_program import Part
from patchstore import Publisher, open_store
from patchstore.stores import Store, layout
from tests.support.beside import is_running


def arguments(folder: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    chaos.arguments(parser)
    return parser.parse_args(["--stub", "--folder", str(folder), "--publish-s", "0.5", *more])


@pytest.fixture(autouse=True)
def _sigterm_as_it_was() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def running(folder: Path) -> list[str]:
    """Command lines of the processes that name a folder in them."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = place.read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(folder) in line:
            found.append(line)
    return found


@pytest.mark.exhaustive
def test_after_kills_of_each_part_all_is_there_and_nothing_runs_any_more(tmp_path: Path) -> None:
    (row,) = chaos.run(arguments(tmp_path, "--minutes", "0.1", "--every-s", "0.5"))
    assert row["failed"] == []
    assert len(row["proved"]) == 9
    assert min(row[f"{part}_kills"] for part in ("trainer", "server", "follow")) >= 1
    assert row["kills"] == sum(row[f"{part}_kills"] for part in ("trainer", "server", "follow"))
    assert row["versions"] > row["acknowledged"] > 0
    assert row["applied"] > 0
    assert running(tmp_path) == []
    assert [*tmp_path.iterdir()] == []
    json.dumps(row)


@pytest.mark.exhaustive
def test_a_spoilt_version_and_one_that_only_the_trainer_knows_are_not_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(self: Chaos, deadline: float) -> None:
        self._wait("a few are served", lambda: max(self._journal.applied) > 2)
        delta = next(key for key in self._store.list("deltas/00000001-"))
        data = bytearray(self._store.get(delta))
        data[-1] ^= 1
        self._store.put(delta, bytes(data))
        self._journal.stored[100_000] = "blake3:0"

    monkeypatch.setattr(Chaos, "kill_until", spoil)
    rows = chaos.run(arguments(tmp_path))
    assert next(rows)["failed"] == [
        "every version can be rebuilt",
        "every version said to be stored has the trainer's weights",
    ]
    with pytest.raises(SystemExit, match="not so: every version can be rebuilt"):
        next(rows)


@pytest.mark.exhaustive
def test_an_interrupted_run_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def interrupt(self: Chaos, deadline: float) -> None:
        seen.extend(running(tmp_path))
        raise KeyboardInterrupt

    monkeypatch.setattr(Chaos, "kill_until", interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(chaos.run(arguments(tmp_path)))
    assert any("benchmarks.chaos.trainer" in line for line in seen)
    assert running(tmp_path) == []
    assert [*tmp_path.iterdir()] == []


@pytest.mark.exhaustive
def test_a_part_that_ends_by_itself_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sabotage(self: Chaos, deadline: float) -> None:
        self._follow.ask_to_end()
        self._wait("nothing", lambda: False)

    monkeypatch.setattr(Chaos, "kill_until", sabotage)
    with pytest.raises(RuntimeError, match="follow-0 ended with status"):
        next(chaos.run(arguments(tmp_path)))
    assert running(tmp_path) == []


FAMILY = """
import mmap, os, sys, time
with open(sys.argv[1], "xb+") as file:
    file.truncate(100)
    shared = mmap.mmap(file.fileno(), 100)
if os.fork() == 0:
    os.setpgid(0, 0)
os.write(1, b'{"me": %d}\\n' % os.getpid())
time.sleep(600)
"""


def test_a_kill_leaves_neither_children_of_other_groups_nor_shared_memory(tmp_path: Path) -> None:
    shared = Path("/dev/shm", f"patchstore-{uuid.uuid4().hex}")
    heard: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    part = Part(
        "family",
        [sys.executable, "-c", FAMILY, str(shared)],
        tmp_path,
        life_s=60,
        environment={},
        hear=lambda number, message: heard.put((number, message["me"])),
    )
    processes = set()
    for expected in (0, 0, 1, 1):
        if not processes or part.number != expected:
            part.kill()
            part.start()
        number, process = heard.get(timeout=60)
        assert number == expected
        assert is_running(process)
        processes.add(process)
    part.check_alive()
    part.kill()
    assert len(processes) == 4
    assert not any(map(is_running, processes))
    assert not shared.exists()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Versions 0 to 3."""
    store = open_store(tmp_path / "bucket")
    weights = {"w": torch.zeros(10)}
    with Publisher(store, weights) as publisher:
        for step in range(4):
            weights["w"][step] += 1
            publisher.publish_patch(step).result()
    return store


def rewritten(store: Store) -> None:
    key = layout.manifest_key(1)
    store.put(key, store.get(key).replace(b'"step":1', b'"step":9').replace(b'"step": 1', b'"step": 9'))


def forked(store: Store) -> None:
    weights = {"w": torch.zeros(10)}
    weights["w"][:2] += 1
    with Publisher(store, weights, resume=1):
        pass


@pytest.mark.parametrize(
    ("change", "head", "is_chain"),
    [
        (lambda store: None, 3, True),
        (lambda store: None, 2, False),
        (lambda store: None, 4, False),
        (lambda store: store.delete(layout.manifest_key(1)), 3, False),
        # A manifest that is not the one its child names.
        (rewritten, 3, False),
        (forked, 4, False),
    ],
)
def test_a_log_is_one_chain_up_to_its_head_only(
    store: Store, change: Callable[[Store], object], head: int, is_chain: bool
) -> None:
    change(store)
    assert is_one_chain(store, head) == is_chain


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Part, Part]:
    """A trainer and a server that were not started."""
    trainer, server = (
        Part(name, ["true"], tmp_path, life_s=1, environment={}) for name in ("trainer", "server")
    )
    return trainer, server


def test_recovery_from_a_kill_is_a_later_word_of_a_later_process(parts: tuple[Part, Part]) -> None:
    journal, (trainer, server) = Journal(), parts
    trainer.number = 2
    journal.killed(trainer, at=0.0, head=7)
    journal.trainer_said(2, {"version": 7, "state": "a"})
    assert len(journal.open_kills()) == 1
    journal.trainer_said(3, {"version": 9, "state": "b"})
    assert journal.open_kills() == []

    journal.killed(server, at=0.0, head=9)
    journal.follow_said(0, {"event": "failed", "version": 10})
    journal.follow_said(0, {"event": "applied", "version": 9})
    assert len(journal.open_kills()) == 1
    journal.follow_said(0, {"event": "applied", "version": 10})
    assert journal.open_kills() == []
    assert [len(journal.recover_s(victim)) for victim in ("trainer", "server", "follow")] == [1, 1, 0]
    assert (journal.stored, journal.applied, journal.twice) == ({7: "a", 9: "b"}, [9, 10], [])


def test_kills_that_meet_are_not_timed(parts: tuple[Part, Part]) -> None:
    journal, (trainer, server) = Journal(), parts
    journal.killed(trainer, at=0.0, head=7)
    journal.killed(server, at=1.0, head=7)
    journal.trainer_said(0, {"version": 8, "state": "a"})
    journal.follow_said(0, {"event": "applied", "version": 8})
    assert journal.open_kills() == []
    assert journal.recover_s("trainer") == journal.recover_s("server") == []
