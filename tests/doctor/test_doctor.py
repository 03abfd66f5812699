"""What `patchstore doctor` finds of stores, runs, servers and packages that something is wrong with."""

import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from patchstore import open_store
from patchstore.cli import main
from patchstore.doctor import KINDS, Finding, examine
from patchstore.errors import UnsupportedStore, UsageError
from patchstore.format import history, layout
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from patchstore.testing.hub import Hub
from patchstore.testing.hub.clients import quick_clients
from patchstore.testing.vllm_stub import Engine, StubServer, serving
from tests.stores.conftest import s3_options, s3_session, s3_url  # noqa: F401 - fixtures
from tests.stores.test_probe import ChecksThenWrites, IgnoresConditions
from tests.support.manifests import begin_run, commit
from tests.support.weights import Run

ROOT = Path(__file__).parents[2]
WRITTEN = ["write", "create-only", "read-after-write", "listing", "ranges", "latency", "throughput"]
OF_A_RUN = ["run", "lineage", "payloads"]
CLIENTS = pytest.mark.parametrize("client", ["s3fs", "obstore"])


def found(store: Store | str, *servers: str, **options: Any) -> dict[str, Finding]:
    """All that was found, by kind."""
    every = [*examine(store, servers, **{"num_bytes": 1_000_000, **options})]
    by_kind = {finding.kind: finding for finding in every}
    assert len(by_kind) == len(every), "a kind was found twice"
    return by_kind


def wrong(findings: dict[str, Finding]) -> list[str]:
    return [kind for kind, finding in findings.items() if finding.level != "ok"]


@pytest.fixture
def run(store: MemoryStore) -> Run:
    """A run of six versions, with anchors at 0 and 4."""
    run = Run(store)
    run.publish_versions(6)
    run.close()
    return run


# Stores that are well.


def test_a_folder_that_is_missing_is_said_examined_and_not_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "typo" / "bucket"
    findings = found(str(path))
    assert wrong(findings) == ["no-folder"]
    assert {*findings} == {"packages", "no-folder", "store", "clock", *WRITTEN, "no-run"}
    assert f"no folder {path}; this user may make it in {tmp_path}" in findings["no-folder"].found
    assert [*tmp_path.iterdir()] == []


def test_an_empty_folder_is_well_and_left_empty(tmp_path: Path) -> None:
    findings = found(str(tmp_path))
    assert wrong(findings) == []
    assert {*findings} == {"packages", "store", "clock", *WRITTEN, "no-run"}
    assert [*tmp_path.iterdir()] == []


def test_a_reader_is_told_that_a_folder_is_missing_and_makes_none(tmp_path: Path) -> None:
    findings = found(str(tmp_path / "typo"), read_only=True)
    assert wrong(findings) == ["no-folder"]
    assert [*tmp_path.iterdir()] == []


def test_a_folder_in_which_a_run_was_begun_meanwhile_stays(tmp_path: Path) -> None:
    for finding in examine(str(tmp_path / "bucket"), num_bytes=1_000_000):
        if finding.kind == "throughput":
            open_store(tmp_path / "bucket").put("store.json", b"{}")
    assert [*open_store(tmp_path / "bucket").list()] == ["store.json"]


def test_an_interrupted_examination_leaves_nothing(tmp_path: Path) -> None:
    examination = examine(str(tmp_path / "bucket"), num_bytes=1_000_000)
    for finding in examination:
        if finding.kind == "latency":
            break
    assert (tmp_path / "bucket").exists()
    examination.close()
    assert [*tmp_path.iterdir()] == []


def test_a_store_in_memory_is_well_and_its_run_is_described(run: Run) -> None:
    before = [*run.store.list()]
    findings = found(run.store)
    assert wrong(findings) == []
    assert {*findings} == {"packages", "store", "clock", *WRITTEN, *OF_A_RUN}
    head = history.read_manifest(run.store, 5)
    assert head.run_id in findings["run"].found
    assert "6 versions, the newest is 5" in findings["run"].found
    assert f"by {head.writer.id} (epoch {head.writer.epoch})" in findings["run"].found
    assert "1 delta leads from anchor 4" in findings["lineage"].found
    assert [*run.store.list()] == before


