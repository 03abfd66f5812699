"""Histories of a run and its replica: any process may sleep for days between two requests, or be killed.

All that happens is a list of `Op`. What a version must have is known from its step, which no two publications
share. The time is what the clock is told. Pools work inline, so a request has the same number each time.
"""

import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any, NamedTuple

import pytest
import torch

from patchstore import Publisher, Replica
from patchstore.bucket import history, notes
from patchstore.errors import (
    IsReplica,
    NotFound,
    PatchstoreError,
    PublishFailed,
    StoreReplaced,
    StoreUnavailable,
    Unsigned,
    UsageError,
    VersionConflict,
    VersionNotFound,
    VersionRetired,
)
from patchstore.ops.compact.service import Compactor
from patchstore.ops.replicate.replicator import Replicator
from patchstore.ops.retention import Retention, Retirement, collect, delete_tag, retire, tag
from patchstore.signing import KeySigner
from patchstore.stores import layout, tries
from patchstore.stores.base import Store
from patchstore.stores.memory import MemoryStore
from patchstore.stores.probe import check_create_only
from patchstore.support.threads import Task, Threads, Worker
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.copies import Unsteady, objects_of
from tests.support.weights import State, assert_same_bits

DAY_H = 27.0
"""Hours after which all that may be deleted may be deleted, whichever clocks are wrong."""
GRACE_H = 22.0
"""Hours for which a reader of a version is safe when others give it up, if their clocks are an hour wrong."""
SOURCE, REPLICA = 0, 1
_RECORDS = (layout.TAGS, layout.RETIRED, layout.RESERVATIONS, layout.UNNAMED, layout.HEAD)
_DTYPE = {"layers.0.norm.weight": "float32"}
_FLOAT32 = "layers.0.norm.weight"

Policy = dict[str, float]
POLICIES: tuple[Policy, ...] = ({"keep_last": 1}, {"keep_last": 3}, {"keep_every": 4}, {"keep_days": 1})


class Loss(AssertionError):
    """A promise was broken; says which."""


class Killed(StoreUnavailable):
    """What a process that was killed hears of its stores: nothing happens any more."""


class Op(NamedTuple):
    """What a process does: a method of `Histories`. A process has a name, and does one thing at a time."""

    who: str
    does: str
    args: tuple[Any, ...] = ()
    skew_h: float = 0.0
    """By how much the process's clock is ahead."""
    dies: str | None = None
    """What the key begins with before whose put the process is killed."""


def _of(found: Retirement) -> set[int]:
    """The versions that a call retires."""
    return {version for first, last in found.retired for version in range(first, last + 1)}


def _faults(chance: float, *, of_reader: bool) -> tuple[Fault, ...]:
    """Return requests that fail or are lost, and uploads of a part; for readers also wrong bytes."""
    found = [
        *(("put", effect, "*") for effect in ("fail-before", "fail-after", "exists")),
        *(("upload", effect, "*") for effect in ("fail-after", "truncate")),
        ("get", "fail-before", "*"),
        ("delete", "fail-after", "*"),
    ]
    if of_reader:
        found += [("get", "flip", "deltas/*"), ("get", "truncate", "anchors/*"), ("get", "stale", "states/*")]
    return tuple(
        Fault(verb=verb, effect=effect, key=key, times=None, chance=chance)  # type: ignore[arg-type]
        for verb, effect, key in found
    )


@dataclass(slots=True)
class Turn:
    """An operation under way."""

    at: int | None
    """The request before which something happens; None for nothing."""
    meanwhile: Callable[[], None] | None
    """What happens while the process sleeps; None to kill it."""
    dies: str | None
    storm: float
    """The share of requests that fail."""
    num: int = 0
    is_disturbed: bool = False
    is_dead: bool = False
    lock: Any = field(default_factory=threading.RLock)
    """Taken in each request, so that all threads of the process sleep."""


