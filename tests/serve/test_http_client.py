"""How servers are asked: through TLS, past or through a proxy, with what a gateway in front of them wants."""

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from examples.processes import free_port
from patchstore import Publisher, open_store, wait_until
from patchstore.errors import ServerUnavailable, UsageError
from patchstore.follow import http_client
from patchstore.follow.http_api import Listener
from patchstore.follow.http_client import FollowClient
from patchstore.follow.settings import Settings
from patchstore.follow.vllm_server import VllmServer
from patchstore.tensors import state_digest
from tests.support.commands import Cli
from tests.support.gateway import Gateway, certified, forwarding
from tests.support.vllm_stub import StubServer

ROOT = Path(__file__).parents[2]
SECRET = "s3cr3t-t0k3n"
BEARER = f"Bearer {SECRET}"
NAMED = "http://gpu-7.example:8000"
"""A server that only a proxy can find."""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this machine."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name in {"SSL_CERT_FILE", "SSL_CERT_DIR"}:
            monkeypatch.delenv(name)
    monkeypatch.delenv("PATCHSTORE_SERVER_TOKEN", raising=False)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def bucket(tmp_path: Path, stub: StubServer) -> Path:
    """A run that the stub serves, and can prove."""
    with Publisher(open_store(tmp_path / "bucket"), {"w": torch.zeros(10)}, dtype=None) as publisher:
        publisher.publish_patch(0).result(timeout_s=60)
        stub.run_id = publisher.run_id
    for engine in stub.engines:
        engine.initialised, engine.held, engine.run_id = True, 0, stub.run_id
    stub.opened = {"store": str(tmp_path / "bucket")}
    sums = state_digest.of_elements(torch.arange(10), torch.zeros(10))
    stub.sums = [
        {
            "num_applied": 1,
            "next": None,
            "sums": {"w": [[[0, 10, 1], sums.hex()]]},
            "computed": [],
            "unverified": [],
        }
    ]
    return tmp_path / "bucket"


@pytest.fixture
def said(patchstore: Cli) -> Callable[..., tuple[int, str]]:
    """Run a command; returns its exit code, and what it prints, in which there is never a secret."""

    def call(*words: object) -> tuple[int, str]:
        code, out, err = patchstore(*words)
        assert SECRET not in out + err
        return code, " ".join((out + err).split())

    return call


def followed_once(*options: object, **environment: str) -> str:
    """Follow until the server was asked, and return all that was printed, and what `/healthz` said."""
    port = free_port()
    follow = ["--verbose", "follow", *map(str, options), "--listen", str(port), "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "patchstore", *follow],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        while True:
            with suppress(httpx.TransportError):
                health = httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=60).text
                if any(
                    each["serving"] is not None or each["error"]
                    for each in json.loads(health)["servers"].values()
                ):
                    break
            time.sleep(0.05)
    finally:
        process.terminate()
        out, err = process.communicate(timeout=60)
    return out + err + health


# TLS


def test_a_server_of_ones_own_ca_is_reached_by_all_commands_when_the_variable_names_it(
    opened, stub, bucket, tmp_path, said, monkeypatch
):
    tls, ca = certified(tmp_path)
    gate = opened.enter_context(forwarding(Gateway(stub.url), tls=tls))
    for words in (
        ("verify", "--server", gate.url),
        ("wait", 0, "--server", gate.url, "--patience", 0),
        ("doctor", bucket, "--server", gate.url, "--read-only", "--json"),
        ("pin", 0, "--follow", gate.url),
    ):
        code, text = said(*words)
        assert code != 0
        assert "CERTIFICATE_VERIFY_FAILED" in text and "SSL_CERT_FILE" in text
    text = followed_once(bucket, "--server", gate.url)
    assert "SSL_CERT_FILE" in json.loads(text.splitlines()[0])["error"]["message"]

    monkeypatch.setenv("SSL_CERT_FILE", str(ca))
    code, text = said("verify", "--server", gate.url)
    assert code == 0, text
    assert said("wait", 0, "--server", gate.url)[0] == 0
    assert "is vLLM" in said("doctor", bucket, "--server", gate.url, "--json")[1]
    stub.restart()
    assert '"initialised"' in followed_once(bucket, "--server", gate.url)


def test_a_listener_behind_tls_is_reached_too(opened, tmp_path, monkeypatch):
    tls, ca = certified(tmp_path)
    gate = opened.enter_context(forwarding(Gateway("", says=(200, '{"servers": {}}')), tls=tls))
    with FollowClient(gate.url) as client, pytest.raises(ServerUnavailable, match="SSL_CERT_FILE"):
        client.state()
    monkeypatch.setenv("SSL_CERT_FILE", str(ca))
    with FollowClient(gate.url) as client:
        assert client.state() == {"servers": {}}


