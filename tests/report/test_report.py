"""The page about a run: its numbers are those of the log, and no text of a bucket becomes a part of it."""

import importlib.resources
import json
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import numpy as np
import plotly.graph_objects
import pytest
import torch

from patchstore.bucket import digests, history
from patchstore.bucket.manifest_json import to_json
from patchstore.bucket.notes import spelled
from patchstore.bucket.records import Adapter, Anchor, Base, Delta, Payload, Writer
from patchstore.errors import StoreUnavailable, UsageError, VersionNotFound
from patchstore.ops.compact.service import Compactor
from patchstore.ops.report import layers
from patchstore.ops.report.logs import Happened
from patchstore.ops.report.page import Report, contents, one_page
from patchstore.ops.retention import Retention, collect, retire, tag
from patchstore.signing import KeySigner
from patchstore.signing.statement import sign_version
from patchstore.stores import layout
from patchstore.stores.base import Store
from patchstore.stores.folder import FolderStore
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import FaultyStore
from tests.report.read_page import Page
from tests.support.commands import Cli, Started
from tests.support.keys import key_pair
from tests.support.manifests import DIGEST, begin_run, commit, manifest
from tests.support.weights import Run

HOSTILE = "</script><img src=x onerror=alert(1)>&lt;b&gt;"


def page_of(store: Store, **options: Any) -> Page:
    return Page(one_page(Report(store, **options))[0])


