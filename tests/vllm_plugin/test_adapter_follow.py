"""`follow` and a real server of adapters: updates, a pin, a restart, and the bits that are served."""

from pathlib import Path

import httpx
import pytest
import tiny_adapter
from asking import ask
from server_process import ForkingServer, call

from patchstore import Publisher, wait_until
from patchstore.bucket import history
from patchstore.bucket.records import Manifest
from patchstore.errors import SchemaMismatch, ServerUnavailable, StateMismatch
from patchstore.follow.adapter_server import AdapterServer
from patchstore.follow.reconcile import Reconciler
from patchstore.follow.settings import Settings
from patchstore.follow.vllm_server import VllmServer
from patchstore.stores import open_store

LORA = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--max-cpu-loras", "4")


def held(url: str) -> dict[str, int]:
    """Names of the adapters that a server has, and what its ranks call each."""
    cards = httpx.get(f"{url}/v1/models", timeout=60).raise_for_status().json()["data"]
    return {card["id"]: card["lora_int_id"] for card in cards if card["id"].startswith("policy")}


@pytest.mark.timeout(1800)
def test_a_server_is_kept_at_the_newest_version_or_a_pinned_one(model: Path, tmp_path: Path) -> None:
    store, tensors = open_store(tmp_path / "store"), tiny_adapter.tensors()
    files, scratch = tiny_adapter.config(tmp_path / "config"), tmp_path / "tmp"
    scratch.mkdir()
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "TMPDIR": str(scratch)}
    process = ForkingServer(tmp_path / "vllm.log", *LORA, environment=environment)
    pinned: int | None = None

    def desired() -> Manifest | None:
        return history.head(store) if pinned is None else history.read_manifest(store, pinned)

    with (
        Publisher(store, tensors, adapter="default", files=files, dtype=None) as publisher,
        process.serving(model),
        AdapterServer(process.url, "policy", store) as server,
    ):
        follow = Reconciler(store, server, Settings(verify_every_s=0), desired=desired)
        answers = []
        for version in range(3):
            publisher.publish_patch(version).result()
            assert [follow.step().outcome for _ in range(2)] == ["applied", "verified"]
            assert wait_until(version, servers=process.url, adapter="policy", exactly=True)
            answers.append(ask(process.url, model="policy", logprobs=1))
            for tensor in tensors.values():
                tensor.mul_(-1.5)
        assert held(process.url).keys() == {"policy", "policy@1", "policy@2"}
        assert answers[0].tokens != answers[1].tokens != answers[2].tokens

        pinned = 0
        assert follow.step().outcome == "applied"
        assert ask(process.url, model="policy", logprobs=1)[:2] == answers[0][:2]

        process.stop()
        assert isinstance(follow.step().error, ServerUnavailable)
        pinned = None
        process.start(model)
        assert [follow.step().outcome for _ in range(2)] == ["applied", "verified"]
        assert ask(process.url, model="policy", logprobs=1)[:2] == answers[2][:2]

        with VllmServer(process.url) as ranks:
            call(ranks, "delta_spoil_adapter", held(process.url)["policy"])
        assert isinstance(follow.step().error, StateMismatch)

        other = open_store(tmp_path / "other")
        files = tiny_adapter.config(tmp_path / "other-config", base_model_name_or_path="somebody/else")
        with Publisher(other, tensors, adapter="default", files=files, dtype=None) as others:
            others.publish_patch(0).result()
        with (
            AdapterServer(process.url, "other", other) as client,
            pytest.raises(SchemaMismatch, match="somebody/else"),
        ):
            client.apply(0)
