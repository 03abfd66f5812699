"""Random lives of a run: two trainers that crash, resume and race, readers, an operator, and a forger.

The model is what each version has to have, known from what its trainer was about to publish. After each
step the newest version can be rebuilt, and each reader has all of one version. At the end every kept
version can be rebuilt, bit for bit.
"""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from safetensors.torch import load_file

from patchstore import Publisher, Replica, replay
from patchstore.compact.service import Compactor
from patchstore.errors import (
    PatchstoreError,
    PublishFailed,
    StoreUnavailable,
    Unsigned,
    VersionConflict,
    VersionRetired,
)
from patchstore.format import history, layout
from patchstore.format.records import Manifest
from patchstore.publish import uploads
from patchstore.retention import Retention, collect, delete_tag, retire, tag
from patchstore.signing import KeySigner, PublicKey
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore
from patchstore.support.worker import Task, Worker
from patchstore.testing.faults import Fault, FaultyStore
from tests.retention.kept_runs import later
from tests.support.keys import key_pair
from tests.support.weights import State, assert_same_bits, served

DAY_H = 27
"""Hours after which all that may be deleted may be deleted."""
_NAMES = st.sampled_from(["best", "last"])
_SLOTS = st.integers(0, 1)


def faults_of_writers(chance: float) -> tuple[Fault, ...]:
    """Lost and failed requests, and uploads of which a part is stored."""
    common = {"times": None, "chance": chance}
    return (
        Fault(verb="put", effect="fail-before", **common),  # type: ignore[arg-type]
        Fault(verb="put", effect="fail-after", **common),  # type: ignore[arg-type]
        Fault(verb="put", effect="exists", **common),  # type: ignore[arg-type]
        Fault(verb="upload", effect="fail-after", **common),  # type: ignore[arg-type]
        Fault(verb="upload", effect="truncate", **common),  # type: ignore[arg-type]
        Fault(verb="get", effect="fail-before", **common),  # type: ignore[arg-type]
    )


def faults_of_readers(chance: float) -> tuple[Fault, ...]:
    """Failed requests, and payloads that arrive otherwise than they were stored."""
    common = {"times": None, "chance": chance}
    return (
        Fault(verb="get", effect="fail-before", **common),  # type: ignore[arg-type]
        Fault(verb="get", effect="flip", key="deltas/*", **common),  # type: ignore[arg-type]
        Fault(verb="get", effect="truncate", key="anchors/*", **common),  # type: ignore[arg-type]
        Fault(verb="get", effect="stale", key="states/*", **common),  # type: ignore[arg-type]
    )


class Weather(FaultyStore):
    """A store whose faults come and go."""

    def turn(self, *faults: Fault) -> None:
        with self._lock:
            self._faults, self._matches = faults, [0] * len(faults)


