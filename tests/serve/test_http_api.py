"""What the service says of itself over HTTP, and how it is told to hold servers at a version."""

import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
import torch
from fleet_thread import listening, silent

import patchstore
from patchstore import Publisher
from patchstore.errors import StateMismatch, UsageError
from patchstore.follow.desired import HeadWatcher
from patchstore.follow.http_api import Listener
from patchstore.follow.loop import address_of
from patchstore.follow.metrics import Metrics
from patchstore.follow.reconcile import StepResult
from patchstore.stores.memory import MemoryStore
from tests.support.manifests import begin_run, commit, commit_at_no_time

UNREACHABLE = "http://127.0.0.1:9"


def test_a_fleet_at_its_version_is_well_and_says_what_it_serves(serve, stub):
    with serve(stub.url) as service:
        service.fleet.until(lambda: service.fleet.applied(stub.url, 0))
        # The step after an update is the one that finds nothing to do.
        while (answer := service.get("/healthz")).status_code != 200:
            pass
    found = answer.json()
    assert answer.text.count("\n") == 1
    assert (found["problems"], found["head"], found["target"], found["pinned"]) == ([], 0, 0, None)
    assert found["servers"][stub.url] == {
        "up": True,
        "serving": 0,
        "run_id": "run",
        "num_engines": 1,
        "engines_differ": False,
        "half_applied": False,
        "error": None,
    }


def test_a_server_that_is_gone_is_named_and_the_others_are_not(serve, stub):
    with serve(stub.url, UNREACHABLE) as service:
        service.fleet.until(lambda: service.fleet.applied(stub.url, 0) and service.fleet.did(UNREACHABLE))
        while len(found := service.problems()) != 2:
            pass
        answer = service.get("/healthz")
        assert answer.status_code == 503
        assert found == {("failing", UNREACHABLE), ("behind", UNREACHABLE)}
        assert answer.json()["servers"][UNREACHABLE]["error"]["kind"] == "server-unavailable"
        assert service.get("/livez").status_code == 200


def test_patience_is_for_those_who_were_well_before(serve, stub):
    with serve(stub.url, UNREACHABLE, unhealthy_after_s=10_000) as service:
        service.fleet.until(lambda: service.fleet.applied(stub.url, 0) and service.fleet.did(UNREACHABLE))
        stub.down = True
        service.fleet.until(lambda: "failed" in service.fleet.did(stub.url))
        # One never came to its version, and the other may come back.
        assert service.problems() == {("behind", UNREACHABLE)}


def test_a_store_that_does_not_answer_is_a_problem(serve, store, stub):
    with serve(stub.url) as service:
        service.fleet.until(lambda: service.fleet.applied(stub.url, 0))
        with silent(store):
            service.fleet.until(lambda: "failed" in service.fleet.did(None))
            assert ("failing", "store") in service.problems()
            assert service.figures()["patchstore_store_up",] == 0
            assert service.figures()["patchstore_store_failures_total", "store-unavailable"] >= 1


def test_a_newest_version_that_is_too_old_is_said_once_until_there_is_a_newer_one(stub):
    store = MemoryStore("memory://old")
    begin_run(store)
    commit(store, 0, created_at=(datetime.now(UTC) - timedelta(hours=2)).isoformat()[:23] + "Z")
    with listening(store, [stub.url], unhealthy_after_s=60, max_head_age_s=3600) as service:
        fleet = service.fleet
        fleet.until(lambda: fleet.did(None) == ["old-head"] and fleet.applied(stub.url, 0))
        assert service.problems() == {("old-head", "store")}
        status, gate = service.ready()
        assert status == 503 and "version 0, the newest, is 72" in gate["reasons"][0]
        figures = service.figures()
        assert figures["patchstore_head_old",] == 1
        assert 7200 <= figures["patchstore_head_age_seconds", "run"] < 7300
        commit(store, 1)
        fleet.until(lambda: fleet.did(None) == ["old-head", "new-head"] and fleet.applied(stub.url, 1))
        assert service.figures()["patchstore_head_old",] == 0
        assert not service.problems()
        service.until_ready()


def test_a_thread_that_died_is_a_problem(serve, stub, monkeypatch):
    with serve(stub.url, unhealthy_after_s=10_000) as service:
        service.fleet.until(lambda: service.fleet.applied(stub.url, 0))
        (worker,) = service.fleet.fleet.workers.values()
        monkeypatch.setattr(threading, "excepthook", lambda _: None)
        monkeypatch.setattr(worker.reconciler, "step", None)
        worker.thread.join()
        assert service.problems() == {("stopped", stub.url)}


