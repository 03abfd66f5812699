"""Whole or not at all, for one rank and for two, without a server: a plain module and its loader."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from halves import half_of
from trainer import Trainer

from patchstore.errors import (
    CorruptObject,
    HalfApplied,
    LoadFailed,
    PatchstoreError,
    SchemaMismatch,
    StateMismatch,
    StoreReplaced,
    UsageError,
    VersionNotFound,
)
from patchstore.format import history, layout
from patchstore.format import manifest_json as manifests
from patchstore.format.records import Schema
from patchstore.format.state_sums import Sums, read_sums
from patchstore.read import host_cache
from patchstore.read.host_cache import HostCache
from patchstore.stores import open_store
from patchstore.tensors.bits import bits
from patchstore.testing.faults import FaultyStore
from tests.format import bad_buckets, surgery
from tests.support.interpreted import DEVICE, kernels
from tests.support.weights import lie
from vllm_plugin.change import Change
from vllm_plugin.identify import find_version, read_folder, read_tensors
from vllm_plugin.post_load import Derived
from vllm_plugin.update import Updater
from vllm_plugin.weights import LiveWeights

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

SHAPES = {
    "a": (4, 6),
    "b": (4, 6),
    "bias": (4,),
    "cols": (6, 8),
    "embed": (8, 4),
    "log_rate": (6,),
    "norm": (5,),
    "rotary": (3,),
}
"""What `Fused` is loaded from. The norm comes last, but for a name of no use."""


class Fused(torch.nn.Module):
    """Serves its slice of a checkpoint with a loader that does what vLLM's do.

    It fuses `a` and `b`, and takes half of their rows on each of two ranks; it takes columns of `cols`,
    widens `bias` to float32, calculates its rate from `log_rate`, has one copy of what `embed` and `head`
    share, ignores `rotary`, and spoils every tensor that it was given.
    """

    def __init__(self, rank: int = 0, num_ranks: int = 1) -> None:
        super().__init__()
        self.rank, self.num_ranks = rank, num_ranks
        self.ab = _parameter(8 // num_ranks, 6)
        self.bias = _parameter(4, dtype=torch.float32)
        self.cols = _parameter(6, 8 // num_ranks)
        self.embed = _parameter(8, 4)
        self.norm = _parameter(5)
        self.register_buffer("rate", torch.zeros(6))
        self.register_buffer("count", torch.zeros(2))
        self.drafts: tuple[torch.nn.Module, ...] = ()
        """Draft models that are loaded from the same checkpoint."""
        self.ignored = {"rotary"}
        self.fails_after: str | None = None
        """Fails the next load when this name was loaded."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name not in self.ignored:
                self.load_one(name, tensor)
                tensor.zero_()
            if self.fails_after == name:
                self.fails_after = None
                raise OSError("made to fail")

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        if name in {"a", "b"}:
            half = self.ab.data.chunk(2)[name == "b"]
            half.copy_(tensor.chunk(self.num_ranks)[self.rank])
        elif name == "log_rate":
            self.rate.copy_(-torch.exp(tensor))
        else:
            target = {"bias": self.bias, "cols": self.cols, "embed": self.embed, "head": self.embed}
            target["norm"] = self.norm
            part = tensor.chunk(self.num_ranks, dim=1)[self.rank] if name == "cols" else tensor
            target[name].data.copy_(part)

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of all bits."""
        return {name: bits(tensor).clone() for name, tensor in self.state_dict().items()}


def _parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


class Ranks:
    """Some ranks of one server, driven in turns as the engine drives them."""

    kind: type[LiveWeights]

    def __init__(self, url: str, modules: Iterable[Fused], scratch: Path) -> None:
        self.modules = list(modules)
        self.scratch = scratch
        self.live = [self.kind([each, *each.drafts], _load, Derived([each], _load)) for each in self.modules]
        self.updaters = [
            Updater(open_store(url), live, HostCache(scratch, max_bytes=0)) for live in self.live
        ]

    @property
    def one(self) -> Updater:
        (updater,) = self.updaters
        return updater

    @property
    def held(self) -> int | None:
        (held,) = {None if each.held is None else each.held.version for each in self.updaters}
        return held

    def open(self) -> None:
        traces = [each.trace() for each in self.updaters]
        shares = [live.share(traced) for live, traced in zip(self.live, traces, strict=True)]
        for each, traced in zip(self.updaters, traces, strict=True):
            each.follow(traced, shares)
        claims = [each.claims() for each in self.updaters]
        found = [each.find(claims) for each in self.updaters]
        if not all([each.adopt(each.read(found[0])) for each in self.updaters]):  # noqa: C419  # All have to try.
            for each in self.updaters:
                each.forget()

    def stage(self, version: int) -> None:
        for each in self.updaters:
            each.stage(version)
        changes = [each.changes() for each in self.updaters]
        for each in self.updaters:
            each.verify(changes)

    def write(self) -> None:
        for each in self.updaters:
            each.apply()
        if self.updaters[0].replaces_all:
            claims = [each.claims() for each in self.updaters]
            for each in self.updaters:
                each.verify_written(claims)

    def apply(self, version: int) -> None:
        self.stage(version)
        self.write()
        for each in self.updaters:
            each.accept()

    def roll_back(self) -> None:
        for each in self.updaters:
            each.roll_back()

    def check_served(self) -> None:
        claims = [each.claims() for each in self.updaters]
        for each in self.updaters:
            each.check_served(claims)

    def spooled(self) -> list[Path]:
        # What an accepted update needed is removed behind its back.
        for each in self.updaters:
            try:
                each._background.submit(int).result()
            except RuntimeError:  # Closed.
                each._background.shutdown()
        return list(self.scratch.iterdir())

    def close(self) -> None:
        for each in self.updaters:
            each.close()


def _load(model: torch.nn.Module, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    model.load_weights(weights)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """A checkpoint; two of its names are one tensor."""
    random = torch.Generator().manual_seed(3)
    made = {n: torch.randn(s, generator=random).bfloat16() for n, s in SHAPES.items()}
    made["log_rate"] = made["log_rate"].float()
    return made | {"head": made["embed"]}


@pytest.fixture
def trainer(new_trainer, tensors) -> Trainer:
    """Has published versions 0 to 3, of which only 0 is an anchor."""
    # Interpreted, every tile takes a tenth of a second: `new_trainer` alone brings those to kernels.
    encoding = "auto" if Ranks.kind is LiveWeights else "gap"
    return publish(new_trainer(tensors, dtype=None, encoding=encoding), 4)


def publish(trainer: Trainer, num_versions: int) -> Trainer:
    for _ in range(num_versions):
        trainer.step(density=0.5)
    return trainer


@pytest.fixture
def open_ranks(tmp_path) -> Iterator[Callable[..., Ranks]]:
    """Open a trainer's store in ranks that serve these modules."""
    made: list[Ranks] = []

    def start(trainer: Trainer, *modules: Fused) -> Ranks:
        made.append(Ranks(trainer.url, modules, tmp_path / f"scratch-{len(made)}"))
        made[-1].open()
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.fixture
def module() -> Fused:
    return Fused()


