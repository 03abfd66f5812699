"""What requests may have a server open."""

from pathlib import Path

import pytest

from patchstore.errors import CorruptObject, UsageError
from patchstore.serve.vllm_server import VllmServer
from tests.support.keys import key_pair
from vllm_plugin import permission
from vllm_plugin.permission import ENDPOINTS, SCRATCH, STORES, check_scratch, check_store, unquoted

pytestmark = pytest.mark.vllm

KEYS = {"key": "k", "secret": "s"}
ELSEWHERE = {"endpoint_url": "https://elsewhere.example"}


@pytest.fixture(autouse=True)
def started_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (STORES, ENDPOINTS, SCRATCH, "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("/data/run", {}),
        ("file:///data/run", {}),
        ("s3://bucket/run", {}),
        ("s3://bucket/run", {"profile": "mine", "timeout_s": 5}),
        ("s3://bucket/run", ELSEWHERE | KEYS),
        ("s3://bucket/run", ELSEWHERE | {"anon": True}),
        ("s3://bucket/run", KEYS | {"client_kwargs": ELSEWHERE}),
        ("hf://buckets/me/run", {}),
        ("hf://buckets/me/run", {"endpoint": "https://elsewhere.example", "token": "hf_x"}),
    ],
)
def test_what_leads_nowhere_with_the_servers_own_credentials_may_be_opened(url, options):
    check_store(url, options)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://bucket/run", ELSEWHERE),
        ("S3A://bucket/run", ELSEWHERE),
        ("s3://bucket/run", ELSEWHERE | {"key": "k"}),
        ("s3://bucket/run", ELSEWHERE | {"anon": False}),
        ("s3://bucket/run", {"client_kwargs": ELSEWHERE}),
        ("s3://bucket/run", {"config_kwargs": {"proxies": {"https": "http://elsewhere.example"}}}),
        ("hf://buckets/me/run", {"endpoint": "https://elsewhere.example"}),
        ("hf://buckets/me/run", {"endpoint": "https://elsewhere.example", "token": True}),
        ("hf://buckets/me/run", {"endpoint": "https://elsewhere.example", "key": "k", "secret": "s"}),
    ],
)
def test_the_servers_own_credentials_go_to_no_endpoint_of_a_request(monkeypatch, url, options):
    with pytest.raises(UsageError, match=ENDPOINTS):
        check_store(url, options)
    monkeypatch.setenv(
        ENDPOINTS, "https://other.example, https://elsewhere.example/, http://elsewhere.example"
    )
    check_store(url, options)
    monkeypatch.delenv(ENDPOINTS)
    if "proxies" not in str(options):
        monkeypatch.setenv("AWS_ENDPOINT_URL", "https://elsewhere.example")
        check_store(url, options)


def test_other_protocols_are_opened_only_where_they_were_allowed(monkeypatch):
    with pytest.raises(UsageError, match=STORES):
        check_store("gs://bucket/run", {})
    monkeypatch.setenv(STORES, "s3://a/b,gs://bucket")
    check_store("gs://bucket/run", {})


@pytest.mark.parametrize(
    ("url", "is_allowed"),
    [
        ("s3://bucket/runs", True),
        ("s3://bucket/runs/7", True),
        ("s3://bucket/runs-of-others", False),
        ("s3://bucket/runs/../secret", False),
        ("s3://bucket", False),
        ("{folder}", True),
        ("{folder}/run", True),
        ("file://{folder}/run", True),
        ("{folder}/../other", False),
        ("file://{folder}/%2e%2e/other", False),
        ("{folder}/link", False),
        ("/etc", False),
        ("memory://x", False),
    ],
)
def test_only_what_was_allowed_may_be_opened(monkeypatch, tmp_path, url, is_allowed):
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / "link").symlink_to("/etc")
    monkeypatch.setenv(STORES, f"s3://bucket/runs/, {folder}")
    if is_allowed:
        check_store(url.format(folder=folder), {})
        return
    with pytest.raises(UsageError, match=STORES):
        check_store(url.format(folder=folder), {})


def test_temporary_files_go_below_the_systems_folder_or_one_that_was_allowed(monkeypatch, tmp_path):
    check_scratch(tmp_path / "new")
    monkeypatch.chdir("/")
    for folder in ("/var/lib/patchstore", "/tmp/../etc", "relative"):
        with pytest.raises(UsageError, match=SCRATCH):
            check_scratch(Path(folder))
    monkeypatch.setenv(SCRATCH, "/var/lib/patchstore")
    check_scratch(Path("/var/lib/patchstore/cache"))


def test_what_a_folders_files_hold_is_not_told_unless_it_was_allowed(monkeypatch):
    def read() -> None:
        raise CorruptObject("store.json: unknown field 'password'")

    for url in ("/srv/other", "file:///srv/other"):
        with pytest.raises(CorruptObject) as caught, unquoted(url):
            read()
        assert "password" not in str(caught.value)
        assert "patchstore doctor" in str(caught.value)
    with pytest.raises(CorruptObject, match="password"), unquoted("s3://bucket/run"):
        read()
    monkeypatch.setenv(STORES, "/srv")
    with pytest.raises(CorruptObject, match="password"), unquoted("/srv/other"):
        read()


def test_the_keys_that_a_server_requires_are_those_it_was_started_with(monkeypatch, tmp_path):
    monkeypatch.delenv(permission.KEYS, raising=False)
    assert permission.required_keys() is None
    (private, one), (_, other) = (key_pair(tmp_path, name) for name in ("one", "other"))
    monkeypatch.setenv(permission.KEYS, f"{one}, {other}")
    found = permission.required_keys()
    assert found is not None and len(found.names) == 2
    # A server must not start without the check that its operator asked for.
    for wrong in ("", " , ", str(tmp_path / "none"), str(private), f"{one},{tmp_path}"):
        monkeypatch.setenv(permission.KEYS, wrong)
        with pytest.raises(UsageError, match=permission.KEYS):
            permission.required_keys()


@pytest.mark.exhaustive
def test_a_real_server_sends_its_credentials_nowhere(process, tmp_path):
    with VllmServer(process.url) as server:
        for store, options, named in (
            ("s3://bucket/run", ELSEWHERE, ENDPOINTS),
            ("gs://bucket/run", {}, STORES),
        ):
            with pytest.raises(UsageError, match=named):
                server.init_weight_transfer(store, options)
        with pytest.raises(UsageError, match=SCRATCH):
            server.init_weight_transfer(str(tmp_path), scratch="/var/lib/patchstore")
