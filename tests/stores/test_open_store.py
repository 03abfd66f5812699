import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import s3fs
from fsspec.registry import _registry, known_implementations

from patchstore.errors import UnsupportedStore, UsageError
from patchstore.stores import open_store
from patchstore.stores.folder import FolderStore
from patchstore.stores.fsspec_store import FsspecStore
from patchstore.stores.hub import HubStore
from patchstore.stores.memory import MemoryStore
from patchstore.stores.s3 import S3Store


def test_a_path_is_a_folder(tmp_path: Path) -> None:
    for url in (tmp_path, str(tmp_path), f"file://{tmp_path}", f"file://localhost{tmp_path}"):
        store = open_store(url)
        assert isinstance(store, FolderStore)
        store.put("a", str(url).encode())
        assert (tmp_path / "a").read_bytes() == str(url).encode()


def test_a_file_url_is_unquoted(tmp_path: Path) -> None:
    open_store(f"file://{tmp_path}/with%20space").put("a", b"x")
    assert (tmp_path / "with space" / "a").exists()


@pytest.mark.parametrize(
    "url", ["file://", "file://another-machine/path", "memory://", "s3://", "s3:///prefix", "s3:////"]
)
def test_a_url_that_names_no_place_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        open_store(url)


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("s3:/bucket/run", "s3://bucket/run"),
        ("s3:bucket/run", "s3://bucket/run"),
        ("s3//bucket/run", "s3://bucket/run"),
        ("S3:/bucket/run", "s3://bucket/run"),
        ("s3a:/bucket/run", "s3a://bucket/run"),
        ("hf:/buckets/user/bucket", "hf://buckets/user/bucket"),
        ("hf//buckets/user/bucket", "hf://buckets/user/bucket"),
        ("gs:/bucket/run", "gs://bucket/run"),
        ("memory:name", "memory://name"),
        ("file:run", "file:///run"),
        ("other:/bucket", "other://bucket"),
        ("://bucket/run", "s3://bucket/run"),
        (Path("s3://bucket/run"), "s3://bucket/run"),
        ("s3:/key:SECRET@bucket/run", "s3://key@bucket/run"),
        ("s3:/bucket/run?X-Amz-Signature=SECRET", "s3://bucket/run"),
    ],
)
def test_a_mistyped_url_is_no_folder_and_what_was_meant_is_said(
    url: str | Path, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"is {re.escape(meant)} meant") as caught:
        open_store(url)
    assert "SECRET" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url",
    [
        "",
        " ",
        "\n",
        "\0",
        " s3://bucket/run",
        "run ",
        "run\n",
        "s3://bucket/a\0b",
        "/tmp/a\0b",
        "s3://bu\tcket",
    ],
)
def test_white_space_and_control_characters_are_no_url(url: str) -> None:
    with pytest.raises(UsageError):
        open_store(url)


@pytest.mark.parametrize(
    "url", ["$HOME/run", "${RUNS}/a", "%TEMP%\\run", "C:\\run", "\\\\host\\run", "/", "//"]
)
def test_what_a_shell_would_have_replaced_and_other_systems_paths_are_no_folders(url: str) -> None:
    with pytest.raises(UsageError):
        open_store(url)


@pytest.mark.parametrize("url", ["folder", "memory://name", "s3://bucket/run", "hf://buckets/a/b"])
@pytest.mark.parametrize("option", ["url", "self"])
def test_what_constructors_call_their_arguments_is_no_option(url: str, option: str) -> None:
    with pytest.raises(UsageError, match=f"option {option}"):
        open_store(url, **{option: "x"})


@pytest.mark.parametrize("url", [None, b"folder", 5, ["folder"], True])
def test_what_is_no_text_is_no_url(url: Any) -> None:
    with pytest.raises(UsageError, match="as text"):
        open_store(url)


def test_a_path_of_bytes_is_no_url() -> None:
    class OfBytes:
        def __fspath__(self) -> bytes:
            return b"folder"

    with pytest.raises(UsageError, match="as text"):
        open_store(OfBytes())  # type: ignore[arg-type]


