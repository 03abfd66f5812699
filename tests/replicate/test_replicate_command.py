"""`patchstore replicate` and `promote` as processes: what they print, how they end, and kills.

The service is tested in this process too.
"""

import fcntl
import json
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from replicas import assert_equal, assert_whole

from patchstore.errors import StoreUnavailable
from patchstore.format import history, layout
from patchstore.replicate import service
from patchstore.stores.folder import FolderStore
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.weights import Run

COMMAND = (sys.executable, "-m", "patchstore")


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """A bucket of six versions, and a place that does not exist yet."""
    run = Run(FolderStore(tmp_path / "near"))
    run.publish_versions(6)
    run.close()
    return tmp_path / "near", tmp_path / "far"


def patchstore(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=120
    )


@pytest.fixture
def started() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> "subprocess.Popen[str]":
        command = [*COMMAND, *map(str, arguments)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for each in processes:
        each.kill()
        each.communicate()


def test_the_command_copies_says_what_and_again_copies_nothing(places: tuple[Path, Path]) -> None:
    done = patchstore("replicate", *places, "--json")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr) == (0, "")
    assert [(event["event"], event["version"]) for event in events] == [("copied", v) for v in range(6)]
    assert all(event["bytes"] > 0 for event in events)
    assert_equal(FolderStore(places[0]), FolderStore(places[1]))
    again = patchstore("replicate", *places)
    assert again.returncode == 0
    assert again.stdout == f"{places[1]} is equal to {places[0]}: 0 versions copied, 0 bytes\n"


def test_promote_says_where_the_replica_ends(places: tuple[Path, Path]) -> None:
    patchstore("replicate", *places)
    done = patchstore("promote", places[1])
    assert done.returncode == 0
    assert f"Its newest version is 5 (step 5); later versions of {places[0]} are not here" in done.stdout
    refused = patchstore("replicate", *places)
    assert refused.returncode == 2
    assert "was promoted at" in refused.stderr
    (line,) = patchstore("promote", places[1], "--json").stdout.splitlines()
    assert json.loads(line)["version"] == 5


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("replicate", "{near}", "{near}"), 2, "cannot be a replica of itself"),
        (("replicate", "{far}", "{near}"), 2, "holds no run"),
        (("replicate", "{near}", "{far}", "--listen", "0"), 2, "only with --follow"),
        (("replicate", "{near}", "{far}", "--target-option", "x"), 2, "KEY=VALUE"),
        (("replicate", "{near}", "s3:/bucket"), 2, "looks mistyped"),
        (("replicate", "{near}"), 2, "TARGET"),
        (("promote", "{near}"), 2, "is no replica"),
        (("promote", "{far}"), 2, "is no replica"),
    ],
)
def test_an_impossible_call_is_explained(
    places: tuple[Path, Path], arguments: tuple[str, ...], code: int, says: str
) -> None:
    done = patchstore(*(each.format(near=places[0], far=places[1]) for each in arguments))
    assert done.returncode == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_byte_ends_the_command_with_its_exit_code(places: tuple[Path, Path]) -> None:
    payload = next(places[0].glob("deltas/00000002*/*"))
    data = bytearray(payload.read_bytes())
    data[-1] ^= 1
    payload.write_bytes(data)
    done = patchstore("replicate", *places)
    assert done.returncode == 3
    assert "corrupt-object" in done.stderr and payload.name in done.stderr
    assert assert_whole(FolderStore(places[0]), FolderStore(places[1])) == 2