class Trainer:
    """A process that trains; it may be dead."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store = Weather(store, seed=seed)
        self.model = {"weight": torch.randn(40), "other": torch.randn(8)}
        self.publisher: Publisher | None = None
        self.had_faults = False

    def end(self) -> None:
        """Let go of the run, as a process that is killed: nothing is stored any more."""
        self.store.turn(Fault(verb="*", effect="fail-before", times=None))
        publisher, self.publisher = self.publisher, None
        if publisher is not None:
            with suppress(PatchstoreError):
                publisher.close()
        self.store.turn()


class Reader:
    """A process that holds a version."""

    def __init__(self, store: Store, seed: int, key: PublicKey | None) -> None:
        self.store = Weather(store, seed=seed)
        self.key = key
        self.tensors: State = {}
        self.replica = Replica(self.store, self.tensors, required_keys=key)

    def restart(self) -> None:
        """Begin again with the weights that are there."""
        held = self.replica.held
        self.replica = Replica(self.store, self.tensors, held=held, required_keys=self.key)


def in_turn(worker: Worker, task: Task[Any], hand_over: Any = Worker.hand_over) -> None:
    """Have a publisher's requests beside an upload made before it.

    Which of them fails is drawn when it is made, and Hypothesis refuses runs that differ.
    """
    if worker._thread.name in {"patchstore-check", "patchstore-state"}:
        task.run()
    else:
        hand_over(worker, task)


class Lifecycle(RuleBasedStateMachine):
    """See above."""

    @initialize(anchor_every=st.none() | st.integers(1, 4), is_signed=st.booleans(), seed=st.integers(0, 9))
    def create(self, anchor_every: int | None, is_signed: bool, seed: int) -> None:
        torch.manual_seed(seed)
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(uploads, "FIRST_PAUSE_S", 0.0)
        self.patches.setattr(Worker, "hand_over", in_turn)
        self.signer: KeySigner | None = None
        if is_signed:
            with tempfile.TemporaryDirectory() as folder:
                self.signer = KeySigner(key_pair(Path(folder))[0])
        self.key = None if self.signer is None else self.signer.public_key
        self.store = MemoryStore()
        self.anchor_every = anchor_every
        self.trainers = [Trainer(self.store, seed), Trainer(self.store, seed + 1)]
        self.owner: Trainer | None = None
        """The one that claimed the run last."""
        self.attempts: dict[int, State] = {}
        """What publications have, by step."""
        self.forged_steps: set[int] = set()
        self.weights: dict[int, State] = {}
        self.forged: set[int] = set()
        """Versions with weights of the forger's."""
        self.retired: set[int] = set()
        self.tags: dict[str, int] = {}
        self.hours = 0.0
        self.begin(self.trainers[0])
        self.publish(self.trainers[0])
        self.readers = [Reader(self.store, seed + place, self.key) for place in range(2)]

    # What trainers do.

    def begin(self, trainer: Trainer) -> None:
        trainer.publisher = Publisher(
            trainer.store, trainer.model, anchor_every=self.anchor_every, resume="auto", signer=self.signer
        )
        self.owner = trainer

    def publish(self, trainer: Trainer) -> Manifest:
        assert trainer.publisher is not None
        step = len(self.attempts)
        trainer.model["weight"][torch.randint(40, (3,))] += 1
        self.attempts[step] = served(trainer.model)
        return trainer.publisher.publish_patch(step).result()

    @rule(slot=_SLOTS, count=st.integers(1, 4))
    def train(self, slot: int, count: int) -> None:
        """Publish; only a fenced trainer, or one that has seen faults, may fail."""
        trainer = self.trainers[slot]
        if trainer.publisher is None:
            return
        for _ in range(count):
            try:
                self.publish(trainer)
            except VersionConflict:
                assert trainer is not self.owner or trainer.had_faults
                trainer.end()
                return
            except PublishFailed:
                assert trainer.had_faults

    @rule(slot=_SLOTS, chance=st.sampled_from([0.05, 0.2, 0.5]))
    def train_in_a_storm(self, slot: int, chance: float) -> None:
        trainer = self.trainers[slot]
        if trainer.publisher is None:
            return
        trainer.had_faults = True
        trainer.store.turn(*faults_of_writers(chance))
        try:
            for _ in range(3):
                with suppress(PublishFailed, StoreUnavailable):
                    self.publish(trainer)
        except PatchstoreError:
            trainer.end()
        trainer.store.turn()

    @rule(slot=_SLOTS, after=st.integers(0, 12))
    def kill(self, slot: int, after: int) -> None:
        """The process is killed at some call of a publication."""
        trainer = self.trainers[slot]
        if trainer.publisher is None:
            return
        trainer.store.turn(Fault(verb="*", effect="fail-before", skip=after, times=None))
        with suppress(PatchstoreError):
            self.publish(trainer)
        trainer.end()

    @rule(slot=_SLOTS, in_storm=st.booleans())
    def resume(self, slot: int, in_storm: bool) -> None:
        """Begin again with the weights that the process had."""
        trainer = self.trainers[slot]
        trainer.end()
        trainer.had_faults = in_storm
        if in_storm:
            trainer.store.turn(*faults_of_writers(0.1))
        try:
            self.begin(trainer)
        except PatchstoreError:
            assert in_storm
            # It may have claimed the run all the same.
            self.owner = None
        trainer.store.turn()

    @rule(slot=_SLOTS, data=st.data())
    def load(self, slot: int, data: st.DataObject) -> None:
        """Begin again with the weights of a kept version, as after going back in the training."""
        trainer, choice = self.trainers[slot], sorted(self.kept - self.forged)
        if not choice:
            return
        trainer.end()
        version = data.draw(st.sampled_from(choice))
        for name, tensor in self.weights[version].items():
            trainer.model[name].copy_(tensor)
        trainer.had_faults = False
        self.begin(trainer)

    @precondition(lambda self: all(each.publisher is not None for each in self.trainers))
    @rule()
    def race(self) -> None:
        """Both publish at the same time."""

        def attempt(trainer: Trainer) -> None:
            try:
                self.publish(trainer)
            except VersionConflict:
                trainer.end()
            except PublishFailed:
                assert trainer.had_faults

        steps = len(self.attempts)
        with ThreadPoolExecutor(2) as pool:
            # Steps must differ, so that it is known whose version it is.
            first, second = self.trainers
            done = pool.submit(attempt, first)
            while len(self.attempts) == steps:
                pass
            attempt(second)
            done.result()
        self.owner = next((each for each in self.trainers if each.publisher is not None), None)

    @precondition(lambda self: self.signer is not None)
    @rule()
    def forge(self) -> None:
        """Another program that may write publishes."""
        step = len(self.attempts)
        model = {name: torch.randn_like(tensor) for name, tensor in self.trainers[0].model.items()}
        self.attempts[step] = served(model)
        self.forged_steps.add(step)
        with Publisher(self.store, model, resume="anchor") as forger:
            forger.publish_patch(step).result()
        self.owner = None

    # What readers do.

    @rule(place=_SLOTS, chance=st.sampled_from([0.0, 0.0, 0.1, 0.4]))
    def follow(self, place: int, chance: float) -> None:
        self.sync()
        self.bring(self.readers[place], max(self.weights), chance)

    @rule(place=_SLOTS, data=st.data())
    def visit(self, place: int, data: st.DataObject) -> None:
        self.sync()
        self.bring(self.readers[place], data.draw(st.sampled_from(sorted(self.weights))), 0.0)

    @rule(place=_SLOTS)
    def restart_reader(self, place: int) -> None:
        self.readers[place].restart()

    def bring(self, reader: Reader, version: int, chance: float) -> None:
        before = reader.replica.held
        reader.store.turn(*(faults_of_readers(chance) if chance else ()))
        try:
            reader.replica.update(version)
        except PatchstoreError as exc:
            assert reader.replica.held == before
            if isinstance(exc, Unsigned):
                assert version in self.unsigned
            elif isinstance(exc, VersionRetired):
                assert version not in self.kept
            elif not chance:
                raise
        else:
            assert reader.replica.held == version
            assert version not in self.unsigned
        reader.store.turn()

    # What the operator does.

    @rule(name=_NAMES, data=st.data())
    def set_tag(self, name: str, data: st.DataObject) -> None:
        self.sync()
        version = data.draw(st.sampled_from(sorted(self.kept)))
        tag(self.store, name, version)
        self.tags[name] = version

    @rule(name=_NAMES)
    def remove_tag(self, name: str) -> None:
        if self.tags.pop(name, None) is not None:
            delete_tag(self.store, name)

    @rule(keep_last=st.integers(1, 5), keep_every=st.none() | st.integers(2, 6))
    def retire_some(self, keep_last: int, keep_every: int | None) -> None:
        self.sync()
        policy = Retention(keep_last=keep_last, keep_every=keep_every)
        found = retire(self.store, policy, dry_run=False, clock=later(self.hours))
        self.retired |= {v for first, last in found.retired for v in range(first, last + 1)}

    @rule(anchor_every=st.integers(2, 6), killed_after=st.none() | st.integers(0, 30))
    def compact(self, anchor_every: int, killed_after: int | None) -> None:
        store = Weather(self.store)
        if killed_after is not None:
            store.turn(Fault(verb="*", effect="fail-before", skip=killed_after, times=None))
        try:
            list(Compactor(store, anchor_every=anchor_every).compact())
        except PatchstoreError:
            assert killed_after is not None

    @rule(hours=st.sampled_from([1.0, float(DAY_H)]))
    def wait(self, hours: float) -> None:
        self.hours += hours

    @rule(killed_after=st.none() | st.integers(0, 60))
    def collect_some(self, killed_after: int | None) -> None:
        store = Weather(self.store)
        if killed_after is not None:
            store.turn(Fault(verb="*", effect="fail-before", skip=killed_after, times=None))
        try:
            collect(store, dry_run=False, clock=later(self.hours))
        except StoreUnavailable:
            assert killed_after is not None

    # What must be so.

    def sync(self) -> None:
        """Find out which versions exist by now, and what each must have."""
        head = history.head(self.store)
        assert head is not None
        for version in range(len(self.weights), head.version + 1):
            found = history.read_manifest(self.store, version)
            assert found.version == version
            if found.anchor is None and found.delta is not None and not found.delta.payloads:
                assert found.parent is not None
                # A claim has its parent's weights.
                self.weights[version] = self.weights[found.parent]
                is_forged = found.parent in self.forged
            else:
                self.weights[version] = self.attempts[found.step]
                is_forged = found.step in self.forged_steps
                assert self.signer is None or is_forged == self.is_unsigned(version)
            if is_forged:
                self.forged.add(version)
                assert self.is_unsigned(version)

    def is_unsigned(self, version: int) -> bool:
        """Whether no signature is of this manifest; a writer that lost the number may have left one."""
        prefix = layout.signature_prefix(version)
        if self.key is None:
            return True
        wanted = layout.signature_key(version, history.stored_digest(self.store, version), self.key.name)
        return wanted not in self.store.list(prefix)

    @property
    def unsigned(self) -> set[int]:
        """Versions that readers with a key must refuse."""
        return set() if self.signer is None else {each for each in self.weights if self.is_unsigned(each)}

    @property
    def kept(self) -> set[int]:
        return (self.weights.keys() - self.retired) | set(self.tags.values()) | {max(self.weights)}

    def check(self, version: int, key: PublicKey | None) -> None:
        with tempfile.TemporaryDirectory() as folder:
            try:
                replay(self.store, version, out=Path(folder) / "out", required_keys=key)
            except VersionRetired:
                assert version not in self.kept
            except Unsigned:
                assert version in self.unsigned and key is not None
            else:
                assert version in self.kept
                assert_same_bits(load_file(Path(folder) / "out" / "model.safetensors"), self.weights[version])

    @invariant()
    def the_newest_can_be_rebuilt(self) -> None:
        self.sync()
        self.check(max(self.weights), None)
        self.check(max(self.weights), self.key)

    @invariant()
    def each_reader_has_one_whole_version(self) -> None:
        for reader in self.readers:
            held = reader.replica.held
            if held is None:
                assert not reader.tensors
            else:
                assert_same_bits(dict(reader.replica.tensors), self.weights[held])

    def teardown(self) -> None:
        if not hasattr(self, "readers"):
            return
        for trainer in self.trainers:
            trainer.end()
        self.patches.undo()
        self.sync()
        for version in sorted(self.weights):
            self.check(version, None)
            if self.key is not None:
                self.check(version, self.key)


_SETTINGS = settings(
    report_multiple_bugs=False,
    max_examples=2,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
Lifecycle.TestCase.settings = _SETTINGS
TestLifecycle = Lifecycle.TestCase


class LongLifecycle(Lifecycle):
    """The same, longer."""


LongLifecycle.TestCase.settings = settings(_SETTINGS, max_examples=40, stateful_step_count=40)
TestLongLifecycle = pytest.mark.exhaustive(LongLifecycle.TestCase)
