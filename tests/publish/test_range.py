"""Numbers that do not fit the dtype in which they are served are never published as infinity or NaN."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from patchstore import Publisher
from patchstore.bucket import history
from patchstore.errors import PublishFailed, SchemaMismatch
from patchstore.publish.snapshot import Place
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.small_models import assert_refused
from tests.support.weights import assert_same_bits, newest

Tensors = dict[str, torch.Tensor]


def model(dtype: torch.dtype = torch.float32) -> Tensors:
    torch.manual_seed(0)
    return {"norm.weight": torch.ones(16, dtype=dtype), "up.weight": torch.randn(300, 200).to(dtype)}


def as_served(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def source_of(tensors: Tensors, source: str) -> Any:
    return tensors if source == "mapping" else lambda: iter(tensors.items())


@pytest.mark.parametrize("source", ["mapping", "function"])
@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize(
    ("given", "dtype", "number"),
    [
        (torch.float32, torch.float16, 1e5),
        (torch.bfloat16, torch.float16, -7e4),
        (torch.float64, torch.bfloat16, 1e300),
        (torch.float64, torch.float32, -1e39),
        (torch.float32, torch.bfloat16, 3.4e38),
    ],
)
def test_a_number_that_grows_beyond_the_range_is_refused_and_the_next_call_goes_on(
    store: MemoryStore,
    source: str,
    place: Place,
    given: torch.dtype,
    dtype: torch.dtype,
    number: float,
) -> None:
    tensors = model(given)
    with Publisher(store, source_of(tensors, source), dtype=dtype, snapshot=place) as publisher:
        publisher.publish_patch(0).result()
        kept = float(tensors["up.weight"][7, 3])
        tensors["norm.weight"] *= 1.5
        tensors["up.weight"][7, 3] = number
        with pytest.raises(SchemaMismatch, match=r"'up.weight' has 1 number beyond the range of .*, such as"):
            publisher.publish_patch(1)
        head = history.head(store)
        assert head is not None and head.version == 0
        tensors["up.weight"][7, 3] = kept
        manifest = publisher.publish_patch(2).result()
    assert (manifest.version, manifest.kind) == (1, "delta")
    assert manifest.delta is not None and manifest.delta.num_changed == 16
    assert_same_bits(newest(store), as_served(tensors, dtype))


def test_an_infinity_in_a_transposed_tensor_is_published_again_and_again(store: MemoryStore) -> None:
    mask = torch.zeros(3, 5)
    mask[0, 1:], mask[2, 0] = -torch.inf, torch.nan
    tensors = {"mask": mask.t()}
    with Publisher(store, tensors, dtype="bfloat16") as publisher:
        publisher.publish_patch(0).result()
        mask[1, 2] = torch.inf
        manifest = publisher.publish_patch(1).result()
        assert manifest.delta is not None and manifest.delta.num_changed == 1
        mask[1, 3] = 3.4e38
        with pytest.raises(SchemaMismatch, match="'mask' has 1 number beyond the range"):
            publisher.publish_patch(2)
        mask[1, 3] = 1
        publisher.publish_patch(3).result()
    assert_same_bits(newest(store), as_served(tensors, torch.bfloat16))


@pytest.mark.parametrize("source", ["mapping", "function"])
def test_a_number_beyond_the_range_is_refused_before_a_run_is_created(
    store: MemoryStore, source: str
) -> None:
    tensors = {"ok": torch.tensor([float("inf"), 1.0]), "w": torch.tensor([1.0, 70_000.0])}
    says = r"'w' has 1 number beyond the range of torch\.float16, such as 70000"
    assert_refused(store, source_of(tensors, source), says, dtype="float16")
    del tensors["w"]
    Publisher(store, source_of(tensors, source), dtype="fp16").close()


@pytest.mark.parametrize("source", ["mapping", "function"])
@pytest.mark.parametrize("place", ["device", "host"])
def test_a_number_that_takes_the_place_of_an_infinity_is_refused(
    store: MemoryStore, source: str, place: Place
) -> None:
    tensors = model()
    weight = tensors["up.weight"]
    weight[0, 0] = float("inf")
    with Publisher(store, source_of(tensors, source), dtype="float16", snapshot=place) as publisher:
        publisher.publish_patch(0).result()
        weight[0, 0] = 70_000
        weight[1] += 1
        for step in (1, 2):
            with pytest.raises(SchemaMismatch, match=r"'up.weight' has 1 number .*, such as 70000.0"):
                publisher.publish_patch(step)
        weight[0, 0] = 1
        publisher.publish_patch(3).result()
        # An infinity that came with a delta, beside one in another tensor.
        tensors["norm.weight"][3] = weight[2, 5] = float("-inf")
        weight[3, 3] = float("nan")
        publisher.publish_patch(4).result()
        tensors["norm.weight"][3] = 1
        weight[2, 5] = -70_000
        with pytest.raises(SchemaMismatch, match=r"'up.weight' has 1 number .*, such as -70000.0"):
            publisher.publish_patch(5)
        # What this call found of the other tensor was not published.
        weight[2, 5] = 1
        tensors["norm.weight"][3] = -80_000
        with pytest.raises(SchemaMismatch, match=r"'norm.weight' has 1 number .*, such as -80000.0"):
            publisher.publish_patch(6)
        tensors["norm.weight"][3] = float("-inf")
        publisher.publish_patch(7).result()
    assert_same_bits(newest(store), as_served(tensors, torch.float16))


def test_a_number_is_refused_after_an_infinity_that_the_trainer_had_in_half_precision(
    store: MemoryStore,
) -> None:
    """A trainer may give a tensor in the dtype in which it is served, and later in a wider one."""
    tensors = model()
    with Publisher(store, tensors, dtype="float16") as publisher:
        publisher.publish_patch(0).result()
        tensors["up.weight"] = tensors["up.weight"].half()
        tensors["up.weight"][0, 0] = float("inf")
        publisher.publish_patch(1).result()
        tensors["up.weight"] = tensors["up.weight"].float()
        tensors["up.weight"][0, 0] = 70_000
        with pytest.raises(SchemaMismatch, match=r"'up.weight' has 1 number .*, such as 70000.0"):
            publisher.publish_patch(2)


def test_a_stream_with_a_number_beyond_the_range_is_read_to_its_end(store: MemoryStore) -> None:
    """Other ranks may gather the tensors that follow, and would wait for this one."""
    tensors, last = model(), []

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            last.append(name)
            yield name, tensor

    with Publisher(store, source, dtype="float16") as publisher:
        publisher.publish_patch(0).result()
        tensors["norm.weight"][0] = 1e5
        last.clear()
        with pytest.raises(SchemaMismatch, match=r"'norm.weight' has 1 number"):
            publisher.publish_patch(1)
    assert last == ["norm.weight", "up.weight"]


def test_a_number_in_its_own_dtype_is_never_beyond_the_range(store: MemoryStore) -> None:
    tensors = model(torch.float64) | {"steps": torch.arange(3)}
    with Publisher(store, tensors, dtype=None) as publisher:
        publisher.publish_patch(0).result()
        tensors["up.weight"][0, 0] = 1e300
        publisher.publish_patch(1).result()
    assert_same_bits(newest(store), tensors)


def test_an_anchor_after_a_failure_has_no_number_beyond_the_range(store: MemoryStore) -> None:
    tensors = model()
    fault = Fault(verb="upload", key="deltas/*", effect="fail-before", times=5)
    with Publisher(FaultyStore(store, fault), tensors, dtype="float16") as publisher:
        publisher.publish_patch(0).result()
        tensors["norm.weight"] += 1
        with pytest.raises(PublishFailed):
            publisher.publish_patch(1).result()
        tensors["norm.weight"][2] = 1e5
        with pytest.raises(SchemaMismatch, match=r"'norm.weight' has 1 number"):
            publisher.publish_patch(2)
        tensors["norm.weight"][2] = 1
        assert publisher.publish_patch(3).result().kind == "anchor"
    assert_same_bits(newest(store), as_served(tensors, torch.float16))


@pytest.mark.parametrize("source", ["mapping", "function"])
def test_what_stays_as_it_is_in_a_run_in_fp8_keeps_its_range(store: MemoryStore, source: str) -> None:
    tensors = {
        "model.layers.0.mlp.up_proj.weight": torch.randn(256, 256),
        "model.layers.0.input_layernorm.weight": torch.ones(256),
    }
    norm = tensors["model.layers.0.input_layernorm.weight"]
    with Publisher(store, source_of(tensors, source), dtype="float16", quantization="fp8-block") as publisher:
        publisher.publish_patch(0).result()
        norm[5] = 1e5
        with pytest.raises(SchemaMismatch, match=r"'model.layers.0.input_layernorm.weight' has 1 number"):
            publisher.publish_patch(1)
        norm[5] = 2
        publisher.publish_patch(2).result()
    assert newest(store)["model.layers.0.input_layernorm.weight"][5] == 2
