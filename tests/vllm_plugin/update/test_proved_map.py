"""Before any version is held, the models' loaders prove the map; then versions are written through it."""

from collections.abc import Iterable
from threading import Event

import pytest
import torch
from plain_ranks import Fused, equal, loaded, parameter, serves

from patchstore.bucket.records import Schema, TensorSpec
from patchstore.errors import DeviceMemoryShort, HalfApplied, HostError, LoadFailed, UsageError
from patchstore.tensors.bits import bits
from vllm_plugin.live import rank_weights
from vllm_plugin.live.random_checkpoint import RandomCheckpoint
from vllm_plugin.live.weights import LiveWeights


class Counting(Fused):
    """Remembers what its loader was given, other than for a trace."""

    def __init__(self, rank: int = 0, num_ranks: int = 1) -> None:
        super().__init__(rank, num_ranks)
        self.loaded: list[str] = []

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        if not tensor.is_meta:
            self.loaded.append(name)
        super().load_one(name, tensor)


class Swapped(Counting):
    """Loads otherwise than it shows when it is traced: the map is wrong."""

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        if not tensor.is_meta:
            name = {"a": "b", "b": "a"}.get(name, name)
            self.count += 1
        super().load_one(name, tensor)


class Padded(Counting):
    """Has rows for which no checkpoint has numbers: its loader makes them zeros, as vLLM's do."""

    def __init__(self, rank: int = 0, num_ranks: int = 1) -> None:
        super().__init__(rank, num_ranks)
        self.embed = parameter(11, 4)

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        if name in {"embed", "head"}:
            self.embed.data[8:].fill_(0)
            self.embed.data[:8].copy_(tensor)
        else:
            super().load_one(name, tensor)


def as_dummies(module: Fused) -> Fused:
    """Give a module any bits, as vLLM does with --load-format dummy, NaN among them."""
    for _, tensor in (*module.named_parameters(), *module.named_buffers()):
        bits(tensor).random_()
    return module


def test_a_map_that_is_wrong_is_refused_and_the_weights_stay(trainer, open_ranks):
    module = as_dummies(Swapped())
    before = module.state()
    with pytest.raises(UsageError, match="puts 2 tensors elsewhere than when it was traced, such as 'a'"):
        open_ranks(trainer, module)
    # Also where no name of the map leads.
    assert equal(module.state(), before)


def test_anchors_are_written_through_the_map(trainer, open_ranks):
    modules = [as_dummies(Counting(0, 2)), as_dummies(Counting(1, 2))]
    before = [module.state() for module in modules]
    ranks = open_ranks(trainer, *modules)
    assert ranks.held is None
    assert all(equal(module.state(), was) for module, was in zip(modules, before, strict=True))
    for module in modules:
        assert {"a", "b", "cols", "log_rate", "norm"} <= set(module.loaded)
        module.loaded.clear()
    ranks.stage(2)
    ranks.write()
    for module in modules:
        assert torch.equal(module.state()["ab"], loaded(trainer.history[2], module)["ab"])
    # What is calculated has no place to be written to.
    assert all(set(module.loaded) == {"log_rate"} for module in modules)
    ranks.roll_back()
    assert all(equal(module.state(), was) for module, was in zip(modules, before, strict=True))
    ranks.apply(3)
    ranks.check_served()


def test_what_a_loader_itself_chooses_is_served_from_the_proof_on(trainer, open_ranks):
    module = as_dummies(Padded())
    before = module.state()
    ranks = open_ranks(trainer, module)
    assert torch.equal(module.state()["embed"][:32], before["embed"][:32])
    assert not module.embed.data[8:].any()
    module.count.zero_()
    ranks.apply(1)
    assert serves(ranks, trainer.history[1])