def test_a_bucket_is_well_and_left_empty(s3_options: dict[str, Any], s3_url: str) -> None:  # noqa: F811
    # More than a part, so that it goes up and comes back in several.
    findings = found(s3_url, storage_options=s3_options, num_bytes=9_000_000)
    assert wrong(findings) == []
    assert {*findings} == {"packages", "store", "clock", *WRITTEN, "no-run"}
    assert "9.0 MB" in findings["throughput"].found
    store = open_store(s3_url, **s3_options)
    assert [*store.list()] == []
    store.close()


def test_a_bucket_of_the_hub_is_left_empty(tmp_path: Path) -> None:
    with quick_clients(tmp_path), Hub() as hub:
        hub.create_bucket("user/bucket")
        url, options = "hf://buckets/user/bucket/typo", hub.options("user")
        assert wrong(found(url, storage_options=options)) == []
        store = open_store(url, **options)
        assert [*store.list()] == []
        store.close()


def test_a_reader_writes_nothing_and_says_what_it_left_out(run: Run) -> None:
    store = FaultyStore(run.store)
    findings = found(store, read_only=True)
    assert {verb for verb, _ in store.calls} <= {"get", "size", "list"}
    assert {*findings} == {"packages", "store", "clock-unknown", *OF_A_RUN, "not-tried"}
    assert "creating only once" in findings["not-tried"].found


# Stores that cannot be opened, or refuse.


def test_urls_and_options_that_are_wrong_are_named(s3_url: str) -> None:  # noqa: F811
    assert "fsspec knows no protocol nosuch" in found("nosuch://place")["store-url"].found
    findings = found(s3_url, storage_options={"endpoint": "x"})
    assert "no option endpoint" in findings["store-url"].found
    assert "--option" in str(findings["store-url"].advice)
    assert wrong(findings) == ["store-url"]


def test_a_store_that_cannot_keep_versions_is_unsupported() -> None:
    assert wrong(found("http://127.0.0.1:9/bucket")) == ["store-unsupported"]


@CLIENTS
def test_a_bucket_that_is_missing_is_told_from_one_that_refuses(
    s3_options: dict[str, Any],  # noqa: F811
    client: str,
) -> None:
    options = {name: s3_options[name] for name in ("endpoint_url", "key", "secret")}
    findings = found("s3://no-such-bucket/run", storage_options={**options, "client": client})
    assert wrong(findings) == ["no-bucket"]
    assert "create the bucket" in str(findings["no-bucket"].advice)


