"""A real server that was started to require signatures."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from server_process import RUNNING, ServerProcess

from patchstore.errors import PatchstoreError, RollbackRefused, Unsigned, UsageError
from patchstore.format import history
from patchstore.serve.desired import DesiredVersion, HeadWatcher
from patchstore.serve.reconcile import Reconciler
from patchstore.serve.vllm_server import VllmServer
from patchstore.signing import KeySigner, RequiredKeys, stored
from tests.support.keys import key_pair
from vllm_plugin.permission import KEYS

# A server may take minutes to start on a busy machine.
pytestmark = [pytest.mark.vllm, pytest.mark.exhaustive, pytest.mark.timeout(1200)]


@pytest.fixture
def signer(tmp_path: Path) -> KeySigner:
    return KeySigner(key_pair(tmp_path)[0])


@pytest.fixture
def requiring(model: Path, tmp_path: Path, signer: KeySigner) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path / "vllm.log", environment={KEYS: str(tmp_path / "trainer.pub")})
    RUNNING.append(process)
    try:
        process.start(model)
        yield process
    finally:
        process.stop()
        RUNNING.remove(process)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(PatchstoreError) as caught:
        call()
    return caught.value.kind


def test_only_signed_versions_reach_the_weights(requiring, signer, new_trainer):
    trainer = new_trainer()
    trainer.publish()
    trainer.step()
    trainer.step()
    header = history.read_header(trainer.store)
    other = KeySigner(key_pair(Path(trainer.url).parent, "other")[0])

    def sign(by: KeySigner, version: int) -> None:
        stored.sign_version(trainer.store, by, header, version)

    with VllmServer(requiring.url, timeout_s=120) as server:
        before = server.fingerprint()
        server.init_weight_transfer(trainer.url)
        # It was started from these weights, and no key has signed that version.
        assert (server.status().serving, server.status().required_keys) == (None, (signer.name,))
        for each in (0, 1):
            assert refusal(lambda version=each: server.apply(version)) == Unsigned.kind
        sign(other, 0)
        assert refusal(lambda: server.apply(0)) == Unsigned.kind
        assert (
            refusal(
                lambda: server._http.post(
                    "/init_weight_transfer_engine", {"init_info": {"store": trainer.url, "partial": True}}
                )
            )
            == UsageError.kind
        )
        assert (
            refusal(
                lambda: server._http.post(
                    "/init_weight_transfer_engine", {"init_info": {"store": trainer.url, "required_keys": []}}
                )
            )
            == UsageError.kind
        )
        assert server.fingerprint() == before
        assert not server.is_paused()

        sign(signer, 0)
        server.init_weight_transfer(trainer.url)
        assert server.status().serving == 0
        sign(signer, 2)
        required = RequiredKeys([signer.public_key])
        desired = DesiredVersion(HeadWatcher(trainer.store), required=required)
        follow = Reconciler(trainer.store, server, desired=desired.refresh, is_signed=True)
        assert follow.step().outcome == "applied"
        # Its parent has no signature, and is covered by the chain of digests.
        assert server.status().serving == 2
        assert server.fingerprint() != before
        assert refusal(lambda: server.apply(0)) == RollbackRefused.kind
        server.apply(0, allow_rollback=True)
        assert server.status().serving == 0
        assert follow.step().outcome == "applied"
        trainer.step()
        failed = follow.step()
        assert isinstance(failed.error, Unsigned)
        assert refusal(lambda: server.apply(3)) == Unsigned.kind
        assert server.status().serving == 2


def test_a_server_whose_keys_cannot_be_read_does_not_start(model: Path, tmp_path: Path):
    process = ServerProcess(tmp_path / "vllm.log", environment={KEYS: str(tmp_path / "none.pub")})
    with pytest.raises(RuntimeError) as failed:
        process.start(model)
    assert KEYS in process.log.read_text() and "cannot be read" in str(failed.value) + process.log.read_text()
