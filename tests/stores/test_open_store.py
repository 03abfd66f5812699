import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import s3fs
from fsspec.registry import known_implementations, register_implementation

from patchstore.errors import UnsupportedStore, UsageError
from patchstore.stores import open_store
from patchstore.stores.base import Store
from patchstore.stores.folder import FolderStore
from patchstore.stores.fsspec_store import FsspecStore
from patchstore.stores.hub import HubStore
from patchstore.stores.memory import MemoryStore
from patchstore.stores.s3 import S3Store


def test_a_path_is_a_folder(tmp_path: Path) -> None:
    files = (f"file:{tmp_path}", f"file://{tmp_path}", f"file://localhost{tmp_path}", f"file:///{tmp_path}")
    for url in (tmp_path, str(tmp_path), *files):
        store = open_store(url)
        assert isinstance(store, FolderStore)
        store.put("a", str(url).encode())
        assert (tmp_path / "a").read_bytes() == str(url).encode()


class _OfBytes:
    def __fspath__(self) -> bytes:
        return b"folder"


_HUB = "hf://buckets"
REFUSED: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
    # They name no place.
    (
        UsageError,
        ".",
        ("file://", "file://another-machine/path", "file://[::1/a", "file:///a%00b", "memory://"),
    ),
    (UsageError, ".", ("s3://", "s3:///prefix", "s3:////", "s3://b/a//b", _HUB, f"{_HUB}/user")),
    (UsageError, ".", (f"{_HUB}//bucket", f"{_HUB}/user/bucket/a//b", f"{_HUB}/user/bucket/..")),
    # White space and control characters.
    (
        UsageError,
        ".",
        ("", " ", "\n", "\0", " s3://bucket/run", "run ", "run\n", "/tmp/a\0b", "s3://bu\tcket"),
    ),
    # What a shell would have replaced, and paths of other systems.
    (UsageError, ".", ("$HOME/run", "${RUNS}/a", "%TEMP%\\run", "C:\\run", "\\\\host\\run", "/", "//")),
    # They have secrets.
    (UsageError, ".", ("s3://key:SECRET@bucket/run", "s3://bucket/run?X-Amz-Signature=SECRET")),
    (UsageError, ".", ("s3://bucket/run#SECRET", "gs://user:SECRET@bucket/run")),
    (UsageError, ".", ("hf://token:SECRET@buckets/user/bucket", "file:///a?a=SECRET", "file:///a#SECRET")),
    (UsageError, "as text", (None, b"folder", 5, ["folder"], True, _OfBytes())),
    (UsageError, "no name of a bucket", ("s3://my bucket/run", "s3://bücket/run", "s3://-bucket/run")),
    (UsageError, "no name of a bucket", ("s3://a%62/run", "s3://$HOME/run")),
    (UsageError, "no such user", ("~no-such-user/run",)),
    (UsageError, "nonsense", ("nonsense://bucket/run",)),
    (UnsupportedStore, ".", ("hf://datasets/user/name", "hf://user/model")),
    # Before they are reached.
    (UnsupportedStore, "only once", ("local://127.0.0.1/run", "http://127.0.0.1/run")),
    (UnsupportedStore, "only once", ("ftp://127.0.0.1/run", "zip://127.0.0.1/run")),
]


@pytest.mark.parametrize(
    ("kind", "match", "url"), [(kind, match, url) for kind, match, urls in REFUSED for url in urls]
)
def test_what_is_no_place_of_a_store_is_refused_without_its_secrets(
    kind: type[Exception], match: str, url: Any
) -> None:
    with pytest.raises(kind, match=match) as caught:
        open_store(url)
    assert type(caught.value) is kind
    assert "SECRET" not in str(caught.value)


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


@pytest.mark.parametrize("url", ["folder", "memory://name", "s3://bucket/run", "hf://buckets/a/b"])
@pytest.mark.parametrize("option", ["url", "self"])
def test_what_constructors_call_their_arguments_is_no_option(url: str, option: str) -> None:
    with pytest.raises(UsageError, match=f"option {option}"):
        open_store(url, **{option: "x"})


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
    assert list(tmp_path.iterdir()) == []


def test_a_protocol_may_be_in_capitals(tmp_path: Path) -> None:
    assert open_store("S3://bucket/run").url == "s3://bucket/run"
    assert open_store("HF://buckets/user/bucket").url == "hf://buckets/user/bucket"
    assert open_store("Memory://capitals") is open_store("memory://capitals")
    assert open_store(f"FILE://{tmp_path}").url == str(tmp_path)


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("memory://opened", MemoryStore),
        ("s3://bucket", S3Store),
        ("s3://bucket/some/run", S3Store),
        ("hf://buckets/user/bucket/some/run", HubStore),
    ],
)
def test_a_protocol_has_its_kind_of_store(url: str, kind: type[Store]) -> None:
    store = open_store(url)
    assert isinstance(store, kind)
    assert store.url == url


def test_the_same_name_is_the_same_store() -> None:
    open_store("memory://a-name-of-its-own").put("key", b"x")
    assert open_store("memory://a-name-of-its-own").get("key") == b"x"
    assert list(open_store("memory://another-name").list()) == []