def test_a_replica_that_is_followed_gets_new_versions_and_tells_figures(
    places: tuple[Path, Path], started: Callable[..., "subprocess.Popen[str]"]
) -> None:
    process = started("replicate", *places, "--follow", "--listen", "0", "--log-format", "json")
    assert process.stderr is not None

    def logged(event: str, version: int | None = None) -> dict[str, Any]:
        for line in process.stderr:  # type: ignore[union-attr]
            found: dict[str, Any] = json.loads(line)
            if found.get("event") == event and version in (None, found.get("version")):
                return found
        raise AssertionError("it ended")

    url = logged("listening")["url"]
    logged("copied", 5)
    run = Run(FolderStore(places[0]))
    run.open(resume="anchor")
    run.publish()
    run.close()
    logged("copied", 7)
    answer = urllib.request.urlopen(f"{url}/metrics", timeout=60).read().decode()
    figures = {
        sample.name: sample.value
        for family in text_string_to_metric_families(answer)
        for sample in family.samples
    }
    assert figures["patchstore_replica_version"] == 7
    assert figures["patchstore_replica_versions_total"] == 8
    assert figures["patchstore_replica_bytes_total"] > 0
    state = json.loads(urllib.request.urlopen(f"{url}/healthz", timeout=60).read())
    assert (state["problems"], state["version"]) == ([], 7)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert_equal(FolderStore(places[0]), FolderStore(places[1]))


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2))
def test_killed_again_and_again_beside_another_it_completes(
    tmp_path: Path, seed: int, started: Callable[..., "subprocess.Popen[str]"]
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    run = Run(FolderStore(near))
    run.publish_versions(80)
    run.close()
    source, target, chance = FolderStore(near), FolderStore(far), random.Random(seed)
    done, kills = 0, 0
    while done < 80 and kills < 100:
        doomed = [started("replicate", near, far, "--json") for _ in range(2)]
        # They wait for someone who reads, after some versions: on a busy machine the kill comes late.
        for each in doomed:
            assert each.stdout is not None
            fcntl.fcntl(each.stdout, fcntl.F_SETPIPE_SZ, 4096)
        # Until it has copied a version, or has ended as there was none left.
        assert doomed[0].stdout is not None
        doomed[0].stdout.readline()
        time.sleep(chance.random() * 0.05)
        for each in doomed:
            each.kill()
            each.communicate()
            kills += 1
        done = assert_whole(source, target)
    assert kills > 2
    assert patchstore("replicate", near, far).returncode == 0
    assert_equal(source, target)


# The service, in this process.


def events_until(events: Any, is_last: Callable[[Any], bool]) -> list[Any]:
    found = []
    for event in events:
        found.append(event)
        if is_last(event):
            return found
    raise AssertionError("it ended")


def test_following_outlives_outages_and_says_so_once_in_a_while(run: Run) -> None:
    run.publish_versions(3)
    target = MemoryStore("memory://followed")
    source = FaultyStore(
        run.store, Fault(verb="get", key="versions/00000001*", effect="fail-before", times=5)
    )
    stop = threading.Event()
    events = service.follow(source, target, stop, min_poll_interval_s=0.001, max_poll_interval_s=0.002)
    found = events_until(events, lambda event: event.version == 2)
    assert [event.outcome for event in found] == ["copied", "failed", "failed", "failed", "copied", "copied"]
    assert [event.num_times for event in found if event.outcome == "failed"] == [1, 2, 4]
    assert isinstance(found[1].error, StoreUnavailable)
    stop.set()
    events.close()
    assert_equal(run.store, target)


def test_following_waits_for_a_source_without_a_run(run: Run) -> None:
    target, stop = MemoryStore("memory://waiting"), threading.Event()
    events = service.follow(run.store, target, stop, min_poll_interval_s=0.001, max_poll_interval_s=0.002)
    assert next(events).outcome == "waiting"
    run.publish_versions(2)
    assert [event.version for event in events_until(events, lambda event: event.version == 1)] == [0, 1]
    stop.set()
    assert list(events) == []


def test_following_reports_a_source_that_was_emptied(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_RECHECK_S", 0.0)
    run.publish_versions(2)
    run.close()
    target, stop = MemoryStore("memory://emptied"), threading.Event()
    events = service.follow(run.store, target, stop, min_poll_interval_s=0.001, max_poll_interval_s=0.002)
    events_until(events, lambda event: event.version == 1)
    kept = {key: run.store.get(key) for key in run.store.list()}
    for key in kept:
        run.store.delete(key)
    failed = next(events)
    assert failed.error is not None and failed.error.kind == "store-replaced"
    for key, data in kept.items():
        run.store.put(key, data)
    run.open(resume="anchor")
    events_until(events, lambda event: event.version == 2)
    stop.set()
    events.close()
    newest = history.head(target)
    assert newest is not None and layout.REPLICA in set(target.list()) and newest.version == 2
