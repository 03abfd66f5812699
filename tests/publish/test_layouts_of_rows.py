"""Fused rows as Megatron orders them, against a full copy that is put together row by row."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from patchstore import LocalPart, interleaved_qkv, joined_gate_up, mapped, without_padding
from patchstore.errors import SchemaMismatch, UsageError
from patchstore.stores.memory import MemoryStore
from tests.support.small_models import published
from tests.support.weights import assert_same_bits, random_bits

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.uint8, torch.float8_e4m3fn]


def megatron_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, head: int) -> torch.Tensor:
    """Order rows as Megatron does: head by head, with no shapes to get wrong."""
    groups = k.shape[0] // head
    per_group = q.shape[0] // head // groups
    rows = []
    for group in range(groups):
        for number in range(per_group):
            rows += [q[(group * per_group + number) * head + row] for row in range(head)]
        rows += [k[group * head + row] for row in range(head)]
        rows += [v[group * head + row] for row in range(head)]
    return torch.stack(rows)


def of_shards(name: str, shards: Sequence[torch.Tensor], rule: Any) -> dict[str, torch.Tensor]:
    """Return what is published of a tensor that is cut over tensor parallel ranks, each element once."""
    parts = [LocalPart.shard(each, 0, rank=rank, size=len(shards)) for rank, each in enumerate(shards)]
    return published(MemoryStore(), mapped({name: parts}, lambda _, whole: rule(whole)), dtype=None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 2), (4, 1), (1, 1)])
@pytest.mark.parametrize("hidden", [(5,), ()])
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_query_key_and_value_are_taken_from_their_groups(
    dtype: torch.dtype, heads: int, groups: int, hidden: tuple[int, ...], tp: int
) -> None:
    head = 6
    q = random_bits(dtype, (heads * head, *hidden))
    k, v = (random_bits(dtype, (groups * head, *hidden), seed) for seed in (1, 2))
    fused = megatron_qkv(q, k, v, head)

    def rule(whole: torch.Tensor) -> Any:
        return interleaved_qkv(whole, ("q", "k", "v"), num_heads=heads, num_query_groups=groups)

    # Also shards that cut a head.
    assert_same_bits(of_shards("qkv", fused.chunk(tp), rule), {"q": q, "k": k, "v": v})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [(5,), ()])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_gate_and_up_are_taken_from_each_ranks_halves(
    dtype: torch.dtype, hidden: tuple[int, ...], tp: int
) -> None:
    gate, up = (random_bits(dtype, (12, *hidden), seed) for seed in (1, 2))
    locals_ = [torch.cat(both) for both in zip(gate.chunk(tp), up.chunk(tp), strict=True)]
    found = of_shards("fc1", locals_, lambda whole: joined_gate_up(whole, ("gate", "up"), num_shards=tp))
    assert_same_bits(found, {"gate": gate, "up": up})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [16, 13, 8, 5])
def test_padding_of_the_vocabulary_is_left_out(dtype: torch.dtype, vocabulary: int) -> None:
    padded = random_bits(dtype, (16, 3))
    # The last ranks may have padding alone.
    found = of_shards(
        "embed",
        padded.chunk(4),
        lambda whole: without_padding(whole, "embed.weight", num_rows=vocabulary),
    )
    assert_same_bits(found, {"embed.weight": padded[:vocabulary]})


WHOLE = torch.empty(48, 5)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (lambda: interleaved_qkv(WHOLE, ("q", "k", "v"), num_heads=4, num_query_groups=3), "do not|are not"),
        (lambda: interleaved_qkv(WHOLE, ("q", "k", "v"), num_heads=7, num_query_groups=1), "48 rows"),
        (lambda: interleaved_qkv(WHOLE, ("q", "k"), num_heads=4, num_query_groups=2), "3 names"),
        (lambda: interleaved_qkv(WHOLE, "qkv", num_heads=4, num_query_groups=2), "3 names"),
        (lambda: interleaved_qkv(WHOLE, ("q", "k", "v"), num_heads=0, num_query_groups=2), "num_heads"),
        (lambda: interleaved_qkv([1], ("q", "k", "v"), num_heads=4, num_query_groups=2), "takes a tensor"),
        (lambda: joined_gate_up(WHOLE, ("g", "u"), num_shards=5), "5 shards"),
        (lambda: joined_gate_up(WHOLE, ("g", "u"), num_shards=True), "num_shards"),
        (lambda: joined_gate_up(torch.tensor(1.0), ("g", "u"), num_shards=1), "takes a tensor"),
        (lambda: without_padding(WHOLE, "embed", num_rows=49), "less than num_rows=49"),
        (lambda: without_padding(WHOLE, "embed", num_rows=4.5), "num_rows"),
        (lambda: LocalPart.shard(WHOLE, 2, rank=0, size=2), "dim must be"),
        (lambda: LocalPart.shard(WHOLE, 0, rank=2, size=2), "rank must be"),
        (lambda: LocalPart.shard(torch.tensor(1.0), 0, rank=0, size=2), "with dimensions"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(said: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        said()


def test_a_forgotten_row_is_refused(store: MemoryStore) -> None:
    """Half of a layer's heads, as from one rank of two."""
    source = mapped(
        {"qkv": LocalPart.shard(torch.randn(24, 5), 0, rank=0, size=2)},
        lambda _, whole: interleaved_qkv(whole, ("q", "k", "v"), num_heads=4, num_query_groups=2),
    )
    with pytest.raises(SchemaMismatch, match="elements"):
        published(store, source)