class Watched(Unsteady):
    """A store as one process sees it."""

    turn: Turn | None = None

    def __init__(self, inner: Store) -> None:
        super().__init__(inner, before=self._take_turn)

    def _take_turn(self, verb: str, key: str) -> None:
        if (turn := self.turn) is not None:
            with turn.lock:
                turn.num += 1
                dies = turn.dies is not None and verb == "put" and key.startswith(turn.dies)
                if dies or (turn.num == turn.at and turn.meanwhile is None):
                    turn.is_dead = True
                elif turn.num == turn.at:
                    turn.is_disturbed = True
                    turn.meanwhile()
            if turn.is_dead:
                raise Killed(f"{self.url}: {verb} {key}: killed before request {turn.num}")


class Before(Watched):
    """The same store as a reader sees it that asked for retirements before there were any.

    It asks again when it misses an object.
    """

    has_missed = False

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        try:
            return super().get(key, start, end)
        except NotFound:
            self.has_missed |= layout.attempt_of(key) is not None
            raise

    def list(self, prefix: str = "") -> Iterator[str]:
        yield from () if prefix == layout.RETIRED and not self.has_missed else super().list(prefix)


class _Bucket(MemoryStore):
    """A store whose own clock is right, whichever process writes."""

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        skew_h, Now.skew_h = Now.skew_h, 0.0
        try:
            super().put(key, data, if_absent=if_absent)
        finally:
            Now.skew_h = skew_h

    def copy(self) -> "_Bucket":
        other = _Bucket(self.url)
        vars(other).update({name: dict(each) for name, each in vars(self).items() if isinstance(each, dict)})
        return other


@dataclass(slots=True)
class Place:
    """A bucket, and what is promised of it."""

    store: _Bucket
    kept_h: dict[int, float] = field(default_factory=dict)
    """When each version was last seen to be kept."""
    acknowledged: dict[int, int] = field(default_factory=dict)
    """Steps by version, as publishers were told."""
    own: set[int] = field(default_factory=set)
    """Versions that were retired here, and not after the source's."""

    def copy(self) -> "Place":
        return Place(self.store.copy(), dict(self.kept_h), dict(self.acknowledged), set(self.own))

    def kept(self) -> tuple[int, frozenset[int]]:
        """Return the newest version, -1 for none, and all that are kept by what the records say."""
        key = hash(frozenset(objects_of(self.store).items()))
        if key not in _kept:
            head = history.head(self.store)
            newest = -1 if head is None else head.version
            records = notes.retirements(self.store)
            gone = {version for version in range(newest) if records.find(version) is not None}
            tagged = {each.version for each in notes.read_tags(self.store).values()} - {None}
            _kept[key] = newest, frozenset((set(range(newest + 1)) - gone) | tagged)
        return _kept[key]

    def step(self, version: int) -> int:
        return history.read_manifest(self.store, version).step

    def mark(self) -> int:
        """Return what is equal for places with the same versions, payloads and shortcuts."""
        return hash(
            frozenset(each for each in objects_of(self.store).items() if not each[0].startswith(_RECORDS))
        )


class _Inline(ThreadPoolExecutor):
    """A pool that does at once what it is given."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def submit(self, work: Any, /, *args: Any, **more: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **more))
        except BaseException as exc:  # noqa: BLE001 -- as pools do
            done.set_exception(exc)
        return done

    def shutdown(self, *_: Any, **__: Any) -> None: ...


class _InTurn(Worker):
    """Has a publisher's requests beside an upload made before it."""

    def __init__(self, name: str) -> None:
        self._is_first = name in {"patchstore-check", "patchstore-state"}
        super().__init__(name)

    def hand_over(self, task: Task[Any]) -> None:
        if self._is_first:
            task.run()
        else:
            super().hand_over(task)


def _check_in_turn(store: Store) -> None:
    """Test create-only puts as where there is no race."""
    alone = FaultyStore(store)
    alone.single_writer = True
    check_create_only(alone)


