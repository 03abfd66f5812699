"""Fused rows as Megatron orders them, against a full copy that is put together row by row."""

from typing import Any

import pytest
import torch
from small_models import published

from patchstore import LocalPart, interleaved_qkv, joined_gate_up, mapped, without_padding
from patchstore.errors import SchemaMismatch, UsageError
from patchstore.publish.sources import Weights
from patchstore.stores.memory import MemoryStore
from patchstore.tensors.bits import bits

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.uint8, torch.float8_e4m3fn]


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return random bits, NaN with payloads and -0.0 among them."""
    size = dtype.itemsize
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8)
    tensor = raw.view(dtype)
    if dtype.is_floating_point and size > 1:
        tensor.view(-1)[:2] = torch.tensor([float("nan"), -0.0]).to(dtype)
    return tensor


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


def exact(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, each in found.items():
        assert each.dtype == expected[name].dtype
        assert torch.equal(bits(each.contiguous()), bits(expected[name].contiguous())), name


def put_together(sources: list[Any]) -> dict[str, torch.Tensor]:
    """Return the whole tensors that the pieces of several processes make, each element once."""
    found: dict[str, torch.Tensor] = {}
    written: dict[str, torch.Tensor] = {}
    for source in sources:
        given = Weights(source).read()
        for key, tensor in given.tensors.items():
            place = given.places.get(key)
            name, shape = (place.name, place.shape) if place else (key, tuple(tensor.shape))
            start = place.start if place else (0,) * tensor.dim()
            found.setdefault(name, torch.zeros(shape, dtype=tensor.dtype))
            written.setdefault(name, torch.zeros(shape, dtype=torch.int32))
            box = tuple(slice(at, at + size) for at, size in zip(start, tensor.shape, strict=True))
            found[name][box] = tensor
            written[name][box] += 1
    assert all(bool((each == 1).all()) for each in written.values())
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 2), (4, 1), (1, 1)])
@pytest.mark.parametrize("hidden", [(5,), ()])
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_query_key_and_value_are_taken_from_their_groups(
    dtype: torch.dtype, heads: int, groups: int, hidden: tuple[int, ...], tp: int
) -> None:
    head = 6
    q = filled((heads * head, *hidden), dtype)
    k, v = filled((groups * head, *hidden), dtype), filled((groups * head, *hidden), dtype)
    fused = megatron_qkv(q, k, v, head)
    shards = fused.chunk(tp)  # also shards that cut a head
    sources = []
    for rank, local in enumerate(shards):
        part = LocalPart.shard(local, 0, rank=rank, size=tp)
        sources.append(
            mapped(
                {"qkv": part},
                lambda _, whole: interleaved_qkv(
                    whole, ("q", "k", "v"), num_heads=heads, num_query_groups=groups
                ),
            )
        )
    exact(put_together(sources), {"q": q, "k": k, "v": v})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [(5,), ()])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_gate_and_up_are_taken_from_each_ranks_halves(
    dtype: torch.dtype, hidden: tuple[int, ...], tp: int
) -> None:
    gate, up = filled((12, *hidden), dtype), filled((12, *hidden), dtype)
    locals_ = [torch.cat(both) for both in zip(gate.chunk(tp), up.chunk(tp), strict=True)]
    sources = [
        mapped(
            {"fc1": LocalPart.shard(local, 0, rank=rank, size=tp)},
            lambda _, whole: joined_gate_up(whole, ("gate", "up"), num_shards=tp),
        )
        for rank, local in enumerate(locals_)
    ]
    exact(put_together(sources), {"gate": gate, "up": up})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [16, 13, 8, 5])
def test_padding_of_the_vocabulary_is_left_out(dtype: torch.dtype, vocabulary: int) -> None:
    padded = filled((16, 3), dtype)
    sources = [
        mapped(
            {"embed": LocalPart.shard(local, 0, rank=rank, size=4)},
            lambda _, whole: without_padding(whole, "embed.weight", num_rows=vocabulary),
        )
        for rank, local in enumerate(padded.chunk(4))
        # A rank that has padding alone has nothing to publish.
        if rank * 4 < vocabulary
    ]
    exact(put_together(sources), {"embed.weight": padded[:vocabulary]})


def test_rules_of_these_parts_are_published(store: MemoryStore) -> None:
    q, k, v = (filled((rows, 5), torch.bfloat16) for rows in (24, 12, 12))
    gate, up = filled((12, 5), torch.bfloat16), filled((12, 5), torch.bfloat16)
    padded = filled((16, 3), torch.bfloat16)
    source = {
        "linear_qkv": megatron_qkv(q, k, v, 6),
        "linear_fc1": torch.cat([gate[:6], up[:6], gate[6:], up[6:]]),
        "embedding": padded,
    }

    def rule(name: str, whole: torch.Tensor) -> Any:
        if name == "linear_qkv":
            return interleaved_qkv(whole, ("q", "k", "v"), num_heads=4, num_query_groups=2)
        if name == "linear_fc1":
            return joined_gate_up(whole, ("gate", "up"), num_shards=2)
        return without_padding(whole, "embed", num_rows=13)

    found = published(store, mapped(source, rule))
    exact(found, {"q": q, "k": k, "v": v, "gate": gate, "up": up, "embed": padded[:13]})


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
