"""Kernels and plain torch do the same to the same weights, on a GPU or in Triton's interpreter."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mapped import mapped, served

from patchstore.bucket.records import Schema, TensorSpec
from patchstore.codec import encoding
from patchstore.errors import CorruptObject, LoadFailed, StateMismatch, UsageError
from patchstore.read.deltas import Deltas
from patchstore.tensors.bits import TORCH_DTYPES, TensorPatch, bits, index_dtype
from tests.support.interpreted import DEVICE, kernels
from tests.support.stated import content_of, with_bridges
from vllm_plugin.live import copies
from vllm_plugin.live.copies import Batch
from vllm_plugin.live.weights import LiveWeights, StagedWrite

pytestmark = pytest.mark.timeout(1200)

SPECS = {
    "blocks": ("BF16", (6, 5, 8)),
    "bytes": ("F8_E4M3", (1300,)),
    "codes": ("F4", (40, 33)),
    "cols": ("BF16", (37, 64)),
    "empty": ("BF16", (0, 4)),
    "fused": ("BF16", (4097,)),
    "long": ("BF16", (70_000,)),
    "numbers": ("I64", (70,)),
    "scalar": ("BF16", ()),
    "scales": ("F8_E8M0", (40, 3)),
    "single": ("F32", (600,)),
    "transposed": ("BF16", (40, 50)),
    "twice": ("F16", (530,)),
    "widened": ("BF16", (513, 3)),
}
"""Every width, fewer and more elements than a program takes, and `fused` at an odd address."""
SCHEMA = Schema(
    tensors=tuple(TensorSpec(name=name, dtype=dtype, shape=shape) for name, (dtype, shape) in SPECS.items()),
    tied={},
)


class Model(torch.nn.Module):
    """Weights that are slices, transpositions and copies of a checkpoint's."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {name: shape for name, (_, shape) in SPECS.items()} | {
            "blocks": (5, 6, 8),
            "cols": (37, 20),
            "fused": (4104,),
            "transposed": (50, 40),
        }
        for name, shape in shapes.items():
            dtype = TORCH_DTYPES[SPECS[name][0]]
            self._add(name, torch.zeros(shape, dtype=torch.float32 if name == "widened" else dtype))
        self._add("again", torch.zeros(530, dtype=torch.float16))

    def _add(self, name: str, value: torch.Tensor) -> None:
        self.register_parameter(name, torch.nn.Parameter(value.to(DEVICE), requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            target = getattr(self, name).data
            if name == "blocks":
                target.copy_(tensor.permute(1, 0, 2))
            elif name == "cols":
                target.copy_(tensor[:, 17:57:2])
            elif name == "fused":
                target[:7].fill_(0)
                target[7:].copy_(tensor)
            elif name == "transposed":
                target.copy_(tensor.t())
            else:
                target.copy_(tensor)
            if name == "twice":
                self.again.data.copy_(tensor)

    def state(self) -> dict[str, torch.Tensor]:
        return {name: bits(each).clone() for name, each in self.named_parameters()}


class Stored(Deltas):
    """Patches of versions as a store has them, in `gap`."""

    def __init__(self, *versions: Iterable[TensorPatch]) -> None:
        contents = [content_of(encoding("gap").index, SCHEMA, each) for each in versions]
        super().__init__([(manifest(i), each) for i, each in enumerate(contents)], SCHEMA)


def manifest(version: int) -> Any:
    return SimpleNamespace(version=version, delta=SimpleNamespace(encoding="gap"))


def random_bits(spec: TensorSpec, num: int) -> torch.Tensor:
    dtype = TORCH_DTYPES[spec.dtype]
    return torch.randint(0, 256, (num * dtype.itemsize,), dtype=torch.uint8).view(dtype)


def patches(share: float) -> list[TensorPatch]:
    """New bits for a share of every tensor's elements, NaN among them."""
    found = []
    for spec in SCHEMA.tensors:
        at = (torch.rand(spec.num_elements) < share).nonzero()[:, 0]
        values = random_bits(spec, len(at))
        found.append(
            TensorPatch(name=spec.name, indices=at.to(index_dtype(spec.num_elements)), values=values)
        )
    return found


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def plain(model: Model) -> LiveWeights:
    return followed(LiveWeights, model)


@pytest.fixture
def fast(model: Model, plain: LiveWeights) -> LiveWeights:
    return followed(kernels("vllm_plugin.gpu.weights").DeviceWeights, model)


def followed(kind: type[LiveWeights], model: Model) -> LiveWeights:
    (live,) = mapped(SCHEMA, served(model), kinds=[kind])
    live.models.load(
        SCHEMA, {each.name: random_bits(each, each.num_elements).view(each.shape) for each in SCHEMA.tensors}
    )
    assert set(live.map.regions) == SPECS.keys() - {"empty"}
    return live


def sum_staged(change: StagedWrite) -> list[list[int]]:
    """Slices and their sums, in an order of their own."""
    growth = change.staged_sums
    rows = zip(growth.slices.tolist(), growth.before.tolist(), growth.after.tolist(), strict=True)
    return sorted([number, *before, *after] for number, before, after in rows)


def digests(live: LiveWeights, names: list[str]) -> list[list[int]]:
    """Slices and their sums, in an order of their own."""
    told = live.slice_sums(names)
    return sorted([number, *sums] for number, sums in zip(told.slices, told.sums.tolist(), strict=True))


def growth(change: StagedWrite) -> dict[int, list[int]]:
    """By how much the sums of each slice grow. A write may leave out elements that it would not change."""
    return {
        number: [(after - before) % 2**64 for before, after in zip(sums[:2], sums[2:], strict=True)]
        for number, *sums in sum_staged(change)
    }


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_all_that_is_served_has_the_digests_of_plain_torch(plain, fast, model):
    names = sorted(plain.map.regions)
    assert digests(fast, names) == digests(plain, names)
    assert digests(fast, names[::3]) == digests(plain, names[::3])
    # What a wider element has beside the checkpoint's bits belongs to no checkpoint.
    bits(model.widened)[1000] |= 1
    assert digests(fast, names) == digests(plain, names)
    assert digests(fast, ["widened"]) == digests(plain, ["widened"])


def test_a_part_of_the_schema_is_not_taken_for_all_that_is_served(fast):
    every = digests(fast, sorted(fast.map.regions))
    # As many as are served, one of which is not.
    some = sorted({*fast.map.regions, "empty"} - {"bytes"})
    numbers = [number for number, (name, _) in enumerate(fast.map.slices) if name != "bytes"]
    assert digests(fast, some) == [each for each in every if each[0] in numbers] != every
    assert digests(fast, sorted(fast.map.regions)) == every


def test_a_parameter_that_is_wrapped_anew_has_not_moved(fast, model):
    model.long = torch.nn.Parameter(model.long.data, requires_grad=False)
    assert (fast.moved(), fast.has_moved()) == ([], False)
    model.long = torch.nn.Parameter(model.long.data.clone(), requires_grad=False)
    assert (fast.moved(), fast.has_moved()) == (["0.long"], True)


def test_parameters_of_a_module_that_was_replaced_have_moved() -> None:
    schema = Schema(tensors=(TensorSpec(name="inner.weight", dtype="F32", shape=(3, 2)),))
    model = torch.nn.ModuleDict({"inner": torch.nn.Linear(2, 3, bias=False)}).requires_grad_(False)

    def load(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        model["inner"].weight.copy_(dict(weights)["inner.weight"])

    (live,) = mapped(schema, served(model, load=load))
    assert live.moved() == []
    model["inner"] = torch.nn.Linear(2, 3, bias=False)
    assert live.moved() == ["0.inner.weight"]


def test_a_parameter_that_is_gone_has_moved(fast, model):
    model.long = None
    assert (fast.moved(), fast.has_moved()) == (["0.long"], True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("is_stored", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.03, 0.6, 1.0])
def test_a_change_is_proved_written_and_undone_as_by_plain_torch(plain, fast, model, share, is_stored):
    # A file lists no tensor of which it states nothing.
    found = [patch for patch in patches(share) if len(patch.indices) or not is_stored]
    before = model.state()
    expected = plain.stage(found, keep_old=True)
    names = sorted(plain.map.regions)
    staged = (
        fast.stage_deltas(Stored(found), names, {}, keep_old=True)
        if is_stored
        else fast.stage(found, keep_old=True)
    )
    assert equal(model.state(), before)
    assert sum_staged(staged) == sum_staged(expected)

    plain.scatter(expected)
    after = model.state()
    plain.gather_back(expected)
    fast.scatter(staged)

    assert equal(model.state(), after)
    assert equal(after, before) is (share == 0.0)
    fast.gather_back(staged)
    assert equal(model.state(), before)


@pytest.mark.sample(1)
@pytest.mark.parametrize("at_a_time", [2000, 1 << 25])
def test_of_several_versions_the_last_value_of_an_element_counts(plain, fast, model, monkeypatch, at_a_time):
    monkeypatch.setattr(kernels("vllm_plugin.gpu.merge"), "MERGED", at_a_time)
    before, names = model.state(), sorted(plain.map.regions)
    versions = [patches(share) for share in (0.3, 0.0, 0.5)]
    # Not every version states every tensor.
    versions[2] = [each for each in versions[2] if each.name not in {"cols", "single"}]
    deltas = Stored(*versions)
    expected = plain.stage_deltas(deltas, names, {}, keep_old=True)
    staged = fast.stage_deltas(deltas, names, {}, keep_old=True)
    assert growth(staged) == growth(expected)
    plain.scatter(expected)
    after = model.state()
    plain.gather_back(expected)
    fast.scatter(staged)
    assert equal(model.state(), after)
    fast.gather_back(staged)
    assert equal(model.state(), before)


@pytest.mark.parametrize("at_a_time", [20, 2000])
def test_versions_after_an_anchor_are_merged_with_it(plain, fast, model, monkeypatch, at_a_time):
    monkeypatch.setattr(kernels("vllm_plugin.gpu.merge"), "MERGED", at_a_time)
    monkeypatch.setattr(kernels("vllm_plugin.gpu.merge"), "COMPARED", 900)
    before, names, anchor = model.state(), sorted(plain.map.regions), in_one_file()
    deltas = Stored(patches(0.3), patches(0.5))
    expected = plain.stage_deltas(deltas, names, anchor, keep_old=False)
    staged = fast.stage_deltas(deltas, names, anchor, keep_old=False)
    assert equal(model.state(), before)
    plain.load(anchor)
    plain.scatter(expected)
    after = model.state()
    plain.load(anchor)
    fast.scatter(staged)
    assert equal(model.state(), after)


def test_an_anchor_without_versions_after_it_changes_nothing_more(fast):
    staged = fast.stage_deltas(Stored(), [], in_one_file(), keep_old=False)
    assert (staged.parts, len(staged.staged_sums.slices)) == ([], 0)


def test_a_bridge_states_an_unchanged_element(fast, plain, model):
    at = with_bridges(encoding("gap").index, torch.tensor([69_990], dtype=torch.int32))
    values = model.long.data.cpu()[at.long()].clone()
    bits(values)[-1] ^= 1
    patch = TensorPatch(name="long", indices=at, values=values)
    staged = fast.stage_deltas(Stored([patch]), ["long"], {}, keep_old=True)
    assert sum_staged(staged) == sum_staged(plain.stage([patch], keep_old=True))
    fast.scatter(staged)
    assert len(at) == 2
    assert torch.equal(bits(model.long.cpu())[at.long()], bits(values))


def test_gaps_beyond_a_tensor_are_refused_before_anything_is_written(fast, model):
    before = model.state()
    spec = next(each for each in SCHEMA.tensors if each.name == "fused")
    patch = TensorPatch(
        name="fused", indices=torch.arange(4090, 4098, dtype=torch.int32), values=random_bits(spec, 8)
    )
    with pytest.raises(CorruptObject, match=r"a/key: gaps of 'fused' reach position 4097, beyond its 4097"):
        fast.stage_deltas(Stored([patch]), ["fused"], {}, keep_old=True)
    # Nor would the kernels have followed them.
    fast.scatter(fast.stage([patch], keep_old=False))
    assert torch.equal(bits(model.fused)[:4097], before["fused"][:4097])
    assert torch.equal(bits(model.again), before["again"])


def test_to_write_and_to_undo_need_no_more_memory_of_the_device(fast, model, monkeypatch):
    staged, before = fast.stage(patches(0.5), keep_old=True), model.state()

    def full(*args, **named):
        raise torch.OutOfMemoryError("made to fail")

    for name in ("full", "empty", "zeros", "cat", "stack", "tensor"):
        monkeypatch.setattr(torch, name, full)
    fast.scatter(staged)
    is_written = not equal(model.state(), before)
    fast.gather_back(staged)
    monkeypatch.undo()
    assert is_written
    assert equal(model.state(), before)


def test_what_something_else_wrote_is_noticed_and_put_back(fast, model):
    staged = fast.stage(patches(0.5), keep_old=True)
    bits(model.transposed)[:] ^= 1
    before = model.state()
    with pytest.raises(StateMismatch, match="something wrote to 'transposed'"):
        fast.scatter(staged)
    fast.gather_back(staged)
    assert equal(model.state(), before)


def test_an_undo_that_does_not_hold_is_noticed(fast, monkeypatch):
    staged = fast.stage(patches(0.5), keep_old=True)
    fast.scatter(staged)

    def forgetful(change: StagedWrite) -> None:
        """Writes nothing."""

    monkeypatch.setattr(fast, "scatter", forgetful)
    with pytest.raises(LoadFailed, match="did not keep"):
        fast.gather_back(staged)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU, and 13 GB of its memory")
def test_elements_past_two_to_the_31_are_reached():
    num = 2**31 + 70_000
    schema = Schema(tensors=(TensorSpec(name="huge", dtype="BF16", shape=(num // 8, 8)),), tied={})

    class Huge(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            random = torch.randint(-(2**62), 2**62, (num // 4,), device=DEVICE).view(torch.bfloat16)
            self.huge = torch.nn.Parameter(random.view(num // 8, 8), requires_grad=False)

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for _, tensor in weights:
                self.huge.data.copy_(tensor)

    model = Huge()
    kinds = (LiveWeights, kernels("vllm_plugin.gpu.weights").DeviceWeights)
    plain, fast = mapped(schema, served(model), kinds=kinds)
    assert digests(fast, ["huge"]) == digests(plain, ["huge"])
    at = torch.tensor([0, 5, 2**31 - 1, 2**31, 2**31 + 1, num - 1], device=DEVICE)
    before = bits(model.huge)[at].clone()
    patch = TensorPatch(name="huge", indices=at, values=(before ^ 1).view(torch.bfloat16))
    expected, staged = plain.stage([patch], keep_old=True), fast.stage([patch], keep_old=True)
    assert sum_staged(staged) == sum_staged(expected)
    fast.scatter(staged)
    assert torch.equal(bits(model.huge)[at], before ^ 1)
    fast.gather_back(staged)
    assert torch.equal(bits(model.huge)[at], before)


@pytest.mark.parametrize("limit", [0, 30_000, 1 << 20])
def test_pieces_are_written_wherever_they_wait(fast, model, limit, monkeypatch):
    monkeypatch.setattr(kernels("vllm_plugin.gpu.weights"), "BROUGHT_BYTES", limit)
    checkpoint = in_one_file()
    fast.models.load(SCHEMA, checkpoint)
    expected = model.state()
    assert fast.serves(checkpoint)
    fast.models.load(SCHEMA, {name: torch.zeros_like(each) for name, each in checkpoint.items()})
    cleared = model.state()

    brought = fast.bring(fast.pieces(checkpoint))

    assert equal(model.state(), cleared) and not equal(cleared, expected)
    batches = [each for each in brought if isinstance(each, Batch)]
    first, end = (checkpoint[name].data_ptr() for name in (min(SPECS), max(SPECS)))
    near = [not first <= each.given.data_ptr() <= end for each in batches]
    assert (any(near), all(near)) == (limit > 0, limit == 1 << 20)
    fast.write(brought)
    assert equal(model.state(), expected)
    assert fast.serves(checkpoint)


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("room", [0, 3000, 1 << 20])
def test_a_map_is_proved_and_the_weights_are_as_before(fast, model, room, is_kept, monkeypatch):
    fast.models.load(SCHEMA, in_one_file())
    expected, load_weights, handed = model.state(), model.load_weights, dict[str, torch.Tensor]()

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in list(weights) if is_kept else weights:
            load_weights([(name, tensor)])
            handed[name] = bits(tensor).cpu().clone()
            bits(tensor).zero_()

    model.load_weights = load
    monkeypatch.setattr(type(fast), "spare_bytes", lambda _: room)
    fast.prove()
    assert list(handed) == sorted(SPECS.keys() - {"empty"})
    assert equal(model.state(), expected)
    # Numbers of all sizes, no two tensors alike.
    assert all(len(each.unique()) > 40 for name, each in handed.items() if name not in {"empty", "scalar"})
    assert len({each[:60].numpy().tobytes() for each in handed.values()}) == len(handed)


@pytest.mark.parametrize("name", sorted(SPECS.keys() - {"empty"}))
def test_one_element_that_a_loader_puts_elsewhere_is_found(fast, model, name):
    fast.models.load(SCHEMA, in_one_file())
    expected, load_weights = model.state(), model.load_weights

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        load_weights(weights)
        bits(getattr(model, name).data).view(-1)[-1] ^= 1

    model.load_weights = load
    with pytest.raises(UsageError, match=f"puts 1 tensors elsewhere than .* such as '{name}'"):
        fast.prove()
    assert equal(model.state(), expected)


def test_what_is_calculated_is_handed_to_a_loader_on_the_cpu(fast, model, monkeypatch):
    monkeypatch.setattr(type(fast), "spare_bytes", lambda _: 1 << 20)
    fast.map.computed = frozenset({"long"})
    load_weights, devices = model.load_weights, dict[str, str]()

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            devices[name] = tensor.device.type
            load_weights([(name, tensor)])

    model.load_weights = load
    fast.prove()
    assert {name for name, device in devices.items() if device != DEVICE.type} <= {"long"}
    assert devices["long"] == "cpu"


def test_neighbours_in_a_file_are_one_batch(fast, monkeypatch):
    monkeypatch.setattr(copies, "BLOCK_BYTES", 20_000)
    checkpoint = in_one_file()
    pieces = fast.pieces(checkpoint)
    joined, others = copies.batched(pieces)

    assert max(len(each.parts) for each in joined) > 1
    assert all(each.given.numel() <= max(20_000, each.pieces[0].given.nbytes) for each in joined)
    assert sum(len(each.pieces) for each in joined) + len(others) == sum(p.given.numel() > 0 for p in pieces)
    # Slices, transpositions and wider numbers.
    assert {each.spec.name for each in others} == {"blocks", "cols", "transposed", "widened"}


@pytest.mark.parametrize("name", sorted(SPECS.keys() - {"empty"}))
def test_a_difference_in_one_element_is_found(fast, name):
    checkpoint = in_one_file()
    fast.models.load(SCHEMA, checkpoint)
    assert fast.serves(checkpoint)
    # The columns that the model takes of `cols` end with 55.
    bits(checkpoint[name]).view(-1)[55 if name == "cols" else -1] ^= 1
    assert not fast.serves(checkpoint)


def in_one_file() -> dict[str, torch.Tensor]:
    """Random tensors of the schema, one behind the other in memory as in a file."""
    specs = sorted(SCHEMA.tensors, key=lambda each: each.name)
    memory = torch.randint(0, 256, (sum(-(-each.num_bytes // 8) * 8 for each in specs),), dtype=torch.uint8)
    found, at = {}, 0
    for each in specs:
        part = memory[at : at + each.num_bytes]
        found[each.name] = part.view(TORCH_DTYPES[each.dtype]).view(each.shape)
        at += -(-each.num_bytes // 8) * 8
    return found
