"""Changes of parts, encoded where kernels found them, against what the CPU makes of the same."""

from collections.abc import Callable

import pytest
import torch

from patchstore.bucket.records import Part, Schema, TensorSpec
from patchstore.codec import ENCODINGS
from patchstore.tensors import parts as torch_parts
from patchstore.tensors.bits import bits, spec_of
from tests.support import sharded
from tests.support.interpreted import DEVICE, kernels

# Minutes, where they are interpreted.
pytestmark = pytest.mark.timeout(1200)

device = kernels("patchstore.publish.snapshot_gpu")

SHAPES = {"a": (40, 48), "b": (40, 48), "c": (2, 3, 8, 6), "f": (7, 9), "n": (64,)}


def whole_tensors() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(3)
    old = {
        name: (0.02 * torch.randn(shape, generator=random)).to(torch.bfloat16)
        for name, shape in SHAPES.items()
    }
    old["f"] = old["f"].float()
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
    old, new = whole_tensors()
    schema = Schema(tensors=tuple(spec_of(name, tensor) for name, tensor in sorted(old.items())))
    table = sharded.table_of(schema, [part for spec in schema.tensors for part in held(spec)])

    def local(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            key: torch_parts.of_whole(part, state[part.spec.name]).contiguous().to(DEVICE)
            for key, part in ((part.key, part) for part in table.parts)
        }

    specs = [TensorSpec(name=part.key, dtype=part.spec.dtype, shape=part.size) for part in table.parts]
    taken = device.DeviceSnapshot(local(old), specs, "device", DEVICE)
    changes = taken.compare(local(new))
    found = taken.encode(schema, table, changes, ENCODINGS[encoding])

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