@contextmanager
def answering(answer: Callable[[str], tuple[int, bytes]]) -> Iterator[str]:
    """An HTTP server that gives the same answer to all requests of a method."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # whose clients may wait to be told to go on

        def _handle(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = answer(self.command)
            self.send_response(status)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_DELETE = _handle  # noqa: N815

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def s3_error(code: str, status: int = 403) -> tuple[int, bytes]:
    return status, f"<Error><Code>{code}</Code><Message>It says {code}.</Message></Error>".encode()


def s3_options_for(url: str) -> dict[str, Any]:
    return {"endpoint_url": url, "key": "test", "secret": "test"}


@CLIENTS
@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied"])
def test_credentials_that_are_refused_are_told_the_options(code: str, client: str) -> None:
    with answering(lambda _: s3_error(code)) as url:
        findings = found("s3://bucket/run", storage_options={**s3_options_for(url), "client": client})
    assert wrong(findings) == ["store-refused"]
    assert code in findings["store-refused"].found
    assert "-o key=" in str(findings["store-refused"].advice)


@CLIENTS
def test_a_user_who_may_only_read_is_told_of_read_only(client: str) -> None:
    def may_read(method: str) -> tuple[int, bytes]:
        return s3_error("NoSuchKey", 404) if method == "GET" else s3_error("AccessDenied")

    with answering(may_read) as url:
        options = {**s3_options_for(url), "client": client}
        findings = found("s3://bucket/run", storage_options=options)
        assert "--read-only" in str(findings["write-refused"].advice)
        assert "write-refused" not in found("s3://bucket/run", storage_options=options, read_only=True)


@pytest.mark.parametrize("place", ["file", "file/bucket"])
def test_a_file_in_the_folders_place_is_a_finding(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    findings = found(str(tmp_path / place))
    assert wrong(findings) == ["store-url"]
    assert f"{tmp_path / 'file'} is a file" in findings["store-url"].found


def test_a_store_that_does_not_answer_is_unreachable_and_leaves_out_the_rest(run: Run) -> None:
    store = FaultyStore(run.store, Fault(verb="*", effect="fail-before", times=None))
    findings = found(store)
    assert {*findings} == {"packages", "store-unreachable", "clock-unknown"}
    assert "endpoint_url" in str(findings["store-unreachable"].advice)


# Clocks.


@pytest.mark.parametrize(
    ("ahead_s", "kind"), [(100, "clock-off"), (-100, "clock-off"), (1000, "clock-wrong")]
)
def test_a_clock_that_is_off_is_measured_against_the_stores(
    ahead_s: int,
    kind: str,
    tmp_path: Path,
    s3_options: dict[str, Any],  # noqa: F811
    s3_url: str,  # noqa: F811
) -> None:
    def now() -> float:
        return time.time() + ahead_s

    for findings in (found(str(tmp_path), now=now), found(s3_url, storage_options=s3_options, now=now)):
        assert wrong(findings) == [kind]
        off = re.search(r"([\d,]+) s (ahead|behind)", findings[kind].found)
        assert off is not None
        # HTTP tells whole seconds.
        assert round(int(off[1].replace(",", "")), -1) == abs(ahead_s)
        assert off[2] == ("ahead" if ahead_s > 0 else "behind")
        assert "timedatectl" in str(findings[kind].advice)


@CLIENTS
def test_a_signature_that_is_refused_for_its_time_is_the_clocks_fault(client: str) -> None:
    with answering(lambda _: s3_error("RequestTimeTooSkewed")) as url:
        options = {**s3_options_for(url), "client": client}
        findings = found("s3://bucket/run", storage_options=options)
    assert wrong(findings) == ["clock-wrong"]
    assert "RequestTimeTooSkewed" in findings["clock-wrong"].found


# Stores that do not keep what versions depend on.


@pytest.mark.parametrize("kind", [IgnoresConditions, ChecksThenWrites])
def test_a_store_that_lets_two_writers_win_is_a_problem(kind: type[MemoryStore]) -> None:
    findings = found(kind())
    assert wrong(findings) == ["create-only-broken"]
    assert "If-None-Match" in str(findings["create-only-broken"].advice)


def test_a_bucket_of_the_hub_without_gateway_credentials_is_told_the_options() -> None:
    class NoGateway(MemoryStore):
        def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
            if if_absent:
                raise UnsupportedStore(f"{self.url} cannot create {key} only once")
            super().put(key, data)

    findings = found(NoGateway("hf://buckets/me/run"))
    assert wrong(findings) == ["gateway-missing"]
    advice = str(findings["gateway-missing"].advice)
    assert all(option in advice for option in ("gateway_key", "gateway_secret", "single_writer"))
    assert "create-only" not in findings["latency"].found


def test_a_store_of_one_writer_by_ones_word_is_warned_of() -> None:
    class OneWriter(MemoryStore):
        single_writer = True

    findings = found(OneWriter("hf://buckets/me/run"))
    assert wrong(findings) == ["single-writer"]
    assert "only detected" in findings["single-writer"].found
    assert "gateway_key" in str(findings["single-writer"].advice)


def test_a_listing_that_lags_is_a_warning() -> None:
    findings = found(FaultyStore(MemoryStore(), Fault(verb="list", effect="stale", times=None)))
    assert wrong(findings) == ["listing-lags"]
    assert "1 were not listed" in findings["listing-lags"].found


def test_an_object_that_cannot_be_read_back_at_once_is_a_problem() -> None:
    findings = found(FaultyStore(MemoryStore(), Fault(verb="get", key="probes/*/3", effect="stale")))
    assert wrong(findings) == ["read-lags"]


def test_ranges_that_are_ignored_are_a_problem() -> None:
    class Whole(MemoryStore):
        def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
            return super().get(key)

    assert "ranges-wrong" in found(Whole(), num_bytes=1000)


@pytest.mark.parametrize("effect", ["flip", "truncate"])
def test_a_payload_that_changes_on_the_way_is_a_problem(effect: Any) -> None:
    findings = found(FaultyStore(MemoryStore(), Fault(verb="upload", effect=effect)))
    assert wrong(findings) == ["payload-wrong"]


def test_what_cannot_be_removed_is_said() -> None:
    class Keeps(MemoryStore):
        def delete(self, key: str) -> None:
            raise UsageError("no right to delete")

    findings = found(Keeps())
    assert wrong(findings) == ["left-behind"]
    assert "s3:DeleteObject" in str(findings["left-behind"].advice)


@pytest.mark.parametrize("error", [RuntimeError("a defect"), UsageError("refused")])
def test_a_check_that_breaks_off_is_a_finding_and_hides_no_other(run: Run, error: Exception) -> None:
    class CannotList(FaultyStore):
        def list(self, prefix: str = "") -> Iterator[str]:
            raise error

    findings = found(CannotList(run.store))
    assert wrong(findings) == ["check-failed"]
    assert "listing could not be checked" in findings["check-failed"].found
    assert str(error) in findings["check-failed"].found
    assert {*OF_A_RUN, "throughput"} < {*findings}


# Runs that are damaged.


def test_a_run_of_a_later_format_is_not_understood(run: Run) -> None:
    record = json.loads(run.store.get(layout.HEADER))
    run.store.put(layout.HEADER, json.dumps({**record, "format_version": 99}).encode())
    findings = found(run.store)
    assert wrong(findings) == ["format-unknown"]
    assert "release" in str(findings["format-unknown"].advice)


@pytest.mark.parametrize("key", [layout.HEADER, layout.manifest_key(5)])
def test_a_run_whose_records_are_spoilt_is_unreadable(run: Run, key: str) -> None:
    run.store.put(key, b"{")
    findings = found(run.store)
    assert wrong(findings) == ["run-unreadable"]
    assert key in findings["run-unreadable"].found


def test_a_chain_with_another_parent_in_it_is_broken(run: Run) -> None:
    key = layout.manifest_key(4)
    run.store.put(key, run.store.get(key) + b" ")
    findings = found(run.store)
    assert wrong(findings) == ["lineage-broken"]
    assert "resume='anchor'" in str(findings["lineage-broken"].advice)


def test_a_chain_without_its_anchor_is_broken(run: Run) -> None:
    run.store.delete(layout.manifest_key(4))
    assert wrong(found(run.store)) == ["lineage-broken"]


def test_payloads_that_are_missing_or_cut_are_named(run: Run) -> None:
    anchor, delta = history.read_manifest(run.store, 4).anchor, history.read_manifest(run.store, 5).delta
    assert anchor is not None and delta is not None
    gone, cut = anchor.payloads[0], delta.payloads[0]
    run.store.delete(gone.key)
    run.store.put(cut.key, run.store.get(cut.key)[:-1])
    findings = found(run.store)
    assert wrong(findings) == ["payload-missing", "payload-size"]
    assert gone.key in findings["payload-missing"].found
    assert f"{cut.key}: expected {cut.size:,} bytes, found {cut.size - 1:,}" in findings["payload-size"].found
    assert "resume='anchor'" in str(findings["payload-missing"].advice)


def test_payloads_that_the_newest_version_does_not_need_are_not_asked_for(run: Run) -> None:
    old = history.read_manifest(run.store, 0).anchor
    assert old is not None
    run.store.delete(old.payloads[0].key)
    assert wrong(found(run.store)) == []


# Servers.


class StubVllm(StubServer):
    """A stub that also says which vLLM it is, and whether its model takes a run."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.version = "0.32.0"
        self.is_healthy = True
        self.extra: dict[str, Any] = {"release": "0.1.0"}
        """What each rank says besides."""
        self.failure: dict[str, Any] | None = None
        """Why its model does not take a run."""
        header = history.read_header(store)
        assert header is not None
        self.run_id, self.opened = header.run_id, {"store": "/bucket"}
        self.open(held=5)

    def open(self, held: int) -> None:
        """Follow the run, in all engines."""
        for engine in self.engines:
            engine.initialised, engine.run_id, engine.held = True, self.run_id, held

    def status(self, rank: int, engine: Engine) -> dict[str, Any]:
        return {**super().status(rank, engine), **self.extra}

    def answer(self, path: str, query: dict[str, str], body: dict[str, Any]) -> dict[str, Any]:
        match path:
            case "/version":
                return {"version": self.version}
            case "/health" if not self.is_healthy:
                raise ValueError("engine is dead")
            case "/collective_rpc" if body["method"] == "delta_fits":
                assert '"run_id"' in body["args"][0]
                return {"results": [{"failure": self.failure}] * self.num_ranks}
        return super().answer(path, query, body)