def test_a_folder_may_be_named_like_a_url_below_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("./s3:/bucket", "run:1", "a b", "s3", "s3/bucket"):
        open_store(name).put("a", b"x")
        assert (tmp_path / name / "a").read_bytes() == b"x"


def test_a_tilde_is_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for url in ("~/run", Path("~/run")):
        assert open_store(url).url == str(tmp_path / "run")
    with pytest.raises(UsageError, match="no such user"):
        open_store("~no-such-user/run")
    assert list(tmp_path.iterdir()) == []


def test_a_protocol_may_be_in_capitals(tmp_path: Path) -> None:
    assert open_store("S3://bucket/run").url == "s3://bucket/run"
    assert open_store("HF://buckets/user/bucket").url == "hf://buckets/user/bucket"
    assert open_store("Memory://capitals") is open_store("memory://capitals")
    assert open_store(f"FILE://{tmp_path}").url == str(tmp_path)


def test_slashes_at_the_end_are_dropped(tmp_path: Path) -> None:
    assert open_store("s3://bucket///").url == "s3://bucket"
    assert open_store("s3://bucket/run//").url == "s3://bucket/run"
    assert open_store("hf://buckets/user/bucket/run/").url == "hf://buckets/user/bucket/run"
    assert open_store(f"{tmp_path}//").url == str(tmp_path)


def test_a_file_url_has_several_forms_and_no_query(tmp_path: Path) -> None:
    for url in (
        f"file:{tmp_path}",
        f"file://{tmp_path}",
        f"file://localhost{tmp_path}",
        f"file:///{tmp_path}",
    ):
        assert Path(open_store(url).url) == Path(open_store(tmp_path).url)
    for url in (f"file://{tmp_path}?a=SECRET", f"file://{tmp_path}#SECRET", "file:///a%00b", "file://[::1/a"):
        with pytest.raises(UsageError) as caught:
            open_store(url)
        assert "SECRET" not in str(caught.value)
    assert open_store(f"file://{tmp_path}/a%FFb").url == os.fsdecode(os.fsencode(tmp_path) + b"/a\xffb")


@pytest.mark.parametrize("bucket", ["my bucket", "bücket", "-bucket", "a%62", "$HOME"])
def test_what_is_no_name_of_a_bucket_is_refused(bucket: str) -> None:
    with pytest.raises(UsageError, match="no name of a bucket"):
        open_store(f"s3://{bucket}/run")


@pytest.mark.parametrize(
    "options",
    [
        {"endpoint_url": 5},
        {"endpoint_url": "storage.example.com"},
        {"endpoint_url": "ftp://storage.example.com"},
        {"endpoint_url": "http://storage example.com"},
        {"endpoint_url": "http://127.0.0.1:99999"},
        {"endpoint_url": "http://user:SECRET@storage.example.com"},
        {"endpoint_url": "http://storage.example.com/?token=SECRET"},
        {"endpoint_url": "http://storage\0.example.com"},
        {"client_kwargs": {"endpoint_url": "nonsense"}},
        {"client_kwargs": {"verify": "/no/such/file.pem"}},
        {"client_kwargs": "SECRET"},
        {"config_kwargs": 5},
        {"config_kwargs": {"nonsense": 1}},
        {"config_kwargs": {"read_timeout": "5"}},
        {"config_kwargs": {"connect_timeout": None}},
        {"config_kwargs": {"retries": 5}},
        {"config_kwargs": {"retries": {"max_attempts": "5"}}},
        {"config_kwargs": {"s3": {"addressing_style": "nonsense"}}},
        {"key": 5},
        {"secret": "SECRET\n"},
        {"token": "SECRET\0"},
        {"secret": "SECRETключ"},
        {"key": "a", "username": "b"},
        {"profile": ["a"]},
        {"session": "a"},
        {"max_concurrency": 0},
        {"max_concurrency": "a"},
        {"client": "nonsense"},
        {"client": 5},
    ],
)
def test_an_option_of_s3_that_cannot_be_is_refused_when_the_store_is_opened(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"^s3://bucket/run: ") as caught:
        open_store("s3://bucket/run", **options)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"endpoint": 5},
        {"endpoint": "huggingface.co"},
        {"endpoint": "https://user:SECRET@huggingface.co"},
        {"token": 5},
        {"token": "SECRET\n"},
        {"gateway_key": 5, "gateway_secret": "SECRET"},
        {"gateway_key": "HFAK", "gateway_secret": "SECRET", "gateway_url": "nonsense"},
        {"single_writer": 1},
    ],
)
def test_an_option_of_the_hub_that_cannot_be_is_refused_when_the_store_is_opened(
    options: dict[str, Any],
) -> None:
    with pytest.raises(UsageError, match=r"^hf://buckets/user/bucket: ") as caught:
        open_store("hf://buckets/user/bucket", **options)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "known"), [("folder", "none"), ("memory://options", "none"), ("s3://bucket", "endpoint_url")]
)
def test_an_unknown_option_is_refused_and_the_known_ones_named(url: str, known: str) -> None:
    with pytest.raises(UsageError, match=known) as caught:
        open_store(url, endpoint="http://127.0.0.1")
    assert caught.value.kind == "usage"


