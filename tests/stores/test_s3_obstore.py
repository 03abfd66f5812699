"""Which client moves the bytes, and that obstore goes where s3fs would go, as the same user."""

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import certifi
import pytest
import s3fs
from botocore.exceptions import ClientError

from patchstore.errors import StoreUnavailable, UnsupportedStore, UsageError
from patchstore.stores import options as store_options
from patchstore.stores.base import PART_BYTES
from patchstore.stores.s3 import S3Store
from patchstore.support import web
from tests.stores.lost_answers import Place, Request, answering

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'obstore>=0.12'")
from patchstore.stores import s3_obstore

pytestmark = pytest.mark.usefixtures("no_identity")

_ISSUE = """
import datetime, json, pathlib, sys
turns = pathlib.Path(sys.argv[1])
turn = len(turns.read_text()) + 1 if turns.exists() else 1
turns.write_text("x" * turn)
soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=1)
print(json.dumps({
    "Version": 1, "AccessKeyId": f"KEY{turn}", "SecretAccessKey": "s", "SessionToken": "token",
    "Expiration": soon.isoformat(),
}))
"""
"""Issues other credentials each time, which botocore renews whenever it is asked."""


Watched = tuple[Callable[..., S3Store], list[Request]]


@pytest.fixture
def watched(s3: Place) -> Iterator[Watched]:
    """Opens stores with no other options than are given; and all requests so far."""
    with ExitStack() as stack:
        url, asked = stack.enter_context(answering(s3.options["endpoint_url"]))
        place = Place(s3.url, {"endpoint_url": url, "client": s3.options["client"]})
        yield lambda **options: stack.enter_context(place.opened(**options)), asked


def user(request: Request) -> tuple[str, str]:
    """The key that signed a request, and the token sent with it."""
    signed = request.headers.get("authorization", "").partition("Credential=")[2]
    return signed.partition("/")[0], request.headers.get("x-amz-security-token", "")


# The choice


def test_obstore_moves_the_bytes_where_it_is_installed() -> None:
    assert S3Store("s3://bucket/run").client == "obstore"
    assert S3Store("s3://bucket/run", client="s3fs").client == "s3fs"


@pytest.mark.parametrize("version", [None, "0.11.9"])
def test_without_obstore_s3fs_moves_them_unless_obstore_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    if version is None:
        monkeypatch.setitem(sys.modules, "obstore", None)
    else:
        releases = {"obstore": version, "s3fs": "2026.9", "aiobotocore": "3.0"}
        monkeypatch.setattr(store_options.metadata, "version", releases.get)
    assert S3Store("s3://bucket/run").client == "s3fs"
    with pytest.raises(UnsupportedStore, match="pip install 'obstore"):
        S3Store("s3://bucket/run", client="obstore")


@pytest.mark.parametrize(
    ("url", "options", "name"),
    [
        ("s3://bucket", {"requester_pays": True}, "requester_pays"),
        ("s3://bucket", {"s3_additional_kwargs": {"ServerSideEncryption": "AES256"}}, "s3_additional_kwargs"),
        ("s3://bucket", {"client_kwargs": {"api_version": "2006-03-01"}}, "client_kwargs.api_version"),
        ("s3://bucket", {"config_kwargs": {"proxies": {"http": "http://p"}}}, "config_kwargs.proxies"),
        (
            "s3://bucket",
            {"config_kwargs": {"s3": {"use_accelerate_endpoint": True}}},
            "config_kwargs.s3.use_accelerate_endpoint",
        ),
        ("s3://fast--use1-az4--x-s3", {}, "bucket fast--use1-az4--x-s3"),
    ],
)
def test_an_option_without_an_equivalent_leaves_it_to_s3fs(
    url: str, options: dict[str, Any], name: str
) -> None:
    assert S3Store(url, **options).client == "s3fs"
    with pytest.raises(UsageError, match=name):
        S3Store(url, client="obstore", **options)


@pytest.mark.parametrize("setting", ["AWS_USE_FIPS_ENDPOINT", "profile"])
def test_so_does_a_setting_of_the_environment_or_the_profile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: str
) -> None:
    if setting == "profile":
        (tmp_path / "config").write_text("[profile fast]\ns3 =\n    use_accelerate_endpoint = true\n")
    else:
        monkeypatch.setenv(setting, "true")
    profile = {"profile": "fast"} if setting == "profile" else {}
    assert S3Store("s3://bucket", **profile).client == "s3fs"


