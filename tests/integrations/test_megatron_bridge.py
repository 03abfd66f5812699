"""Models of Megatron-Core are published with the bits that Megatron-Bridge exports, in every layout."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import bridge_jobs
import pytest
import torch

from patchstore import Replica
from patchstore.stores import opened
from patchstore.tensors.bits import bits
from tests.support.ranks import Ranks

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None
        or importlib.util.find_spec("megatron.bridge") is None
        or importlib.util.find_spec("megatron.core") is None,
        reason="needs megatron-bridge and megatron-core, which are not on the list of test packages: see "
        "docs/trainers.md",
    ),
]
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    """Ranks with time to import Megatron, which takes minutes where the machine is busy."""
    ranks = Ranks(2, timeout_s=500)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    ("kind", "options", "sizes"),
    [
        ("Qwen3Moe", MOE, (2, 1, 1)),
        ("Qwen3Moe", MOE, (1, 2, 1)),
        ("Qwen3Moe", MOE, (1, 1, 2)),
        ("Qwen3Moe", MOE, (2, 1, 2)),
        ("Qwen2", {"tie_word_embeddings": True}, (2, 1, 1)),
        ("Qwen2", {"tie_word_embeddings": True}, (1, 2, 1)),
    ],
)
def test_each_version_has_the_bits_that_bridge_exports(
    two_ranks: Ranks,
    tmp_path: Path,
    kind: str,
    options: dict[str, object],
    sizes: tuple[int, int, int],
) -> None:
    folder, url = tmp_path / "base", str(tmp_path / "store")
    bridge_jobs.make_checkpoint(folder, kind, **options)
    results = two_ranks.run(bridge_jobs.publish, url, str(folder), sizes)
    assert all(gathered == [] for _, gathered, _ in results)
    assert all(converted == [] for _, _, converted in results)
    with opened(url) as store:
        for version, expected in results[0][0]:
            found: dict[str, torch.Tensor] = {}
            Replica(store, found).update(version)
            same = {
                name: (each.dtype, tuple(each.shape), bits(each).numpy().tobytes())
                for name, each in found.items()
            }
            assert same.keys() == expected.keys()
            for name, each in same.items():
                assert each == expected[name], name
