"""Which client moves the bytes, and that obstore goes where s3fs would go, as the same user."""

import hashlib
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import certifi
import pytest
from botocore.exceptions import ClientError

from patchstore.errors import StoreUnavailable, UnsupportedStore, UsageError
from patchstore.stores import packages
from patchstore.stores.base import PART_BYTES
from patchstore.stores.s3 import S3Store
from tests.stores.lost_answers import Request, answering

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'obstore>=0.12'")
from patchstore.stores import s3_obstore

CLIENTS = ["s3fs", "obstore"]

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


@pytest.fixture(autouse=True)
def _nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials or settings but those of the test."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


@pytest.fixture
def endpoint(s3_options: dict[str, Any]) -> Iterator[tuple[str, list[Request]]]:
    with answering(s3_options["endpoint_url"]) as (url, asked):
        yield url, asked


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
        monkeypatch.setattr(packages.metadata, "version", releases.get)
    assert S3Store("s3://bucket/run").client == "s3fs"
    with pytest.raises(UnsupportedStore, match="pip install 'obstore"):
        S3Store("s3://bucket/run", client="obstore")


def test_an_unknown_client_is_refused_and_the_known_ones_named() -> None:
    with pytest.raises(UsageError, match="auto, s3fs, obstore"):
        S3Store("s3://bucket/run", client="boto3")  # type: ignore[arg-type]


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


def test_what_has_an_equivalent_does_not() -> None:
    config = {"connect_timeout": 1, "s3": {"addressing_style": "path"}, "retries": {"max_attempts": 1}}
    options = {"key": "k", "secret": "s", "token": "t", "use_ssl": True, "requester_pays": False}
    region = {"region_name": "eu-west-1", "verify": certifi.where()}
    store = S3Store("s3://b", client="obstore", config_kwargs=config, client_kwargs=region, **options)
    assert store.client == "obstore"


# The user


@pytest.mark.parametrize("client", CLIENTS)
def test_keys_given_are_used_and_nothing_of_the_environment_with_them(
    endpoint: tuple[str, list[Request]], monkeypatch: pytest.MonkeyPatch, client: Any
) -> None:
    url, asked = endpoint
    monkeypatch.setenv("AWS_SESSION_TOKEN", "another's")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    store = S3Store("s3://bucket/run", endpoint_url=url, key="mine", secret="s", client=client)
    store.put("a", b"x")
    store.close()
    assert [user(request) for request in asked] == [("mine", "")]


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("where", ["environment", "file", "profile"])
def test_credentials_are_found_where_botocore_finds_them(
    endpoint: tuple[str, list[Request]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    client: Any,
    where: str,
) -> None:
    url, asked = endpoint
    if where == "environment":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "environment")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
        monkeypatch.setenv("AWS_SESSION_TOKEN", "its token")
    name = {"file": "default"}.get(where, where)
    (tmp_path / "credentials").write_text(
        f"[{name}]\naws_access_key_id = {where}\naws_secret_access_key = s\n"
    )
    options = {"profile": "profile"} if where == "profile" else {}
    store = S3Store("s3://bucket/run", endpoint_url=url, client=client, **options)
    store.put("a", b"x", if_absent=False)
    store.close()
    assert [user(request) for request in asked] == [(where, "its token" if where == "environment" else "")]


