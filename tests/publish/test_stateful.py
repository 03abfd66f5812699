"""Random histories against a trivial model: a list of state dicts.

A trainer trains, publishes, fails, restarts and goes back; a follower updates to any version and
rolls back; the store loses requests and answers. Whatever happens, every version that was
acknowledged can be rebuilt with the bits that the trainer had.
"""

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from patchstore import Publisher, Replica
from patchstore.bucket import history
from patchstore.codec import CHOICES
from patchstore.errors import PublishFailed
from patchstore.stores.memory import MemoryStore
from patchstore.testing.faults import Fault
from tests.support.copies import Unsteady
from tests.support.weights import State, assert_same_bits, rebuilt, served, small_model

EFFECTS = ("fail-before", "fail-after", "exists", "truncate")


class Training(RuleBasedStateMachine):
    """One run, its true history, and one follower."""

    @initialize(anchor_every=st.integers(1, 5), encoding=st.sampled_from(CHOICES))
    def create(self, anchor_every: int, encoding: str) -> None:
        torch.manual_seed(0)
        self.inner = MemoryStore()
        self.network = Unsteady(self.inner)
        self.options = {"anchor_every": anchor_every, "encoding": encoding}
        self.model = small_model()
        self.history: dict[int, State] = {}
        self.publisher = Publisher(self.network, self.model, **self.options)
        self.publish()
        self.tensors: State = {}
        self.follower = Replica(self.inner, self.tensors)

    @rule(name=st.sampled_from(["embed.weight", "layers.0.norm.weight", "scale"]), value=st.floats(width=16))
    def train(self, name: str, value: float) -> None:
        flat = self.model[name].view(-1)
        flat[torch.randint(flat.numel(), (1 + flat.numel() // 50,))] = value

    @rule()
    def publish(self) -> None:
        manifest = self.publisher.publish_patch(len(self.history)).result()
        self.history[manifest.version] = served(self.model)

    @rule(
        effect=st.sampled_from(EFFECTS),
        verb=st.sampled_from(["put", "upload", "get", "size"]),
        times=st.integers(1, 12),
    )
    def publish_through_a_bad_network(self, effect: str, verb: str, times: int) -> None:
        # Only what the effect means something for: `exists` is about puts, `truncate` about uploads.
        verb = {"exists": "put", "truncate": "upload"}.get(effect, verb)
        key = "versions/*" if effect == "exists" else "*"
        fault = Fault(verb=verb, key=key, effect=effect, times=times)  # type: ignore[arg-type]
        self.network.arm(fault)
        try:
            self.publish()
        except PublishFailed:
            pass
        finally:
            self.network.arm()
        # A commit may have taken place although its answer was lost: its version has these bits.
        head = history.head(self.inner)
        assert head is not None
        self.history.setdefault(head.version, served(self.model))

    @rule(data=st.data())
    def restart_from(self, data: st.DataObject) -> None:
        self.publisher.close()
        version = data.draw(st.sampled_from(sorted(self.history)))
        for name, tensor in self.history[version].items():
            self.model[name].copy_(tensor)
        self.publisher = Publisher(self.network, self.model, resume=version, **self.options)
        head = history.head(self.inner)
        assert head is not None and head.parent == version
        self.history[head.version] = served(self.model)

    @rule(data=st.data())
    def follow_to(self, data: st.DataObject) -> None:
        self.follower.update(data.draw(st.sampled_from(sorted(self.history))))

    @precondition(lambda self: self.follower.held is not None)
    @rule(data=st.data())
    def follow_and_roll_back(self, data: st.DataObject) -> None:
        held = self.follower.held
        self.follower.apply(self.follower.stage(data.draw(st.sampled_from(sorted(self.history))))).rollback()
        assert self.follower.held == held

    @precondition(lambda self: self.follower.held is not None)
    @rule()
    def follower_restarts(self) -> None:
        self.follower = Replica(self.inner, self.tensors, held=self.follower.held)

    @invariant()
    def the_follower_has_exactly_the_version_it_names(self) -> None:
        if hasattr(self, "follower") and self.follower.held is not None:
            assert_same_bits(self.tensors, self.history[self.follower.held])

    def teardown(self) -> None:
        if not hasattr(self, "publisher"):
            return
        self.publisher.close()
        for version, expected in self.history.items():
            assert_same_bits(rebuilt(self.inner, version), expected)


def test_every_acknowledged_version_survives_any_history() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        Training,
        settings=settings(
            max_examples=25,
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
