"""Real loads beside a trace: everything that the trace says must be what the loads do, bit for bit."""

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from patchstore.bucket.records import Schema
from patchstore.tensors.bits import bits, spec_of
from vllm_plugin.map.provenance import Trace
from vllm_plugin.map.regions import locate, positions
from vllm_plugin.map.trace import trace

Weights = Mapping[str, torch.Tensor]
Loader = Callable[[torch.nn.Module, Iterator[tuple[str, torch.Tensor]]], object]

CPU = torch.device("cpu")
KINDS = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.int64: torch.int64,
    torch.uint8: torch.uint8,
}


def random_bits(shape: Iterable[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bit patterns, NaNs and infinities among them."""
    generator = torch.Generator().manual_seed(seed)
    kind = KINDS[dtype]
    limits = torch.iinfo(kind)
    return torch.randint(limits.min, limits.max, tuple(shape), dtype=kind, generator=generator).view(dtype)


def schema_of(weights: Weights, tied: Mapping[str, str] | None = None) -> Schema:
    return Schema(tensors=tuple(spec_of(name, weights[name]) for name in sorted(weights)), tied=tied or {})


def renewed(weights: Weights, names: Iterable[str], seed: int) -> dict[str, torch.Tensor]:
    """The same checkpoint, with other elements in some of its tensors."""
    chosen = set(names)
    return {
        name: random_bits(tensor.shape, tensor.dtype, seed + i) if name in chosen else tensor
        for i, (name, tensor) in enumerate(sorted(weights.items()))
    }


class Scene:
    """A model, its loader and a checkpoint."""

    def __init__(
        self,
        model: torch.nn.Module,
        load: Loader,
        weights: Weights,
        tied: Mapping[str, str] | None = None,
    ) -> None:
        self.model, self.load, self.weights, self.tied = model, load, weights, tied or {}
        before = self.state()
        self.trace = trace([model], schema_of(weights, tied), load)
        assert same(before, self.state()), "the trace wrote to the model"

    def state(self) -> list[torch.Tensor]:
        return [bits(tensor).clone() for tensor in self._memories()]

    def _memories(self) -> list[torch.Tensor]:
        """All memory of the model, each storage once, in the order of a trace's runtimes."""
        found: list[torch.Tensor] = []
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            storage = tensor.untyped_storage()
            whole = torch.empty(0, dtype=tensor.dtype).set_(storage)
            if not any(whole.is_set_to(each) for each in found):
                found.append(whole)
        return found

    def reset(self, state: list[torch.Tensor]) -> None:
        for memory, old in zip(self._memories(), state, strict=True):
            bits(memory).copy_(old)

    def loaded(self, weights: Weights, over: list[torch.Tensor]) -> list[torch.Tensor]:
        """What the real loader makes of a checkpoint, on top of a state."""
        self.reset(over)
        every = {
            **weights,
            **{name: weights[stored] for name, stored in self.tied.items() if stored in weights},
        }
        with torch.no_grad():
            self.load(self.model, iter([(name, tensor.clone()) for name, tensor in sorted(every.items())]))
        return self.state()

    def patched(self, state: list[torch.Tensor], old: Weights, new: Weights) -> list[torch.Tensor]:
        """A state after only the elements that differ went where the trace says."""
        state = [memory.clone() for memory in state]
        for name, found in self.trace.regions.items():
            now = bits(new[name])
            indices = (bits(old[name]) != now).nonzero().flatten()
            for index, region in found:
                inside, mask, target = locate(region, indices)
                at = indices[inside] if mask is None else indices[inside][mask]
                state[index][target] = widened(now[at], state[index])
        return state


def widened(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values if values.element_size() == like.element_size() else values.to(torch.int32) << 16


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def assert_exact(scene: Scene) -> None:
    """Everything that a trace says is what real loads do."""
    found, weights = scene.trace, scene.weights
    blank = scene.state()
    loaded = scene.loaded(weights, blank)
    explained = [torch.zeros(len(memory), dtype=torch.bool) for memory in loaded]
    for name, regions in found.regions.items():
        for index, region in regions:
            source, target = positions(region.source, CPU), positions(region.target, CPU)
            assert torch.equal(loaded[index][target], widened(bits(weights[name])[source], loaded[index])), (
                name
            )
            assert not explained[index][target].any(), f"{name} is written over"
            explained[index][target] = True
    for _, indices in found.computed:
        for index in indices:
            explained[index][:] = True
    # What nothing explains does not depend on the checkpoint, and unread names change nothing.
    other = scene.loaded(renewed(weights, weights, 1000), blank)
    for now, then, known in zip(loaded, other, explained, strict=True):
        assert torch.equal(now[~known], then[~known])
    listed = [name for names, _ in found.computed for name in names]
    unread = weights.keys() - {*found.regions, *listed}
    assert same(scene.loaded(renewed(weights, unread, 2000), blank), loaded)
    assert_uncovered(scene, blank, loaded)
    # Mapped names: patches alone. Computed ones: the loader, given no others.
    target = renewed(weights, found.regions, 3000)
    target = {
        name: torch.where(
            random_bits(new.shape, torch.uint8, 7) > 128,
            new.view(KINDS[new.dtype]),
            weights[name].view(KINDS[new.dtype]),
        ).view(new.dtype)
        for name, new in target.items()
    }
    assert same(scene.patched(loaded, weights, target), scene.loaded(target, blank))
    for names, indices in found.computed:
        target = renewed(weights, names, 4000)
        alone = scene.loaded({name: target[name] for name in names}, loaded)
        assert same(alone, scene.loaded(target, blank)), f"{sorted(names)} need others"
        for i, (now, then) in enumerate(zip(alone, loaded, strict=True)):
            assert i in indices or torch.equal(now, then)
    assert sorted([*found.regions, *listed, *unread]) == sorted(weights)
    scene.reset(blank)


def assert_uncovered(scene: Scene, blank: list[torch.Tensor], loaded: list[torch.Tensor]) -> None:
    """Elements are left as they were exactly where the trace says that nothing reaches them."""
    buffers = [name for name, _ in scene.model.named_buffers()]
    flipped = [
        memory if set(runtime.names) & set(buffers) else ~memory
        for runtime, memory in zip(scene.trace.runtimes, blank, strict=True)
    ]
    again = scene.loaded(scene.weights, flipped)
    for name, parameter in scene.model.named_parameters(remove_duplicate=False):
        index = next(i for i, runtime in enumerate(scene.trace.runtimes) if name in runtime.names)
        left = (loaded[index] != again[index]).as_strided(
            parameter.shape, parameter.stride(), parameter.storage_offset()
        )
        assert int(left.sum()) == scene.trace.uncovered.get(name, 0), name


def model_of(**shapes: tuple[int, ...]) -> torch.nn.Module:
    model = torch.nn.Module()
    for i, (name, shape) in enumerate(shapes.items()):
        setattr(model, name, torch.nn.Parameter(random_bits(shape, torch.float32, i), requires_grad=False))
    return model


def checkpoint(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name: random_bits(shape, torch.float32, 50 + i) for i, (name, shape) in enumerate(shapes.items())}


def check(
    model: torch.nn.Module,
    write: Callable[..., object],
    weights: Weights,
    tied: Mapping[str, str] | None = None,
) -> Trace:
    """Trace a loader that calls `write(model, name, tensor)` for each tensor; compare it with real loads."""

    def load(model: torch.nn.Module, given: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in given:
            write(model, name, tensor)

    scene = Scene(model, load, weights, tied)
    assert_exact(scene)
    return scene.trace


def assert_copied(found: Trace, *names: str) -> None:
    assert not found.computed
    assert sorted(found.regions) == sorted(names)


def makes_anew(model: torch.nn.Module, given: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Load as vLLM does the bias of an output layer, in its backend for models of transformers."""
    for _, tensor in given:
        model.bias = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        model.bias.data[:3].copy_(tensor)
        model.bias.data[3:].fill_(0)
