"""A server that starts at a version of a run, and goes on from there by deltas."""

import json
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_adapter
import torch
import vllm
from asking import Answer, ask
from server_process import ForkingServer, ServerProcess
from trainer import Trainer, replayed

from patchstore import Publisher
from patchstore.bucket import history, kept
from patchstore.errors import PatchstoreError, SchemaMismatch, StoreUnavailable, UsageError
from patchstore.follow.desired import DesiredVersion, HeadWatcher
from patchstore.follow.reconcile import Reconciler
from patchstore.follow.verify import verify_server
from patchstore.follow.vllm_server import VllmServer
from patchstore.read.host_cache import HostCache
from patchstore.signing import KeySigner, statement
from patchstore.stores import open_store
from tests.support.keys import key_pair
from tests.support.weights import small_model
from vllm_plugin import boot
from vllm_plugin.permission import KEYS, STORES

CREDENTIALS = {"aws_access_key_id": "k", "aws_secret_access_key": "s"}
LABELS = not vllm.__version__.startswith("0.26.")


def starting(place: object, version: object = "head", **more: Any) -> tuple[str, ...]:
    """Arguments of a server that starts at a version."""
    given = json.dumps({"store": str(place), "version": version, **more})
    return ("--load-format", "patchstore", "--model-loader-extra-config", given)


@pytest.fixture(scope="module")
def trainer(model: Path, weights: dict[str, torch.Tensor], tmp_path_factory) -> Iterator[Trainer]:
    """Version 0 is an anchor, 1 to 3 are deltas; `best` is version 2."""
    made = Trainer(tmp_path_factory.mktemp("run") / "store", weights, files=model)
    with closing(made) as trainer:
        trainer.publish()
        for _ in range(3):
            trainer.step()
        kept.tag(trainer.store, "best", 2)
        yield trainer


@pytest.fixture(scope="module")
def fresh(trainer: Trainer, model: Path, tmp_path_factory) -> Answer:
    """What a server answers that was started with a replay of version 2."""
    folder = tmp_path_factory.mktemp("fresh")
    served = replayed(trainer.store, 2, folder / "2", model)
    with ForkingServer(folder / "vllm.log").serving(served) as process:
        return ask(process.url, logprobs=3)


def without_anchors(trainer: Trainer, aside: Path) -> None:
    shutil.move(Path(trainer.url) / "anchors", aside)