def test_a_certificate_of_another_host_is_no_matter_of_cas(opened, tmp_path, monkeypatch):
    tls, ca = certified(tmp_path, address="192.0.2.1")
    gate = opened.enter_context(forwarding(Gateway(""), tls=tls))
    monkeypatch.setenv("SSL_CERT_FILE", str(ca))
    with VllmServer(gate.url) as server, pytest.raises(ServerUnavailable, match=r"192|127") as failed:
        server.is_paused()
    assert "SSL_CERT_FILE" not in str(failed.value)


def test_without_tls_certificates_are_not_read_and_tls_with_a_server_that_has_none_is_explained(
    stub, bucket, monkeypatch, said
):
    url = stub.url.replace("http:", "https:")
    assert "begins with http://" in said("wait", 0, "--server", url, "--patience", 0)[1]
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/ca.pem")
    assert wait_until(0, servers=stub.url) == {stub.url: 0}


# Proxies


def test_other_servers_are_asked_through_the_proxy_with_its_password(opened, stub, bucket, monkeypatch):
    proxy = opened.enter_context(forwarding(Gateway(stub.url)))
    monkeypatch.setenv("http_proxy", proxy.url.replace("//", "//me:pass@"))
    assert wait_until(0, servers=NAMED) == {NAMED: 0}
    target, headers = proxy.seen[0]
    assert target.startswith(NAMED) and headers["Proxy-Authorization"].startswith("Basic ")


@pytest.mark.parametrize(
    ("status", "page"), [(502, "<h1>Bad gateway</h1>"), (503, ""), (407, "who?"), (403, "denied")]
)
def test_an_answer_of_the_proxy_is_not_taken_for_the_servers(opened, said, monkeypatch, status, page):
    proxy = opened.enter_context(forwarding(Gateway("", says=(status, page))))
    monkeypatch.setenv("HTTP_PROXY", proxy.url.replace("//", f"//me:{SECRET}@"))
    for words in (
        ("wait", 0, "--server", NAMED, "--patience", 0),
        ("verify", "--server", NAMED),
        ("pin", 0, "--follow", NAMED),
    ):
        code, text = said(*words)
        assert code == 4
        assert f"HTTP {status}" in text and f"the proxy {proxy.url}, which HTTP_PROXY names" in text
        assert "add gpu-7.example to NO_PROXY" in text


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_that_is_gone_is_named_without_its_password(said, monkeypatch, scheme):
    port = free_port()
    monkeypatch.setenv("ALL_PROXY", f"http://me:{SECRET}@127.0.0.1:{port}")
    url = NAMED.replace("http", scheme)
    code, text = said("wait", 0, "--server", url, "--patience", 0)
    assert code == 4
    assert f"the proxy http://127.0.0.1:{port}, which ALL_PROXY names" in text and "NO_PROXY" in text


def test_a_proxy_that_makes_no_tunnel_is_named(opened, said, monkeypatch):
    proxy = opened.enter_context(forwarding(Gateway("")))
    monkeypatch.setenv("HTTPS_PROXY", proxy.url)
    text = said("wait", 0, "--server", "https://gpu-7.example", "--patience", 0)[1]
    assert "501" in text and "HTTPS_PROXY" in text


def test_an_error_of_the_server_comes_through_a_proxy_as_it_is(opened, stub, bucket, monkeypatch):
    proxy = opened.enter_context(forwarding(Gateway(stub.url)))
    monkeypatch.setenv("http_proxy", proxy.url)
    stub.failures["delta_status"] = ["[half-applied] parts of two versions"]
    with VllmServer(NAMED) as server, pytest.raises(Exception, match="parts of two") as failed:
        server.status()
    assert "proxy" not in str(failed.value)


@pytest.mark.parametrize(
    "value",
    [
        f"http://me:{SECRET}/x@proxy:3128",
        f"http://me:{SECRET}@proxy:99999",
        f"ftp://me:{SECRET}@proxy",
        "http://",
        f"socks5://me:{SECRET}@proxy:1080",
    ],
)
def test_a_proxy_that_cannot_be_used_is_said_in_a_sentence(said, monkeypatch, value):
    if value.startswith("socks5"):
        monkeypatch.setitem(sys.modules, "socksio", None)
    monkeypatch.setenv("http_proxy", value)
    code, text = said("wait", 0, "--server", NAMED, "--patience", 0)
    assert code == 2
    assert "http_proxy" in text and "NO_PROXY" in text
    assert ("httpx[socks]" in text) == value.startswith("socks5")


# Headers


@pytest.fixture
def gate(opened: ExitStack, stub: StubServer) -> Gateway:
    """A gateway that wants credentials, and repeats what it was sent where it refuses."""
    return opened.enter_context(forwarding(Gateway(stub.url, needs=("Authorization", BEARER))))


