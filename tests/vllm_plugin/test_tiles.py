"""Coded deltas in slices: what each rank of a server decodes from the part of a tensor that it holds."""

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from mapped import mapped, served

from patchstore import Publisher
from patchstore.bucket import history
from patchstore.bucket.records import Box, Part, Schema, TensorSpec, view_of
from patchstore.codec.context import Cuts, tiling
from patchstore.read.deltas import open_deltas
from patchstore.read.host_cache import HostCache
from patchstore.stores.memory import MemoryStore
from patchstore.tensors.bits import bits
from tests.support import sharded
from tests.support.interpreted import DEVICE, kernels
from vllm_plugin.live.weights import LiveWeights
from vllm_plugin.map.mapping import are_cut, boxes, numbers

pytestmark = pytest.mark.timeout(1200)

SHAPES = {"column": (64, 48), "experts": (2, 32, 64), "fused": (96, 32), "odd": (50, 48), "row": (48, 64)}


class Slices(torch.nn.Module):
    """Holds its part of each tensor: rows, columns, of a fused pair, and rows that cut through tiles."""

    def __init__(self, rank: int, num_ranks: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.rank, self.num_ranks = rank, num_ranks
        for name, shape in SHAPES.items():
            part = self.part(name, torch.zeros(shape, dtype=dtype, device=DEVICE))
            setattr(self, name, torch.nn.Parameter(torch.zeros_like(part), requires_grad=False))

    def part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "fused":
            return torch.cat([each.tensor_split(self.num_ranks)[self.rank] for each in tensor.chunk(2)])
        dim = {"row": 1, "experts": 1}.get(name, 0)
        return tensor.tensor_split(self.num_ranks, dim)[self.rank].contiguous()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "fused":
                halves = getattr(self, name).data.chunk(2)
                for half, each in zip(halves, tensor.chunk(2), strict=True):
                    half.copy_(each.tensor_split(self.num_ranks)[self.rank])
            else:
                dim = {"row": 1, "experts": 1}.get(name, 0)
                getattr(self, name).data.copy_(tensor.tensor_split(self.num_ranks, dim)[self.rank])


def live_weights(kind: type[LiveWeights], num_ranks: int, dtype: torch.dtype, schema: Schema):
    """Each rank's module and live weights."""
    modules = [Slices(rank, num_ranks, dtype) for rank in range(num_ranks)]
    live = mapped(schema, *(served(each) for each in modules), kinds=[kind])
    return list(zip(modules, live, strict=True))


def assert_holds(module: Slices, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        held, expected = getattr(module, name), module.part(name, tensor.to(DEVICE))
        assert torch.equal(bits(held), bits(expected)), name


PLAIN = [
    (1, torch.bfloat16),
    (2, torch.bfloat16),
    (4, torch.float8_e4m3fn),
    (8, torch.float16),
    (16, torch.bfloat16),
]


@pytest.mark.parametrize(
    ("kind", "num_ranks", "dtype", "num_versions", "is_partial"),
    [
        *(("plain", *each, 1, True) for each in PLAIN),
        *(("plain", *each, 3, False) for each in PLAIN),
        # Triton's interpreter takes a minute for each of these versions and ranks.
        pytest.param("kernels", 4, torch.float8_e4m3fn, 1, True, marks=pytest.mark.exhaustive),
        pytest.param("kernels", 2, torch.bfloat16, 2, False, marks=pytest.mark.exhaustive),
    ],
)
def test_every_rank_decodes_its_own_part(
    tmp_path, monkeypatch, kind, num_ranks, dtype, num_versions, is_partial
):
    if kind == "kernels":
        # Two versions state more than that of some tensors, and less of others.
        monkeypatch.setattr(kernels("vllm_plugin.gpu.merge"), "MERGED", 1100)
    random = torch.Generator().manual_seed(1)
    model = {n: (0.02 * torch.randn(s, generator=random)).to(dtype) for n, s in SHAPES.items()}
    started = {name: tensor.clone() for name, tensor in model.items()}
    store = MemoryStore()
    with Publisher(store, model, dtype=None, encoding="context", anchor_every=100) as publisher:
        publisher.publish_patch(0).result()
        for step in range(num_versions):
            for tensor in model.values():
                # Not everywhere: some ranks have nothing to decode of a version.
                chosen = (torch.rand(tensor.shape, generator=random) < 0.1) & (
                    torch.arange(tensor.shape[-1]) < 30
                )
                values = tensor[chosen].float() * 1.01 + 1e-3
                bits(tensor)[chosen.view(-1)] = bits(values.to(dtype))
            publisher.publish_patch(step + 1).result()
    header = history.read_header(store)
    which = LiveWeights if kind == "plain" else kernels("vllm_plugin.gpu.weights").DeviceWeights
    manifests = tuple(history.read_manifest(store, version + 1) for version in range(num_versions))
    for module, live in live_weights(which, num_ranks, dtype, header.schema):
        live.models.load(header.schema, started)
        # Nothing else would tell the parent's bits of a tile that is held in part.
        base = {name: started[name] for name in live.cut}
        needs = live.needs if is_partial else None
        with open_deltas(store, manifests, header.schema, None, HostCache(tmp_path), needs) as deltas:
            change = live.stage_deltas(deltas, sorted(deltas.names), base, keep_old=True)
        live.scatter(change)
        assert_holds(module, model)
        assert ("odd" in live.cut) == (num_ranks > 1)
        assert live.cut <= {"odd", "fused"}
        live.gather_back(change)
        assert_holds(module, started)


def test_many_versions_of_few_changes_are_merged_at_once(tmp_path, monkeypatch):
    """A tensor is copied once for all versions, so its size counts once where memory is bounded."""
    num_elements = sum(np.prod(shape) for shape in SHAPES.values())
    # What is stated is little beside the copies: 64 bytes a change, and two an element.
    monkeypatch.setattr(kernels("vllm_plugin.gpu.merge"), "MERGED", 2 * num_elements // 32)
    model = {name: torch.full(shape, 0.02, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    started = {name: tensor.clone() for name, tensor in model.items()}
    store = MemoryStore()
    with Publisher(store, model, dtype=None, encoding="context", anchor_every=100) as publisher:
        publisher.publish_patch(0).result()
        for step in range(4):
            for tensor in model.values():
                bits(tensor)[step] += 1
            publisher.publish_patch(step + 1).result()
    header = history.read_header(store)
    manifests = tuple(history.read_manifest(store, version + 1) for version in range(4))
    [(module, live)] = live_weights(
        kernels("vllm_plugin.gpu.weights").DeviceWeights, 1, torch.bfloat16, header.schema
    )
    live.models.load(header.schema, started)
    with open_deltas(store, manifests, header.schema, None, HostCache(tmp_path)) as deltas:
        change = live.stage_deltas(deltas, sorted(deltas.names), {}, keep_old=True)

    assert len(change.parts) == 1
    live.scatter(change)
    assert_holds(module, model)


def thirds(spec: TensorSpec, dim: int) -> list[Part]:
    """Three uneven parts."""
    side = spec.shape[dim]
    return sharded.cut(spec, dim, [0, side // 5, side // 5 + side // 3, side])


@pytest.mark.parametrize(
    ("kind", "num_ranks", "encoding", "num_versions", "is_partial"),
    [
        *(("plain", *each, 1, True) for each in ((1, "context"), (2, "context"), (4, "gap"), (8, "context"))),
        *(("plain", *each, 3, False) for each in ((1, "gap"), (2, "context"), (2, "raw"), (4, "context"))),
        ("kernels", 2, "gap", 1, False),
        # Triton's interpreter takes minutes for these.
        pytest.param("kernels", 4, "context", 1, True, marks=pytest.mark.exhaustive),
        pytest.param("kernels", 2, "context", 2, False, marks=pytest.mark.exhaustive),
        pytest.param("kernels", 2, "gap", 2, False, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("dim", [0, 1])
def test_every_rank_applies_what_several_processes_published(
    tmp_path, dim, kind, num_ranks, encoding, num_versions, is_partial
):
    random = torch.Generator().manual_seed(1)
    started = {n: (0.02 * torch.randn(s, generator=random)).to(torch.bfloat16) for n, s in SHAPES.items()}
    store = MemoryStore()
    with Publisher(store, started, dtype=None, encoding="context", anchor_every=100) as publisher:
        publisher.publish_patch(0).result()
    header = history.read_header(store)
    specs = header.schema.by_name()
    ranks = [[thirds(spec, dim)[rank] for spec in specs.values()] for rank in range(3)]
    model = started
    for _ in range(num_versions):
        before, model = model, {name: tensor.clone() for name, tensor in model.items()}
        for tensor in model.values():
            chosen = torch.rand(tensor.numel(), generator=random) < 0.02
            bits(tensor)[chosen] += 1
        sharded.publish(store, ranks, before, model, encoding)
    which = LiveWeights if kind == "plain" else kernels("vllm_plugin.gpu.weights").DeviceWeights
    manifests = tuple(history.read_manifest(store, version + 1) for version in range(num_versions))
    for module, live in live_weights(which, num_ranks, torch.bfloat16, header.schema):
        live.models.load(header.schema, started)
        needs = live.needs if is_partial else None
        with open_deltas(store, manifests, header.schema, None, HostCache(tmp_path), needs) as deltas:
            # Rows of a fused pair are in twice as many slices as there are ranks.
            assert live.cut_by(deltas) <= ({"fused"} if num_ranks == 8 else set())
            live.cut |= live.cut_by(deltas)
        base = {name: started[name] for name in live.cut}
        with open_deltas(store, manifests, header.schema, None, HostCache(tmp_path), needs) as deltas:
            assert not live.cut_by(deltas)
            change = live.stage_deltas(deltas, sorted(deltas.names), base, keep_old=True)
        live.scatter(change)
        assert_holds(module, model)


def test_a_rank_notices_tiles_of_small_parts_that_it_holds_in_part(tmp_path):
    started = {"row": (0.02 * torch.randn(16, 4096)).to(torch.bfloat16)}
    model = {name: tensor.clone() for name, tensor in started.items()}
    bits(model["row"])[::4000] += 1
    store = MemoryStore()
    with Publisher(store, started, dtype=None, encoding="context") as publisher:
        publisher.publish_patch(0).result()
    header = history.read_header(store)
    (spec,) = header.schema.tensors
    sharded.publish(
        store, [sharded.chunks(spec, 0, 2)[:1], sharded.chunks(spec, 0, 2)[1:]], started, model, "context"
    )
    manifests = (history.read_manifest(store, 1),)
    for num_ranks, is_cut in ((8, False), (16, True)):
        module = torch.nn.Module()
        module.row = torch.nn.Parameter(torch.zeros(16, 4096 // num_ranks).bfloat16(), requires_grad=False)

        def load(model, weights, num_ranks=num_ranks) -> None:
            for _, tensor in weights:
                model.row.data.copy_(tensor.chunk(num_ranks, 1)[1])

        (live,) = mapped(header.schema, served(module, load=load))
        live.cut = frozenset()  # of which the other ranks' parts are not here
        with open_deltas(store, manifests, header.schema, None, HostCache(tmp_path)) as deltas:
            assert live.cut_by(deltas) == ({"row"} if is_cut else set())


def test_a_rank_holds_whole_tiles_in_boxes_of_its_memory():
    schema = Schema(tensors=(TensorSpec(name="row", dtype="BF16", shape=(48, 64)),))
    model = torch.nn.Module()
    model.row = torch.nn.Parameter(torch.zeros(48, 16, dtype=torch.bfloat16), requires_grad=False)

    def load(model, weights) -> None:
        for _, tensor in weights:
            model.row.data.copy_(tensor[:, 32:48])

    (live,) = mapped(schema, served(model, load=load))
    (box,) = boxes(schema.tensors[0], live.map.regions["row"])
    assert box.elements == Box(0, 1, 0, 48, 32, 16)
    assert (box.origin, box.strides[1:]) == (-32, (16, 1))
    tiles = tiling((48, 64))
    levels, rows, cols, _, _ = tiles.places(numbers(tiles, [box]))
    assert set(cols.tolist()) == {32, 36, 40, 44}
    assert np.unique(rows).tolist() == list(range(0, 48, 3))
    assert levels.max() == 0
    assert not are_cut(tiles, [box])
    # Tiles of 16 columns, from column 24 on: the first of the box's is cut by the part, and not by the box.
    part = tiling((48, 64), Box(0, 1, 5, 20, 24, 40), (1, 4))
    assert numbers(part, [box]).tolist() == [1]
    assert not are_cut(part, [box])
    assert are_cut(tiling((48, 64), Box(0, 1, 5, 20, 24, 40), (1, 2)), [box])
    assert not are_cut(tiling((48, 64), Box(0, 1, 5, 20, 0, 32), (1, 1)), [box])


def test_tiles_within_boxes_are_found_for_all_parts_at_once() -> None:
    rng = np.random.default_rng(5)
    shapes = [(512, 512), (4096, 48), (3, 64, 40), (7,), (1,), (300, 5000), (2, 5, 70_000), (33, 65_600)]

    def box_of(shape: tuple[int, ...]) -> Box:
        found = []
        for side in view_of(shape):
            first = int(rng.integers(side))
            found += [first, int(rng.integers(1, side - first + 1))]
        return Box(*found)

    cuts, held = [], []
    for number in range(2000):
        shape = shapes[number % len(shapes)]
        cuts.append(tiling(shape, None if number % 3 == 0 else box_of(shape)))
        held.append(box_of(shape))
    rows = np.array([(b.level, b.levels, b.row, b.rows, b.col, b.cols) for b in held])
    geometry = kernels("patchstore.kernels.context_tables").geometry(Cuts.of(cuts))
    found, is_held = kernels("vllm_plugin.gpu.decode").tiles_within(geometry, rows)
    expected = [cut.ranges_within(box) for cut, box in zip(cuts, held, strict=True)]
    assert is_held.tolist() == [each is not None for each in expected]
    assert found[is_held].tolist() == [[*each] for each in expected if each is not None]
    assert 100 < is_held.sum() < 1900
