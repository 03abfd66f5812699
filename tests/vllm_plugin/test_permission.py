"""What requests may have a server open, and where the checkpoint is that vLLM loaded."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from patchstore.errors import CorruptObject, UsageError
from patchstore.follow.vllm_server import VllmServer
from tests.support.keys import key_pair
from vllm_plugin import permission
from vllm_plugin.opening import checkpoint_folder
from vllm_plugin.permission import (
    ENDPOINTS,
    SCRATCH,
    STORES,
    check_scratch,
    check_store,
    unquoted,
)

KEYS = {"key": "k", "secret": "s"}
ELSEWHERE = {"endpoint_url": "https://elsewhere.example"}


@pytest.fixture(autouse=True)
def started_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (STORES, ENDPOINTS, SCRATCH, "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


THEIRS = {"endpoint": "https://elsewhere.example"}
PROXIES = {"config_kwargs": {"proxies": {"https": "http://elsewhere.example"}}}


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
        ("hf://buckets/me/run", THEIRS | {"token": "hf_x"}),
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
        ("s3://bucket/run", PROXIES),
        ("hf://buckets/me/run", THEIRS),
        ("hf://buckets/me/run", THEIRS | {"token": True}),
        ("hf://buckets/me/run", THEIRS | KEYS),
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
    if options is not PROXIES:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "https://elsewhere.example")
        check_store(url, options)


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
        ("gs://bucket", True),
        ("gs://other", False),
    ],
)
def test_only_what_was_allowed_may_be_opened(monkeypatch, tmp_path, url, is_allowed):
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / "link").symlink_to("/etc")
    if url.startswith("gs"):
        # Another protocol is opened nowhere unless that was allowed.
        with pytest.raises(UsageError, match=STORES):
            check_store(url, {})
    monkeypatch.setenv(STORES, f"s3://bucket/runs/, {folder}, gs://bucket")
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


# The checkpoint that vLLM loaded: a folder, what it downloaded from the Hub, or nowhere.

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def config(model: str, *, load_format: str = "auto", download_dir: Path | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        load_config=SimpleNamespace(load_format=load_format, download_dir=download_dir),
        model_config=SimpleNamespace(model=model, revision=None),
    )


@pytest.fixture
def downloaded(tmp_path) -> Path:
    """A cache of the Hub's client, with a snapshot of `org/model`."""
    folder = tmp_path / "models--org--model"
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    (folder / "snapshots" / COMMIT / "model.safetensors").touch()
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    return tmp_path


SNAPSHOT = f"models--org--model/snapshots/{COMMIT}"


@pytest.mark.parametrize(
    ("model", "load_format", "index", "found"),
    [
        ("{folder}", "auto", None, ""),
        *(("{folder}", load_format, None, None) for load_format in ("dummy", "runai_streamer", "tensorizer")),
        # From the Hub: whole, in part, or not at all.
        ("org/model", "auto", None, SNAPSHOT),
        ("org/model", "auto", '{"weight_map": {"a": "model-1.safetensors"}}', None),
        *(("org/model", "auto", index, None) for index in ("{}", "[", "[]")),
        *(
            (model, "auto", None, None)
            for model in ("org/other", "no folder/and no/name", "s3://bucket/model")
        ),
    ],
)
def test_the_checkpoint_that_vllm_loaded_is_found_or_is_nowhere(downloaded, model, load_format, index, found):
    if index is not None:
        (downloaded / SNAPSHOT / "model.safetensors.index.json").write_text(index)
    asked = config(model.format(folder=downloaded), load_format=load_format, download_dir=downloaded)
    assert checkpoint_folder(asked) == (None if found is None else downloaded / found)