def test_what_a_gateway_wants_is_said(gate, bucket, said):
    for words in (
        ("verify", "--server", gate.url),
        ("wait", 0, "--server", gate.url, "--patience", 0),
        ("wait", 0, "--follow", gate.url, "--patience", 0),
        ("doctor", bucket, "--server", gate.url, "--read-only"),
        ("pin", "--off", "--follow", gate.url),
    ):
        text = said(*words)[1]
        assert "401" in text and "--server-header" in text and "PATCHSTORE_SERVER_TOKEN" in text


def test_every_command_sends_what_it_is_given_and_shows_it_nowhere(
    opened, stub, gate, bucket, tmp_path, said, monkeypatch
):
    value, whole = tmp_path / "value", tmp_path / "whole"
    value.write_text(f"{BEARER}\n")
    whole.write_text(f"X-Tenant: research\nAuthorization: {BEARER}\n")
    for given in (f"Authorization: {BEARER}", f"authorization: @{value}", f"@{whole}"):
        header = ("--server-header", given)
        code, text = said("verify", "--server", gate.url, *header)
        assert code == 0, text
    assert said("wait", 0, "--server", gate.url, *header)[0] == 0
    assert "is vLLM" in said("doctor", bucket, "--server", gate.url, "--json", *header)[1]
    assert gate.seen[-1][1]["X-Tenant"] == "research"
    listener = opened.enter_context(
        forwarding(Gateway("", needs=gate.needs, says=(200, '{"pinned": 0, "servers": {}}')))
    )
    assert said("pin", 0, "--follow", listener.url, *header)[0] == 0
    assert said("pin", "--off", "--follow", listener.url, *header)[0] == 0
    assert [headers["Authorization"] for _, headers in listener.seen] == [BEARER] * 2

    follow = (bucket, "--server", gate.url)
    for options in (("--server-header", f"@{whole}"), ("--server-header", f"Authorization: {BEARER}-wrong")):
        gate.seen.clear()
        printed = followed_once(*follow, *options)
        assert gate.seen[0][1]["Authorization"].startswith(BEARER)
        assert SECRET not in printed
    assert "401" in printed
    gate.seen.clear()
    assert SECRET not in followed_once(*follow, PATCHSTORE_SERVER_TOKEN=SECRET)
    assert gate.seen[0][1]["Authorization"] == BEARER


def test_a_token_in_the_environment_is_sent_unless_a_header_says_otherwise(gate, bucket, monkeypatch):
    monkeypatch.setenv("PATCHSTORE_SERVER_TOKEN", f"{SECRET}\n")
    assert wait_until(0, servers=gate.url) == {gate.url: 0}
    with pytest.raises(ServerUnavailable) as failed:
        wait_until(0, servers=gate.url, headers={"authorization": "Basic bm90LXRoaXM="}, patience_s=0)
    assert "it does not accept what it was sent as authorization" in str(failed.value)
    assert gate.seen[-1][1]["authorization"] == "Basic bm90LXRoaXM="
    assert "bm90" not in str(failed.value) and SECRET not in str(failed.value)


def test_what_was_sent_is_hidden_where_the_answer_repeats_it(opened, caplog):
    caplog.set_level(logging.DEBUG)
    page = f"<p>{BEARER}</p>"
    other = opened.enter_context(forwarding(Gateway("", says=(500, page))))
    echo = opened.enter_context(forwarding(Gateway("", says=(200, json.dumps({"sent": BEARER})))))
    headers = {"Authorization": BEARER, "X-Quoted": f'"{SECRET}"'}
    said = [repr(Settings(headers=headers))]
    for call in (
        lambda: VllmServer(other.url, headers=headers).is_paused(),
        lambda: VllmServer(other.url, headers=headers).status(),
        lambda: FollowClient(other.url, headers=headers).state(),
        lambda: FollowClient(echo.url, headers=headers).state(),
    ):
        with pytest.raises(ServerUnavailable) as failed:
            call()
        said.append(str(failed.value))
    assert SECRET not in "".join(said) + caplog.text
    assert sum("(hidden)" in each for each in said) == 4


