"""A server whose output layer is the embedding, and runs that store both."""

from pathlib import Path

import pytest
import torch

from patchstore.errors import PatchstoreError
from patchstore.testing import tiny_qwen

# A server may take minutes to start on a busy machine.
pytestmark = [pytest.mark.vllm, pytest.mark.exhaustive, pytest.mark.timeout(1200)]

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    """The tiny model's tensors, without the name that is tied."""
    state = tiny_qwen.build(tied=True).state_dict()
    return {name: tensor.detach() for name, tensor in state.items() if name != HEAD}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen.save(tiny_qwen.build(tied=True), tmp_path_factory.mktemp("models") / "tied")


def test_a_second_tensor_is_followed_while_it_is_equal_and_refused_by_name_once_it_differs(
    server, new_trainer, weights
):
    trainer = new_trainer({**weights, HEAD: weights[EMBEDDING].clone()})
    trainer.publish()
    server.init_weight_transfer(trainer.url)
    server.apply(0)
    before = server.fingerprint()
    trainer.step()

    with pytest.raises(PatchstoreError, match=f"{HEAD!r} than as {EMBEDDING!r}") as caught:
        server.apply(1)

    assert caught.value.kind == "schema-mismatch"
    assert server.status().ranks[0]["serving"] == 0
    assert server.fingerprint() == before