class Mixed(Padded):
    """Has a memory of which a part is calculated, one is copied, and one is padding."""

    def __init__(self, rank: int = 0, num_ranks: int = 1) -> None:
        super().__init__(rank, num_ranks)
        self.mixed = parameter(14, dtype=torch.float32)

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        super().load_one(name, tensor)
        if name == "log_rate":
            self.mixed.data[:6].copy_(-torch.exp(tensor))
        elif name == "norm":
            self.mixed.data[6:].fill_(0)
            self.mixed.data[6:11].copy_(tensor)


class Around(Counting):
    """Sets constants before the first name and after the last one, and calculates from all names."""

    def __init__(self, rank: int = 0, num_ranks: int = 1) -> None:
        super().__init__(rank, num_ranks)
        self.around = parameter(4)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.around.data[:2].fill_(1)
        super().load_weights((name, -tensor) for name, tensor in weights)
        self.around.data[2:].fill_(2)


@pytest.mark.parametrize("make", [Mixed, Around])
def test_constants_are_served_whatever_else_is_in_their_memory(make, trainer, open_ranks):
    module = as_dummies(make())
    ranks = open_ranks(trainer, module)
    if make is Mixed:
        assert not module.mixed.data[11:].any() and not module.embed.data[8:].any()
    else:
        assert module.around.data.tolist() == [1, 1, 2, 2]
    module.count.zero_()
    ranks.apply(1)
    assert serves(ranks, trainer.history[1])


class Scaled(Counting):
    """Keeps what it is given for a name, in the trace alone of no use, where no tensor belongs."""

    def __init__(self, rank: int = 0, num_ranks: int = 1) -> None:
        super().__init__(rank, num_ranks)
        self.register_buffer("scale", torch.ones(3))
        self.plain, self.label = torch.ones(3), "as started"

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        super().load_one(name, tensor)
        if not tensor.is_meta and name in {"norm", "rotary"}:
            self.scale.copy_(tensor.flatten()[:3])
            self.plain.copy_(tensor.flatten()[:3])
            self.label = "loaded"


@pytest.mark.parametrize("fails", [False, True])
def test_what_no_tensor_belongs_to_is_as_before(trainer, open_ranks, fails):
    module = as_dummies(Scaled())
    before = module.state()
    if fails:
        fails_once(module, "norm")
        with pytest.raises(LoadFailed):
            open_ranks(trainer, module)
    else:
        open_ranks(trainer, module)
        # Nothing is made of it.
        assert "rotary" not in module.loaded
    assert equal(module.state(), before)
    assert module.plain.tolist() == [1, 1, 1]
    assert module.label == ("as started" if fails else "loaded")


def test_a_number_that_a_loader_keeps_is_refused(trainer, open_ranks):
    class Keeps(Fused):
        kept = 7

        def load_one(self, name: str, tensor: torch.Tensor) -> None:
            super().load_one(name, tensor)
            if name == "norm":
                self.kept = max(0.5, tensor[0].item())

    with pytest.raises(UsageError, match="or another value, instead of writing to them, such as 'kept'"):
        open_ranks(trainer, Keeps())


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F16", "F8_E4M3", "I64"])
def test_numbers_are_the_same_wherever_they_are_made(dtype):
    """Loaders run with another default dtype, in which tables of numbers may be made, or not."""
    specs = {"a": (7, 100), "b": ()}
    schema = Schema(tensors=tuple(TensorSpec(name=n, dtype=dtype, shape=shape) for n, shape in specs.items()))
    expected = RandomCheckpoint(schema).tensor("a", torch.device("cpu"))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        again = RandomCheckpoint(schema)
        assert torch.equal(bits(again.tensor("a", torch.device("cpu"))), bits(expected))
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(bits(again.part("a", 650, 700, torch.device("cpu"))), bits(expected)[650:])
    assert not torch.equal(bits(again.tensor("b", torch.device("cpu"))), bits(expected)[:1])


def test_a_known_version_needs_no_loader(trainer, open_ranks):
    module = Counting()
    module.load_weights((name, tensor.clone()) for name, tensor in trainer.history[1].items())
    module.loaded.clear()
    assert open_ranks(trainer, module).held == 1
    # It is calculated again.
    assert module.loaded == ["log_rate"]


