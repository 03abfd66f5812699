"""A real server that was started to require signatures."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess

from patchstore.bucket import history
from patchstore.errors import PatchstoreError, RollbackRefused, Unsigned
from patchstore.follow.desired import DesiredVersion, HeadWatcher
from patchstore.follow.reconcile import Reconciler
from patchstore.follow.settings import Settings
from patchstore.follow.vllm_server import VllmServer
from patchstore.signing import KeySigner, RequiredKeys, statement
from tests.support.keys import key_pair
from vllm_plugin.permission import KEYS

pytestmark = pytest.mark.exhaustive


@pytest.fixture
def signer(tmp_path: Path) -> KeySigner:
    return KeySigner(key_pair(tmp_path)[0])


@pytest.fixture
def requiring(model: Path, tmp_path: Path, signer: KeySigner) -> Iterator[ServerProcess]:
    environment = {KEYS: str(tmp_path / "trainer.pub")}
    with ServerProcess(tmp_path / "vllm.log", environment=environment).serving(model) as process:
        yield process


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
        statement.sign_version(trainer.store, by, header, version)

    with VllmServer(requiring.url, timeout_s=120) as server:
        before = server.fingerprint()
        server.init_weight_transfer(trainer.url)
        # It was started from these weights, and no key has signed that version.
        assert (server.status().serving, server.status().required_keys) == (None, (signer.public_key.name,))
        for key in (None, other):
            if key is not None:
                sign(key, 0)
            assert refusal(lambda: server.apply(0)) == Unsigned.kind
        assert server.fingerprint() == before
        assert not server.is_paused()

        sign(signer, 0)
        server.init_weight_transfer(trainer.url)
        assert server.status().serving == 0
        sign(signer, 2)
        required = RequiredKeys([signer.public_key])
        desired = DesiredVersion(HeadWatcher(trainer.store), required=required)
        settings = Settings(required_keys=required)
        follow = Reconciler(trainer.store, server, settings, desired=desired.refresh)
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