def test_slashes_at_the_end_are_dropped(tmp_path: Path) -> None:
    assert open_store("s3://bucket///").url == "s3://bucket"
    assert open_store("s3://bucket/run//").url == "s3://bucket/run"
    assert open_store("hf://buckets/user/bucket/run/").url == "hf://buckets/user/bucket/run"
    assert open_store(f"{tmp_path}//").url == str(tmp_path)


def test_a_file_url_is_unquoted(tmp_path: Path) -> None:
    assert open_store(f"file://{tmp_path}/a%FFb").url == os.fsdecode(os.fsencode(tmp_path) + b"/a\xffb")


NO_TIMES = ("abc", "5", None, True, 0, -1, float("nan"), float("inf"), 1e6, [5])
WRONG_OPTIONS: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("s3://bucket/run", ""): [
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
    ("hf://buckets/user/bucket", ""): [
        {"endpoint": 5},
        {"endpoint": "huggingface.co"},
        {"endpoint": "https://user:SECRET@huggingface.co"},
        {"token": 5},
        {"token": "SECRET\n"},
        {"gateway_key": 5, "gateway_secret": "SECRET"},
        {"gateway_key": "HFAK", "gateway_secret": "SECRET", "gateway_url": "nonsense"},
        {"single_writer": 1},
    ],
    ("hf://buckets/user/bucket", "gateway_key|single_writer"): [
        {"gateway_key": "HFAK"},
        {"gateway_secret": "SECRET"},
        {"gateway_url": "http://127.0.0.1"},
        {"gateway_key": "HFAK", "gateway_secret": "SECRET", "single_writer": True},
        {"gateway": "HFAK"},
        {"single_writer": "false"},
    ],
    ("s3://bucket/run", "timeout_s"): [{"timeout_s": each} for each in NO_TIMES],
    ("hf://buckets/user/bucket", "timeout_s"): [{"timeout_s": each} for each in NO_TIMES],
}


@pytest.mark.parametrize(
    ("url", "named", "options"),
    [(*where, each) for where, options in WRONG_OPTIONS.items() for each in options],
)
def test_an_option_that_cannot_be_is_refused_when_the_store_is_opened(
    url: str, named: str, options: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match=f"(?s)^{url}: .*({named})") as caught:
        open_store(url, **options)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "options", "known"),
    [
        ("folder", {"endpoint": "http://127.0.0.1"}, "none"),
        ("memory://options", {"endpoint": "http://127.0.0.1"}, "none"),
        ("s3://bucket", {"endpoint": "http://127.0.0.1"}, "endpoint_url"),
        ("s3://bucket", {"client": "boto3"}, "auto, s3fs, obstore"),
        ("folder", {"timeout_s": 5}, "leave the option out"),
        ("memory://name", {"timeout_s": 5}, "leave the option out"),
    ],
)
def test_an_unknown_option_is_refused_and_the_known_ones_named(
    url: str, options: dict[str, Any], known: str
) -> None:
    with pytest.raises(UsageError, match=known) as caught:
        open_store(url, **options)
    assert caught.value.kind == "usage"


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"class": "no_such_package.FileSystem", "err": "Install no_such_package"}
    monkeypatch.setitem(known_implementations, "missing", missing)
    with pytest.raises(UnsupportedStore, match="Install no_such_package"):
        open_store("missing://bucket/run")


KEYS = {"gateway_key": "HFAK", "gateway_secret": "secret"}


@pytest.mark.parametrize(
    ("url", "options", "packages"),
    [
        ("s3://bucket/run", {}, ["s3fs", "fsspec"]),
        ("gs://bucket/run", {}, ["s3fs", "fsspec"]),
        ("hf://buckets/user/bucket", KEYS, ["s3fs", "fsspec"]),
        ("hf://buckets/user/bucket", {}, ["huggingface_hub"]),
        ("hf://buckets/user/bucket", {}, ["hf_xet"]),
    ],
)
def test_where_a_package_is_missing_the_message_says_what_to_install(
    url: str, options: dict[str, Any], packages: list[str]
) -> None:
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({packages}))\n"
        "from patchstore.errors import PatchstoreError\n"
        "from patchstore.stores import open_store\n"
        "try:\n"
        f"    open_store({url!r}, **{options})\n"
        "except PatchstoreError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert ran.stdout.startswith("UnsupportedStore") and "pip install" in ran.stdout, ran.stderr


def test_another_protocol_of_fsspec_is_opened_through_it(s3_options: dict[str, Any], s3_url: str) -> None:
    class Another(s3fs.S3FileSystem):
        protocol = ("another", "s3")

    # As the package of a filesystem does. It stays for the process, which no other test notices.
    register_implementation("another", Another, clobber=True)
    url = s3_url.replace("s3://", "another://")
    store = open_store(url, **s3_options)
    assert isinstance(store, FsspecStore)
    assert store.url == url
    store.put("a", b"x", if_absent=True)
    assert open_store(s3_url, **s3_options).get("a") == b"x"