def test_credentials_that_expire_are_renewed_and_a_failure_to_is_no_mistake(
    endpoint: tuple[str, list[Request]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url, asked = endpoint
    program, turns = tmp_path / "issue.py", tmp_path / "turns"
    program.write_text(_ISSUE)
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {sys.executable} {program} {turns}\n")
    monkeypatch.setattr(s3_obstore, "_CREDENTIALS_S", 0)
    store = S3Store("s3://bucket/run", endpoint_url=url, client="obstore")
    store.put("a", b"x")
    store.put("b", b"x")
    (first, *token), (second, *_) = (user(request) for request in asked)
    assert int(second.removeprefix("KEY")) > int(first.removeprefix("KEY"))
    assert token == ["token"]
    program.write_text("raise SystemExit('signed out')")
    with pytest.raises(StoreUnavailable, match="signed out"):
        store.put("c", b"x")
    store.close()


@pytest.mark.parametrize("client", CLIENTS)
def test_without_credentials_the_caller_is_told(endpoint: tuple[str, list[Request]], client: Any) -> None:
    url, asked = endpoint
    store = S3Store("s3://bucket/run", endpoint_url=url, client=client)
    with pytest.raises(UsageError, match="credentials"):
        store.get("a")
    store.close()
    assert asked == []


@pytest.mark.parametrize("client", CLIENTS)
def test_an_anonymous_reader_signs_nothing(endpoint: tuple[str, list[Request]], client: Any) -> None:
    url, asked = endpoint
    store = S3Store("s3://bucket/run", endpoint_url=url, client=client, anon=True)
    with pytest.raises(UsageError):  # moto wants a signature
        store.get("a")
    store.close()
    assert [user(request) for request in asked] == [("", "")]


# The place


@pytest.mark.parametrize(
    ("endpoint_url", "bucket", "style", "expected"),
    [
        ("https://s3.amazonaws.com", "bucket", "auto", ("https://bucket.s3.eu-west-1.amazonaws.com", True)),
        ("https://s3.us-east-1.amazonaws.com", "b", "auto", ("https://b.s3.eu-west-1.amazonaws.com", True)),
        ("https://s3.amazonaws.com", "my.bucket", "auto", ("https://s3.eu-west-1.amazonaws.com", False)),
        ("https://s3.amazonaws.com", "bucket", "path", ("https://s3.eu-west-1.amazonaws.com", False)),
        (
            "https://s3.cn-north-1.amazonaws.com.cn",
            "b",
            "path",
            ("https://s3.eu-west-1.amazonaws.com.cn", False),
        ),
        ("http://127.0.0.1:9000/", "bucket", "auto", ("http://127.0.0.1:9000", False)),
        ("https://s3.example/namespace", "bucket", "auto", ("https://s3.example/namespace", False)),
        ("https://s3.example", "bucket", "virtual", ("https://bucket.s3.example", True)),
        (
            "https://bucket.vpce-1.s3.us-east-1.vpce.amazonaws.com",
            "bucket",
            "auto",
            ("https://bucket.vpce-1.s3.us-east-1.vpce.amazonaws.com", False),
        ),
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

    def head(method: str, **parameters: Any) -> Any:
        assert (method, parameters.pop("timeout") > 0) == ("head_bucket", True)
        assert parameters == {"Bucket": "bucket"}
        if is_refused:
            raise PermissionError("forbidden") from ClientError({"Error": {"Code": "403"}, **answer}, method)
        return answer

    monkeypatch.setattr(store._client.fs, "call_s3", head)
    config = configured(store, monkeypatch)["config"]
    assert config["region"] == "eu-north-1"
    assert config["aws_endpoint_url_s3"] == "https://bucket.s3.eu-north-1.amazonaws.com"


@pytest.mark.parametrize(
    ("endpoint_url", "calculation", "expected"),
    [
        ("https://s3.example", "when_supported", (True, "CRC64NVME")),
        ("https://s3.example", "when_required", (False, None)),
        ("http://127.0.0.1:9000", "when_supported", (False, None)),
    ],
)
def test_a_payload_is_left_unsigned_only_under_tls_and_a_checksum(
    monkeypatch: pytest.MonkeyPatch, endpoint_url: str, calculation: str, expected: tuple[bool, str | None]
) -> None:
    config_kwargs = {"request_checksum_calculation": calculation}
    store = S3Store("s3://b", endpoint_url=endpoint_url, key="k", secret="s", config_kwargs=config_kwargs)
    config = configured(store, monkeypatch)["config"]
    assert (config["unsigned_payload"], config.get("checksum_algorithm")) == expected


def test_over_plain_http_the_signature_covers_the_bytes(endpoint: tuple[str, list[Request]]) -> None:
    url, asked = endpoint
    store = S3Store("s3://bucket/run", endpoint_url=url, key="k", secret="s", client="obstore")
    store.put("a", b"the bytes")
    store.close()
    assert asked[0].headers["x-amz-content-sha256"] == hashlib.sha256(b"the bytes").hexdigest()


def test_timeouts_retries_and_certificates_are_those_of_s3fs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    certificate = tmp_path / "ca.pem"
    certificate.write_text("a certificate")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    keys = {"key": "k", "secret": "s", "endpoint_url": "https://s3.example"}
    told = configured(S3Store("s3://b", **keys), monkeypatch)
    options = told["client_options"]
    assert options["connect_timeout"].total_seconds() == 5
    assert options["read_timeout"].total_seconds() == 60
    assert options["root_certificate"] == b"a certificate"
    assert not options["allow_http"]
    assert told["retry_config"] == {"max_retries": 4, "retry_timeout": timedelta(seconds=60)}
    config_kwargs = {"read_timeout": 7, "retries": {"max_attempts": 1}}
    store = S3Store("s3://b", **keys, config_kwargs=config_kwargs, client_kwargs={"verify": False})
    told = configured(store, monkeypatch)
    assert told["client_options"]["read_timeout"].total_seconds() == 7
    assert told["client_options"]["allow_invalid_certificates"]
    assert told["retry_config"]["max_retries"] == 1


def test_an_object_of_more_than_ten_thousand_parts_is_refused(
    s3_options: dict[str, Any], s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_obstore, "_MAX_PARTS", 2)
    store = S3Store(s3_url, **s3_options, client="obstore")
    store.upload("just", [bytes(2 * PART_BYTES)])
    with pytest.raises(UsageError, match="client='s3fs'"):
        store.upload("large", [bytes(2 * PART_BYTES), b"x"])
    assert list(store.list()) == ["just"]
    store.close()
