"""Changes of parts, encoded where kernels found them, against what the CPU makes of the same."""

from collections.abc import Callable, Mapping

import pytest
import torch

from patchstore.bucket.records import Part, Schema, TensorSpec
from patchstore.codec import ENCODINGS, part_table
from patchstore.publish.snapshot import Ahead
from patchstore.support.threads import Worker
from patchstore.tensors import parts as torch_parts
from patchstore.tensors.bits import bits, spec_of
from tests.support import sharded
from tests.support.interpreted import DEVICE, kernels

# Minutes, where they are interpreted.
pytestmark = pytest.mark.timeout(1200)

device = kernels("patchstore.publish.snapshot_gpu")
context_encode = kernels("patchstore.kernels.context_encode")

SHAPES = {"a": (40, 48), "b": (40, 48), "c": (2, 3, 8, 6), "f": (7, 9), "n": (64,)}


def whole_tensors(
    narrow: Mapping[str, tuple[int, ...]],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A state and the next; `narrow` are shapes of tensors in FP8."""
    random = torch.Generator().manual_seed(3)
    old = {
        name: (0.02 * torch.randn(shape, generator=random)).to(torch.bfloat16)
        for name, shape in SHAPES.items()
    }
    old["f"] = old["f"].float()
    for name, shape in narrow.items():
        old[name] = torch.randn(shape, generator=random).to(torch.float8_e4m3fn)
    new = {name: tensor.clone() for name, tensor in old.items()}
    for tensor in new.values():
        flat = bits(tensor)
        chosen = torch.rand(len(flat), generator=random) < 0.03
        chosen[::50] = True
        flat[chosen] += 1
    return old, new


def along(dim: int) -> Callable[[TensorSpec], list[Part]]:
    """The second of three parts, and of `a` the first too."""

    def held(spec: TensorSpec) -> list[Part]:
        found = sharded.chunks(spec, min(dim, len(spec.shape) - 1), 3)
        return found[:2] if spec.name == "a" else found[1:2]

    return held


def no_box(spec: TensorSpec) -> list[Part]:
    if spec.name != "c":
        return [Part.whole(spec)]
    return [Part(spec, (0, 1, 0, 0), (2, 2, 8, 6)), Part(spec, (0, 0, 2, 0), (1, 1, 6, 6))]


@pytest.mark.sample(3)
@pytest.mark.parametrize("held", [along(0), along(1), no_box], ids=["rows", "columns", "no box"])
@pytest.mark.parametrize("encoding", ["context", "gap", "raw"])
def test_parts_are_encoded_as_on_the_cpu(encoding: str, held: Callable[[TensorSpec], list[Part]]) -> None:
    check(encoding, held)


@pytest.mark.parametrize("is_ahead", [True, False], ids=["ahead", "afterwards"])
@pytest.mark.parametrize("held", [lambda spec: [Part.whole(spec)], along(0)], ids=["whole", "rows"])
def test_a_snapshot_that_is_copied_in_pieces_is_encoded_as_on_the_cpu(
    held: Callable[[TensorSpec], list[Part]], is_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one in host memory is: tensors of two widths, and more pieces than there are rooms for copies."""
    monkeypatch.setattr(device, "is_far", lambda memory, device: True)
    monkeypatch.setattr(device, "COPIED_BYTES", 1500)
    monkeypatch.setattr(device, "FIRST_ROOM", 10_000)
    monkeypatch.setattr(part_table, "TOGETHER", 800)
    begun = []

    class Counted(context_encode.Encoder):  # type: ignore[misc, name-defined]
        def order(self) -> None:
            begun.append(self)
            super().order()

    monkeypatch.setattr(context_encode, "Encoder", Counted)
    more = {f"a{number}": (24, 16) for number in range(2, 6)} | {"b2": (30, 24), "b3": (16, 20)}
    check("context", held, more, is_ahead=is_ahead)
    assert len(begun) > device.ROOMS


def check(
    encoding: str,
    held: Callable[[TensorSpec], list[Part]],
    narrow: Mapping[str, tuple[int, ...]] | None = None,
    *,
    is_ahead: bool = False,
) -> None:
    old, new = whole_tensors(narrow or {})
    schema = Schema(tensors=tuple(spec_of(name, tensor) for name, tensor in sorted(old.items())))
    table = sharded.table_of(schema, [part for spec in schema.tensors for part in held(spec)])

    def local(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            key: torch_parts.of_whole(part, state[part.spec.name]).contiguous().to(DEVICE)
            for key, part in ((part.key, part) for part in table.parts)
        }

    specs = [TensorSpec(name=part.key, dtype=part.spec.dtype, shape=part.size) for part in table.parts]
    taken = device.DeviceSnapshot(local(old), specs, "device", DEVICE)
    taken.warm_up(table, ENCODINGS[encoding])
    encoder = Worker("encoder")
    ahead = Ahead(schema, table, ENCODINGS[encoding], encoder) if is_ahead else None
    changes = taken.compare(local(new), ahead)
    found = taken.encode(schema, table, changes, ENCODINGS[encoding])
    encoder.stop()

    expected = sharded.encoded(schema, table.parts, old, new, encoding)
    assert found.num_changed == expected.num_changed
    assert found.encoding == expected.encoding
    assert found.listing.firsts == expected.listing.firsts
    for one, other in zip(found.listing.columns, expected.listing.columns, strict=True):
        assert (one.suffix, one.dtype) == (other.suffix, other.dtype)
        assert (one.numbers.tolist(), one.counts.tolist()) == (other.numbers.tolist(), other.counts.tolist())
        assert torch.equal(bits(one.data), bits(other.data))
    assert found.coded.keys() == expected.coded.keys()
    assert all(torch.equal(found.coded[name].cpu(), entry) for name, entry in expected.coded.items())
    for one, other in ((found.growth, expected.growth), (found.parents, expected.parents)):
        assert sharded.by_number(one) == sharded.by_number(other)