@pytest.fixture
def vllm(run: Run) -> Iterator[StubVllm]:
    with serving(StubVllm(run.store)) as stub:
        yield stub  # type: ignore[misc]


def of_server(run: Run, url: str) -> dict[str, Finding]:
    """What is found of a server, in the order in which it is found."""
    return {
        finding.kind: finding
        for finding in examine(FolderLike(run.store), [url], read_only=True)
        if finding.about == url
    }


class FolderLike(FaultyStore):
    """A store whose URL says nothing against a server here."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.url = "/bucket"


def test_a_server_at_the_head_is_well_and_was_not_touched(run: Run, vllm: StubVllm) -> None:
    findings = of_server(run, vllm.url)
    assert [*findings] == ["server", "delta", "following", "tensors"]
    assert vllm.calls == []


def test_a_server_that_is_down_is_unreachable(run: Run) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        findings = of_server(run, url)
    assert [*findings] == ["server-unreachable"]
    assert "--server" in str(findings["server-unreachable"].advice)


@pytest.mark.parametrize("page", [b"<html>", b'{"version": null}', b"[]"])
def test_a_server_that_is_not_vllm_is_told_apart(run: Run, vllm: StubVllm, page: bytes) -> None:
    vllm.page = page
    assert [*of_server(run, vllm.url)] == ["not-vllm"]


def test_a_server_that_is_sick_or_of_another_version_is_a_problem(run: Run, vllm: StubVllm) -> None:
    vllm.version = "0.25.1"
    findings = of_server(run, vllm.url)
    assert [*findings] == ["server-version"]
    assert "pip install 'vllm<0.34,>=0.26'" in str(findings["server-version"].advice)
    vllm.version, vllm.is_healthy = "0.32.1rc1.dev3+cpu", False
    assert [*of_server(run, vllm.url)] == ["server-unhealthy"]


def test_a_server_without_development_routes_is_told_the_variable(run: Run, vllm: StubVllm) -> None:
    vllm.is_dev = False
    findings = of_server(run, vllm.url)
    assert [*findings] == ["server", "dev-mode-off"]
    assert "VLLM_SERVER_DEV_MODE=1" in str(findings["dev-mode-off"].advice)


def test_a_server_without_the_extension_is_told_the_options_and_its_ranks_are_not_asked(
    run: Run, vllm: StubVllm
) -> None:
    vllm.config["parallel_config"]["worker_extension_cls"] = ""
    vllm.config["weight_transfer_config"] = None
    vllm.status = None  # type: ignore[assignment, method-assign]
    findings = of_server(run, vllm.url)
    assert [*findings] == ["server", "no-extension", "no-delta-backend"]
    assert "--worker-extension-cls" in str(findings["no-extension"].advice)
    assert "--weight-transfer-config" in str(findings["no-delta-backend"].advice)


def test_a_server_behind_the_head_is_told_the_command(run: Run, vllm: StubVllm) -> None:
    vllm.held = 3
    findings = of_server(run, vllm.url)
    assert [*findings] == ["server", "delta", "behind", "tensors"]
    assert "serves version 3; the newest is 5" in findings["behind"].found
    assert f"patchstore follow /bucket --server {vllm.url}" in str(findings["behind"].advice)


def test_a_half_applied_server_that_was_left_in_a_switch_says_all_of_it(run: Run, vllm: StubVllm) -> None:
    vllm.half_applied, vllm.held, vllm.switch, vllm.paused, vllm.update_open = (
        True,
        None,
        "resume",
        True,
        True,
    )
    vllm.extra["last_error"] = {"rank": 0, "kind": "half-applied", "message": "parts of two versions"}
    vllm.extra["asleep"] = True
    findings = of_server(run, vllm.url)
    told = [
        "server-half-applied",
        "server-asleep",
        "switch-open",
        "update-open",
        "server-paused",
        "server-last-error",
    ]
    assert [*findings] == ["server", "delta", *told, "behind", "tensors"]
    assert "patchstore follow" in str(findings["server-half-applied"].advice)
    assert "/wake_up" in str(findings["server-asleep"].advice)
    assert "/resume" in str(findings["server-paused"].advice)
    assert "[half-applied] parts of two versions" in findings["server-last-error"].found


def test_ranks_and_engines_that_differ_are_warnings(run: Run, vllm: StubVllm) -> None:
    vllm.num_engines = 3
    vllm.open(held=5)
    vllm.num_ranks, vllm.held_by_rank, vllm.engines[2].half_applied = 2, {1: 4}, True
    findings = of_server(run, vllm.url)
    assert "4, 5" in findings["server-ranks-differ"].found
    assert "2 ranks; 3 engines" in findings["delta"].found
    assert "patchstore follow" in str(findings["server-engines-differ"].advice)


def test_tensors_are_compared_though_the_server_follows_nothing_yet(run: Run, vllm: StubVllm) -> None:
    vllm.initialised = False
    assert [*of_server(run, vllm.url)] == ["server", "delta", "following-nothing", "tensors"]
    vllm.failure = {"rank": 0, "kind": "schema-mismatch", "message": "no parameter named scale"}
    findings = of_server(run, vllm.url)
    assert [*findings] == ["server", "delta", "following-nothing", "tensors-unfit"]
    assert "[schema-mismatch] no parameter named scale" in findings["tensors-unfit"].found
    assert "vllm serve" in str(findings["tensors-unfit"].advice)
    assert vllm.calls == []


def test_a_run_of_a_wrapped_model_is_told_what_to_publish(vllm: StubVllm) -> None:
    store = MemoryStore("memory://wrapped")
    # A publisher refuses such names; another writer may not.
    begin_run(store, tensors=("module.b", "module.model.w"))
    commit(store, 0)
    vllm.initialised = False
    every = " ".join(f"'layers.{number}.weight'" for number in range(1000))
    vllm.failure = {"rank": 0, "kind": "schema-mismatch", "message": f"ValueError: no 'module', but {every}"}
    finding = found(store, vllm.url, read_only=True)["tensors-unfit"]
    assert "wrapped model: its names have 'module.'" in finding.found
    assert "layers." not in finding.found
    assert "publish model.module" in str(finding.advice)


def test_a_servers_long_list_of_its_parameters_is_cut(run: Run, vllm: StubVllm) -> None:
    vllm.initialised = False
    every = " ".join(f"'layers.{number}.weight'" for number in range(1000))
    vllm.failure = {"rank": 0, "kind": "schema-mismatch", "message": f"no 'scale', but {every}"}
    finding = of_server(run, vllm.url)["tensors-unfit"]
    assert "no 'scale', but 'layers.0.weight'" in finding.found
    assert len(finding.found) < 400


def test_a_server_on_another_run_is_told_apart(run: Run, vllm: StubVllm) -> None:
    vllm.run_id = "another"
    vllm.open(held=5)
    findings = of_server(run, vllm.url)
    assert [*findings] == ["server", "delta", "other-run", "tensors"]
    assert "follows run another" in findings["other-run"].found


def test_a_server_that_cannot_tell_about_tensors_is_not_asked(run: Run, vllm: StubVllm) -> None:
    vllm.initialised = False
    vllm.failure = {"rank": 0, "kind": "internal", "message": "was asked"}
    vllm.config["model_config"]["quantization"] = "fp8"
    assert "tensors-unknown" in of_server(run, vllm.url)
    vllm.config["model_config"]["quantization"], vllm.extra = None, {}
    assert "tensors-unknown" in of_server(run, vllm.url)


def test_a_store_that_a_server_cannot_open_is_a_warning(run: Run, vllm: StubVllm) -> None:
    assert "this process only" in found(run.store, vllm.url)["store-not-shared"].found


@pytest.mark.parametrize("as_url", [False, True])
def test_a_folder_is_not_on_another_machine_however_it_is_written(
    tmp_path: Path, vllm: StubVllm, as_url: bool
) -> None:
    # An address of this machine which does not look like one.
    elsewhere = vllm.url.replace("127.0.0.1", "127.1")
    folder = tmp_path / "bucket"
    findings = found(folder.as_uri() if as_url else str(folder), elsewhere, read_only=True)
    assert f"{folder} is a folder" in findings["store-not-shared"].found
    assert "store-not-shared" not in found(str(folder), vllm.url, read_only=True)


def test_a_server_is_examined_though_the_store_cannot_be_opened(vllm: StubVllm) -> None:
    assert wrong(found("nosuch://place", vllm.url)) == ["store-url"]


def test_a_server_that_does_not_tell_how_it_was_started_is_not_asked_further(
    run: Run, vllm: StubVllm
) -> None:
    vllm.config = {}
    findings = of_server(run, vllm.url)
    assert [*findings] == ["server", "check-failed"]
    assert "/server_info" in findings["check-failed"].found


def test_servers_are_examined_though_the_store_is_down(vllm: StubVllm) -> None:
    dead = FaultyStore(MemoryStore(), Fault(verb="*", effect="fail-before", times=None))
    findings = found(dead, vllm.url)
    assert wrong(findings) == ["store-unreachable", "store-not-shared"]
    assert {"server", "delta", "following"} < {*findings}


# Packages.


def versions(monkeypatch: pytest.MonkeyPatch, **pretended: str | None) -> None:
    real = metadata.version

    def version(name: str) -> str:
        found = pretended[name] if name in pretended else real(name)
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)


def test_an_s3fs_without_conditional_writes_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    # The release that a resolver once went back to.
    versions(monkeypatch, s3fs="0.4.2", blake3=None, vllm="0.25.0", obstore=None)
    findings = found(MemoryStore())
    assert wrong(findings) == ["package-missing", "package-version", "package-version-server"]
    assert findings["package-version"].advice == "pip install 's3fs>=2024.12'"
    assert findings["package-missing"].advice == "pip install 'blake3>=0.4'"
    assert findings["package-version-server"].level == "warning"
    assert "s3fs" not in findings["packages"].found and "torch" in findings["packages"].found


def test_a_folder_that_was_never_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", not_installed)
    findings = found(MemoryStore())
    assert wrong(findings) == ["packages-unknown"]
    assert "pip install" in str(findings["packages-unknown"].advice)


# The command.


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["patchstore", "doctor", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return int(ended.value.code or 0)


def test_the_command_prints_one_object_a_finding_and_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, tmp_path, "--json", "--size", 1) == 0
    findings = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [finding["kind"] for finding in findings][:2] == ["packages", "store"]
    assert {finding["level"] for finding in findings} == {"ok"}
    assert {finding["about"] for finding in findings} == {"packages", str(tmp_path)}
    (throughput,) = [finding["found"] for finding in findings if finding["kind"] == "throughput"]
    assert throughput.startswith("1.0 MB")


def test_the_command_shows_a_problem_with_what_to_do_and_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, tmp_path, "--read-only", "--server", "http://127.0.0.1:9") == 1
    out = capsys.readouterr().out
    assert re.search(r"problem\W+server-unreachable", out)
    assert "-> start it" in out


# The page.


def test_the_page_explains_every_kind_and_no_other() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text()
    explained = re.findall(r"^\| `([a-z-]+)` \| (ok|warning|problem) \|", page, re.MULTILINE)
    assert explained == [*KINDS.items()]


def test_every_kind_is_found_somewhere_in_the_code() -> None:
    folder = ROOT / "patchstore" / "doctor"
    source = "".join(path.read_text() for path in folder.glob("*.py") if path.name != "finding.py")
    source += (folder / "finding.py").read_text().partition("class Finding")[2]
    # Options that a server was started without are found by its driver too.
    source += (folder.parent / "serve" / "vllm_configuration.py").read_text()
    assert [kind for kind in KINDS if f'"{kind}"' not in source] == []
