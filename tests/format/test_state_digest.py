"""The state digest against plain integers, and against the changes that it must not miss."""

import struct
import subprocess
import sys

import pytest
import torch

from patchstore.bucket import digests
from patchstore.bucket.records import DTYPE_BYTES, Manifest, Payload, Schema, StateDigest, TensorSpec, Writer
from patchstore.bucket.state_sums import Sums, pack_sums, state_total
from patchstore.errors import SchemaMismatch, StateMismatch
from patchstore.stores.memory import MemoryStore
from patchstore.tensors import elements, state_digest
from patchstore.tensors.bits import TORCH_DTYPES, TensorPatch, bits, raw_bytes
from patchstore.tensors.columns import in_order
from tests.format import independent_reader
from tests.support.stated import group_of
from tests.support.weights import random_bits

CHUNK = elements.CHUNK
ONE_PER_WIDTH = ("U8", "BF16", "F32", "I64")


def plainly(tensor: torch.Tensor) -> str:
    return independent_reader.sums(bytes(raw_bytes(tensor)), tensor.element_size())


def at(tensor: torch.Tensor, positions: torch.Tensor) -> state_digest.Sums:
    return state_digest.of_elements(positions, bits(tensor)[positions].view(tensor.dtype))


SIZES = (0, 1, 2, 5, 63, 300, 1000, CHUNK - 7, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1)
EXTREMES = (0x00, 0x01, 0x7F, 0x80, 0xFF)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_every_dtype_has_the_sums_of_plain_integers(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each tensor alone, of many at once, and of all elements of one, in chunks or not."""
    monkeypatch.setattr(elements, "NUMPY_CHUNK", CHUNK)
    kind, width = TORCH_DTYPES[dtype], DTYPE_BYTES[dtype]
    tensors = {f"{size} elements": random_bits(kind, (size,), size) for size in SIZES}
    for byte in EXTREMES[:2] if dtype == "BOOL" else EXTREMES:
        tensors[f"bytes {byte}"] = torch.full((5 * width,), byte, dtype=torch.uint8).view(kind)
    tensors |= {"no rows": torch.empty(0, 3, dtype=kind), "a scalar": random_bits(kind, ())}
    together = state_digest.of_named(tensors)
    for name, tensor in tensors.items():
        expected = plainly(tensor)
        assert state_digest.of_tensor(tensor).hex() == together[name].hex() == expected, name
        for index_dtype in (torch.int32, torch.int64):
            every = torch.arange(tensor.numel(), dtype=index_dtype)
            assert at(tensor.reshape(-1), every).hex() == expected, name
    assert together["no rows"].hex() == "0" * 32
    # Shape does not enter the sums.
    assert state_digest.of_tensor(tensors["a scalar"].reshape(1, 1)) == together["a scalar"]


COMPILED = """
import numpy as np
from patchstore.tensors import elements
counts = np.array([0, 5, 40_000, 0, 700_001])
given = {kind: np.arange(counts.sum(), dtype=kind) * kind(40503) for kind in (np.uint16, np.uint32)}
given[np.uint8] = given[np.uint16].astype(np.uint8)
by_numpy = {kind: elements.sum_each(bits, counts) for kind, bits in given.items()}
elements.compile_ahead().join()
# With which numpy would digest nothing.
elements.NUMPY_CHUNK = 0
for kind, bits in given.items():
    bits.flags.writeable = False
    for one, other in zip(by_numpy[kind], elements.sum_each(bits, counts), strict=True):
        assert one.any() and (one == other).all(), kind
"""


def test_what_is_compiled_ahead_has_the_sums_of_numpy() -> None:
    pytest.importorskip("numba")
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", ONE_PER_WIDTH)
def test_sums_of_the_elements_of_many_tensors_at_once_are_those_of_each(dtype: str) -> None:
    groups, expected = [], []
    for number, size in enumerate((1, CHUNK - 3, 7, CHUNK + 9, 2, 1000)):
        tensor = random_bits(TORCH_DTYPES[dtype], (3 * size + 1,), number)
        positions = torch.randperm(tensor.numel())[:size].sort().values
        values = bits(tensor)[positions].view(tensor.dtype)
        expected.append(at(tensor, positions))
        patch = TensorPatch(name="", indices=positions.to(torch.int32), values=values)
        groups.append(group_of(patch, number))
    assert [Sums(*each) for each in state_digest.of_group(in_order(groups)).tolist()] == expected
    # The last position of the largest tensor with positions in int32.
    last = TensorPatch(name="", indices=torch.tensor([2**31 - 1], dtype=torch.int32), values=values[:1])
    wide = state_digest.of_elements(last.indices.to(torch.int64), values[:1])
    assert Sums(*state_digest.of_group(group_of(last))[0].tolist()) == wide


@pytest.mark.parametrize(
    "position",
    [0, CHUNK - 1, CHUNK, 2**31 - 2, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40 + 12_345, 2**48 - 1],
)
@pytest.mark.parametrize("dtype", ONE_PER_WIDTH)
def test_positions_of_any_size_have_the_sums_of_plain_integers(position: int, dtype: str) -> None:
    value = random_bits(TORCH_DTYPES[dtype], (1,), position % 1000)
    first, second = independent_reader.added(position, int.from_bytes(raw_bytes(value), "little"))
    expected = state_digest.Sums(first % 2**64, second % 2**64)
    assert state_digest.of_elements(torch.tensor([position]), value) == expected
    if position < 2**31 - 1:
        assert state_digest.of_elements(torch.tensor([position], dtype=torch.int32), value) == expected


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_a_change_that_is_followed_gives_the_sums_of_the_whole(dtype: str) -> None:
    old, fresh = random_bits(TORCH_DTYPES[dtype], (5000,), 1), random_bits(TORCH_DTYPES[dtype], (5000,), 2)
    new = old.clone()
    for seed in range(3):
        before = new.clone()
        positions = (torch.rand(5000, generator=torch.Generator().manual_seed(seed)) < 0.1).nonzero().view(-1)
        bits(new)[positions] = bits(fresh)[positions]
        followed = state_digest.of_tensor(before).minus(at(before, positions)).plus(at(new, positions))
        assert followed == state_digest.of_tensor(new)
    assert state_digest.of_tensor(new).hex() == plainly(new)


def test_parts_add_up_in_any_order() -> None:
    tensor = random_bits(torch.bfloat16, (100_000,))
    order = torch.randperm(100_000, generator=torch.Generator().manual_seed(0))
    total = state_digest.Sums()
    for positions in torch.split(order, 33_333):
        total = total.plus(at(tensor, positions))
    assert total == state_digest.of_tensor(tensor)


@pytest.mark.parametrize("dtype", ["I64", "U64", "F64", "I32", "BF16"])
def test_what_is_digested_is_not_modified(dtype: str) -> None:
    tensor = random_bits(TORCH_DTYPES[dtype], (1000,))
    positions = torch.arange(1000)
    copies = bits(tensor).clone(), positions.clone()
    state_digest.of_tensor(tensor)
    state_digest.of_elements(positions, tensor)
    assert torch.equal(bits(tensor), copies[0])
    assert torch.equal(positions, copies[1])


@pytest.mark.parametrize("dtype", ["BF16", "F32", "I8"])
def test_what_is_lost_or_mixed_up_is_found(dtype: str) -> None:
    tensor = random_bits(TORCH_DTYPES[dtype], (512,), 3)
    bits(tensor)[:8] = 0
    plain = state_digest.of_tensor(tensor)

    def changed(positions: list[int], values: torch.Tensor) -> state_digest.Sums:
        other = tensor.clone()
        bits(other)[torch.tensor(positions)] = values
        assert not torch.equal(bits(other), bits(tensor))
        return state_digest.of_tensor(other)

    flat = bits(tensor)
    sign = 8 * tensor.element_size() - 1
    others = [
        changed([i, i + 100], flat[[i + 100, i]]) for i in range(8, 300) if flat[i] != flat[i + 100]
    ]  # swaps
    others += [changed([i, 0], flat[[0, i]]) for i in range(8, 300) if flat[i]]  # moves among zeros
    others += [
        changed([i], flat[i] ^ torch.tensor(1).bitwise_left_shift(sign).to(flat.dtype)) for i in range(300)
    ]
    others += [changed([i], flat[i] + 1) for i in range(300)]
    others += [
        changed([i, i + 1], flat[[i, i + 1]] + torch.tensor([1, -1]).to(flat.dtype)) for i in range(300)
    ]
    others += [state_digest.of_tensor(tensor[:-1]), state_digest.of_tensor(torch.cat([tensor, tensor[:1]]))]
    assert plain not in others
    assert plain.first not in {sums.first for sums in others}
    assert plain.second not in {sums.second for sums in others}


def test_zeros_have_places() -> None:
    assert state_digest.of_tensor(torch.zeros(10)) != state_digest.of_tensor(torch.zeros(11))
    one_at = {state_digest.of_tensor(torch.eye(64)[i]) for i in range(64)}
    assert len(one_at) == 64
    assert state_digest.of_tensor(torch.tensor([0.0])) != state_digest.of_tensor(torch.tensor([-0.0]))


def test_no_two_elements_of_16_bits_can_trade_places_below_2_to_the_47_elements() -> None:
    """The claim in the definition of B: for no difference d is (B / A) * d a distance below 2**47."""
    ratio = elements.B * pow(elements.A, -1, 2**64) % 2**64
    nearest = min(min(ratio * d % 2**64, -ratio * d % 2**64) for d in range(1, 2**16))
    assert nearest >= 2**47


def test_hexadecimal_digits_go_there_and_back() -> None:
    for sums in (
        state_digest.Sums(),
        state_digest.Sums(1, 2),
        state_digest.Sums(2**64 - 1, 2**64 - 1),
        state_digest.Sums(0, 2**63),
    ):
        assert state_digest.Sums.from_hex(sums.hex()) == sums
        assert len(sums.hex()) == 32
        assert sums.minus(sums) == state_digest.Sums()
        assert sums.plus(state_digest.Sums(5, 7)).minus(state_digest.Sums(5, 7)) == sums


SCHEMA = Schema(
    tensors=(
        TensorSpec(name="a", dtype="BF16", shape=(2, 3)),
        TensorSpec(name="b", dtype="BF16", shape=(6,)),
        TensorSpec(name="s", dtype="F32", shape=()),
    )
)


def tensors_of_schema() -> dict[str, torch.Tensor]:
    return {
        "a": random_bits(torch.bfloat16, (2, 3), 1),
        "b": random_bits(torch.bfloat16, (6,), 2),
        "s": torch.tensor(1.0),
    }


def test_the_total_and_the_stored_sums_are_those_of_the_page() -> None:
    tensors = tensors_of_schema()
    a, b, s = map(plainly, tensors.values())
    lines = f"a\tBF16\t2,3\t{a}\nb\tBF16\t6\t{b}\ns\tF32\t\t{s}\n"
    found = state_digest.of_tensors(SCHEMA, reversed(tensors.items()))
    assert state_total(SCHEMA, found) == independent_reader.digest_of(lines.encode())
    assert {name: sums.hex() for name, sums in found.items()} == {"a": a, "b": b, "s": s}
    assert struct.unpack("<6Q", pack_sums(SCHEMA, found)) == (*found["a"], *found["b"], *found["s"])


def test_two_tensors_that_traded_their_weights_have_another_total() -> None:
    tensors = tensors_of_schema()
    traded = tensors | {"a": tensors["b"].reshape(2, 3), "b": tensors["a"].flatten()}
    one, other = (state_total(SCHEMA, state_digest.of_tensors(SCHEMA, t.items())) for t in (traded, tensors))
    assert one != other


def test_a_mismatch_names_the_tensor_that_is_wrong(store: MemoryStore) -> None:
    sums = {name: state_digest.of_tensor(tensor) for name, tensor in tensors_of_schema().items()}
    data = pack_sums(SCHEMA, sums)
    store.put("states/00000003-w.sums", data)
    stored = Payload(key="states/00000003-w.sums", size=48, digest=digests.digest(data))
    manifest = Manifest(
        version=3,
        parent=None,
        parent_digest=None,
        run_id="r",
        step=0,
        created_at="now",
        delta=None,
        anchor=None,
        writer=Writer(id="w", epoch=1, write_id="0" * 16),
        state=StateDigest(total=state_total(SCHEMA, sums), sums=stored),
    )
    state_digest.check_state(store, SCHEMA, sums, manifest)
    with pytest.raises(StateMismatch) as caught:
        state_digest.check_state(store, SCHEMA, sums | {"b": state_digest.Sums(1, 1)}, manifest)
    assert "version 3" in str(caught.value)
    assert str(caught.value).endswith(": b")


def test_tensors_that_are_not_the_schemas_are_not_digested() -> None:
    tensors = tensors_of_schema()
    for wrong in (
        tensors | {"c": torch.zeros(1)},
        tensors | {"a": torch.zeros(2, 3)},
        tensors | {"a": tensors["a"].flatten()},
        {name: tensor for name, tensor in tensors.items() if name != "s"},
    ):
        with pytest.raises(SchemaMismatch):
            state_digest.of_tensors(SCHEMA, wrong.items())