class Now(datetime):
    """The clock of all processes, which moves when it is told, and the chance of the one that is awake."""

    hours, skew_h, chance = 0.0, 0.0, Random(0)

    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=Now.hours + Now.skew_h)


@contextmanager
def alone_in_time() -> Iterator[None]:
    """Take threads, time and chance out of the package."""
    instead = {ThreadPoolExecutor: _Inline, Threads: _Inline, Worker: _InTurn, datetime: Now}
    with pytest.MonkeyPatch.context() as patches:
        for module in [each for name, each in sys.modules.items() if name.startswith("patchstore.")]:
            for name, value in [*vars(module).items()]:
                if isinstance(value, type) and value in instead:
                    patches.setattr(module, name, instead[value])
        patches.setattr(tries, "FIRST_PAUSE_S", 0.0)
        for who in ("publish.open", "ops.replicate.replicator"):
            patches.setattr(f"patchstore.{who}.check_create_only", _check_in_turn)
        patches.setattr(uuid, "uuid4", lambda: uuid.UUID(int=Now.chance.getrandbits(128), version=4))
        yield


def model() -> State:
    """Weights as before training: bf16, one tensor in float32, one tied."""
    draw = torch.Generator().manual_seed(0)
    embedding = 0.02 * torch.randn(16, 24, generator=draw)
    return {
        "embed.weight": embedding,
        "layers.0.proj.weight": 0.2 * torch.randn(24, 16, generator=draw),
        _FLOAT32: torch.ones(24),
        "head.weight": embedding,
    }


def as_served(weights: State) -> State:
    return {
        name: (each if name == _FLOAT32 else each.bfloat16()).clone()
        for name, each in weights.items()
        if name != "head.weight"
    }


class _Trainer:
    def __init__(self, store: Watched) -> None:
        self.store, self.model, self.publisher = store, model(), None
        self.had_faults = False

    def load(self, weights: State) -> None:
        for name, each in weights.items():
            self.model[name].copy_(each)

    def close(self) -> None:
        publisher, self.publisher = self.publisher, None
        if publisher is not None:
            with suppress(PatchstoreError):
                publisher.close()


