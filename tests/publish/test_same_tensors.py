"""A publisher finds tensors where they were, and sees what else was done to them since the last call."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from patchstore import Publisher
from patchstore.errors import SchemaMismatch
from patchstore.publish import snapshot
from patchstore.stores.memory import MemoryStore
from patchstore.tensors.bits import bits
from tests.support.interpreted import DEVICE, kernels
from tests.support.weights import newest

State = dict[str, torch.Tensor]


def weights() -> State:
    torch.manual_seed(0)
    state = {name: torch.randn(6, 6).to(torch.bfloat16) for name in "abcd"}
    # Published once, and by two names.
    return state | {"tied": state["a"]}


@pytest.fixture(params=[False, True], ids=["plain", "kernels"])
def published(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[State, Callable[[], State]]]:
    """A source, and what publishes it and returns what a reader then has; without and with kernels."""
    if request.param:
        kernels("patchstore.publish.snapshot_gpu")
        if DEVICE.type == "cuda":
            pytest.skip("kernels are not interpreted here, and these tensors are on the CPU")
        monkeypatch.setattr(snapshot, "have_kernels", lambda devices: True)
    state, store = weights(), MemoryStore()
    with Publisher(store, state) as publisher:
        steps = iter(range(10**6))

        def publish() -> State:
            publisher.publish_patch(next(steps)).result()
            return newest(store)

        publish()
        publish()
        yield state, publish


def check(found: State, state: State) -> None:
    assert found.keys() == state.keys() - {"tied"}
    for name, tensor in found.items():
        assert torch.equal(bits(tensor), bits(state[name].detach())), name


def reordered(state: State) -> None:
    first = state.pop("b")
    state["b"] = first
    first += 1


def trained(state: State) -> None:
    for name in "abcd":
        state[name][2:] *= 3


Change = Callable[[State], object]
CHANGES: dict[str, Change] = {
    "moved": lambda state: state.update(b=state["b"] + 1),
    "moved in place": lambda state: setattr(state["b"], "data", state["b"] + 1),
    # The same address, shape and dtype.
    "transposed in place": lambda state: setattr(state["b"], "data", state["b"].t()),
    "swapped": lambda state: state.update(b=state["c"], c=state["b"]),
    "reordered": reordered,
    "parameters now": lambda state: state.update(b=nn.Parameter(state["b"] + 1)),
    "trained": trained,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_published_are_the_tensors_of_now(
    published: tuple[State, Callable[[], State]], change: Change
) -> None:
    state, publish = published
    for _ in range(3):
        change(state)
        check(publish(), state)


def without_memory(state: State) -> None:
    state["b"] = state["b"].clone()
    state["b"].untyped_storage().resize_(0)


REFUSED: dict[str, Change] = {
    "untied": lambda state: state.update(tied=state["tied"].clone()),
    "tied otherwise": lambda state: state.update(c=state["d"]),
    "retyped": lambda state: state.update(b=(state["b"] * 100).to(torch.int16)),
    "reshaped": lambda state: state.update(b=state["b"].view(4, 9)),
    "left out": lambda state: state.pop("b"),
    "added": lambda state: state.update(e=torch.zeros(3)),
    "without memory": without_memory,
    "on meta": lambda state: state.update(b=state["b"].to("meta")),
    "sparse": lambda state: state.update(b=state["b"].to_sparse()),
    "no tensor": lambda state: state.update(b=[1.0] * 36),  # type: ignore[arg-type]
    "emptied": lambda state: state.clear(),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_other_tensors_are_refused_again_and_again_until_they_are_back(
    published: tuple[State, Callable[[], State]], change: Change
) -> None:
    state, publish = published
    before = dict(state)
    kept = state["b"].clone()
    change(state)
    for _ in range(3):
        with pytest.raises(SchemaMismatch):
            publish()
    state.clear()
    state.update(before)
    state["b"] = kept + 1
    check(publish(), state)


def test_nothing_is_kept_alive(published: tuple[State, Callable[[], State]]) -> None:
    state, publish = published
    for _ in range(2):
        freed: list[Any] = []
        weakref.finalize(state["b"], freed.append, "tensor")
        publish()
        state["b"] = torch.zeros(6, 6, dtype=torch.bfloat16)
        gc.collect()
        assert freed == ["tensor"]
        check(publish(), state)