def test_a_memory_url_is_a_memory_store() -> None:
    store = open_store("memory://opened")
    assert isinstance(store, MemoryStore)
    assert store.url == "memory://opened"


def test_an_s3_url_is_an_s3_store_at_bucket_and_prefix() -> None:
    store = open_store("s3://bucket/some/run/", key="k", secret="very secret")
    assert isinstance(store, S3Store)
    assert store.url == "s3://bucket/some/run"
    assert open_store("s3://bucket").url == "s3://bucket"


def test_an_s3_prefix_that_is_no_key_is_refused() -> None:
    with pytest.raises(UsageError):
        open_store("s3://bucket/a//b")


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:SECRET@bucket/run",
        "s3://bucket/run?X-Amz-Signature=SECRET",
        "s3://bucket/run#SECRET",
        "gs://user:SECRET@bucket/run",
        "hf://token:SECRET@buckets/user/bucket",
    ],
)
def test_secrets_in_a_url_are_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(url)
    assert "SECRET" not in str(caught.value)


def test_a_url_of_the_hub_is_a_hub_store_at_bucket_and_prefix() -> None:
    store = open_store("hf://buckets/user/bucket/some/run/", token="hf_secret")
    assert isinstance(store, HubStore)
    assert store.url == "hf://buckets/user/bucket/some/run"


def test_an_unknown_protocol_is_the_callers_mistake() -> None:
    with pytest.raises(UsageError, match="nonsense"):
        open_store("nonsense://bucket/run")


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"class": "no_such_package.FileSystem", "err": "Install no_such_package"}
    monkeypatch.setitem(known_implementations, "missing", missing)
    with pytest.raises(UnsupportedStore, match="Install no_such_package"):
        open_store("missing://bucket/run")


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket/run"])
def test_without_s3fs_and_fsspec_the_message_says_what_to_install(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("patchstore.stores.s3", "patchstore.stores.fsspec_store"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(UnsupportedStore, match="pip install"):
        open_store(url)


@pytest.mark.parametrize("package", ["huggingface_hub", "hf_xet"])
def test_without_the_hubs_clients_the_message_says_what_to_install(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.startswith("patchstore.stores.hub")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UnsupportedStore, match="pip install"):
        open_store("hf://buckets/user/bucket")


@pytest.mark.parametrize("protocol", ["local", "http", "ftp", "zip"])
def test_a_protocol_without_an_exclusive_create_is_refused_before_it_is_reached(protocol: str) -> None:
    pytest.importorskip("aiohttp")
    with pytest.raises(UnsupportedStore, match="only once"):
        open_store(f"{protocol}://127.0.0.1/run")


def test_another_protocol_of_fsspec_is_opened_through_it(
    monkeypatch: pytest.MonkeyPatch, s3_options: dict[str, Any], s3_url: str
) -> None:
    class Another(s3fs.S3FileSystem):
        protocol = ("another", "s3")

    monkeypatch.setitem(_registry, "another", Another)
    url = s3_url.replace("s3://", "another://")
    store = open_store(url, **s3_options)
    assert isinstance(store, FsspecStore)
    assert store.url == url
    store.put("a", b"x", if_absent=True)
    assert open_store(s3_url, **s3_options).get("a") == b"x"