@pytest.fixture
def ranks(trainer, module, open_ranks) -> Ranks:
    """One rank, at version 0."""
    ranks = open_ranks(trainer, module)
    ranks.apply(0)
    return ranks


@pytest.fixture
def updater(ranks) -> Updater:
    return ranks.one


@pytest.fixture
def pair(trainer, open_ranks) -> Ranks:
    """Two ranks, at version 0."""
    pair = open_ranks(trainer, Fused(0, 2), Fused(1, 2))
    pair.apply(0)
    return pair


def loaded(tensors: Mapping[str, torch.Tensor], module: Fused) -> dict[str, torch.Tensor]:
    """The state of a module like this one that was started from these tensors."""
    fresh = type(module)(module.rank, module.num_ranks)
    fresh.ignored = module.ignored
    fresh.load_weights((name, tensor.clone()) for name, tensor in tensors.items())
    return fresh.state()


def equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def serves(ranks: Ranks, tensors: Mapping[str, torch.Tensor]) -> bool:
    return all(equal(each.state(), loaded(tensors, each)) for each in ranks.modules)


def fail_scatters(live: LiveWeights, num_failures: int) -> None:
    """Let the next writes of changes fail after half of them."""
    scatter = live.scatter
    left = num_failures

    def failing(change: Change) -> None:
        nonlocal left
        if left == 0:
            return scatter(change)
        left -= 1
        scatter(half_of(change))
        raise LoadFailed("made to fail")

    live.scatter = failing