@pytest.mark.timeout(1800)
def test_a_server_starts_at_a_tag_without_a_checkpoint_and_goes_on_by_deltas(trainer, fresh, tmp_path):
    scratch = str(tmp_path / "scratch")
    log = tmp_path / "vllm.log"
    with (
        ForkingServer(log, *starting(trainer.url, "best", scratch=scratch)).serving(Path(trainer.url)) as it,
        VllmServer(it.url, timeout_s=120) as server,
    ):
        if LABELS:
            assert server.weight_version() == "2"
        said = ask(it.url, logprobs=3)
        assert (said.tokens, said.logprobs) == (fresh.tokens, fresh.logprobs)
        without_anchors(trainer, tmp_path / "anchors")
        try:
            follow = Reconciler(
                trainer.store, server, desired=DesiredVersion(HeadWatcher(trainer.store)).refresh
            )
            assert follow.step().outcome == "initialised"
            assert server.status().serving == 2
            assert follow.step().outcome == "applied"
        finally:
            shutil.move(tmp_path / "anchors", Path(trainer.url) / "anchors")
        assert server.status().serving == 3
        assert verify_server(trainer.store, server, 3).unverified == ()
        server.apply(2)
        again = ask(it.url, logprobs=3)
        assert (again.tokens, again.logprobs) == (fresh.tokens, fresh.logprobs)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_an_old_version_is_known_without_a_search_and_its_anchor_is_not_read_again(trainer, model, tmp_path):
    # A folder with a config alone serves too, and keeps its name.
    served = tmp_path / "config-alone"
    served.mkdir()
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, served)
    arguments = starting(trainer.url, 0, scratch=str(tmp_path / "scratch"))
    with (
        ForkingServer(tmp_path / "vllm.log", *arguments).serving(served) as it,
        VllmServer(it.url, timeout_s=120) as server,
    ):
        without_anchors(trainer, tmp_path / "anchors")
        try:
            server.init_weight_transfer(trainer.url)
            assert server.status().serving == 0
        finally:
            shutil.move(tmp_path / "anchors", Path(trainer.url) / "anchors")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A URL on a server of S3 that this process, and what it starts, reaches."""
    # Not above: the other tests run on hosts that have no moto.
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **CREDENTIALS)
    client.create_bucket(Bucket="bucket")
    client.close()
    found = {name.upper(): value for name, value in CREDENTIALS.items()} | {"AWS_ENDPOINT_URL_S3": url}
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    yield "s3://bucket/run"
    server.stop()


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_two_ranks_start_at_the_head_of_a_bucket(bucket, model, weights, tmp_path):
    arguments = starting(bucket, scratch=str(tmp_path / "scratch"))
    process = ForkingServer(tmp_path / "vllm.log", *arguments, "--tensor-parallel-size", "2")
    with closing(open_store(bucket)) as store, Publisher(store, weights, files=model) as publisher:
        publisher.publish_patch(0).result(timeout_s=60)
        with process.serving(bucket), VllmServer(process.url, timeout_s=120) as server:
            server.init_weight_transfer(bucket)
            assert [each["serving"] for each in server.status().ranks] == [0, 0]
            assert verify_server(store, server, 0).unverified == ()


def ended(process: ServerProcess, model: Path | str) -> str:
    """Start a server that does not become healthy, and return what it wrote."""
    with pytest.raises(RuntimeError, match="did not start"):
        process.start(model)
    return process.log.read_text(errors="replace")


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_a_server_that_is_killed_while_it_starts_leaves_nothing_that_a_later_one_would_use(
    trainer, fresh, tmp_path
):
    scratch = tmp_path / "scratch"
    arguments = starting(trainer.url, 2, scratch=str(scratch))
    killer = ("--worker-extension-cls", "killed_extension.KilledExtension")
    killed = ForkingServer(tmp_path / "killed.log", *arguments, *killer)
    ended(killed, trainer.url)
    assert killed.exit_code == -signal.SIGKILL
    assert list(scratch.glob("*.part"))
    with ForkingServer(tmp_path / "vllm.log", *arguments).serving(trainer.url) as process:
        assert ask(process.url, logprobs=3) == fresh
    HostCache(scratch)
    assert not list(scratch.glob("*.part"))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("version", "kind"),
    [(99, "VersionNotFound"), pytest.param(0, "SchemaMismatch", marks=pytest.mark.exhaustive)],
)
def test_a_server_that_cannot_start_at_a_version_ends_with_a_sentence(
    trainer, model, tmp_path, version, kind
):
    place = trainer.url
    if kind == "SchemaMismatch":
        # It takes names of another architecture, which a rank hears from vLLM's loader.
        place = str(tmp_path / "other")
        with Publisher(place, small_model()) as publisher:
            publisher.publish_patch(0).result(timeout_s=60)
    process = ForkingServer(tmp_path / "vllm.log", *starting(place, version))
    said = ended(process, model)
    assert process.exit_code not in {0, None}
    assert kind in said
    sentence = {"VersionNotFound": "has no version 99", "SchemaMismatch": "the model's loader failed"}
    assert sentence[kind] in said, said[-3000:]


# What is refused before anything is started.


def settled(given: object, model: str = "MODEL") -> Any:
    """Arguments of a server as `create_engine_config` then sees them."""
    args = SimpleNamespace(load_format="PatchStore", model=model, served_model_name=None)
    args.model_loader_extra_config = given
    assert boot.settle(args, lambda headless: headless, headless=True) is True
    return args


def test_the_version_is_decided_before_any_rank_is_started(trainer, tmp_path):
    scratch = {"scratch": str(tmp_path / "scratch")}
    for named, number in (("best", 2), ("head", 3), (1, 1)):
        given = {"store": trainer.url, "version": named, **scratch}
        args = settled(given)
        assert args.model_loader_extra_config == given | {"version": number}
        assert (args.model, args.served_model_name) == ("MODEL", None)
    newest = settled({"store": trainer.url, **scratch}, trainer.url + "/")
    assert newest.model_loader_extra_config["version"] == 3
    assert newest.served_model_name == trainer.url + "/"


def test_config_and_tokenizer_are_those_of_the_anchor_whatever_lies_there(trainer, model, tmp_path):
    given = {"store": trainer.url, "scratch": str(tmp_path / "scratch")}
    folder = Path(settled(given, trainer.url).model)
    names = {path.name for path in model.iterdir() if path.suffix != ".safetensors"}
    assert {path.name for path in folder.iterdir()} == names
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").unlink()
    assert Path(settled(given, trainer.url).model) == folder
    for name in names:
        assert (folder / name).read_bytes() == (model / name).read_bytes()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, r"lacks \['store'\]"),
        (["a"], "must be an object"),
        ({"store": "/nowhere", "partial": True}, r"unknown keys \['partial'\]"),
        ({"store": "/nowhere", "version": None}, "has a NoneType as 'version'; .*'version' .int | str, opt"),
        ({"store": "/nowhere", "version": True}, "has a bool as 'version'"),
        ({"store": "/nowhere", "scratch": "/var/lib"}, "scratch must be below"),
        ({"store": "gs://bucket/run"}, STORES),
    ],
)
def test_settings_that_cannot_be_are_refused_with_what_can(given, says):
    with pytest.raises(UsageError, match=says):
        settled(given)


@pytest.mark.parametrize(
    ("version", "kind", "says"),
    [
        (4, "version-not-found", "4"),
        (-1, "usage", "count from 0"),
        ("worst", "version-not-found", "no tag 'worst'"),
        ("a/b", "usage", "cannot name a tag"),
    ],
)
def test_a_version_that_is_not_there_is_refused(trainer, tmp_path, version, kind, says):
    with pytest.raises(PatchstoreError, match=says) as caught:
        settled({"store": trainer.url, "version": version, "scratch": str(tmp_path / "scratch")})
    assert caught.value.kind == kind


def test_what_is_no_whole_signed_run_with_a_config_is_refused(trainer, tmp_path, monkeypatch):
    scratch = str(tmp_path / "scratch")
    for place, files in (("bare", None), ("adapter", "policy")):
        options: dict[str, Any] = {}
        if files is not None:
            options = {"adapter": "default", "files": tiny_adapter.config(tmp_path / files), "dtype": None}
        tensors = small_model() if files is None else tiny_adapter.tensors()
        with Publisher(tmp_path / place, tensors, **options) as publisher:
            publisher.publish_patch(0).result(timeout_s=60)
    bare, adapter = str(tmp_path / "bare"), str(tmp_path / "adapter")
    with pytest.raises(UsageError, match=r"no config\.json.*MODEL"):
        settled({"store": bare, "scratch": scratch}, bare)
    with pytest.raises(SchemaMismatch, match=r"is a run of .*--enable-lora"):
        settled({"store": adapter, "scratch": scratch}, adapter)

    private, public = key_pair(tmp_path)
    monkeypatch.setenv(KEYS, str(public))
    given = {"store": trainer.url, "version": 1, "scratch": scratch}
    with pytest.raises(PatchstoreError) as caught:
        settled(given)
    assert caught.value.kind == "unsigned"
    statement.sign_version(trainer.store, KeySigner(private), history.run_header(trainer.store), 1)
    assert settled(given).model_loader_extra_config["version"] == 1


def test_a_bucket_that_does_not_answer_is_a_sentence(monkeypatch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{listening.getsockname()[1]}")
        for name, value in CREDENTIALS.items():
            monkeypatch.setenv(name.upper(), value)
        options = {"storage_options": {"timeout_s": 2}, "scratch": str(tmp_path / "scratch")}
        with pytest.raises(StoreUnavailable, match="s3://bucket/run"):
            settled({"store": "s3://bucket/run", **options}, "s3://bucket/run")