def test_what_has_an_equivalent_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    config = {"connect_timeout": 1, "s3": {"addressing_style": "path"}, "retries": {"max_attempts": 1}}
    options = {"key": "k", "secret": "s", "token": "t", "use_ssl": True, "requester_pays": False}
    region = {"region_name": "eu-west-1", "verify": certifi.where()}
    store = S3Store("s3://b", client="obstore", config_kwargs=config, client_kwargs=region, **options)
    assert store.client == "obstore"


# The user


def test_keys_given_are_used_and_nothing_of_the_environment_with_them(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_, asked = watched
    monkeypatch.setenv("AWS_SESSION_TOKEN", "another's")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    open_(key="mine", secret="s").put("a", b"x")
    assert [user(request) for request in asked] == [("mine", "")]


@pytest.mark.parametrize("where", ["environment", "file", "profile"])
def test_credentials_are_found_where_botocore_finds_them(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    open_, asked = watched
    if where == "environment":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "environment")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
        monkeypatch.setenv("AWS_SESSION_TOKEN", "its token")
    name = {"file": "default"}.get(where, where)
    (tmp_path / "credentials").write_text(
        f"[{name}]\naws_access_key_id = {where}\naws_secret_access_key = s\n"
    )
    open_(**{"profile": "profile"} if where == "profile" else {}).put("a", b"x", if_absent=False)
    assert [user(request) for request in asked] == [(where, "its token" if where == "environment" else "")]


def test_credentials_that_expire_are_renewed_and_a_failure_to_is_no_mistake(
    watched: Watched, tmp_path: Path
) -> None:
    open_, asked = watched
    program, turns = tmp_path / "issue.py", tmp_path / "turns"
    program.write_text(_ISSUE)
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {sys.executable} {program} {turns}\n")
    store = open_()
    store.put("a", b"x")
    store.put("b", b"x")
    (first, *token), (second, *_) = (user(request) for request in asked)
    assert int(second.removeprefix("KEY")) > int(first.removeprefix("KEY"))
    assert token == ["token"]
    program.write_text("raise SystemExit('signed out\\nat line 3')")
    with pytest.raises(StoreUnavailable, match=r"put c: .*credential_process failed: signed out[^\n3]*$"):
        store.put("c", b"x")


def test_an_anonymous_reader_signs_nothing(watched: Watched) -> None:
    open_, asked = watched
    open_(key="mine", secret="s").put("a", b"x")
    asked.clear()
    with pytest.raises(UsageError):  # moto wants a signature
        open_(anon=True).get("a")
    assert {user(request) for request in asked} == {("", "")}


@pytest.mark.parametrize("client", ["obstore"])
def test_over_plain_http_the_signature_covers_the_bytes(watched: Watched) -> None:
    open_, asked = watched
    open_(key="k", secret="s").put("a", b"the bytes")
    assert asked[0].headers["x-amz-content-sha256"] == hashlib.sha256(b"the bytes").hexdigest()


# The place


@pytest.mark.parametrize("where", ["option", "client_kwargs", "environment", "profile", ""])
def test_the_endpoint_is_where_botocore_finds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    url, options = "https://s3.example:9000", dict[str, Any]()
    if where == "option":
        options["endpoint_url"] = url
    elif where == "client_kwargs":
        options["client_kwargs"] = {"endpoint_url": url}
    elif where == "environment":
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
    elif where == "profile":
        (tmp_path / "config").write_text(f"[default]\nendpoint_url = {url}\n")
    store = S3Store("s3://bucket/run", key="k", secret="s", **options)
    assert store.endpoint == (url if where else "https://s3.us-east-1.amazonaws.com")
    store.close()


AWS, EU = "https://s3.amazonaws.com", "s3.eu-west-1.amazonaws.com"
OWN = "https://bucket.vpce-1.s3.us-east-1.vpce.amazonaws.com"


@pytest.mark.parametrize(
    ("endpoint_url", "bucket", "style", "expected"),
    [
        (AWS, "bucket", "auto", (f"https://bucket.{EU}", True)),
        ("https://s3.us-east-1.amazonaws.com", "b", "auto", (f"https://b.{EU}", True)),
        (AWS, "my.bucket", "auto", (f"https://{EU}", False)),
        (AWS, "bucket", "path", (f"https://{EU}", False)),
        ("https://s3.cn-north-1.amazonaws.com.cn", "b", "path", (f"https://{EU}.cn", False)),
        ("http://127.0.0.1:9000/", "bucket", "auto", ("http://127.0.0.1:9000", False)),
        ("https://s3.example/namespace", "bucket", "auto", ("https://s3.example/namespace", False)),
        ("https://s3.example", "bucket", "virtual", ("https://bucket.s3.example", True)),
        (OWN, "bucket", "auto", (OWN, False)),
    ],
)
def test_the_bucket_is_where_botocore_would_look(
    endpoint_url: str, bucket: str, style: str, expected: tuple[str, bool]
) -> None:
    assert s3_obstore.place(endpoint_url, bucket, region="eu-west-1", style=style) == expected


def configured(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What obstore is told at the first request, which is not made."""
    told: dict[str, Any] = {}

    def opened(bucket: str, **options: Any) -> Any:
        told.update(options)
        raise OSError("not made")

    monkeypatch.setattr(s3_obstore, "S3Store", opened)
    with pytest.raises(StoreUnavailable, match="not made"):
        store.get("a")
    store.close()
    return told


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_bucket_of_aws_is_asked_in_its_own_region(
    monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    store = S3Store("s3://bucket/run", key="k", secret="s")
    answer = {"ResponseMetadata": {"HTTPHeaders": {"x-amz-bucket-region": "eu-north-1"}}}

    def head(_: Any, method: str, **parameters: Any) -> Any:
        assert (method, parameters.pop("timeout") > 0) == ("head_bucket", True)
        assert parameters == {"Bucket": "bucket"}
        if is_refused:
            raise PermissionError("forbidden") from ClientError({"Error": {"Code": "403"}, **answer}, method)
        return answer

    monkeypatch.setattr(s3fs.S3FileSystem, "call_s3", head)
    config = configured(store, monkeypatch)["config"]
    assert config["region"] == "eu-north-1"
    assert config["aws_endpoint_url_s3"] == "https://bucket.s3.eu-north-1.amazonaws.com"


@pytest.mark.parametrize(
    ("endpoint_url", "calculation", "expected"),
    [
        ("https://s3.example", "when_supported", (True, "CRC64NVME")),
        ("https://s3.example", "when_required", (False, None)),
        ("http://127.0.0.1:9000", "when_supported", (False, "CRC64NVME")),
        ("http://127.0.0.1:9000", "when_required", (False, None)),
    ],
)
def test_a_checksum_is_sent_unless_it_is_switched_off_and_no_signature_only_with_one_under_tls(
    monkeypatch: pytest.MonkeyPatch, endpoint_url: str, calculation: str, expected: tuple[bool, str | None]
) -> None:
    config_kwargs = {"request_checksum_calculation": calculation}
    store = S3Store("s3://b", endpoint_url=endpoint_url, key="k", secret="s", config_kwargs=config_kwargs)
    config = configured(store, monkeypatch)["config"]
    assert (config["unsigned_payload"], config.get("checksum_algorithm")) == expected


def test_timeouts_retries_and_certificates_are_those_of_s3fs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", certifi.where())
    monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    keys = {"key": "k", "secret": "s", "endpoint_url": "https://s3.example"}
    told = configured(S3Store("s3://b", **keys), monkeypatch)
    options = told["client_options"]
    assert options["connect_timeout"].total_seconds() == 5
    assert options["read_timeout"].total_seconds() == 30
    assert options["root_certificate"] == web.authorities_at(certifi.where(), "").pem
    assert not options["allow_http"]
    # Small requests are repeated by the rule of both clients.
    assert told["retry_config"]["max_retries"] == 0
    assert told["retry_config"]["retry_timeout"] == timedelta(seconds=60)
    config_kwargs = {"read_timeout": 7}
    store = S3Store("s3://b", **keys, config_kwargs=config_kwargs, client_kwargs={"verify": False})
    told = configured(store, monkeypatch)
    assert told["client_options"]["read_timeout"].total_seconds() == 7
    assert told["client_options"]["allow_invalid_certificates"]


@pytest.mark.parametrize("client", ["obstore"])
def test_an_object_of_more_than_ten_thousand_parts_is_refused(
    s3: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_obstore, "MAX_PARTS", 2)
    with s3.opened() as store:
        store.upload("just", [bytes(2 * PART_BYTES)])
        with pytest.raises(UsageError, match="client='s3fs'"):
            store.upload("large", [bytes(2 * PART_BYTES), b"x"])
        assert list(store.list()) == ["just"]