def test_servers_are_pinned_and_unpinned_by_request(serve, store, stub):
    commit(store, 1)
    with serve(stub.url) as service:
        service.fleet.until(lambda: service.fleet.applied(stub.url, 1))
        answer = service.post("/pin", {"version": 0})
        assert (answer.status_code, answer.json()) == (200, {"pinned": 0})
        service.fleet.until(lambda: service.fleet.applied(stub.url, 0))
        figures = service.figures()
        assert (figures["patchstore_pinned",], figures["patchstore_target_version", "run"]) == (1, 0)
        assert figures["patchstore_head_version", "run"] == figures["patchstore_lag_versions", stub.url] == 1

        assert service.post("/unpin").json() == {"pinned": None}
        service.fleet.until(lambda: service.fleet.did(stub.url).count("applied") == 3)
    assert stub.history == [1, 0, 1]


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"version": 12}, 404, "version-not-found"),
        ({"version": -1}, 400, "usage"),
        ({"version": "1"}, 400, "usage"),
        ({"version": True}, 400, "usage"),
        ({"version": 1.0}, 400, "usage"),
        ({"version": None}, 400, "usage"),
        ({"version": 2**63}, 400, "usage"),
        ({"version": 2**62}, 404, "version-not-found"),
        ({"version": "a tag"}, 400, "usage"),
        ({"version": 0, "allow_rollback": "yes"}, 400, "usage"),
        ({}, 400, "usage"),
        ([1], 400, "usage"),
        (None, 400, "usage"),
    ],
)
def test_what_cannot_be_held_is_refused_and_nothing_changes(serve, stub, body, status, kind):
    with serve(stub.url) as service:
        service.fleet.until(lambda: service.fleet.applied(stub.url, 0))
        answer = service.post("/pin", body)
        assert (answer.status_code, answer.json()["error"]["kind"]) == (status, kind)
        assert service.get("/healthz").json()["pinned"] is None


def test_a_page_in_a_browser_cannot_hold_servers(serve, stub):
    with serve(stub.url) as service:
        answer = service.post("/pin", {"version": 0}, headers={"Origin": "http://example.org"})
        assert answer.status_code == 403
        assert service.fleet.desired.pinned is None
        assert service.get("/nothing").status_code == 404
        assert httpx.post(f"{service.url}/pin", content=b"x" * 70_000).status_code == 400
        assert httpx.post(f"{service.url}/pin", content=b"[" * 60_000).status_code == 400


def test_a_state_that_cannot_be_written_is_said(serve, stub, tmp_path: Path):
    folder = tmp_path / "pins"
    folder.mkdir()
    with serve(stub.url, pin_file=folder / "pin.json") as service:
        service.fleet.until(lambda: service.fleet.applied(stub.url, 0))
        folder.rmdir()
        answer = service.post("/pin", {"version": 0})
        assert (answer.status_code, answer.json()["error"]["kind"]) == (503, "os")
        assert service.fleet.desired.pinned is None


def test_every_figure_is_there(serve, stub):
    with serve(stub.url, UNREACHABLE) as service:
        service.fleet.until(lambda: service.fleet.applied(stub.url, 0) and service.fleet.did(UNREACHABLE))
        figures = service.figures()
        assert figures["patchstore_store_up",] == 1
        assert (figures["patchstore_up", stub.url], figures["patchstore_up", UNREACHABLE]) == (1, 0)
        assert figures["patchstore_serving_version", stub.url] == 0
        assert ("patchstore_serving_version", UNREACHABLE) not in figures
        assert figures["patchstore_lag_versions", stub.url] == 0
        assert figures["patchstore_lag_versions", UNREACHABLE] == 1
        assert figures["patchstore_lag_seconds", stub.url] == 0
        assert figures["patchstore_lag_seconds", UNREACHABLE] > 0
        assert figures["patchstore_updates_total", stub.url] == 1
        assert figures["patchstore_stage_seconds_count", stub.url] == 1
        assert figures["patchstore_apply_seconds_count", stub.url] == 1
        assert figures["patchstore_failures_total", "server-unavailable", UNREACHABLE] >= 1
        assert figures["patchstore_engines", stub.url] == 1
        assert figures["patchstore_build_info", patchstore.__version__] == 1
        openmetrics = {"Accept": "application/openmetrics-text; version=1.0.0"}
        answer = httpx.get(f"{service.url}/metrics", headers=openmetrics)
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        assert answer.text.endswith("# EOF\n")


