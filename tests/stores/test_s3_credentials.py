"""Credentials that change under a long run, or that there are not: the same for both clients."""

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from patchstore.errors import PatchstoreError, StoreUnavailable, UsageError
from patchstore.stores.base import PART_BYTES, Store
from tests.stores.asks import OPERATIONS
from tests.stores.bad_servers import Connection, saying, serving
from tests.stores.lost_answers import Answer, Place, Request, error, passing_on

pytestmark = pytest.mark.usefixtures("no_identity")

ASKS: dict[str, Callable[[Store], object]] = {
    "create": lambda store: store.put("b", b"x", if_absent=True),
    **{verb: OPERATIONS[verb] for verb in ("get", "size", "list", "delete")},
}
_ISSUE = """
import datetime, json, pathlib, sys, time
said, turns = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
turns.write_text(turns.read_text() + "x" if turns.exists() else "x")
while (said.parent / "wait").exists():
    time.sleep(0.05)
later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=6)
print(json.dumps({
    "Version": 1, "AccessKeyId": said.read_text(), "SecretAccessKey": "a secret",
    "Expiration": later.isoformat(),
}))
"""


class Service:
    """S3 that knows some keys, at a place."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.refused: dict[str, Answer] = {}
        """Answers to requests that a key has signed."""
        self.keys: list[str] = []
        """Which signed the requests so far."""
        self._lock = threading.Lock()

    def answer(self, request: Request) -> Answer | None:
        key = request.headers.get("authorization", "").partition("Credential=")[2].partition("/")[0]
        with self._lock:
            self.keys.append(key)
        return self.refused.get(key)

    @contextmanager
    def opened(self, **options: Any) -> Iterator[Store]:
        """Open a store with no other options than are given."""
        with passing_on(self.place.options["endpoint_url"], instead=self.answer) as url:
            here = Place(self.place.url, {"endpoint_url": url, "client": self.place.options["client"]})
            with here.opened(**options) as store:
                yield store


@pytest.fixture
def service(s3: Place) -> Service:
    return Service(s3)


def write(file: Path, key: str) -> None:
    """Rewrite a file of credentials, as a tool does: another file takes its name."""
    other = file.with_name("new")
    other.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = a secret of {key}\n")
    other.replace(file)


def issuing(tmp_path: Path, key: str) -> tuple[Path, Path]:
    """Set up a `credential_process`; return the file with the key that it issues, and that with its turns."""
    program, said, turns = (tmp_path / name for name in ("issue.py", "key", "turns"))
    program.write_text(_ISSUE)
    said.write_text(key)
    command = f"{sys.executable} {program} {said} {turns}"
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {command}\n")
    return said, turns


def test_a_file_that_was_rewritten_counts_at_once(service: Service, tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    write(file, "FIRST")
    with service.opened() as store:
        store.put("a", b"x")
        write(file, "SECOND")
        for ask in ASKS.values():
            before = len(service.keys)
            ask(store)
            assert set(service.keys[before:]) == {"SECOND"}
        file.write_text("[default]\naws_access_key_id = TH")  # half written
        store.put("a", b"x")
        write(file, "THIRD")
        store.put("a", b"x")
    assert service.keys[0] == "FIRST" and service.keys[-2:] == ["SECOND", "THIRD"]


@pytest.mark.parametrize("operation", ["create", "get", "size", "list", "upload"])
@pytest.mark.parametrize(
    "refusal",
    [error(400, "ExpiredToken"), error(403, "InvalidAccessKeyId"), error(403, "SignatureDoesNotMatch")],
)
def test_what_is_refused_is_asked_again_with_what_is_issued_now(
    service: Service, tmp_path: Path, operation: str, refusal: Answer
) -> None:
    if operation == "upload" and service.place.options["client"] == "obstore":
        pytest.skip("obstore has no second attempt at a part; the publisher has")
    said, turns = issuing(tmp_path, "FIRST")
    with service.opened() as store:
        store.put("a", b"x")
        said.write_text("SECOND")
        service.refused["FIRST"] = refusal
        (ASKS | OPERATIONS)[operation](store)
        store.put("a", b"x")
    assert service.keys[-1] == "SECOND"
    assert turns.read_text() == "xx"


def test_an_upload_that_was_refused_goes_on_when_it_is_tried_again(service: Service, tmp_path: Path) -> None:
    said, _ = issuing(tmp_path, "FIRST")
    chunks = [bytes(PART_BYTES), b"x"]
    with service.opened() as store:
        store.upload("c", chunks)
        said.write_text("SECOND")
        service.refused["FIRST"] = error(400, "ExpiredToken")
        try:
            store.upload("c", chunks)
        except StoreUnavailable:
            store.size("c")
            store.upload("c", chunks)
    assert service.keys[-1] == "SECOND"


@pytest.mark.parametrize(
    ("refusal", "kind", "num_turns"),
    [
        (error(400, "ExpiredToken"), StoreUnavailable, 2),
        (error(403, "InvalidAccessKeyId"), UsageError, 2),
        (error(403, "AccessDenied"), UsageError, 1),
    ],
)
def test_what_nobody_issues_anew_is_said_and_a_right_that_is_missing_asks_nobody(
    service: Service, tmp_path: Path, refusal: Answer, kind: type[PatchstoreError], num_turns: int
) -> None:
    _, turns = issuing(tmp_path, "FIRST")
    with service.opened() as store:
        store.put("a", b"x")
        service.refused["FIRST"] = refusal
        with pytest.raises(kind) as caught:
            store.get("a")
        assert type(caught.value) is kind
    assert len(turns.read_text()) == num_turns
    assert "a secret" not in str(caught.value)


def test_credentials_in_the_environment_or_in_options_are_refused_once(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.refused["MINE"] = error(403, "InvalidAccessKeyId")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "MINE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a secret")
    for options in ({}, {"key": "MINE", "secret": "a secret"}):
        service.keys.clear()
        with service.opened(**options) as store, pytest.raises(UsageError, match="refused"):
            store.get("a")
        # And once without a signature, whether the endpoint is another one's.
        assert service.keys == ["MINE", ""]


# Without any


def _process(folder: Path) -> str:
    program = folder / "fails.py"
    program.write_text(
        "import sys\nsys.exit('no login: run corp-login\\nat line 3, token hf_abcdefgh12345678')"
    )
    return f"credential_process = {sys.executable} {program}"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (_process, "the profile's credential_process failed: no login: run corp-login;"),
        (lambda _: "credential_process = /nowhere/program", "/nowhere/program cannot be read: No such file"),
        (
            lambda _: (
                "sso_start_url = https://x.awsapps.com/start\nsso_region = us-east-1\n"
                "sso_account_id = 111122223333\nsso_role_name = r"
            ),
            "log in with `aws sso login`",
        ),
        (
            lambda _: "role_arn = arn:aws:iam::111122223333:role/x\nweb_identity_token_file = /nowhere/token",
            "/nowhere/token cannot be read: No such file",
        ),
        (lambda _: "", "none are in the environment, a profile or elsewhere"),
    ],
)
def test_why_there_are_no_credentials_is_said(
    service: Service, tmp_path: Path, settings: Callable[[Path], str], expected: str
) -> None:
    (tmp_path / "config").write_text(f"[default]\n{settings(tmp_path)}\n")
    with service.opened() as store:
        for ask in ASKS.values():
            begin = f"^{store.url}: [a-z]+ ?[ab]?: refused: no credentials: "
            with pytest.raises(UsageError, match=begin) as caught:
                ask(store)
            assert expected in str(caught.value)
            assert "hf_" not in str(caught.value) and "endpoint" not in str(caught.value)
    assert service.keys == []


def test_a_program_that_hangs_ends_with_the_time_of_the_request(service: Service, tmp_path: Path) -> None:
    issuing(tmp_path, "FIRST")
    (tmp_path / "wait").touch()
    with service.opened(timeout_s=1) as store:
        for ask in (ASKS["get"], ASKS["list"]):
            with pytest.raises(StoreUnavailable, match="not done within 1 s"):
                ask(store)
    (tmp_path / "wait").unlink()


# Refusals, and answers that stall


STATUSES = {
    "401 Unauthorized": UsageError,
    "403 Forbidden": UsageError,
    "405 Method Not Allowed": UsageError,
    "501 Not Implemented": UsageError,
    "400 Bad Request": StoreUnavailable,
    "418 Teapot": StoreUnavailable,
    "429 Too Many Requests": StoreUnavailable,
    "500 Internal Server Error": StoreUnavailable,
    "503 Service Unavailable": StoreUnavailable,
}


@pytest.mark.sample(18)
@pytest.mark.parametrize("code", ["", "Made Up"])
@pytest.mark.parametrize("status", STATUSES)
def test_a_status_is_the_same_error_with_both_clients_and_for_all_requests(
    s3: Place, status: str, code: str
) -> None:
    kind, body = STATUSES[status], f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
    # What may pass is repeated until the time is over, and obstore repeats a part of an upload until then.
    timeout_s = 0.5 if kind is StoreUnavailable else 10
    with (
        serving(saying(status, body if code else b"")) as url,
        s3.opened(endpoint_url=url, timeout_s=timeout_s) as store,
    ):
        for ask in (*ASKS.values(), OPERATIONS["upload"]):
            with pytest.raises(PatchstoreError) as caught:
                ask(store)
            assert type(caught.value) is kind


@pytest.mark.parametrize("operation", ["get", "range", "list"])
def test_an_answer_that_stalls_leaves_time_for_another_one(s3: Place, operation: str) -> None:
    server = urlsplit(s3.options["endpoint_url"])
    stalled = threading.Event()

    def behave(connection: Connection) -> None:
        head = connection.request()
        with socket.create_connection((server.hostname, server.port)) as behind:
            behind.sendall(head)
            answer = b"".join(iter(lambda: behind.recv(65_536), b""))
        if stalled.is_set():
            connection.socket.sendall(answer)
            return
        stalled.set()
        connection.socket.sendall(answer[:-5])
        connection.ended.wait()

    data = os.urandom(1000)
    with s3.opened() as store:
        store.put("a", data)
    with serving(behave) as url, s3.opened(endpoint_url=url, timeout_s=6) as store:
        if operation == "range":
            assert store.get("a", 10, 500) == data[10:500]
        else:
            assert OPERATIONS[operation](store) == {"list": ["a"], "get": data}[operation]
    assert stalled.is_set()
