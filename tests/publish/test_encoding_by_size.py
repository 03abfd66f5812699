"""What the default encoding stores of real training steps: never more than the whole model."""

import logging
from collections.abc import Iterator
from threading import Event

import pytest
import torch

from patchstore import Manifest, Publisher, Replica
from patchstore.codec import ENCODINGS
from patchstore.codec.delta import least_bytes
from patchstore.codec.tensor_file import open_buffer
from patchstore.errors import PublishFailed, StoreUnavailable
from patchstore.stores.memory import MemoryStore
from tests.support.copies import before
from tests.support.small_models import causal
from tests.support.weights import State, assert_same_bits, newest


class Training:
    """A small model of transformers and AdamW, with their defaults but for the learning rate."""

    def __init__(self, learning_rate: float) -> None:
        sizes = {"vocab_size": 1000, "hidden_size": 128, "intermediate_size": 352, "head_dim": 32}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
        self.model = causal("Llama", torch.float32, **sizes, **heads)
        self._optimiser = torch.optim.AdamW(self.model.parameters(), lr=learning_rate)

    def step(self) -> None:
        tokens = torch.randint(0, 1000, (2, 32))
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self._optimiser.step()
        self._optimiser.zero_grad()

    def served(self, dtype: torch.dtype) -> State:
        return {name: tensor.detach().to(dtype) for name, tensor in self.model.state_dict().items()}


def model_bytes(publisher: Publisher) -> int:
    return sum(spec.num_bytes for spec in publisher.schema.tensors)


def trained(store: MemoryStore, learning_rate: float, num: int = 3) -> Iterator[tuple[Manifest, float]]:
    """Publish steps with the default arguments; yields versions, and their share of the model's bytes."""
    training = Training(learning_rate)
    held: State = {}
    with Publisher(store, training.model) as publisher:
        publisher.publish_patch(0).result()
        follower = Replica(store, held)
        follower.update()
        for step in range(1, num + 1):
            training.step()
            manifest = publisher.publish_patch(step).result()
            follower.update()
            assert_same_bits(held, training.served(torch.bfloat16))
            yield manifest, manifest.num_bytes / model_bytes(publisher)
    assert_same_bits(newest(store), training.served(torch.bfloat16))


@pytest.mark.parametrize(("learning_rate", "most"), [(1e-3, 0.5), (1e-4, 0.25), (3e-5, 0.15)])
def test_steps_that_change_most_weights_take_a_part_of_the_model(
    store: MemoryStore, learning_rate: float, most: float
) -> None:
    for manifest, share in trained(store, learning_rate):
        assert manifest.delta is not None and manifest.delta.encoding == "context"
        assert share < most


def test_steps_that_change_few_weights_are_stored_as_distances(store: MemoryStore) -> None:
    for manifest, share in trained(store, 1e-6):
        assert manifest.delta is not None and manifest.delta.encoding == "gap"
        assert share < 0.25


def test_a_small_tensor_that_changes_little_is_not_coded_beside_one_that_changes_much(
    store: MemoryStore,
) -> None:
    tensors = {"much": torch.randn(256, 256), "little": torch.randn(256, 256), "few": torch.randn(40)}
    with Publisher(store, tensors) as publisher:
        publisher.publish_patch(0).result()
        tensors["much"] *= 1.01
        tensors["little"][3] *= 1.01
        tensors["few"] += 1
        manifest = publisher.publish_patch(1).result()
    assert manifest.delta is not None and manifest.delta.encoding == "context"
    (payload,) = manifest.delta.payloads
    _, entries = open_buffer(payload.key, bytearray(store.get(payload.key)))
    assert {"table", "tiles", "little.idx", "little.val"} <= dict(entries).keys()
    assert not any(name.startswith("much") for name in dict(entries))
    assert_same_bits(newest(store), {name: each.bfloat16() for name, each in tensors.items()})