def test_a_head_without_a_time_in_utc_is_a_problem_and_the_figures_are_still_served(serve, store, stub):
    with serve(stub.url) as service:
        service.fleet.until(lambda: service.fleet.applied(stub.url, 0))
        commit_at_no_time(store, 1, "2026-01-31T12:00:00")
        service.fleet.until(lambda: "failed" in service.fleet.did(None))
        figures = service.figures()
    assert figures["patchstore_store_up",] == 0
    assert figures["patchstore_store_failures_total", "corrupt-object"] >= 1
    assert figures["patchstore_head_version", "run"] == 0


def test_a_server_that_is_followed_no_more_leaves_the_figures(serve, stub, tmp_path: Path):
    listed = tmp_path / "servers"
    listed.write_text(f"{stub.url}\n{UNREACHABLE}")
    with serve(servers_file=listed) as service:
        service.fleet.until(lambda: service.fleet.applied(stub.url, 0) and service.fleet.did(UNREACHABLE))
        assert any(UNREACHABLE in key for key in service.figures())
        listed.write_text(stub.url)
        while any(UNREACHABLE in key for key in service.figures()):
            pass
        assert service.figures()["patchstore_updates_total", stub.url] == 1


def test_bytes_are_those_of_the_payloads_on_the_way_and_the_head_has_its_own(stub):
    store, weights = MemoryStore("memory://bytes"), {"w": torch.zeros(1000)}
    with Publisher(store, weights) as publisher:
        stub.run_id = publisher.run_id
        with listening(store, [stub.url]) as service:
            num_bytes, of_head = 0, ("step", "bytes", "share_changed")
            for version in range(2):
                weights["w"][:7] = float(version)
                new = publisher.publish_patch(version).result(timeout_s=60)
                service.fleet.until(lambda version=version: service.fleet.applied(stub.url, version))
                num_bytes += new.num_bytes
                figures = service.figures()
                assert figures["patchstore_payload_bytes_total", stub.url] == num_bytes
                head = {name: figures.get((f"patchstore_head_{name}", new.run_id)) for name in of_head}
                changed = None if new.delta is None else new.delta.num_changed / 1000
                assert head == {"step": version, "bytes": new.num_bytes, "share_changed": changed}


def test_a_proof_that_fails_is_counted_by_its_kind(store):
    metrics = Metrics(HeadWatcher(store))
    metrics.observe("http://a", StepResult(outcome="diverged", error=StateMismatch("1 tensors differ")))
    metrics.observe("http://a", StepResult(outcome="verified", version=1))
    text = metrics.expose()[0].decode()
    assert 'patchstore_failures_total{kind="state-mismatch",server="http://a"} 1.0' in text
    assert 'patchstore_verifications_total{server="http://a"} 1.0' in text


@pytest.mark.parametrize(
    ("said", "address"),
    [
        ("9464", ("127.0.0.1", 9464)),
        (":9464", ("127.0.0.1", 9464)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("[::1]:80", ("::1", 80)),
    ],
)
def test_only_this_host_is_listened_to_unless_another_is_named(said, address):
    assert address_of(said) == address


@pytest.mark.parametrize("said", ["", "localhost", "host:", "1:99999", "1:-1", "9" * 5000])
def test_a_place_that_is_none_is_refused(said):
    with pytest.raises(UsageError):
        address_of(said)


def test_a_port_that_is_taken_is_refused(serve, stub):
    with serve(stub.url) as service, pytest.raises(UsageError, match="cannot listen"):
        Listener(("127.0.0.1", int(service.url.rpartition(":")[2])), lambda *_: None)


def test_the_listener_has_a_page_about_the_run_and_its_servers(serve, stub):
    pytest.importorskip("plotly", reason="needs the extra `report`")
    with serve(stub.url) as service:
        service.fleet.until(lambda: service.fleet.applied(stub.url, 0))
        answer = service.get("/")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert "Run run" in answer.text
        new = service.get("/report.json").json()
        assert {each["id"] for each in new["charts"]} == {"share", "bytes", "commits", "records"}
