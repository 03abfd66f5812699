"""What `patchstore doctor` finds of stores that refuse, lose or lag, and of clocks."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from findings import OF_A_RUN, found, wrong

from patchstore.errors import UnsupportedStore, UsageError
from patchstore.stores import layout
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.stores.test_probe import ChecksThenWrites, IgnoresConditions
from tests.support.http_server import Answer, Request, serving
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
def test_a_bucket_that_is_missing_is_told_from_one_that_refuses(s3_options, client):
    options = {name: s3_options[name] for name in ("endpoint_url", "key", "secret")}
    findings = found("s3://no-such-bucket/run", storage_options={**options, "client": client})
    assert wrong(findings) == ["no-bucket"]
    assert "create the bucket" in str(findings["no-bucket"].advice)


def answering(answer: Callable[[str], tuple[int, bytes]]) -> AbstractContextManager[str]:
    """An HTTP server that gives the same answer to all requests of a method."""

    def answered(request: Request) -> Answer:
        status, body = answer(request.method)
        return Answer(status=status, body=body, headers={"Content-Type": "application/xml"})

    return serving(answered)


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
def test_a_clock_that_is_off_is_measured_against_the_stores(ahead_s, kind, tmp_path, s3_options, s3_url):
    def now() -> float:
        return time.time() + ahead_s

    in_moto = found(s3_url, storage_options=s3_options, now=now)
    for findings, others in ((found(str(tmp_path), now=now), []), (in_moto, ["body-unchecked"])):
        assert sorted(wrong(findings)) == sorted([kind, *others])
        off = re.search(r"([\d,]+) s (ahead|behind)", findings[kind].found)
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


class NoGateway(MemoryStore):
    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        if if_absent:
            raise UnsupportedStore(f"{self.url} cannot create {key} only once")
        super().put(key, data)


class OneWriter(MemoryStore):
    single_writer = True


class Whole(MemoryStore):
    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        return super().get(key)


class Keeps(MemoryStore):
    def delete(self, key: str) -> None:
        raise UsageError("no right to delete")


def faulty(verb: Any, effect: Any, key: str = "*", times: int | None = 1) -> FaultyStore:
    return FaultyStore(MemoryStore(), Fault(verb=verb, key=key, effect=effect, times=times))


HUB = "hf://buckets/me/run"


@pytest.mark.parametrize(
    ("open_", "kind", "says"),
    [
        (IgnoresConditions, "create-only-broken", ["If-None-Match"]),
        (ChecksThenWrites, "create-only-broken", ["If-None-Match"]),
        (lambda: NoGateway(HUB), "gateway-missing", ["gateway_key", "gateway_secret", "single_writer"]),
        (lambda: OneWriter(HUB), "single-writer", ["only sometimes detected", "gateway_key"]),
        (lambda: faulty("list", "stale", times=None), "listing-lags", ["1 were not listed"]),
        (lambda: faulty("get", "stale", "probes/*/3"), "read-lags", []),
        (Whole, "ranges-wrong", []),
        (lambda: faulty("upload", "flip"), "payload-wrong", []),
        (lambda: faulty("upload", "truncate"), "payload-wrong", []),
        (Keeps, "left-behind", ["s3:DeleteObject"]),
    ],
)
def test_what_a_store_does_wrong_is_found(open_: Callable[[], Store], kind: str, says: list[str]) -> None:
    findings = found(open_(), num_bytes=1000)
    assert wrong(findings) == [kind]
    said = f"{findings[kind].found} -> {findings[kind].advice}"
    assert [text for text in says if text not in said] == []
    assert kind != "gateway-missing" or "create-only" not in findings["latency"].found


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