def test_changes_that_would_take_more_than_the_model_are_stored_as_an_anchor(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(1e-4)
    held: State = {}
    with caplog.at_level(logging.INFO), Publisher(store, training.model, dtype=None) as publisher:
        publisher.publish_patch(0).result()
        follower = Replica(store, held)
        follower.update()
        # Several are under way at once: an anchor must have the weights of its own step.
        expected = []
        publications = []
        for step in range(1, 6):
            training.step()
            expected.append({n: t.clone() for n, t in training.served(torch.float32).items()})
            publications.append(publisher.publish_patch(step))
        for publication, state in zip(publications, expected, strict=True):
            manifest = publication.result()
            assert manifest.anchor is not None and manifest.delta is None
            assert manifest.num_bytes < 1.01 * model_bytes(publisher)
            follower.update(manifest.version)
            assert_same_bits(held, state)
        training.model.lm_head.weight.data[3] += 1
        assert publisher.publish_patch(6).result().kind == "delta"
    assert "step 3 is an anchor: its changes would take more bytes than the model" in caplog.messages
    assert_same_bits(newest(store), training.served(torch.float32))


def test_an_anchor_in_the_place_of_a_delta_repairs_a_run_whose_last_delta_was_not_stored() -> None:
    gate = Event()

    def fail() -> None:
        gate.wait(30)
        raise StoreUnavailable("the network is down")

    store, model = before(MemoryStore(), "upload", "deltas/*", fail), {"w": torch.randn(100, 1000)}
    with Publisher(store, model, dtype=None) as publisher:
        publisher.publish_patch(0).result()
        model["w"][0] += 1
        small = publisher.publish_patch(1)
        model["w"] *= 1.5
        large = publisher.publish_patch(2)
        gate.set()
        with pytest.raises(PublishFailed, match="the network is down"):
            small.result()
        manifest = large.result()
    assert (manifest.version, manifest.step, manifest.kind, manifest.delta) == (1, 2, "anchor", None)
    assert_same_bits(newest(store), model)


@pytest.mark.parametrize("encoding", ["raw", "gap", "context"])
@pytest.mark.parametrize("share", [0.4, 1.0])
def test_no_delta_is_smaller_than_is_said_before_it_is_encoded(
    store: MemoryStore, encoding: str, share: float
) -> None:
    model = {"a": torch.randn(300, 70), "b": torch.randn(50, 90).bfloat16(), "c": torch.randn(500).double()}
    with Publisher(store, model, dtype=None, encoding=encoding, anchor_every=None) as publisher:
        publisher.publish_patch(0).result()
        for each in model.values():
            each[torch.rand(each.shape) < share] *= 1.01
        delta = publisher.publish_patch(1).result().delta
        assert delta is not None
        least = least_bytes(publisher.schema, delta.num_changed, ENCODINGS[encoding])
        assert delta.num_bytes >= least > 0.5 * share * 6 * 21_000


def test_weights_that_are_all_replaced_never_take_more_than_an_anchor(store: MemoryStore) -> None:
    training = Training(1e-4)
    with Publisher(store, training.model) as publisher:
        publisher.publish_patch(0).result()
        for step in range(1, 3):
            with torch.no_grad():
                for each in training.model.parameters():
                    each.copy_(torch.randn_like(each) * 10.0 ** torch.randint(-30, 30, each.shape))
            assert publisher.publish_patch(step).result().num_bytes < 1.02 * model_bytes(publisher)
    assert_same_bits(newest(store), training.served(torch.bfloat16))


def test_an_encoding_that_was_asked_for_is_used_whatever_it_takes(store: MemoryStore) -> None:
    training = Training(1e-3)
    with Publisher(store, training.model, encoding="gap") as publisher:
        publisher.publish_patch(0).result()
        training.step()
        manifest = publisher.publish_patch(1).result()
    assert manifest.delta is not None and manifest.delta.encoding == "gap"
    assert manifest.num_bytes > 1.2 * model_bytes(publisher)


def test_the_next_periodic_anchor_is_counted_from_one_that_took_the_place_of_a_delta(
    store: MemoryStore,
) -> None:
    tensors = {"w": torch.randn(1000, 1000, dtype=torch.float32)}
    kinds = []
    with Publisher(store, tensors, dtype=None, anchor_every=4) as publisher:
        for step in range(10):
            manifest = publisher.publish_patch(step).result()
            kinds.append("both" if manifest.anchor and manifest.delta else manifest.kind)
            tensors["w"][0] += 1
            if step == 1:
                tensors["w"] += 1
    assert kinds == ["anchor", "delta", "anchor", *["delta"] * 3, "both", *["delta"] * 3]
