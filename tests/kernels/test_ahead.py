"""Changes that are encoded while others are still looked for, as of a snapshot in host memory on a GPU."""

import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
import torch

from patchstore import Manifest, Publisher
from patchstore.codec import part_table
from patchstore.errors import PublishFailed, SchemaMismatch
from patchstore.quantization import FORMS
from patchstore.stores.memory import MemoryStore
from tests.support.interpreted import DEVICE, kernels
from tests.support.weights import assert_same_bits, newest

# Minutes, where they are interpreted.
pytestmark = pytest.mark.timeout(1200)

device = kernels("patchstore.publish.snapshot_gpu")
encoder = kernels("patchstore.kernels.context_encode")
comparison = kernels("patchstore.kernels.compare")
rounded = kernels("patchstore.kernels.rounded")

State = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _pieces(monkeypatch: pytest.MonkeyPatch, _kernels: None) -> None:
    """Every matrix is a piece of its own, the snapshot as far as host memory, and hardly any room there."""
    monkeypatch.setattr(device, "is_far", lambda memory, device: True)
    monkeypatch.setattr(device, "COPIED_BYTES", 700)
    monkeypatch.setattr(device, "COPIED_AT_ONCE", 256)
    monkeypatch.setattr(device, "FIRST_ROOM", 100)
    monkeypatch.setattr(part_table, "TOGETHER", 300)


@pytest.fixture
def tensors() -> State:
    torch.manual_seed(0)
    found = {f"{number}.weight": 0.02 * torch.randn(16, 20, device=DEVICE) for number in range(7)}
    found["bias"] = 0.02 * torch.randn(9, device=DEVICE)
    return found


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def publisher(store: MemoryStore, tensors: State) -> Iterator[Publisher]:
    with Publisher(store, tensors, dtype="float16", snapshot="host", encoding="context") as opened:
        opened.publish_patch(0).result()
        yield opened


def train(tensors: State) -> None:
    for number, tensor in enumerate(tensors.values()):
        # Many changes at the end, so that room becomes short when some were handed on.
        tensor.view(-1)[:: 9 - number] *= 1.25


def check(publisher: Publisher, store: MemoryStore, tensors: State, step: int) -> Manifest:
    manifest = publisher.publish_patch(step).result()
    assert_same_bits(newest(store), {name: each.half().cpu() for name, each in tensors.items()})
    return manifest


