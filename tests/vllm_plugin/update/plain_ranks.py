"""Ranks of a server without a server: a plain module with a loader, and updaters that are driven in turns."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from halves import half_of
from mapped import served
from trainer import Trainer

from patchstore.bucket import history
from patchstore.bucket.records import Schema
from patchstore.errors import LoadFailed
from patchstore.read.host_cache import HostCache
from patchstore.stores import open_store
from patchstore.tensors.bits import bits
from vllm_plugin.live.update import Updater
from vllm_plugin.live.weights import LiveWeights, StagedWrite
from vllm_plugin.map.mapping import share

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
        self.ab = parameter(8 // num_ranks, 6)
        self.bias = parameter(4, dtype=torch.float32)
        self.cols = parameter(6, 8 // num_ranks)
        self.embed = parameter(8, 4)
        self.norm = parameter(5)
        self.register_buffer("rate", torch.zeros(6))
        self.register_buffer("count", torch.zeros(2))
        self.drafts: tuple[torch.nn.Module, ...] = ()
        """Draft models that are loaded from the same checkpoint."""
        self.ignored = {"rotary"}
        self.fails_after: str | None = None
        """The next load fails when this name was loaded."""

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


def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


class Ranks:
    """Some ranks of one server, driven in turns as the engine drives them."""

    kind: type[LiveWeights]

    def __init__(self, url: str, modules: Iterable[Fused], scratch: Path) -> None:
        self.modules = list(modules)
        self.scratch = scratch
        self.live = [self.kind(served(each, *each.drafts)) for each in self.modules]
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
        traces = [each.weights.trace() for each in self.updaters]
        shares = [share(traced) for traced in traces]
        for each, traced in zip(self.updaters, traces, strict=True):
            each.weights.follow(traced, shares)
        slice_sums = [each.weights.slice_sums() for each in self.updaters]
        found = [each.weights.find(slice_sums) for each in self.updaters]
        if not all([each.adopt(each.weights.read(found[0])) for each in self.updaters]):  # noqa: C419  # All have to try.
            for each in self.updaters:
                each.forget()

    def stage(self, version: int) -> None:
        for each in self.updaters:
            each.stage(version)
        changes = [each.weights.changes(each.staged) for each in self.updaters]
        for each in self.updaters:
            each.verify(changes)

    def write(self) -> None:
        for each in self.updaters:
            each.apply()
        if self.updaters[0].staged.plan.anchor is not None:
            slice_sums = [each.weights.slice_sums() for each in self.updaters]
            for each in self.updaters:
                each.weights.verify_written(each.staged, slice_sums)

    def apply(self, version: int) -> None:
        self.stage(version)
        self.write()
        for each in self.updaters:
            each.accept()

    def roll_back(self) -> None:
        for each in self.updaters:
            each.roll_back()

    def check_served(self) -> None:
        slice_sums = [each.weights.slice_sums() for each in self.updaters]
        for each in self.updaters:
            each.weights.check_served(slice_sums, each.version)

    def spooled(self) -> list[Path]:
        # What an accepted update needed is removed behind its back.
        for each in self.updaters:
            try:
                each.background.submit(int).result()
            except RuntimeError:  # Closed.
                each.background.shutdown()
        return list(self.scratch.iterdir())

    def close(self) -> None:
        for each in self.updaters:
            each.close()


def publish(trainer: Trainer, num_versions: int) -> Trainer:
    for _ in range(num_versions):
        trainer.step(density=0.5)
    return trainer


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

    def failing(change: StagedWrite) -> None:
        nonlocal left
        if left == 0:
            return scatter(change)
        left -= 1
        scatter(half_of(change))
        raise LoadFailed("made to fail")

    live.scatter = failing


def schema_of(trainer: Trainer) -> Schema:
    return history.read_header(trainer.store).schema
