"""Changes of parts, encoded where kernels found them, against what the CPU makes of the same."""

from collections.abc import Callable

import pytest
import torch

from patchstore.encodings import ENCODINGS
from patchstore.format.records import Part, TensorSpec
from patchstore.payloads import delta
from patchstore.publish.snapshot.device import DeviceSnapshot
from patchstore.tensors import parts as torch_parts
from patchstore.tensors.bits import bits, spec_of
from tests.support import sharded
from tests.support.interpreted import DEVICE, kernels

# Minutes, where they are interpreted.
pytestmark = pytest.mark.timeout(1200)

encode_gpu = kernels("patchstore.publish.encode_gpu")
device = kernels("patchstore.publish.snapshot.device")
loaded = device.Kernels(
    *(kernels(f"patchstore.kernels.{name}") for name in ("compare", "index_encode", "rounded"))
)

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
    schema = [spec_of(name, tensor) for name, tensor in sorted(old.items())]
    parts = {part.key: part for spec in schema for part in held(spec)}

    def local(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            key: torch_parts.of_whole(part, state[part.spec.name]).contiguous().to(DEVICE)
            for key, part in parts.items()
        }

    specs = [TensorSpec(name=key, dtype=part.spec.dtype, shape=part.size) for key, part in parts.items()]
    taken = DeviceSnapshot(local(old), specs, "device", DEVICE, loaded)
    changes = taken.compare(local(new))
    found = encode_gpu.encode(schema, parts, changes, ENCODINGS[encoding])

    before = {key: tensor.cpu() for key, tensor in local(old).items()}
    expected = delta.encode(schema, parts, changes, before, ENCODINGS[encoding])
    assert found.num_changed == expected.num_changed
    assert found.encoding == expected.encoding
    assert [spec.name for spec in found.listed] == [spec.name for spec in expected.listed]
    assert found.firsts == expected.firsts
    assert found.entries.keys() == expected.entries.keys()
    for name, entry in expected.entries.items():
        assert found.entries[name].dtype == entry.dtype, name
        assert torch.equal(bits(found.entries[name].cpu()), bits(entry)), name
    assert found.sum_growth == expected.sum_growth
    assert found.parent_sums == expected.parent_sums
