"""Sources that say which part of a tensor they have."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patchstore import LocalPart, Publisher
from patchstore.errors import SchemaMismatch
from patchstore.publish.sources.pieces import boxes
from patchstore.stores.memory import MemoryStore
from tests.support.small_models import assert_refused, published
from tests.support.weights import assert_same_bits, newest, served

W = torch.arange(24.0).reshape(4, 6)


@given(st.lists(st.integers(0, 4), max_size=4), st.data())
def test_a_flat_range_is_few_boxes_in_order(shape: list[int], data: st.DataObject) -> None:
    total = prod(shape)
    offset = data.draw(st.integers(0, total))
    num = data.draw(st.integers(0, total - offset))
    whole = torch.arange(total).reshape(shape)
    found = []
    cut = list(boxes(tuple(shape), offset, num))
    for start, size in cut:
        box = whole
        for dim, (first, length) in enumerate(zip(start, size, strict=True)):
            box = box.narrow(dim, first, length)
        found += box.flatten().tolist()
    assert found == list(range(offset, offset + num))
    assert len(cut) <= max(2 * len(shape) - 1, 1)


def test_one_process_may_give_a_tensor_in_parts(store: MemoryStore) -> None:
    parts = {
        "w": LocalPart(W, (4, 6), start=(0, 0)),
        "flat": LocalPart(W.flatten(), (2, 3, 4), offset=0),
    }
    found = published(store, parts)  # type: ignore[arg-type]
    assert_same_bits(found, served({"w": W, "flat": W.reshape(2, 3, 4)}))


def test_several_parts_of_a_tensor_are_a_list(store: MemoryStore) -> None:
    parts = [LocalPart(W[rows], (4, 6), start=(rows.start, 0)) for rows in (slice(2, 4), slice(0, 2))]
    assert_same_bits(published(store, {"w": parts}), served({"w": W}))


@pytest.mark.parametrize("dtypes", [("float16", "float32"), ("bfloat16", "float32"), ("float32", "float16")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_of_several_dtypes_are_rounded_once(
    store: MemoryStore, dtypes: tuple[str, str], dtype: str
) -> None:
    upper, lower = (torch.randn(2, 6).to(getattr(torch, each)) for each in dtypes)
    lower[0, 0] = 60_000.0
    current = torch.cat([upper.float(), lower.float()])
    parts = [LocalPart(upper, (4, 6), start=(0, 0)), LocalPart(lower, (4, 6), start=(2, 0))]
    source = {"w": parts}
    with Publisher(store, source, dtype={"*": dtype}) as publisher:
        publisher.publish_patch(0).result()
        # Another dtype now, in which its numbers are the same.
        source["w"] = [LocalPart(upper.float(), (4, 6), start=(0, 0)), parts[1]]
        assert publisher.publish_patch(1).result().num_bytes == 0
    assert_same_bits(newest(store), {"w": current.to(getattr(torch, dtype))})


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([LocalPart(W, (4, 6), start=(0, 0)), LocalPart(W[:1], (4, 6), start=(0, 0))], "is all of it"),
        ([LocalPart(W, (8, 6), start=(0, 0)), LocalPart(W, (9, 6), start=(4, 0))], "different shapes"),
        ([LocalPart(W[:1], (4, 6), start=(0, 0)), LocalPart(W[:1], (4, 6), start=(2, 0))], "12 of the 24"),
        ([LocalPart(W[:1], (4, 6), start=(0, 0)), W], "is not a tensor but list"),
        (
            [LocalPart(W[:2], (4, 6), start=(0, 0)), LocalPart(W[2:].long(), (4, 6), start=(2, 0))],
            "parts of tensor 'w' would be served as .*BF16.* and as .*I64.*; give them one dtype",
        ),
        ([], "is not a tensor but list"),
    ],
)
def test_a_list_that_is_no_tensor_is_refused(store: MemoryStore, parts: object, says: str) -> None:
    assert_refused(store, {"w": parts, "other": W}, says)


def test_parts_of_one_process_are_joined_also_when_they_come_in_a_stream(store: MemoryStore) -> None:
    weights = W.clone()
    other = torch.ones(3)

    def parts():
        yield "w", LocalPart(weights.view(-1)[:8], (4, 6), offset=0)
        yield "other", other
        yield "w", LocalPart(weights.view(-1)[8:], (4, 6), offset=8)

    with Publisher(store, parts) as publisher:
        publisher.publish_patch(0).result()
        weights[1] += 1
        other[2] = 5
        delta = publisher.publish_patch(1).result().delta
    assert delta is not None and delta.num_changed == 7


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([LocalPart(W[:2], (4, 6), start=(0, 0))], r"12 of the 24 elements of 'w'.*pass a group="),
        ([LocalPart(W, (4, 6), start=(1, 0))], "the indices 1 to 5 of dimension 0.*ends at 4"),
        ([LocalPart(W, (4, 6), start=(0,))], "all three need as many dimensions"),
        ([LocalPart(W, (4, 6))], "either start=.* or offset="),
        ([LocalPart(W, (4, 6), start=(0, 0), offset=0)], "either start=.* or offset="),
        ([LocalPart(W.flatten(), (4, 5), offset=0)], r"elements 0 to 24.* has 20; cut off"),
        ([LocalPart(W.T, (6, 4), offset=0)], "follow each other in memory.*pass boxes"),
        ([LocalPart(W, (4, -6), start=(0, 0))], "impossible shape"),
        (
            [LocalPart(W[:3], (4, 6), start=(0, 0)), LocalPart(W[2:], (4, 6), start=(2, 0))],
            r"'w' are given twice: as \[0:3, 0:6\] and as \[2:4, 0:6\]",
        ),
        (
            [LocalPart(W[:2], (4, 6), start=(0, 0)), LocalPart(W[:2], (4, 6), start=(0, 0))],
            r"\(2, 6\) from \(0, 0\) on of .*'w'.* twice",
        ),
        ([LocalPart(W, (4, 6), start=(0, 0)), LocalPart(W, (4, 6), start=(0, 0))], "'w' twice"),
        ([LocalPart(W[:2].to_sparse(), (4, 6), start=(0, 0))], "to_dense"),
        ([LocalPart([1.0], (1,), offset=0)], "not a tensor but list"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_part_is_refused(store: MemoryStore, parts: list[LocalPart], says: str) -> None:
    assert_refused(store, lambda: (("w", part) for part in parts), f"(?s){says}")


def test_parts_must_stay_where_they_were(store: MemoryStore) -> None:
    cut = [8]

    def parts():
        flat = W.view(-1)
        yield "w", LocalPart(flat[: cut[0]], (4, 6), offset=0)
        yield "w", LocalPart(flat[cut[0] :], (4, 6), offset=cut[0])

    with Publisher(store, parts) as publisher:
        publisher.publish_patch(0).result()
        cut[0] = 12
        with pytest.raises(SchemaMismatch, match="open a publisher anew"):
            publisher.publish_patch(1)
        cut[0] = 8
        assert publisher.publish_patch(1).result().version == 1