@pytest.fixture(params=["plain", pytest.param("kernels", marks=pytest.mark.exhaustive)], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything here holds for plain torch, and for kernels."""
    if request.param == "plain":
        monkeypatch.setattr(Ranks, "kind", LiveWeights, raising=False)
    elif DEVICE.type == "cuda":
        pytest.skip("the modules here are on the CPU; tests on GPUs run the kernels for real")
    else:
        monkeypatch.setattr(Ranks, "kind", kernels("vllm_plugin.weights_gpu").DeviceWeights, raising=False)


# What is served.


def test_a_version_is_served_as_the_loader_lays_it_out(ranks, module, trainer):
    ranks.apply(2)
    then = trainer.history[2]
    expected = {
        "ab": torch.cat([then["a"], then["b"]]),
        "bias": then["bias"].float(),
        "cols": then["cols"],
        "embed": then["embed"],
        "norm": then["norm"],
        "rate": -torch.exp(then["log_rate"]),
        "count": torch.zeros(2),
    }
    assert equal(module.state(), {name: bits(tensor) for name, tensor in expected.items()})
    assert ranks.held == 2
    assert ranks.one.map.computed == {"log_rate"}
    assert ranks.one.map.absent == {"rotary"}


class Tied(Fused):
    """Has one tensor for two names, and loads the first of them only, as vLLM does where both were equal."""

    def __init__(self) -> None:
        super().__init__()
        self.head = self.embed
        self.ignored = {"rotary", "head"}


def test_a_tensor_that_the_server_would_leave_out_is_named_once_it_differs(new_trainer, tensors, open_ranks):
    trainer = new_trainer(tensors | {"head": tensors["embed"].clone()}, dtype=None, encoding="gap")
    trainer.publish()
    trainer.step(density=0.5)
    module = Tied()
    ranks = open_ranks(trainer, module)
    ranks.apply(0)
    before = module.state()
    with pytest.raises(SchemaMismatch, match=r"'head' than as 'embed'.*tie_word_embeddings"):
        ranks.apply(1)
    assert ranks.held == 0
    assert equal(module.state(), before)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_version_is_reached_bit_for_bit(new_trainer, tensors, open_ranks, num_ranks):
    trainer = publish(new_trainer(tensors, dtype=None, anchor_every=3), 7)
    ranks = open_ranks(trainer, *(Fused(rank, num_ranks) for rank in range(num_ranks)))
    # One delta, back through an anchor, several deltas, and across an anchor.
    for version in (0, 1, 2, 1, 6, 3, 5):
        ranks.apply(version)
        assert serves(ranks, trainer.history[version])
        ranks.check_served()


def test_nan_payloads_and_negative_zeros_arrive_and_are_undone(ranks, module, trainer):
    strange = torch.tensor([0x7FC1, -0x0040, -0x8000, 0], dtype=torch.int16).view(torch.bfloat16)
    for name in ("cols", "a", "norm"):
        trainer.tensors[name].view(-1)[:4] = strange
    trainer.tensors["bias"].copy_(strange)
    trainer.publish()
    trainer.step(density=1.0)

    ranks.apply(4)
    before = module.state()
    assert equal(before, loaded(trainer.history[4], module))
    ranks.stage(5)
    ranks.write()
    assert not equal(module.state(), before)
    ranks.roll_back()
    assert equal(module.state(), before)


def test_an_anchor_can_be_undone_too(new_trainer, tensors, module, open_ranks):
    trainer = publish(new_trainer(tensors, dtype=None, anchor_every=2), 3)
    ranks = open_ranks(trainer, module)
    ranks.apply(1)
    # Back to an anchor and, with the map proved by now, through the map.
    ranks.stage(0)
    assert ranks.one.replaces_all
    ranks.write()
    assert serves(ranks, trainer.history[0])
    ranks.roll_back()
    assert (ranks.held, ranks.one.half_applied) == (1, False)
    assert serves(ranks, trainer.history[1])


def test_a_version_in_which_nothing_changed_is_held_too(ranks, trainer):
    trainer.publish()
    ranks.apply(3)
    ranks.apply(4)
    assert ranks.held == 4


def test_memory_stays_where_it_was(ranks, module):
    before = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    for version in (1, 0, 3):
        ranks.apply(version)
    assert {name: tensor.data_ptr() for name, tensor in module.state_dict().items()} == before


# Staging.


def test_staging_touches_nothing(ranks, module, trainer):
    before = module.state()
    ranks.stage(2)
    assert ranks.one.staged.manifest.version == 2
    assert ranks.held == 0
    assert equal(module.state(), before)
    ranks.one.forget()
    ranks.stage(3)
    assert ranks.one.replaces_all
    assert equal(module.state(), before)


def test_an_anchor_is_staged_as_a_mapping_of_its_file_not_as_a_copy(trainer, module, open_ranks, monkeypatch):
    # Small files are read instead.
    monkeypatch.setattr("patchstore.read.download.SMALL_BYTES", 0)
    ranks = open_ranks(trainer, module)
    ranks.stage(0)
    staged = ranks.one.staged
    places = [tensor.data_ptr() for tensor in staged.anchor.values()]
    mapped = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(ranks.scratch) in line:
            low, high = (int(end, 16) for end in line.split()[0].split("-"))
            mapped.append(range(low, high))
    assert mapped
    assert all(any(place in each for each in mapped) for place in places)
    assert staged.computed.keys() == {"log_rate"}


def wait_for_prefetch(updater: Updater, version: int) -> None:
    while not updater.prefetch(version):
        pass


def test_prefetching_returns_while_the_version_is_being_fetched(ranks, updater, trainer, monkeypatch):
    gate, stage = threading.Event(), updater._prepare
    monkeypatch.setattr(updater, "_prepare", lambda *args: gate.wait(60) and stage(*args))
    assert not updater.prefetch(2)
    assert not updater.prefetch(2)
    # Another one has to wait its turn.
    assert not updater.prefetch(3)
    assert serves(ranks, trainer.history[0])
    gate.set()
    ranks.apply(2)
    assert serves(ranks, trainer.history[2])


def test_a_prefetched_version_is_not_fetched_again(ranks, updater, trainer, monkeypatch):
    wait_for_prefetch(updater, 2)
    assert updater.staged is None
    monkeypatch.setattr(updater, "_prepare", lambda *args: pytest.fail("fetched again"))
    ranks.apply(2)
    assert serves(ranks, trainer.history[2])


def test_another_version_than_was_prefetched_can_be_staged(ranks, updater, trainer):
    updater.prefetch(1)
    kept = updater._ahead
    ranks.apply(3)
    assert serves(ranks, trainer.history[3])
    assert (kept[0], ranks.spooled()) == (1, [])
    wait_for_prefetch(updater, 1)
    ranks.apply(1)
    assert serves(ranks, trainer.history[1])


def test_what_was_prefetched_for_other_weights_is_staged_anew(ranks, updater, module, trainer):
    wait_for_prefetch(updater, 3)
    kept = updater._ahead
    updater.mark_half_applied()
    module.norm.data.zero_()
    ranks.apply(3)
    assert serves(ranks, trainer.history[3])
    assert not updater.half_applied
    assert (kept[0], ranks.spooled()) == (3, [])


def test_a_failed_prefetch_is_said_by_stage_and_tried_again(ranks, updater, trainer):
    wait_for_prefetch(updater, 4)
    with pytest.raises(PatchstoreError):
        updater.stage(4)
    trainer.step()
    wait_for_prefetch(updater, 4)
    ranks.apply(4)
    assert serves(ranks, trainer.history[4])


def test_an_update_that_nobody_finished_gives_way_to_a_prefetch(ranks, updater, trainer):
    updater.stage(1)
    assert updater.prefetch(1)
    wait_for_prefetch(updater, 2)
    assert updater.staged is None
    ranks.apply(2)
    assert serves(ranks, trainer.history[2])


def test_a_failed_stage_leaves_nothing_staged(updater):
    updater.stage(1)
    with pytest.raises(PatchstoreError):
        updater.stage(9)
    assert updater.staged is None


def test_a_version_of_another_run_is_refused(updater, trainer):
    other = replace(history.read_manifest(trainer.store, 0), run_id="another")
    trainer.store.put(layout.manifest_key(0), manifests.to_json(other))
    updater.forget()
    with pytest.raises(StoreReplaced, match="of run another"):
        updater.stage(0)


@pytest.mark.parametrize("version", [1, 2])
def test_another_version_of_the_held_number_is_refused(updater, trainer, module, version):
    before, key = module.state(), layout.manifest_key(updater.held.version)
    stored = trainer.store.get(key)
    other = replace(history.read_manifest(trainer.store, updater.held.version), step=99)
    trainer.store.put(key, manifests.to_json(other))
    with pytest.raises((StoreReplaced, CorruptObject)) as error:
        updater.stage(version + updater.held.version - 1)
    assert error.type is (StoreReplaced if version == 1 else CorruptObject)
    assert all(torch.equal(before[name], now) for name, now in module.state().items())
    trainer.store.put(key, stored)
    updater.stage(2)
    assert updater.staged.manifest.version == 2


def test_parameters_that_moved_are_refused_before_and_after_staging(ranks, updater, module, trainer):
    ranks.stage(1)
    module.norm.data = module.norm.data.clone()
    with pytest.raises(UsageError, match=r"0\.norm"):
        updater.apply()
    updater.roll_back()
    with pytest.raises(UsageError, match=r"0\.norm"):
        updater.stage(1)
    assert serves(ranks, trainer.history[0])


@pytest.mark.parametrize(
    "end", ["accept", "drop", "roll_back", "close", "mark_half_applied", "prefetch of another"]
)
@pytest.mark.parametrize("version", [0, 2])
def test_payloads_are_on_disk_while_staged_and_no_longer(ranks, updater, version, end):
    if version == 0:
        updater.forget()
    ranks.stage(version)
    # A reference, so that it is not its end that frees the files.
    kept = updater.staged
    assert (kept.manifest.version, len(ranks.spooled()) > 0) == (version, True)
    if end in {"accept", "roll_back"}:
        ranks.write()
    if end == "prefetch of another":
        wait_for_prefetch(updater, 9)
    else:
        getattr(updater, end)()
    assert ranks.spooled() == []


def test_two_servers_of_a_host_download_each_payload_once(trainer, open_ranks, tmp_path, monkeypatch):
    keys = []
    download = host_cache.download

    def counting(store, wanted, path) -> None:
        keys.append(wanted.key)
        download(store, wanted, path)

    monkeypatch.setattr(host_cache, "download", counting)
    servers = [open_ranks(trainer, Fused(0, 2), Fused(1, 2)) for _ in range(2)]
    for each in servers:
        for updater in each.updaters:
            updater._cache = updater.weights._cache = HostCache(tmp_path / "shared")
            updater.forget()
    # What they read to find out which version they serve.
    keys.clear()
    for version in (0, 1, 3):
        # The second one lags: the first has let go of the version when it begins.
        for each in servers:
            each.apply(version)
            each.spooled()
            assert serves(each, trainer.history[version])
    assert len(keys) == len(set(keys))
    assert sorted(key.partition("/")[0] for key in keys) == ["anchors", *["deltas"] * 3, *["states"] * 3]


def test_what_was_prefetched_is_gone_from_disk_when_the_store_is_closed(ranks, updater):
    wait_for_prefetch(updater, 2)
    kept = updater._ahead
    assert (kept[0], len(ranks.spooled()) > 0) == (2, True)
    updater.close()
    assert ranks.spooled() == []


# What goes wrong while committing.


def test_a_commit_with_nothing_staged_is_a_mistake(ranks, updater, trainer):
    with pytest.raises(UsageError):
        updater.apply()
    updater.roll_back()
    assert serves(ranks, trainer.history[0])


def test_a_failed_write_is_rolled_back(ranks, updater, trainer):
    fail_scatters(ranks.live[0], 1)
    ranks.stage(1)
    with pytest.raises(LoadFailed):
        updater.apply()
    assert not serves(ranks, trainer.history[0])

    updater.roll_back()

    assert (ranks.held, updater.half_applied, updater.staged) == (0, False, None)
    assert serves(ranks, trainer.history[0])
    ranks.apply(2)
    assert serves(ranks, trainer.history[2])


def test_calculated_weights_are_rolled_back_when_their_loader_fails(ranks, updater, module, trainer):
    module.fails_after = "log_rate"
    ranks.stage(1)
    with pytest.raises(LoadFailed, match=r"log_rate.*made to fail"):
        updater.apply()
    assert not torch.equal(module.state()["rate"], loaded(trainer.history[0], module)["rate"])
    updater.roll_back()
    assert serves(ranks, trainer.history[0])
    # What they are calculated from is that of version 0 still.
    ranks.apply(2)
    assert serves(ranks, trainer.history[2])


@pytest.mark.parametrize("name", ["a", "cols", "rotary"])
def test_a_first_load_that_fails_leaves_the_weights_of_the_start(trainer, module, open_ranks, name):
    module.ab.data.fill_(float("nan"))
    module.count.fill_(-0.0)
    before = module.state()
    ranks = open_ranks(trainer, module)
    module.fails_after = name
    ranks.stage(0)
    with pytest.raises(LoadFailed):
        ranks.write()
    ranks.roll_back()
    assert (ranks.held, ranks.one.half_applied) == (None, False)
    assert equal(module.state(), before)


def test_a_failed_undo_is_half_applied_until_an_anchor_is_loaded(ranks, updater, module, trainer):
    fail_scatters(ranks.live[0], 2)
    ranks.stage(1)
    with pytest.raises(LoadFailed):
        updater.apply()
    with pytest.raises(HalfApplied):
        updater.roll_back()
    updater.mark_half_applied()
    assert (ranks.held, updater.half_applied) == (None, True)

    # Failing again does not mend it.
    fail_scatters(ranks.live[0], 1)
    ranks.stage(1)
    with pytest.raises(LoadFailed):
        updater.apply()
    updater.roll_back()
    assert (ranks.held, updater.half_applied) == (None, True)

    ranks.apply(2)
    assert (ranks.held, updater.half_applied) == (2, False)
    assert serves(ranks, trainer.history[2])


# The map.


def test_a_version_that_is_missing_names_the_store_that_the_server_has_open(trainer, open_ranks, module):
    ranks = open_ranks(trainer, module)
    with pytest.raises(VersionNotFound, match=f"{trainer.url} is the store that this server has open"):
        ranks.apply(77)


def test_a_name_that_the_model_lacks_is_refused(new_trainer, tensors, open_ranks, module):
    trainer = publish(new_trainer(tensors | {"more": torch.ones(2)}, dtype=None), 1)
    before = module.state()
    with pytest.raises(SchemaMismatch, match="'more'"):
        open_ranks(trainer, module)
    assert equal(module.state(), before)


def test_a_parameter_that_gets_nothing_is_refused(trainer, open_ranks, module):
    module.extra = _parameter(7)
    with pytest.raises(SchemaMismatch, match=r"'extra' \(7 elements\)"):
        open_ranks(trainer, module)


def test_a_parameter_that_gets_only_a_part_is_refused(trainer, open_ranks, module):
    module.ignored |= {"b"}
    with pytest.raises(SchemaMismatch, match=r"'ab' \(24 elements\)"):
        open_ranks(trainer, module)


@pytest.mark.parametrize("known", ["embed", "head"])
def test_tied_names_are_followed_under_whichever_the_loader_knows(trainer, open_ranks, module, known):
    module.ignored |= {"embed", "head"} - {known}
    ranks = open_ranks(trainer, module)
    for version in (0, 2):
        ranks.apply(version)
        assert serves(ranks, trainer.history[version])
    assert ranks.one.map.absent == {"rotary"}


class OtherWhenReal(Fused):
    """Loads otherwise than it shows when it is traced: the map is wrong."""

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        if not tensor.is_meta:
            name = {"a": "b", "b": "a"}.get(name, name)
            self.count.fill_(7)
        super().load_one(name, tensor)


def test_a_map_that_is_wrong_is_noticed_by_the_first_anchor(trainer, open_ranks):
    module = OtherWhenReal()
    ranks = open_ranks(trainer, module)
    before = module.state()
    ranks.stage(0)
    with pytest.raises(StateMismatch, match="a, b"):
        ranks.write()
    assert not equal(module.state(), before)
    ranks.roll_back()
    # Also where no name of the map leads.
    assert equal(module.state(), before)
    assert (ranks.held, ranks.one.weights.is_map_proved) == (None, False)


def test_weights_that_are_not_where_the_loader_puts_them_are_refused(ranks, updater, module, trainer):
    updater.check_map(trainer.history[0])
    module.ab.data.copy_(module.ab.data.roll(1, 0))
    with pytest.raises(UsageError, match=r"2 tensors .* such as 'a'"):
        updater.check_map(trainer.history[0])


class TakesAPart(Fused):
    """Has no use for the last rows of `cols`."""

    def __init__(self, rank: int = 0, num_ranks: int = 1) -> None:
        super().__init__(rank, num_ranks)
        self.cols = _parameter(4, 8 // num_ranks)

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        super().load_one(name, tensor[:4] if name == "cols" else tensor)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_names_that_are_served_in_part_are_listed_and_exact(trainer, open_ranks, num_ranks):
    ranks = open_ranks(trainer, *(TakesAPart(rank, num_ranks) for rank in range(num_ranks)))
    for version in (0, 1, 3):
        ranks.apply(version)
        assert serves(ranks, trainer.history[version])
    assert ranks.updaters[0].map.partial == {"cols"}
    assert ranks.updaters[0].sums(0, 10_000)["unproved"] == ["cols", "rotary"]
    # Their other parts still tell one version from another.
    assert open_ranks(trainer, *ranks.modules).held == 3


def test_what_is_served_in_part_tells_versions_apart_too(trainer, open_ranks):
    # Only in `cols`, of which no digest can be told, does version 4 differ from 3.
    trainer.tensors["cols"].neg_()
    trainer.publish()
    module = TakesAPart()
    module.load_weights((n, t.clone()) for n, t in trainer.history[3].items())
    ranks = open_ranks(trainer, module)
    assert ranks.held is None

    ranks.apply(4)
    assert serves(ranks, trainer.history[4])
    assert open_ranks(trainer, module).held == 4


# Which version is held.


def test_what_is_served_already_is_recognised_by_its_bits(trainer, module, open_ranks):
    module.load_weights((n, t.clone()) for n, t in trainer.history[1].items())
    ranks = open_ranks(trainer, module)
    assert (ranks.held, ranks.one.weights.is_map_proved) == (1, True)
    assert serves(ranks, trainer.history[1])
    # Also what is calculated, of which the live weights do not say from what.
    ranks.apply(3)
    assert serves(ranks, trainer.history[3])


@pytest.mark.parametrize("name", ["norm", "rate", "bias", "ab"])
def test_one_other_bit_is_not_the_version_and_is_left_alone(trainer, module, open_ranks, name):
    module.load_weights((n, t.clone()) for n, t in trainer.history[1].items())
    # Of `bias`, float32, no checkpoint in bfloat16 has this bit.
    bits(module.state_dict()[name])[2] ^= 1
    before = module.state()
    ranks = open_ranks(trainer, module)
    assert (ranks.held, ranks.one.weights.is_map_proved) == (None, False)
    assert equal(module.state(), before)
    ranks.apply(2)
    assert serves(ranks, trainer.history[2])


def test_versions_before_the_nearest_anchor_are_not_searched(new_trainer, tensors, open_ranks):
    often = new_trainer(tensors, dtype=None, anchor_every=2)
    for _ in range(5):
        often.step(density=1.0)
    for version, found in ((4, 4), (0, None)):
        module = Fused()
        module.load_weights((n, t.clone()) for n, t in often.history[version].items())
        assert open_ranks(often, module).held == found


def test_an_element_of_bool_that_torch_does_not_have_is_refused_where_single_tensors_are_read(tmp_path):
    objects = surgery.load(Path(__file__).parents[1] / "golden" / "v1-gap")
    case = next(case for case in bad_buckets.CASES if case.name == "an element of BOOL is 2 in an anchor")
    case.change(objects)
    store = surgery.store_of(objects)
    schema = history.read_header(store).schema
    cache = HostCache(tmp_path / "cache")
    recorded = read_sums(store, schema, history.read_manifest(store, 0))
    read_tensors(store, schema, 0, ["u8.weight"], recorded, cache)
    with pytest.raises(CorruptObject):
        read_tensors(store, schema, 0, ["bool.weight"], recorded, cache)


def test_a_truncated_checkpoint_file_is_named(tmp_path, trainer):
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    with pytest.raises(CorruptObject, match=r"model\.safetensors"):
        read_folder(tmp_path, _schema(trainer))


def test_a_folder_of_other_tensors_is_not_read(model, trainer, weights, new_trainer):
    assert read_folder(model, _schema(trainer)) == {}
    whole = new_trainer(weights)
    whole.publish()
    found = read_folder(model, _schema(whole))
    assert found.keys() == weights.keys()
    assert all(torch.equal(bits(found[name]), bits(weights[name])) for name in weights)


def _schema(trainer: Trainer) -> Schema:
    return history.read_header(trainer.store).schema


# What is proved.


@pytest.mark.parametrize("name", ["norm", "cols", "log_rate"])
@pytest.mark.parametrize("held", [0, None])
def test_a_version_that_is_not_what_its_manifest_says_is_refused(ranks, updater, trainer, name, held):
    if held is None:
        updater.forget()
    lie(trainer.store, 1, name)
    with pytest.raises(StateMismatch, match=name):
        ranks.apply(1)
    updater.roll_back()
    assert serves(ranks, trainer.history[0])


def test_what_no_rank_serves_cannot_be_proved_and_is_no_obstacle(ranks, trainer):
    lie(trainer.store, 1, "rotary")
    ranks.apply(1)
    assert serves(ranks, trainer.history[1])


def test_weights_that_something_else_wrote_to_are_noticed(ranks, module, trainer):
    ranks.check_served()
    for tensor in trainer.tensors.values():
        tensor.neg_()
    trainer.publish()
    bits(module.cols)[5] ^= 1

    with pytest.raises(StateMismatch, match="cols"):
        ranks.stage(4)
    with pytest.raises(StateMismatch, match=r"version 0, such as 'cols'"):
        ranks.check_served()

    ranks.one.mark_half_applied()
    ranks.apply(4)
    assert serves(ranks, trainer.history[4])


def test_a_write_after_staging_is_noticed_before_anything_is_written(ranks, updater, module, trainer):
    for tensor in trainer.tensors.values():
        tensor.neg_()
    trainer.publish()
    ranks.stage(4)
    bits(module.cols)[5] ^= 1
    before = module.state()

    with pytest.raises(StateMismatch, match="'cols' after this version was staged"):
        updater.apply()
    updater.roll_back()

    assert equal(module.state(), before)


def test_sums_come_in_parts_that_make_up_the_whole(pair, trainer):
    pair.apply(1)
    recorded = read_sums(trainer.store, _schema(trainer), history.read_manifest(trainer.store, 1))
    for updater in pair.updaters:
        whole = updater.sums(0, 10_000)
        assert (whole["held"], whole["num_applied"], whole["next"]) == (1, 2, None)
        assert (whole["computed"], whole["unproved"]) == (["log_rate"], ["rotary"])
        found, at, num_parts = {}, 0, 0
        while at is not None:
            part = updater.sums(at, 20)
            num_parts += 1
            assert not found.keys() & part["sums"].keys()
            found |= part["sums"]
            at = part["next"]
        assert (found, num_parts > 2) == (whole["sums"], True)
        assert found.keys() == recorded.keys() - {"log_rate", "rotary"}
        # A whole tensor's are those that were published.
        ((_, norm),) = found["norm"]
        assert norm == recorded["norm"].hex()
    one, other = (updater.sums(0, 10_000)["sums"] for updater in pair.updaters)
    assert (one["norm"] == other["norm"], one["a"] == other["a"]) == (True, False)


def test_nothing_is_read_from_the_store_while_generation_waits(ranks, updater, trainer):
    watched = FaultyStore(updater.store)
    for version in (1, 0):
        updater.store = updater.weights._store = watched
        updater.stage(version)
        assert any(key.startswith("states/") for _, key in watched.calls)
        watched.calls.clear()
        updater.verify([updater.changes()])
        ranks.write()
        updater.accept()
        ranks.check_served()
        assert watched.calls == []
        # The next one starts from an anchor.
        updater.forget()
    assert serves(ranks, trainer.history[0])


def test_a_version_is_found_by_its_total_where_all_names_are_known(trainer, tmp_path):
    schema, reads = _schema(trainer), FaultyStore(trainer.store)
    cache = HostCache(tmp_path / "sums")
    for version in (3, 2):
        sums = read_sums(trainer.store, schema, history.read_manifest(trainer.store, version))
        reads.calls.clear()
        assert find_version(reads, schema, sums, cache) == version
        assert find_version(reads, schema, sums | {"norm": Sums(1, 2)}, cache) is None
        assert not [key for _, key in reads.calls if key.startswith("states/")]
        # With some names alone, each candidate's sums say.
        del sums["rotary"]
        assert find_version(reads, schema, sums, cache) == version
        assert find_version(reads, schema, sums | {"norm": Sums(1, 2)}, cache) is None
    assert find_version(reads, schema, {}, cache) is None


# A draft model.


class Draft(torch.nn.Module):
    """Shares the target's embedding, although the checkpoint has one for it too."""

    def __init__(self, target: Fused) -> None:
        super().__init__()
        self.embed = target.embed
        self.own = _parameter(3)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        targets = {"embed": self.embed, "layer.embed": self.embed, "layer.own": self.own}
        for name, tensor in weights:
            if name in targets:
                targets[name].data.copy_(tensor)


def test_a_draft_model_is_updated_with_its_target_and_leaves_what_they_share_to_it(
    new_trainer, tensors, open_ranks
):
    more = {"layer.embed": torch.ones(8, 4).bfloat16(), "layer.own": torch.ones(3).bfloat16()}
    trainer = publish(new_trainer(tensors | more, dtype=None, anchor_every=2), 4)
    module = Fused()
    module.ignored |= more.keys()
    draft = Draft(module)
    module.drafts = (draft,)
    ranks = open_ranks(trainer, module)
    # The first by loaders, the others through the map: an anchor and deltas.
    for version in (0, 1, 2, 3):
        ranks.apply(version)
        assert serves(ranks, trainer.history[version])
        assert torch.equal(bits(draft.own), bits(trainer.history[version]["layer.own"]))
        ranks.check_served()
    assert ranks.one.map.absent == {"layer.embed", "rotary"}
    fingerprint = ranks.live[0].fingerprint()
    assert fingerprint["draft.embed"] == fingerprint["embed"]
    assert fingerprint.keys() >= {"draft.own", "norm"}

    ranks.stage(1)
    ranks.write()
    ranks.roll_back()
    assert serves(ranks, trainer.history[3])
    assert torch.equal(bits(draft.own), bits(trainer.history[3]["layer.own"]))
    assert open_ranks(trainer, module).held == 3


# Two ranks.


def test_two_ranks_hold_together_what_neither_holds_alone(pair):
    for each in pair.updaters:
        assert each.map.proved == {"a", "b", "bias", "cols", "embed", "norm"}
        assert each.find([each.claims()]) is None
    assert pair.updaters[0].find([each.claims() for each in pair.updaters]) == 0


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["norm", "cols"])
def test_one_rank_that_differs_is_noticed_by_both(pair, trainer, open_ranks, rank, name):
    # The one is a copy of what the other rank has too, the other a slice that only this rank has.
    for tensor in trainer.tensors.values():
        tensor.neg_()
    trainer.publish()
    bits(getattr(pair.modules[rank], name))[0] ^= 1

    for each in pair.updaters:
        each.stage(4)
    changes = [each.changes() for each in pair.updaters]
    claims = [each.claims() for each in pair.updaters]
    for each in pair.updaters:
        with pytest.raises(StateMismatch, match=name):
            each.verify(changes)
        with pytest.raises(StateMismatch, match=name):
            each.check_served(claims)
        assert each.find(claims) is None
        each.mark_half_applied()
    assert open_ranks(trainer, *pair.modules).held is None
    pair.apply(4)
    assert serves(pair, trainer.history[4])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_in_one_rank_is_undone_in_both(pair, trainer, rank):
    pair.stage(1)
    fail_scatters(pair.live[rank], 1)
    with suppress(LoadFailed):
        pair.updaters[0].apply()
    with suppress(LoadFailed):
        pair.updaters[1].apply()
    assert not any(equal(each.state(), loaded(trainer.history[0], each)) for each in pair.modules)
    pair.roll_back()
    assert (pair.held, pair.spooled()) == (0, [])
    assert serves(pair, trainer.history[0])
    pair.apply(3)
    assert serves(pair, trainer.history[3])


