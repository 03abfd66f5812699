"""What `patchstore doctor` finds of stores that refuse, lose or lag, and of clocks."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from findings import OF_A_RUN, found, wrong

from patchstore.errors import UnsupportedStore, UsageError
from patchstore.format import layout
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.stores.test_probe import ChecksThenWrites, IgnoresConditions
from tests.support.weights import Run

CLIENTS = pytest.mark.parametrize("client", ["s3fs", "obstore"])


def test_urls_and_options_that_are_wrong_are_named(s3_url: str) -> None:
    assert "fsspec knows no protocol nosuch" in found("nosuch://place")["store-url"].found
    findings = found(s3_url, storage_options={"endpoint": "x"})
    assert "no option endpoint" in findings["store-url"].found
    assert "--option" in str(findings["store-url"].advice)
    assert wrong(findings) == ["store-url"]


def test_a_store_that_cannot_keep_versions_is_unsupported() -> None:
    assert wrong(found("http://127.0.0.1:9/bucket")) == ["store-unsupported"]


@CLIENTS
def test_a_bucket_that_is_missing_is_told_from_one_that_refuses(
    s3_options: dict[str, Any],
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


@pytest.mark.parametrize(
    ("ahead_s", "kind"), [(100, "clock-off"), (-100, "clock-off"), (1000, "clock-wrong")]
)
def test_a_clock_that_is_off_is_measured_against_the_stores(
    ahead_s: int,
    kind: str,
    tmp_path: Path,
    s3_options: dict[str, Any],
    s3_url: str,
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
    assert "only sometimes detected" in findings["single-writer"].found
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
def test_a_check_that_fails_is_a_finding_and_hides_no_other(run: Run, error: Exception) -> None:
    class CannotList(FaultyStore):
        def list(self, prefix: str = "") -> Iterator[str]:
            # Nothing but a way to the newest version asks for these.
            if prefix == layout.SHORTCUTS:
                return iter(())
            raise error

    findings = found(CannotList(run.store))
    assert wrong(findings) == ["check-failed"]
    assert "listing could not be checked" in findings["check-failed"].found
    assert str(error) in findings["check-failed"].found
    assert {*OF_A_RUN, "throughput"} < {*findings}
