"""`patchstore replicate`: what it prints, how it ends, and kills; and the service."""

import fcntl
import json
import random
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families
from replicas import assert_equal, assert_whole

from patchstore.bucket import history
from patchstore.errors import StoreUnavailable
from patchstore.follow.loop import LoopSettings
from patchstore.ops.replicate import service
from patchstore.stores import layout
from patchstore.stores.folder import FolderStore
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.commands import Cli
from tests.support.weights import Run

FAST = LoopSettings(min_poll_interval_s=0.001, max_poll_interval_s=0.002)
Places = tuple[Path, Path]


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """A bucket of six versions, and a place that does not exist yet."""
    run = Run(FolderStore(tmp_path / "near"))
    run.publish_versions(6)
    run.close()
    return tmp_path / "near", tmp_path / "far"


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Call = Callable[..., Done]


@pytest.fixture
def patchstore(patchstore: Cli) -> Call:
    return lambda *arguments: Done(*patchstore(*arguments))


def test_the_command_copies_says_what_and_again_copies_nothing(places: Places, patchstore: Call) -> None:
    done = patchstore("replicate", *places, "--json")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr) == (0, "")
    assert [(event["event"], event["version"]) for event in events] == [("copied", v) for v in range(6)]
    assert all(event["bytes"] > 0 for event in events)
    assert_equal(FolderStore(places[0]), FolderStore(places[1]))
    again = patchstore("replicate", *places)
    assert again.returncode == 0
    assert again.stdout == f"{places[1]} is equal to {places[0]}: 0 versions copied, 0 bytes\n"


def test_promote_says_where_the_replica_ends(places: Places, patchstore: Call) -> None:
    patchstore("replicate", *places)
    before = (places[1] / "replica.json").read_bytes()
    asked = patchstore("replicate", "--promote", places[1])
    assert asked.returncode == 0
    assert "newest version is 5 (step 5)" in asked.stdout
    assert "Nothing was written; --yes promotes, which cannot be undone" in asked.stdout
    (line,) = patchstore("replicate", "--promote", places[1], "--json").stdout.splitlines()
    assert json.loads(line)["promoted_at"] is None
    assert (places[1] / "replica.json").read_bytes() == before
    assert patchstore("replicate", *places).returncode == 0
    done = patchstore("replicate", "--promote", places[1], "--yes")
    assert done.returncode == 0
    assert f"Its newest version is 5 (step 5); later versions of {places[0]} are not here" in done.stdout
    refused = patchstore("replicate", *places)
    assert refused.returncode == 2
    assert "was promoted at" in refused.stderr
    (line,) = patchstore("replicate", "--promote", places[1], "--json").stdout.splitlines()
    assert json.loads(line)["version"] == 5


def test_promote_says_that_the_newest_version_cannot_be_rebuilt(places: Places, patchstore: Call) -> None:
    assert patchstore("replicate", *places).returncode == 0
    (gone,) = (places[1] / "deltas").glob("00000005-*/*")
    gone.unlink()
    done = patchstore("replicate", "--promote", places[1], "--yes")
    assert done.returncode == 0
    assert 'resume="anchor"' in done.stdout and str(gone.relative_to(places[1])) in done.stdout
    assert json.loads(patchstore("replicate", "--promote", places[1], "--json").stdout)["resume"] == "anchor"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("replicate", "{near}", "{near}"), 2, "cannot be a replica of itself"),
        (("replicate", "{far}", "{near}"), 2, "holds no run"),
        (("replicate", "{near}", "{far}", "--listen", "0"), 2, "only with --follow"),
        (("replicate", "{near}", "{far}", "--target-option", "x"), 2, "KEY=VALUE"),
        (("replicate", "{near}", "s3:/bucket"), 2, "looks mistyped"),
        (("replicate", "{near}"), 2, "TARGET"),
        (("replicate", "--promote", "{near}"), 2, "is no replica"),
        (("replicate", "--promote", "{far}"), 2, "is no replica"),
        (("replicate", "--promote", "{near}", "{far}"), 2, "--promote takes"),
        (("replicate", "{near}", "{far}", "--yes"), 2, "only with --promote"),
    ],
)
def test_an_impossible_call_is_explained(places, patchstore, arguments, code, says):
    done = patchstore(*(each.format(near=places[0], far=places[1]) for each in arguments))
    assert done.returncode == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_replica_that_is_followed_gets_new_versions_and_tells_figures(places, started):
    process = started("replicate", *places, "--follow", "--listen", "0", "--log-format", "json")

    def logged(event: str, version: int | None = None) -> dict[str, Any]:
        for line in process.stderr:
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
def test_killed_again_and_again_beside_another_it_completes(tmp_path, seed, started, patchstore):
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
            fcntl.fcntl(each.stdout, fcntl.F_SETPIPE_SZ, 4096)
        # Until it has copied a version, or has ended as there was none left.
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
    events = service.follow(source, target, stop, FAST)
    found = events_until(events, lambda event: event.version == 2)
    assert [event.outcome for event in found] == ["copied", "failed", "failed", "failed", "copied", "copied"]
    assert [event.num_times for event in found if event.outcome == "failed"] == [1, 2, 4]
    assert isinstance(found[1].error, StoreUnavailable)
    stop.set()
    events.close()
    assert_equal(run.store, target)


def test_following_waits_for_a_source_without_a_run(run: Run) -> None:
    target, stop = MemoryStore("memory://waiting"), threading.Event()
    events = service.follow(run.store, target, stop, FAST)
    assert next(events).outcome == "waiting"
    run.publish_versions(2)
    assert [event.version for event in events_until(events, lambda event: event.version == 1)] == [0, 1]
    stop.set()
    assert list(events) == []


def test_following_reports_a_source_that_was_emptied(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "RECHECK_S", 0.0)
    run.publish_versions(2)
    run.close()
    target, stop = MemoryStore("memory://emptied"), threading.Event()
    events = service.follow(run.store, target, stop, FAST)
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