class Stage(Fused):
    """The second of two stages of a pipeline: only it has the rate, and the first calculates the norm."""

    def __init__(self, rank: int = 0, num_ranks: int = 1) -> None:
        super().__init__(rank, num_ranks)
        self.ignored |= {"log_rate"} if rank == 0 else set()

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        super().load_one(name, tensor + 1 if name == "norm" and self.rank == 0 else tensor)


def test_names_that_one_rank_calculates_are_updated_and_proved_in_all(trainer, open_ranks):
    ranks = open_ranks(trainer, Stage(0, 2), Stage(1, 2))
    for version in (0, 1, 3):
        ranks.apply(version)
        assert serves(ranks, trainer.history[version])
        ranks.check_served()
    assert [each.map.computed for each in ranks.updaters] == [{"log_rate", "norm"}] * 2
    assert open_ranks(trainer, *ranks.modules).held == 3

    trainer.step(density=1.0)
    lie(trainer.store, 4, "log_rate")
    for each in ranks.updaters:
        each.stage(4)
    changes = [each.changes() for each in ranks.updaters]
    for each in ranks.updaters:
        with pytest.raises(StateMismatch, match="log_rate"):
            each.verify(changes)


def test_ranks_that_fetched_other_values_of_a_calculated_name_are_refused(pair):
    for each in pair.updaters:
        each.stage(1)
    changes = [each.changes() for each in pair.updaters]
    pair.updaters[1].staged.after["log_rate"] = pair.updaters[1].staged.before["log_rate"]
    with pytest.raises(StateMismatch, match=r"copies of 'log_rate'"):
        pair.updaters[0].verify([changes[0], pair.updaters[1].changes()])