class Histories:
    """One run, its replica, and all processes that know them."""

    def __init__(self, signer: KeySigner | None = None) -> None:
        self.signer = signer
        self.places = [Place(_Bucket("memory://source")), Place(_Bucket("memory://replica"))]
        self.states: dict[int, State] = {}
        """What each publication has, by step."""
        self.processes: dict[str, Any] = {}
        self.stores: dict[tuple[str, int], Watched] = {}
        self.turns: dict[str, Turn] = {}
        self.hours = 0.0
        self.generation = 0
        self.chances: dict[str, Random] = {}
        self.num_operations = 0
        self.told: list[str] = []
        """What happened, for people."""

    def copy(self) -> "Histories":
        """Return the same places without their processes."""
        other = Histories(self.signer)
        other.places, other.states = [each.copy() for each in self.places], dict(self.states)
        other.hours, other.generation = self.hours, self.generation + 1
        return other

    def mark(self) -> int:
        """Return what is equal for histories that have come to the same."""
        return hash((self.hours, *(frozenset(objects_of(each.store).items()) for each in self.places)))

    def close(self) -> None:
        for each in self.processes.values():
            if isinstance(each, _Trainer):
                each.close()

    # How things happen.

    def do(
        self, op: Op, at: int | None = None, meanwhile: Sequence[Op] | None = None, storm: float = 0.0
    ) -> Turn:
        """Do something; before request `at` do other things first, or kill the process if there are none.

        Args:
            storm: the share of requests that fail.

        Raises:
            Loss: something was promised, and is not so.
        """
        turn = Turn(at, None if meanwhile is None else lambda: self.do_all(meanwhile), op.dies, storm)
        if op.who in self.turns:
            # It sleeps.
            return turn
        self.turns[op.who] = turn
        before = Now.skew_h, Now.chance
        chance = self.chances.setdefault(op.who, Random(f"{op.who} {self.generation}"))
        Now.hours, Now.skew_h, Now.chance = self.hours, op.skew_h, chance
        self.observe()
        try:
            getattr(self, op.does)(op.who, *op.args)
        except Loss:
            raise
        except PatchstoreError as exc:
            self.told.append(f"{op}: {exc.kind}: {exc}")
            self._end(op.who)
            allowed = (VersionConflict, VersionRetired, UsageError, VersionNotFound, StoreReplaced)
            is_refused = abs(op.skew_h) > 2 and isinstance(exc, UsageError)
            if not (turn.is_dead or storm or is_refused or (turn.is_disturbed and isinstance(exc, allowed))):
                raise Loss(f"{op} ended with {exc.kind}: {exc}") from exc
        except AssertionError as exc:
            raise Loss(f"{op}: {exc}") from exc
        except Exception as exc:
            raise Loss(f"{op} ended with {type(exc).__name__}: {exc}") from exc
        else:
            self.told.append(f"{op}: {turn.num} requests")
            if turn.is_dead:
                self._end(op.who)
        finally:
            del self.turns[op.who]
            for (who, _), store in self.stores.items():
                if who == op.who:
                    store.turn = None
                    store.arm()
            Now.skew_h, Now.chance = before
            self.num_operations += 1
        self.observe()
        return turn

    def do_all(self, ops: Sequence[Op]) -> None:
        for each in ops:
            self.do(each)
            self.check()

    def _end(self, who: str) -> None:
        """Forget a process; what it had in memory is gone."""
        process = self.processes.pop(who, None)
        if isinstance(process, _Trainer):
            process.close()

    def _store(self, who: str, place: int, kind: type[Watched] = Watched) -> Watched:
        """Return a place as a process sees it in its turn."""
        store = self.stores.setdefault((who, place), kind(self.places[place].store))
        turn = store.turn = self.turns[who]
        store.arm(*(_faults(turn.storm, of_reader=kind is Before) if turn.storm else ()))
        if isinstance(store, Before):
            store.has_missed = False
        return store

    # What processes do.

    def wait(self, who: str, hours: float) -> None:
        self.hours += hours
        Now.hours = self.hours

    def train(self, who: str, place: int, back: int | None, count: int, how: Any = None) -> None:
        """Publish; before that load an older version, if told to, and go on from there.

        Args:
            back: among the kept versions, counted from the newest; None to go on.
            how: of `resume`; None for the number.
        """
        store = self._store(who, place)
        trainer = self.processes.get(who)
        if trainer is None:
            trainer = self.processes[who] = _Trainer(store)
        trainer.had_faults |= self.turns[who].storm > 0
        if back is not None or trainer.publisher is None:
            trainer.close()
            version = None if back is None else self._chosen(place, back, self.unsigned(place))
            if version is not None:
                trainer.load(self.expected(place, version))
            resume = "auto" if version is None or how is not None else version
            self.told.append(f"{who} resumes {version} {resume}")
            try:
                trainer.publisher = Publisher(
                    store, trainer.model, dtype=_DTYPE, anchor_every=3, resume=resume, signer=self.signer
                )
            except IsReplica:
                if place == SOURCE or self._is_promoted():
                    raise
                return
        for _ in range(count):
            step = len(self.states)
            draw = torch.Generator().manual_seed(step)
            for name in ("embed.weight", "layers.0.proj.weight", _FLOAT32):
                flat = trainer.model[name].view(-1)
                at = torch.randint(len(flat), (max(1, len(flat) // 40),), generator=draw)
                flat[at] *= 1 + 0.05 * torch.randn(len(at), generator=draw)
            self.states[step] = as_served(trainer.model)
            try:
                found = trainer.publisher.publish_patch(step).result()
            except VersionConflict:
                # Another trainer claimed the run.
                self._end(who)
                return
            except PublishFailed:
                if not trainer.had_faults:
                    raise
                continue
            self.places[place].acknowledged[found.version] = step

    def forge(self, who: str) -> None:
        """Another program that may write publishes other weights, in a signed run without a signature."""
        step, forged = len(self.states), model()
        forged["layers.0.proj.weight"].neg_()
        self.states[step] = as_served(forged)
        store = self._store(who, SOURCE)
        with Publisher(store, forged, dtype=_DTYPE, anchor_every=3, resume="anchor") as forger:
            forger.publish_patch(step).result()

    def retire(self, who: str, place: int, policy: Policy) -> None:
        turn = self.turns[who]
        before = self.places[place].kept()[1]
        # It may sleep, or be killed, when the record is written already.
        with suppress(PatchstoreError):
            self.places[place].own |= _of(retire(self.places[place].store, Retention(**policy)))
        gone = _of(retire(self._store(who, place), Retention(**policy), dry_run=False))
        self.places[place].own |= gone
        if not turn.is_disturbed:
            newest = self.places[place].kept()[0]
            tagged = {each.version for each in notes.read_tags(self.places[place].store).values()}
            wanted = {newest} | tagged
            wanted |= {v for v in before if v > newest - policy.get("keep_last", 0)}
            wanted |= {v for v in before if "keep_every" in policy and v % policy["keep_every"] == 0}
            assert gone.isdisjoint(wanted), f"{sorted(gone & wanted)} were retired"

    def collect(self, who: str, place: int) -> None:
        collect(self._store(who, place), dry_run=False)

    def tag(self, who: str, place: int, name: str, back: int) -> None:
        version = self._chosen(place, back)
        assert version is not None
        tag(self._store(who, place), name, version)

    def untag(self, who: str, place: int, name: str) -> None:
        found = notes.read_tags(self.places[place].store).get(name)
        if found is not None and found.version is not None:
            delete_tag(self._store(who, place), name)

    def compact(self, who: str, place: int, anchor_every: int) -> None:
        store = self._store(who, place)
        compactor = self.processes.get(who)
        if compactor is None:
            compactor = self.processes[who] = Compactor(store, anchor_every=anchor_every)
        list(compactor.compact())

    def replicate(self, who: str) -> None:
        source, target = self._store(who, SOURCE), self._store(who, REPLICA)
        replicator = self.processes.get(who)
        if replicator is None:
            replicator = self.processes[who] = Replicator(source, target)
        was_promoted = self._is_promoted()
        try:
            if replicator.newest is None:
                replicator.open()
            with closing(replicator.versions()) as versions:
                list(versions)
            replicator.copy_shortcuts()
            replicator.copy_records()
            replicator.check_source()
        except UsageError:
            if not was_promoted:
                raise
            self._end(who)
            return
        if not self.turns[who].is_disturbed:
            newest, kept = self.places[SOURCE].kept()
            there, kept_there = self.places[REPLICA].kept()
            assert there == newest, f"the replica is at {there}, and the source at {newest}"
            lacking = kept - kept_there - self.places[REPLICA].own
            assert not lacking, f"the replica gave {sorted(lacking)} up by itself"

    def _is_promoted(self) -> bool:
        mark = notes.read_mark(self.places[REPLICA].store)
        return mark is not None and mark.promoted_at is not None

    def promote(self, who: str) -> None:
        if self.places[REPLICA].kept()[0] >= 0:
            notes.promote(self._store(who, REPLICA), notes.spelled(notes.utc_now()))

    def follow(self, who: str, place: int, back: int | None) -> None:
        """A reader moves to a version; None for the newest."""
        reader = self.processes.get(who)
        newest, _ = self.places[place].kept()
        if newest < 0:
            return
        store = self._store(who, place, Before)
        if reader is None or reader.store is not store:
            key = self.signer.public_key if self.signer is not None and who.endswith("2") else None
            reader = self.processes[who] = Replica(store, {}, required_keys=key)
        version = newest if back is None else self._chosen(place, back)
        began_h, held = self.hours, reader.held
        try:
            reader.update(version)
        except Unsigned:
            assert reader.held == held
            assert version in self.unsigned(place)
        except PatchstoreError:
            assert reader.held == held
            if self.hours - began_h < GRACE_H and not self.turns[who].storm:
                raise
        if reader.held is not None:
            self._same(f"{who} at {reader.held}", dict(reader.tensors), self.expected(place, reader.held))

    def _chosen(self, place: int, back: int, but: Set[int] = frozenset()) -> int | None:
        kept = self.places[place].kept()[1] - but
        return sorted(kept)[-1 - back % len(kept)] if kept else None

    # What must be so.

    def expected(self, place: int, version: int) -> State:
        return self.states[self.places[place].step(version)]

    def unsigned(self, place: int) -> set[int]:
        """Return the versions of a signed run that no signature is of."""
        if self.signer is None:
            return set()
        store, name = self.places[place].store, self.signer.public_key.name
        found = set()
        for version in range(self.places[place].kept()[0] + 1):
            digest = history.stored_digest(store, version)
            if layout.signature_key(version, digest, name) not in store.list(layout.SIGNATURES):
                found.add(version)
        return found

    def observe(self) -> None:
        """Take note of which versions are kept now."""
        for place in self.places:
            for version in place.kept()[1]:
                place.kept_h[version] = self.hours

    def check(self) -> None:
        """Check all that is promised of both places now.

        Raises:
            Loss
        """
        for number, place in enumerate(self.places):
            newest, kept = place.kept()
            if newest < 0:
                continue
            for version, step in place.acknowledged.items():
                if place.step(version) != step:
                    raise Loss(f"{place.store.url} has another version {version} than was acknowledged")
            recent = {version for version, hours in place.kept_h.items() if self.hours - hours < GRACE_H}
            wanted = {(None, version) for version in kept | recent} | {(held, newest) for held in kept}
            unsigned = self.unsigned(number)
            if wrong := unsigned & place.acknowledged.keys():
                raise Loss(f"{place.store.url} has no signature of versions {sorted(wrong)}")
            checked = _checked.setdefault(place.mark(), set())
            for held, version in sorted(wanted - checked, key=str):
                if held != version:
                    self._read(number, held, version)
                if self.signer is not None and held is None:
                    self._read(number, held, version, self.signer.public_key, is_refused=version in unsigned)
            checked |= wanted

    def _read(
        self, place: int, held: int | None, version: int, keys: Any = None, *, is_refused: bool = False
    ) -> None:
        """Read a version, given up or not, as one who began in time."""
        store = self.places[place].store
        name = f"{store.url}: version {version} for a reader at {held}"
        tensors = {} if held is None else {k: v.clone() for k, v in self.expected(place, held).items()}
        try:
            Replica(Before(store), tensors, held=held, required_keys=keys).update(version)
        except Exception as exc:
            if is_refused and isinstance(exc, Unsigned):
                return
            raise Loss(f"{name}: {type(exc).__name__}: {exc}") from exc
        if is_refused:
            raise Loss(f"{name}: read, though no required key has signed it")
        self._same(name, tensors, self.expected(place, version))

    def _same(self, name: str, found: State, expected: State) -> None:
        try:
            assert_same_bits(found, expected)
        except AssertionError as exc:
            raise Loss(f"{name}: other bits: {exc}") from exc


_kept: dict[int, tuple[int, frozenset[int]]] = {}
_checked: dict[int, set[tuple[int | None, int]]] = {}
"""What was found to be so of a place with the same objects, whose records may differ."""