def test_headers_do_not_go_where_an_answer_redirects_to(opened, said):
    other = opened.enter_context(forwarding(Gateway("", says=(200, "{}"))))
    gate = opened.enter_context(forwarding(Gateway("", moved_to=f"{other.url}/login")))
    for words in (
        ("wait", 0, "--server", gate.url, "--patience", 0),
        ("verify", "--server", gate.url),
        ("pin", 0, "--follow", gate.url),
    ):
        code, text = said(*words, "--server-header", f"Authorization: {BEARER}")
        assert code == 4
        assert f"is redirected to {other.url}/login, " in text
        assert "in-the-query" not in text
    assert not other.seen


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Authorization", f"{SECRET}\nX-Other: 1"),
        ("Authorization", f"a\r{SECRET}"),
        ("Authorization", f"{SECRET}\N{EURO SIGN}"),
        ("Authorization", ""),
        ("Authorization", " \t"),
        (f"Bad name {SECRET}", "x"),
        ("", "x"),
        ("Content-Length", SECRET),
    ],
)
def test_headers_that_cannot_be_sent_are_refused_and_not_shown(said, monkeypatch, name, value):
    with pytest.raises(UsageError) as refused:
        VllmServer("http://127.0.0.1:9", headers={name: value})
    assert SECRET not in str(refused.value)
    given = ("--server-header", f"{name}: {value}")
    if value.strip() == value:
        assert said("wait", 0, "--server", "http://127.0.0.1:9", "--patience", 0, *given)[0] == 2
    if name == "Authorization" and value.strip() == value and value:
        monkeypatch.setenv("PATCHSTORE_SERVER_TOKEN", value)
        with pytest.raises(UsageError, match="PATCHSTORE_SERVER_TOKEN") as refused:
            VllmServer("http://127.0.0.1:9")
        assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "given",
    [
        (SECRET,),
        (f"Authorization: @/nowhere/{SECRET}",),
        (f"@/nowhere/{SECRET}",),
        (f"A: {SECRET}", f"A: {SECRET}"),
        (f"A: {SECRET}", f"a: {SECRET}"),
    ],
)
def test_options_that_are_no_headers_are_refused_and_not_shown(said, given):
    options = [word for each in given for word in ("--server-header", each)]
    assert said("wait", 0, "--server", "http://127.0.0.1:9", "--patience", 0, *options)[0] == 2


@pytest.mark.parametrize("url", ["http://h:0", "http://h:99999", "http://h:x", f"http://me:{SECRET}@h:99999"])
def test_a_port_that_there_is_not_is_refused(url):
    for client in (VllmServer, FollowClient):
        with pytest.raises(UsageError) as refused:
            client(url)
        assert SECRET not in str(refused.value)


def silent_at(url: str) -> str:
    with VllmServer(url, timeout_s=0.2) as server, pytest.raises(ServerUnavailable) as refused:
        server.is_paused()
    return str(refused.value)


def test_a_server_that_is_away_is_said_to_be_with_what_to_do(bucket, said):
    url = f"http://127.0.0.1:{free_port()}"
    for words in (
        ("status", bucket, "--server", url),
        ("verify", "--server", url),
        ("wait", 0, "--server", url, "--patience", 0),
        ("pin", 0, "--follow", url),
    ):
        code, text = said(*words)
        assert code != 0
        assert "Connection refused; nothing listens there: start it, wait until it is up, or correct" in text
    assert "finds no address of that name" in silent_at("http://nobody.invalid")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert "did not answer in time" in silent_at(f"http://127.0.0.1:{listening.getsockname()[1]}")


def test_an_answer_is_waited_for_while_the_server_listens_and_not_behind_a_closed_port(monkeypatch):
    monkeypatch.setattr(http_client, "LOOK_S", 0.05)
    monkeypatch.setattr(http_client, "LOOK_AGAIN_S", 0.1)
    listening = socket.create_server(("127.0.0.1", 0))
    answer = b'HTTP/1.1 200 OK\r\nContent-Length: 19\r\n\r\n{"is_paused": true}'
    asked, open_ones = [0], list[socket.socket]()

    def serve() -> None:
        while True:
            connection, _ = listening.accept()
            # Of those who only look whether it listens there is nothing to read.
            if not connection.recv(1 << 16):
                connection.close()
                continue
            asked[0] += 1
            if asked[0] == 2:
                open_ones.append(connection)
                listening.close()
                return
            time.sleep(0.5)
            connection.sendall(answer)
            connection.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    with VllmServer(url, timeout_s=60) as server:
        assert server.is_paused()
        began = time.monotonic()
        with pytest.raises(ServerUnavailable, match=r"closed its port without an answer.*Read its log"):
            server.is_paused()
    assert time.monotonic() - began < 30
    thread.join(10)
    assert asked == [2]
    with open_ones[0] as connection:
        connection.settimeout(10)
        assert connection.recv(1) == b""


def test_a_name_that_the_system_does_not_take_is_an_error_of_ours():
    with VllmServer(f"http://{'a' * 70}.example") as server, pytest.raises(ServerUnavailable, match="idna"):
        server.is_paused()


def test_a_listener_behind_a_gateway_says_itself_why_it_refuses(opened):
    def answer(*_: Any) -> Any:
        raise UsageError("not so")

    listener = opened.enter_context(Listener(("127.0.0.1", 0), answer))
    gate = opened.enter_context(forwarding(Gateway(listener.url)))
    refused = pytest.raises(UsageError, match="call it by 127")
    with FollowClient(gate.url, headers={"Host": "rebound.example"}) as client, refused:
        client.state()