def commit_many(store: Store, num: int, names: tuple[str, ...] = ("model.layers.0.weight",)) -> None:
    """Commit versions whose payloads are not stored: a delta each, and an anchor every 64."""
    begin_run(store, tensors=names, shape=(1000, 10))
    parent = None
    for version in range(num):
        write_id = f"{version:016x}"
        delta = Payload(key=layout.delta_key(version, write_id, 1, 1), size=1000 + version, digest=DIGEST)
        prefix = layout.anchor_prefix(version, write_id)
        anchor = Payload(key=f"{prefix}model.safetensors", size=9, digest=DIGEST)
        at = spelled(datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=30 * version))
        changed = Delta(encoding="gap", num_changed=version % 100, payloads=(delta,))
        data = to_json(
            replace(
                manifest(version, created_at=at),
                parent_digest=parent,
                writer=Writer(id="trainer", epoch=1 + version // 1000, write_id=write_id),
                delta=changed if version else None,
                anchor=None if version % 64 else Anchor(payloads=(anchor,), files=()),
            )
        )
        store.put(layout.manifest_key(version), data)
        parent = digests.digest(data)
    history.write_hint(store, num - 1)


def test_the_page_has_the_numbers_of_the_log(tmp_path: Path, patchstore: Cli) -> None:
    Run(FolderStore(tmp_path / "bucket")).publish_and_close(6)
    code, out, _ = patchstore("report", tmp_path / "bucket", "-o", tmp_path / "run.html", "--json")
    text = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert (code, json.loads(out)["versions"], json.loads(out)["bytes"]) == (0, 6, len(text))
    page = Page(text)
    logged = [json.loads(line) for line in patchstore("log", tmp_path / "bucket", "--json")[1].splitlines()]
    names = {
        "changed": "num_changed",
        "delta": "delta_bytes",
        "anchor": "anchor_bytes",
        "created": "created_at",
    }
    for row, line in zip(page.rows, logged, strict=True):
        for name in (
            "version",
            "parent",
            "step",
            "changed",
            "delta",
            "anchor",
            "encoding",
            "epoch",
            "created",
        ):
            value = line[names.get(name, name)]
            assert row[name] == ("" if value is None else str(value)), name
    lines = logged[::-1]
    assert page.trace("share", "changed")["x"] == [line["version"] for line in lines]
    num_elements = history.run_header(FolderStore(tmp_path / "bucket")).schema.num_elements
    shares = [100 * line["num_changed"] / num_elements for line in lines[1:]]
    assert page.trace("share", "changed")["y"] == [None, *(float(f"{each:.4g}") for each in shares)]
    stored = page.trace("bytes", "delta")
    assert stored["y"] == [line["delta_bytes"] for line in lines if line["delta_bytes"] is not None]
    anchors = [line["version"] for line in lines if line["anchor_bytes"] is not None]
    assert page.trace("bytes", "anchor")["x"] == anchors == page.trace("records", "anchor")["x"]
    assert page.allows_its_scripts()
    assert "connect-src 'none'" in page.policy
    assert not page.attributes & {"src", "onerror", "onload"}


def test_a_run_of_5000_versions_is_one_page(tmp_path: Path) -> None:
    store = MemoryStore("memory://many")
    commit_many(store, 5000)
    text, run = one_page(Report(store))
    page = Page(text)
    assert len(text) < 8_000_000
    assert len(page.rows) == len(page.trace("share", "changed")["x"]) == 5000
    assert [each.number for each in run.resumed] == [1000, 2000, 3000, 4000]
    heat = page.charts["layers"]["figure"]["data"][0]
    assert len(heat["x"]) <= layers.MOST_COLUMNS
    assert {cell for row in heat["z"] for cell in row} == {None}
    assert f"in {len(heat['x'])} of 5,000 versions" in page.text


def test_figures_are_those_that_plotly_knows(tmp_path: Path) -> None:
    run = Run(MemoryStore("memory://valid"))
    run.publish_and_close(6)
    tag(run.store, "best", 3)
    events = [event("2026-01-01T00:00:00Z", "a", 1), event("2026-01-01T00:00:09Z", "a", None, kind="usage")]
    for chart in Report(run.store, events=lambda: events).read()[1]:
        plotly.graph_objects.Figure(chart.figure)
        # Halves between few versions would be shown as one of them.
        of_versions = [axis for axis in chart.figure["layout"].values() if ",d" in str(axis)]
        assert all(axis["dtick"] == 1 for axis in of_versions)
        assert of_versions or chart.id == "updates"


def test_resumes_branches_tags_retired_signed_and_added_are_shown(tmp_path: Path) -> None:
    private, _ = key_pair(tmp_path)
    run = Run(MemoryStore("memory://marks"))
    run.publish_and_close(36, anchor_every=None)
    run.go_back(30)
    run.open(resume=30, anchor_every=None)
    run.train_versions(3)
    run.close()
    for version in (36, 37, 38, 39):
        sign_version(run.store, KeySigner(private), history.run_header(run.store), version)
    for _ in Compactor(run.store, anchor_every=16).compact():
        pass
    tag(run.store, "best", 3)
    retire(run.store, Retention(keep_last=8), dry_run=False)
    page = page_of(run.store)
    rows = {int(row["version"]): row["marks"] for row in page.rows}
    assert rows[3] == "best"
    assert "retired" in rows[1]
    assert rows[36] == "resumed, signed" and rows[39].startswith("signed")
    assert page.trace("commits", "went back")["y"] == [30, 36, None]
    assert page.trace("commits", "resumed")["y"] == [36]
    assert page.trace("records", "tag")["x"] == [3]
    assert page.trace("records", "signed")["x"] == [36, 39, None]
    assert page.trace("records", "added anchor")["x"]
    assert any(each["name"].startswith("rollup of") for each in page.charts["records"]["figure"]["data"])
    assert "1 resume and 1 branch" in page.text and "best = 3" in page.text


@pytest.mark.parametrize("encoding", ["raw", "gap", "context"])
def test_changes_by_layer_are_those_of_the_deltas(encoding: str) -> None:
    run = Run(MemoryStore(f"memory://{encoding}"), dtype=None)
    run.model = {
        f"model.layers.{layer}.{name}.weight": torch.randn(64, 128, dtype=torch.bfloat16)
        for layer in range(12)
        for name in ("q", "up")
    }
    run.open(encoding=encoding, anchor_every=None)
    run.publish(0)
    for layer in range(12):
        run.model[f"model.layers.{layer}.up.weight"].view(-1)[: 100 * layer] *= 2
    found = run.publish(1)
    run.close()
    heat = Report(run.store).read()[1][-1]
    data = heat.figure["data"][0]
    assert data["x"] == [0, 1]
    column = [row[1] for row in data["z"]]
    expected = [100 * 100 * layer / (2 * 64 * 128) for layer in range(12)]
    assert [text[0] for text in data["text"]] == [f"model.layers.{layer}" for layer in range(12)]
    if encoding == "context":
        # Bytes of tiles tell about how many: all together as many as the manifest says.
        assert found.delta is not None
        assert sum(column) * 2 * 64 * 128 / 100 == pytest.approx(found.delta.num_changed, rel=1e-3)
        assert np.argmax(column) == 11 and column[0] == 0
        assert "cells are estimates" in heat.says
    else:
        assert column == pytest.approx(expected, rel=1e-3)


def test_a_delta_that_was_cut_off_or_is_no_delta_is_an_empty_column() -> None:
    run = Run(MemoryStore("memory://cut"))
    run.publish_and_close(8, anchor_every=None)
    for version, kept in ((3, 12), (4, 4), (5, 0), (6, None)):
        manifest = history.read_manifest(run.store, version)
        assert manifest.delta is not None
        (payload,) = manifest.delta.payloads
        run.store.put(
            payload.key, run.store.get(payload.key)[:kept] if kept is not None else b"x" * payload.size
        )
    found = Report(run.store).read()[1][-1].figure["data"][0]
    columns = dict(zip(found["x"], zip(*found["z"], strict=True), strict=True))
    assert {version for version, column in columns.items() if {*column} == {None}} == {0, 3, 4, 5, 6}
    assert {*columns} == {*range(8)}


def test_the_map_of_layers_has_a_column_of_zeros_for_a_version_without_changes() -> None:
    run = Run(MemoryStore("memory://unchanged"))
    run.publish_and_close(2, anchor_every=None)
    run.go_back(1)
    run.open(resume=True, anchor_every=None)
    run.train_versions(1)
    run.publish()
    run.close()
    found = Report(run.store).read()[1][-1].figure["data"][0]
    columns = dict(zip(found["x"], zip(*found["z"], strict=True), strict=True))
    # Version 2 resumed the run, and nothing changed before version 4.
    assert [{*columns[version]} == {0} for version in range(5)] == [False, False, True, False, True]


def test_without_the_right_to_list_the_versions_are_shown_all_the_same() -> None:
    class Unlisted(MemoryStore):
        def list(self, prefix: str = "") -> Iterator[str]:
            raise UsageError(f"not allowed to list {prefix}")

    store = Unlisted("memory://unlisted")
    commit_many(store, 3)
    page = page_of(store)
    assert [row["version"] for row in page.rows] == ["2", "1", "0"]
    assert "this user may not list memory://unlisted" in page.text


def test_of_a_longer_run_the_newest_versions_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore("memory://longer")
    commit_many(store, 10)
    tag(store, "old", 2)
    monkeypatch.setattr("patchstore.ops.report.recorded.MOST_VERSIONS", 4)
    page = page_of(store)
    assert [row["version"] for row in page.rows] == ["9", "8", "7", "6"]
    assert "6 older ones are not shown" in page.text
    assert "old = 2" in page.text


def test_columns_of_deltas_that_were_deleted_are_empty() -> None:
    run = Run(MemoryStore("memory://deleted"))
    run.publish_and_close(8)
    retire(run.store, Retention(keep_last=1), dry_run=False)
    collect(run.store, dry_run=False, clock=lambda: datetime.now(UTC) + timedelta(days=3))
    found = Report(run.store).read()[1][-1].figure["data"][0]
    columns = dict(zip(found["x"], zip(*found["z"], strict=True), strict=True))
    assert {*columns[1]} == {None} and None not in columns[7]


def test_a_run_without_a_version_or_no_run_is_a_sentence(tmp_path: Path, patchstore: Cli) -> None:
    store = FolderStore(tmp_path / "empty")
    out = tmp_path / "run.html"
    for place, code, said in (("none", 2, "is no folder"), ("empty", 2, "holds no run")):
        found, _, err = patchstore("report", tmp_path / place, "-o", out)
        assert (found, said in err) == (code, True), err
        store.put("other", b"")
    begin_run(store, tensors=("w",))
    code, _, err = patchstore("report", tmp_path / "empty", "-o", out)
    assert (code, "no version yet" in err) == (2, True)
    assert not out.exists()
    # A page that is served waits for the first one.
    status, data, _ = Report(store).answer("/")
    assert status == 200 and "none yet" in Page(data.decode()).text


def test_wrong_calls_are_sentences(tmp_path: Path, patchstore: Cli) -> None:
    bucket, out = tmp_path / "bucket", tmp_path / "run.html"
    Run(FolderStore(bucket)).publish_and_close(2)
    (tmp_path / "text").write_text("no\n[1]\n{}\n")
    for args, code, said in (
        ([], 2, "-o FILE"),
        (["-o", out, "--live"], 2, "not both"),
        (["-o", out, "--listen", "0"], 2, "only with --live"),
        (["--live", "--listen", "x"], 2, "no place to listen"),
        (["-o", out, "--follow-log", tmp_path / "none"], 2, "cannot be read"),
        (["-o", out, "--follow-log", tmp_path / "text"], 2, "no event"),
        (["-o", out, "--learning-rate", tmp_path / "text"], 2, "no learning rate"),
        (["-o", tmp_path / "no" / "run.html"], 2, "no is no folder"),
        (["-o", tmp_path], 2, "is a folder"),
        (["-o", ""], 2, "is a folder"),
    ):
        found, _, err = patchstore("report", bucket, *args)
        assert (found, said in err, err.count("\n")) == (code, True, 1), err
    assert not out.exists()


def test_without_plotly_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def files(package: str) -> Any:
        raise ModuleNotFoundError(package)

    monkeypatch.setattr(importlib.resources, "files", files)
    from patchstore.ops.report.page import script

    script.cache_clear()
    with pytest.raises(UsageError, match="pip install plotly"):
        script()


def test_a_damaged_manifest_is_named_and_the_rest_is_shown(tmp_path: Path, patchstore: Cli) -> None:
    Run(FolderStore(tmp_path / "bucket")).publish_and_close(5)
    (tmp_path / "bucket" / "versions" / "00000002.json").write_text("{}")
    code, _, err = patchstore("report", tmp_path / "bucket", "-o", tmp_path / "run.html")
    page = Page((tmp_path / "run.html").read_text(encoding="utf-8"))
    assert (code, [row["version"] for row in page.rows]) == (3, ["4", "3", "1", "0"])
    assert "00000002.json" in err and "00000002.json" in page.text


def test_texts_of_a_bucket_and_of_a_log_are_texts(tmp_path: Path) -> None:
    store = MemoryStore("memory://hostile")
    commit_many(store, 3, names=(f"a.{HOSTILE}.weight", f"b\u00e9.{HOSTILE}"))
    for version in range(3):
        found = history.read_manifest(store, version)
        writer = replace(found.writer, id=HOSTILE, epoch=version)
        store.put(layout.manifest_key(version), to_json(replace(found, writer=writer)))
    events = [
        event("2026-01-01T00:00:00Z", HOSTILE, 1),
        event("2026-01-01T00:00:01Z", HOSTILE, None, kind=HOSTILE),
    ]
    plain = MemoryStore("memory://plain")
    commit_many(plain, 3)
    calm = [replace(each, server="http://a", kind=each.kind and "usage") for each in events]
    found, expected = page_of(store, events=lambda: events), page_of(plain, events=lambda: calm)
    assert (found.tags, found.attributes) == (expected.tags, expected.attributes)
    assert found.allows_its_scripts()
    drawn = "\n".join(found.drawn_texts).replace("<extra></extra>", "").replace("<br>", "")
    assert "<" not in drawn and "onerror" in drawn
    hostile_run = MemoryStore("memory://run")
    begin_run(hostile_run, run_id=HOSTILE, tensors=("w",))
    commit(hostile_run, 0, run_id=HOSTILE)
    assert "onerror" in (page := page_of(hostile_run)).text
    assert not page.attributes & {"src", "onerror"}


def test_a_run_of_adapters_says_of_which_base() -> None:
    store = MemoryStore("memory://adapter")
    adapter = Adapter(base=Base(name="Qwen/Qwen3-0.6B", revision=None, state=None))
    begin_run(store, tensors=("base_model.model.layers.0.lora_A.weight",), adapter=adapter)
    commit(store, 0)
    assert "adapters of the base Qwen/Qwen3-0.6B" in page_of(store).text


def event(at: str, server: str, version: int | None, kind: str | None = None) -> Happened:
    found = Happened.of(
        {
            "time": at,
            "event": "failed" if kind else "applied",
            "server": server,
            "version": version,
            **({"error": {"kind": kind}} if kind else {"timings": {"stage_s": 0.5, "apply_s": 0.01}}),
        }
    )
    assert found is not None
    return found


def test_a_log_of_follow_is_a_staircase_and_a_rate_stands_at_its_step(tmp_path: Path) -> None:
    store = MemoryStore("memory://log")
    commit_many(store, 5)
    lines = [
        {"time": "2026-01-01T00:00:01.000Z", "server": "http://a", "event": "initialised", "version": 0},
        {"time": "2026-01-01T00:00:31.000Z", "server": "http://a", "event": "applied", "version": 1,
         "timings": {"stage_s": 0.25, "apply_s": 0.02}},
        {"time": "2026-01-01T00:01:01.000Z", "server": "http://a", "event": "failed", "version": 2,
         "error": {"kind": "state-mismatch", "message": "x"}},
        {"time": "2026-01-01T00:01:35.000Z", "level": "warning", "server": "http://b", "event": "failed",
         "version": 2, "kind": "usage"},
        {"time": "2026-01-01T00:01:35.500Z", "server": "http://a", "event": "failed", "version": 0,
         "error": {"kind": "usage", "message": "x"}},
        {"time": "never", "server": "http://a", "event": "applied", "version": 3},
        {"time": "2026-01-01T00:01:36.000Z", "event": "applied", "server": "http://a", "version": -3},
        {"time": "2026-01-01T00:01:40Z", "message": "of another logger"},
    ]  # fmt: skip
    log, rates = tmp_path / "follow.jsonl", tmp_path / "lr.jsonl"
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"time": "2026-')
    rates.write_text('{"step": 1, "learning_rate": 1e-6}\n{"step": 3, "lr": 2e-6}\n{"step": 4, "lr": NaN}\n')
    page = page_of(store, events=log, learning_rate=rates)
    served = page.trace("served", "http://a")
    assert served["y"] == [0, 1, 1]
    assert served["x"] == ["2026-01-01T00:00:01.000", "2026-01-01T00:00:31.000", "2026-01-01T00:01:36.000"]
    # The newest one at the begin of the log, and then each at its time.
    assert page.trace("served", "newest")["y"] == [0, 1, 2, 3, 3]
    assert page.trace("served", "failed")["y"] == [2, 0, 2]
    assert page.trace("updates", "paused")["y"] == [0.02]
    rate = page.trace("share", "learning rate")
    assert (rate["x"], rate["y"]) == ([1, 3], [1e-6, 2e-6])


def test_a_page_that_is_served_has_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(MemoryStore("memory://live"))
    run.publish(0)
    now = 0.0
    monkeypatch.setattr("patchstore.ops.report.page.time.monotonic", lambda: now)
    report = Report(run.store)
    status, data, kind = report.answer("/")
    page = Page(data.decode())
    assert (status, kind) == (200, "text/html; charset=utf-8")
    assert "connect-src 'self'" in page.policy and page.allows_its_scripts()
    held = json.loads(page.scripts[0])["id"]
    assert json.loads(report.answer("/report.json", held)[1]).keys() == {"id", "summary"}
    run.train_versions(1)
    now = 60.0
    new = json.loads(report.answer("/report.json", held)[1])
    run.close()
    assert new["id"] != held and new["charts"][0]["id"] == "share"
    assert "version 1, step 0" in new["summary"]
    assert new == {**json.loads(report.answer("/report.json")[1])}


def test_while_a_store_does_not_answer_the_page_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    free, asked = Event(), Event()
    hangs = False

    def hang(_verb: str, _key: str) -> None:
        if hangs:
            asked.set()
            free.wait()

    memory = MemoryStore("memory://silent")
    commit_many(memory, 3)
    now = 0.0
    monkeypatch.setattr("patchstore.ops.report.page.time.monotonic", lambda: now)
    monkeypatch.setattr("patchstore.ops.report.page.RENEW_S", 0.2)
    report = Report(FaultyStore(memory, before=hang), has_layers=False)
    hangs = True
    with ThreadPoolExecutor(1) as pool:
        try:
            first = pool.submit(report.answer, "/report.json")
            assert asked.wait(60)
            with pytest.raises(StoreUnavailable, match="for the first time"):
                report.answer("/report.json")
            hangs = False
            free.set()
            held = first.result()
            free.clear()
            asked.clear()
            hangs, now = True, 60.0
            second = pool.submit(report.answer, "/report.json")
            assert asked.wait(60)
            assert report.answer("/report.json") == held
        finally:
            free.set()
        assert second.result()[0] == 200


def test_the_command_serves_the_page_until_it_is_told_to_end(tmp_path: Path, started: Started) -> None:
    Run(FolderStore(tmp_path / "bucket")).publish_and_close(3)
    process = started("report", tmp_path / "bucket", "--live", "--json")
    assert process.stdout is not None
    url = json.loads(process.stdout.readline())["url"]
    assert url.startswith("http://127.0.0.1:")
    # A busy machine takes longer than the usual 5 s.
    get = partial(httpx.get, timeout=60)
    assert len(Page((whole := get(url)).text).rows) == 3
    assert whole.headers["Content-Encoding"] == "gzip"
    plain = get(url, headers={"Accept-Encoding": "identity"})
    assert "Content-Encoding" not in plain.headers and "Content-Security-Policy" in plain.text
    assert len(get(f"{url}/report.json").json()["charts"]) == 5
    assert get(f"{url}/metrics").status_code == httpx.post(url, timeout=60).status_code == 404
    assert get(url, headers={"Host": "evil.example"}).status_code == 403
    process.terminate()
    assert process.wait(timeout=60) == 0


def test_a_store_that_is_replaced_is_read_anew() -> None:
    store = MemoryStore("memory://replaced")
    begin_run(store, "one", tensors=("w",))
    commit(store, 0, run_id="one")
    commit(store, 1, run_id="one")
    report = Report(store)
    assert len(contents(*report.read())["table"].split("<tr>")) == 4
    for key in [*store.list()]:
        store.delete(key)
    with pytest.raises(VersionNotFound):
        report.read()
    begin_run(store, "two", tensors=("w",))
    commit(store, 0, run_id="two")
    assert "Run two" in contents(*report.read())["summary"]


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_draws_every_picture_without_an_error(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    store = MemoryStore("memory://browser")
    run = Run(store)
    run.publish_and_close(6)
    events = [
        event("2026-01-01T00:00:00Z", HOSTILE, 1),
        event("2026-01-01T00:00:09Z", HOSTILE, None, kind="usage"),
    ]
    text, _ = one_page(Report(store, events=lambda: events))
    (tmp_path / "run.html").write_text(text, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=390,6000", "--dump-dom"]
    options += ["--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}"]
    num_charts = len(Page(text).charts)
    assert num_charts == 7
    num_drawn = 0
    # The browser's own time, which passes faster than a busy machine draws.
    for budget_ms in (5_000, 50_000, 500_000):
        command = [
            CHROMIUM,
            *options,
            f"--virtual-time-budget={budget_ms}",
            f"file://{tmp_path / 'run.html'}",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
        assert "CONSOLE" not in done.stderr, done.stderr
        if (num_drawn := done.stdout.count('<div class="modebar-container"')) == num_charts:
            break
    assert num_drawn == num_charts