@pytest.mark.parametrize("name", ["a", "cols", "norm"])
def test_a_loader_that_fails_leaves_the_weights_and_may_be_asked_again(trainer, open_ranks, name):
    module = as_dummies(Counting())
    before = module.state()
    fails_once(module, name)
    with pytest.raises(LoadFailed, match="made to fail"):
        open_ranks(trainer, module)
    assert equal(module.state(), before)
    module.count.zero_()
    ranks = open_ranks(trainer, module)
    ranks.apply(0)
    assert serves(ranks, trainer.history[0])


def fails_once(module: Counting, after: str) -> None:
    """Have the next load with elements fail when it has loaded a name."""
    load_weights, has_failed = module.load_weights, False

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        nonlocal has_failed
        for name, tensor in weights:
            load_weights([(name, tensor)])
            if name == after and not tensor.is_meta and not has_failed:
                has_failed = True
                raise OSError("made to fail")

    module.load_weights = load


def test_what_cannot_be_put_back_is_half_applied(trainer, open_ranks, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("made to fail")

    for kind in (LiveWeights, *LiveWeights.__subclasses__()):
        monkeypatch.setattr(kind, "restore", fail)
    with pytest.raises(HalfApplied, match="loaded to be compared could not be put back: made to fail"):
        open_ranks(trainer, Counting())


def test_a_host_without_memory_for_a_copy_of_the_weights_is_told_so(trainer, open_ranks, monkeypatch):
    module = as_dummies(Counting())
    before = module.state()
    for kind in (LiveWeights, *LiveWeights.__subclasses__()):
        monkeypatch.setattr(kind, "save", lambda *_: torch.empty(2**60))
    with pytest.raises(HostError, match="each weight goes failed on this host: Cannot allocate"):
        open_ranks(trainer, module)
    assert equal(module.state(), before)


def test_a_device_without_memory_to_compare_is_told_so(trainer, open_ranks, monkeypatch):
    module = as_dummies(Counting())
    before = module.state()

    part, handed = RandomCheckpoint.part, len({*trainer.tensors} - {"rotary"})

    def later(*args, **options):
        """Parts are made to be handed to the loader, and then to be compared."""
        nonlocal handed
        handed -= 1
        if handed < 0:
            raise torch.OutOfMemoryError("no room for 16 MiB")
        return part(*args, **options)

    monkeypatch.setattr(RandomCheckpoint, "part", later)
    with pytest.raises(DeviceMemoryShort, match="start vllm with a lower --gpu-memory-utilization"):
        open_ranks(trainer, module)
    assert equal(module.state(), before)


def test_the_weights_are_saved_while_an_anchor_is_fetched(trainer, open_ranks, monkeypatch):
    ranks = open_ranks(trainer, Counting())
    saved, save, open_ = Event(), ranks.one.weights.live.save, rank_weights.open_anchor

    def saving(*args):
        found = save(*args)
        saved.set()
        return found

    def opening(*args):
        assert saved.wait(60)
        return open_(*args)

    monkeypatch.setattr(ranks.one.weights.live, "save", saving)
    monkeypatch.setattr(rank_weights, "open_anchor", opening)
    ranks.apply(2)
    assert serves(ranks, trainer.history[2])


def test_weights_that_cannot_be_saved_fail_the_update_and_stay(trainer, open_ranks, monkeypatch):
    module = Counting()
    ranks = open_ranks(trainer, module)
    before = module.state()
    with monkeypatch.context() as patched:
        patched.setattr(ranks.one.weights.live, "save", lambda *_: torch.empty(2**60))
        with pytest.raises(HostError, match="memory"):
            ranks.stage(2)
    assert equal(module.state(), before)
    assert ranks.spooled() == []
    ranks.apply(2)
    assert serves(ranks, trainer.history[2])