@pytest.fixture
def encoders(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those that have begun."""
    found: list[Any] = []

    class Counted(encoder.Encoder):  # type: ignore[misc, name-defined]
        def __init__(self, *given: Any, **more: Any) -> None:
            found.append(self)
            super().__init__(*given, **more)

    monkeypatch.setattr(encoder, "Encoder", Counted)
    return found


def test_each_version_has_the_bits_of_the_trainer(
    publisher: Publisher, store: MemoryStore, tensors: State, encoders: list[Any]
) -> None:
    for step in range(1, 3):
        train(tensors)
        assert check(publisher, store, tensors, step).kind == "delta"
    assert len(encoders) > device.ROOMS
    assert check(publisher, store, tensors, 3).num_bytes == 0


@pytest.mark.parametrize("form", FORMS)
def test_matrices_in_fp8_are_encoded_while_others_are_compared(
    store: MemoryStore, encoders: list[Any], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    begun: list[int] = []

    def compare(*given: Any, compare: Any = rounded.compare) -> None:
        begun.append(len(encoders))
        compare(*given)

    monkeypatch.setattr(rounded, "compare", compare)
    tensors = {f"{number}.up_proj.weight": (0.02 * torch.randn(16, 20)).to(DEVICE) for number in range(7)}
    tensors["norm.weight"] = torch.ones(9, device=DEVICE)
    options: Any = {"dtype": "bfloat16", "quantization": form, "snapshot": "host", "encoding": "context"}
    with Publisher(store, tensors, **options) as publisher:
        for step in range(3):
            encoders.clear()
            begun.clear()
            publisher.publish_patch(step).result()
            expected = {"norm.weight": tensors["norm.weight"].bfloat16()}
            for name in sorted(tensors.keys() - expected.keys()):
                codes, scales = FORMS[form].quantize(tensors[name].bfloat16())
                expected |= {name: codes, FORMS[form].scale_name(name): scales}
            assert_same_bits(newest(store), {name: each.cpu() for name, each in expected.items()})
            assert step == 0 or begun[-1] > 0
            train(tensors)


@pytest.mark.parametrize("kinds", [["int64", "int64", "float32"], ["float32"]])
def test_tensors_without_elements_are_no_part_of_another_piece(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, kinds: list[str]
) -> None:
    tensors = {
        f"none {number}": torch.empty(0, dtype=getattr(torch, kind), device=DEVICE)
        for number, kind in enumerate(kinds)
    }
    tensors |= {name: torch.full((40,), 2.0, dtype=torch.bfloat16, device=DEVICE) for name in "ab"}
    trainer, is_short, rooms_for = threading.current_thread(), False, device.rooms_for

    def rooms(*given: Any) -> torch.Tensor:
        if is_short and threading.current_thread() is trainer:
            raise torch.OutOfMemoryError("the trainer has all of it")
        return rooms_for(*given)  # type: ignore[no-any-return]

    monkeypatch.setattr(device, "rooms_for", rooms)
    with Publisher(store, tensors, dtype=None, snapshot="host", encoding="context") as publisher:
        publisher.publish_patch(0).result()
        for step in range(1, 5):
            is_short = step in {1, 3}
            tensors["b"][step] += 1
            manifest = publisher.publish_patch(step).result()
            assert manifest.delta is not None and manifest.delta.num_changed == 1
            assert_same_bits(newest(store), {name: each.cpu() for name, each in tensors.items()})


def test_a_refused_number_leaves_what_there_was_although_some_is_encoded(
    publisher: Publisher, store: MemoryStore, tensors: State, encoders: list[Any]
) -> None:
    train(tensors)
    right = tensors["6.weight"][3, 3].clone()
    tensors["6.weight"][3, 3] = 1e6
    with pytest.raises(SchemaMismatch, match="beyond the range"):
        publisher.publish_patch(1)
    tensors["6.weight"][3, 3] = right
    assert check(publisher, store, tensors, 2).kind == "delta"
    assert len(encoders) > device.ROOMS


def test_an_interrupt_between_pieces_loses_no_change(
    publisher: Publisher, store: MemoryStore, tensors: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tensors)
    interrupted = Mock(wraps=comparison.compare, side_effect=[*[DEFAULT] * 3, KeyboardInterrupt])
    with monkeypatch.context() as patched:
        patched.setattr(comparison, "compare", interrupted)
        with pytest.raises(KeyboardInterrupt):
            publisher.publish_patch(1)
    assert check(publisher, store, tensors, 2).kind == "delta"
    train(tensors)
    assert check(publisher, store, tensors, 3).kind == "delta"


@pytest.mark.parametrize("where", ["Encoder.order", "choose_by_group"])
def test_where_a_piece_cannot_be_encoded_the_next_version_is_whole(
    publisher: Publisher, store: MemoryStore, tensors: State, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    train(tensors)
    broken = Mock(side_effect=torch.OutOfMemoryError("no memory for rows"))
    with monkeypatch.context() as patched:
        patched.setattr(f"{encoder.__name__}.{where}", broken)
        with pytest.raises(PublishFailed, match="no memory for rows"):
            publisher.publish_patch(1).result()
    assert check(publisher, store, tensors, 2).kind == "anchor"
    train(tensors)
    assert check(publisher, store, tensors, 3).kind == "delta"


def test_with_little_memory_for_copies_pieces_are_smaller(
    store: MemoryStore, tensors: State, encoders: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[int] = []

    def rooms(given: Any, there: torch.device, rooms: Any = device.rooms_for) -> torch.Tensor:
        pieces.append(len(given))
        if len(pieces) == 1:
            raise torch.OutOfMemoryError("no memory for rooms")
        return rooms(given, there)

    monkeypatch.setattr(device, "COPIED_BYTES", 3200)
    with Publisher(store, tensors, dtype="float16", snapshot="host", encoding="context") as opened:
        opened.publish_patch(0).result()
        monkeypatch.setattr(device, "rooms_for", rooms)
        train(tensors)
        del encoders[:]
        assert check(opened, store, tensors, 1).kind == "delta"
        train(tensors)
        assert check(opened, store, tensors, 2).kind == "delta"
    assert pieces[0] < pieces[1] == pieces[2]
    assert len(encoders) >= 2 * pieces[1] > 2 * pieces[0]


def test_without_memory_for_copies_the_comparison_goes_over_the_bus(
    publisher: Publisher, store: MemoryStore, tensors: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tensors)
    # Once for each size that is tried.
    none = [torch.OutOfMemoryError("no memory for rooms")] * device.SMALLER.bit_length()
    short = Mock(wraps=device.rooms_for, side_effect=[*none, DEFAULT])
    monkeypatch.setattr(device, "rooms_for", short)
    assert check(publisher, store, tensors, 1).kind == "delta"
    assert short.call_count == len(none) + 1
