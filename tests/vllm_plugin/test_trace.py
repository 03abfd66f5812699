"""Traces against what real loads do, bit for bit: random loaders, and those that models are known to have."""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import pytest
import torch
from torch.nn import functional

from patchstore.errors import SchemaMismatch, UsageError
from patchstore.format.records import Schema
from patchstore.tensors.bits import bits, spec_of
from vllm_plugin.regions import locate, positions
from vllm_plugin.trace import Trace, same_parameters, trace

pytestmark = pytest.mark.vllm

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
        found = {}
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            storage = tensor.untyped_storage()
            whole = torch.empty(0, dtype=tensor.dtype).set_(storage)
            found.setdefault(storage._cdata, whole)
        return list(found.values())

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
    assert same(scene.loaded(renewed(weights, found.unread, 2000), blank), loaded)
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
    listed = [name for names, _ in found.computed for name in names]
    assert sorted([*found.regions, *listed, *found.unread]) == sorted(weights)
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


# Random loaders. One seed makes the same loader for real and for meta tensors, since it asks only for shapes.


class RandomLoader:
    """Steps that each move some tensors into one parameter, as soon as the last of them was read."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.model = torch.nn.Module()
        self.weights = {
            f"w{i}": random_bits(
                [self.rng.choice([1, 2, 3, 4, 6, 8]) for _ in range(self.rng.randint(0, 4))],
                self.rng.choice([torch.float32, torch.bfloat16]),
                seed * 100 + i,
            )
            for i in range(self.rng.randint(1, 5))
        }
        names = sorted(self.weights)
        self.is_buffered = self.rng.random() < 0.3
        self.steps = [
            (
                sorted(self.rng.sample(names, min(len(names), self.rng.choice([1, 1, 1, 2, 3])))),
                self.rng.random(),
            )
            for _ in range(self.rng.randint(1, 6))
        ]
        self.is_pure = self.rng.random() < 0.7
        self._is_built = False
        with torch.no_grad():
            self(self.model, iter(sorted(self.weights.items())))
        self._is_built = True

    def __call__(self, model: torch.nn.Module, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        read: dict[str, torch.Tensor] = {}
        done: set[int] = set()
        for name, tensor in weights:
            read[name] = tensor
            if not self.is_buffered:
                self._run(read, done)
        self._run(read, done)

    def _run(self, read: Weights, done: set[int]) -> None:
        for i, (names, seed) in enumerate(self.steps):
            if i not in done and all(name in read for name in names):
                done.add(i)
                self._step(random.Random(seed), i, [read[name] for name in names])

    def _step(self, rng: random.Random, i: int, given: list[torch.Tensor]) -> None:
        values = [self.moved(rng, tensor) for tensor in given]
        value = values[0] if len(values) == 1 else self.joined(rng, values)
        value = self.moved(rng, value)
        if not self.is_pure and rng.random() < 0.3:
            value = rng.choice(
                [lambda v: -torch.exp(v), lambda v: v + 1, lambda v: v.flip(0) if v.dim() else v * 2]
            )(value)
        if rng.random() < 0.25:
            value = self.buffered(rng, value)
        self.written(rng, i, value)

    def moved(self, rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            move = rng.choice(MOVES)
            made = move(rng, tensor)
            if 0 < made.numel() <= 2000 and made.dim() <= 6:
                tensor = made
        return tensor

    def joined(self, rng: random.Random, values: list[torch.Tensor]) -> torch.Tensor:
        dtype = torch.float32 if any(v.dtype == torch.float32 for v in values) else torch.bfloat16
        flat = [value.reshape(-1).to(dtype) for value in values]
        kind = rng.choice(["cat", "stack", "pieces"])
        if kind == "cat":
            return torch.cat(flat)
        length = min(len(each) for each in flat)
        if kind == "stack":
            return torch.stack([each[:length] for each in flat], rng.choice([0, 1, -1]))
        made = torch.empty(len(flat), length, dtype=dtype)
        for row, each in zip(made, flat, strict=True):
            row.copy_(each[:length])
        return made

    def buffered(self, rng: random.Random, value: torch.Tensor) -> torch.Tensor:
        """Put it together in memory of the loader's own, piece by piece."""
        if not value.dim():
            return value.clone()
        dim = rng.randrange(value.dim())
        kind = rng.choice(["zeros", "empty", "like", "new", "strided"])
        shape = list(value.shape)
        if kind == "zeros":
            shape[dim] += 2
            made = torch.zeros(shape, dtype=value.dtype)
            made.narrow(dim, 1, value.shape[dim]).copy_(value)
            if rng.random() < 0.5:
                made.select(dim, 1).fill_(0.5)
            return made
        if kind == "strided":
            shape[dim] *= 2
            made = value.new_zeros(shape)
            made[(slice(None),) * dim + (slice(rng.randint(0, 1), None, 2),)] = value
            return made
        made = (
            torch.empty_like(value)
            if kind == "like"
            else torch.empty(shape, dtype=value.dtype)
            if kind == "empty"
            else value.new_empty(shape)
        )
        for i in range(value.shape[dim]):
            made.select(dim, i).copy_(value.select(dim, i))
        return made

    def written(self, rng: random.Random, i: int, value: torch.Tensor) -> None:
        is_wide = value.dtype == torch.float32 or rng.random() < 0.2
        dtype = torch.float32 if is_wide else value.dtype

        def new(shape: Iterable[int], *, is_shared: bool = False) -> torch.Tensor:
            """A parameter for this step; made when the loader runs for the first time."""
            name = "shared_" + "_".join(map(str, shape)) if is_shared else f"p{i}"
            if not self._is_built and not hasattr(self.model, name):
                elements = random_bits(shape, dtype, i)
                setattr(self.model, name, torch.nn.Parameter(elements, requires_grad=False))
            return getattr(self.model, name).data

        write = rng.choice(COPIES if self.is_pure else COPIES + OTHERS)
        write(rng, new, value)


New = Callable[..., torch.Tensor]


def whole(rng: random.Random, new: New, value: torch.Tensor) -> None:
    new(value.shape).copy_(value)


def foreach(rng: random.Random, new: New, value: torch.Tensor) -> None:
    torch._foreach_copy_([new(value.shape)], [value])


def part_of_more(rng: random.Random, new: New, value: torch.Tensor) -> None:
    value = value.reshape(value.shape or (1,))
    shape = list(value.shape)
    shape[dim := _dim(rng, value)] += 2
    new(shape).narrow(dim, 1, value.shape[dim]).copy_(value)


def with_padding(rng: random.Random, new: New, value: torch.Tensor) -> None:
    value = value.reshape(value.shape or (1,))
    shape, dim = list(value.shape), _dim(rng, value)
    n = shape[dim]
    shape[dim] += 2
    target = new(shape)
    target.narrow(dim, 0, n).copy_(value)
    target.narrow(dim, n, 2).zero_()


def transposition(rng: random.Random, new: New, value: torch.Tensor) -> None:
    order = rng.sample(range(value.dim()), value.dim())
    new([value.shape[k] for k in order]).copy_(value.permute(order))


def experts(rng: random.Random, new: New, value: torch.Tensor) -> None:
    target = new([3, *value.shape])
    for e in rng.sample(range(3), 2):
        target[e].copy_(value)


def broadcast(rng: random.Random, new: New, value: torch.Tensor) -> None:
    new([2, *value.shape]).copy_(value)


def interleaved(rng: random.Random, new: New, value: torch.Tensor) -> None:
    value = value.reshape(value.shape or (1,))
    target = new([2 * value.shape[0], *value.shape[1:]])
    target[0::2].copy_(value)
    target[1::2] = value


def rows(rng: random.Random, new: New, value: torch.Tensor) -> None:
    value = value.reshape(value.shape or (1,))
    n = value.shape[0]
    target = new([n + 2, *value.shape[1:]])
    target[rng.sample(range(n + 2), n)] = value.to(target.dtype)


def overlapping(rng: random.Random, new: New, value: torch.Tensor) -> None:
    value = value.reshape(value.shape or (1,))
    shape = list(value.shape)
    shape[dim := _dim(rng, value)] += 2
    target = new(shape)
    for first in (0, 1):
        target.narrow(dim, first, value.shape[dim]).copy_(value)


def number(rng: random.Random, new: New, value: torch.Tensor) -> None:
    new((1,)).fill_(value.reshape(-1)[0].item())


def spoilt(rng: random.Random, new: New, value: torch.Tensor) -> None:
    target = new(value.shape)
    target.copy_(value)
    target.reshape(-1)[:1].fill_(1)


def shared(rng: random.Random, new: New, value: torch.Tensor) -> None:
    value = value.reshape(value.shape or (1,))
    target, dim = new(value.shape, is_shared=True), _dim(rng, value)
    if rng.random() < 0.3:
        target.zero_()
    first = rng.randrange(value.shape[dim])
    n = value.shape[dim] - first
    target.narrow(dim, first, n).copy_(value.narrow(dim, first, n))


def accumulated(rng: random.Random, new: New, value: torch.Tensor) -> None:
    new(value.shape).zero_().add_(value)


COPIES = [
    whole,
    foreach,
    part_of_more,
    with_padding,
    transposition,
    experts,
    broadcast,
    interleaved,
    rows,
]
OTHERS = [overlapping, number, spoilt, shared, accumulated]


def _dim(rng: random.Random, x: torch.Tensor) -> int:
    return rng.randrange(x.dim()) if x.dim() else 0


def narrow(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    if not x.dim():
        return x
    dim = _dim(rng, x)
    start = rng.randrange(x.shape[dim])
    return x.narrow(dim, start, rng.randint(1, x.shape[dim] - start))


def stepped(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    return x[rng.randint(0, 1) :: 2] if x.dim() else x


def selected(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    return x.select(dim := _dim(rng, x), rng.randrange(x.shape[dim])) if x.dim() else x


def chunked(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    return rng.choice(x.chunk(2, _dim(rng, x))) if x.dim() else x


def parted(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    return rng.choice(x.split(2, _dim(rng, x))) if x.dim() else x


def unbound(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    return rng.choice(x.unbind(_dim(rng, x))) if x.dim() else x


def transposed(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    return x.transpose(_dim(rng, x), _dim(rng, x)) if x.dim() else x


def permuted(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    return x.permute(rng.sample(range(x.dim()), x.dim()))


def reshaped(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    n, shape = x.numel(), []
    while n > 1 and len(shape) < 4:
        shape.append(rng.choice([d for d in range(1, n + 1) if n % d == 0]))
        n //= shape[-1]
    return x.reshape([*shape, n])


def flattened(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    return x.flatten(_dim(rng, x))


def copied(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    return rng.choice([torch.clone, lambda t: t.contiguous(), lambda t: t.detach(), lambda t: t.to("cpu")])(x)


def gathered(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    if not x.dim():
        return x
    dim = _dim(rng, x)
    rows = [rng.randrange(x.shape[dim]) for _ in range(rng.randint(1, 5))]
    if rng.random() < 0.5:
        return x.index_select(dim, torch.tensor(rows))
    return x[(slice(None),) * dim + (rng.choice([rows, torch.tensor(rows)]),)]


def gathered_apart(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    if not x.dim():
        return x
    rows = torch.tensor([[rng.randrange(-x.shape[0], x.shape[0]) for _ in range(2)] for _ in range(2)])
    return x[rng.choice([rows, rows[0, 0]])]


def masked(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    return x[torch.tensor([rng.random() < 0.6 for _ in range(x.shape[0])])] if x.dim() else x


def padded(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    if not x.dim():
        return x
    pad = [rng.randint(0, 2) for _ in range(2 * rng.randint(1, x.dim()))]
    if x.shape[-1] > 1 and rng.random() < 0.2:
        pad[0] = -1
    return functional.pad(x, pad, value=rng.choice([0, 1.5]))


def spread(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    if not x.dim():
        return x.expand(2)
    dim = rng.randint(0, x.dim())
    shape = [*x.shape[:dim], 2, *x.shape[dim:]]
    made = x.unsqueeze(dim).expand(shape)
    return made if rng.random() < 0.5 else made.reshape(-1)


def repeated(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    if rng.random() < 0.5 or not x.dim():
        return x.repeat([rng.randint(1, 2) for _ in range(x.dim() + rng.randint(0, 1))] or [1])
    return x.repeat_interleave(2, _dim(rng, x))


def squeezed(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    return x.squeeze() if rng.random() < 0.5 else x.unsqueeze(rng.randint(0, x.dim()))


def rotated(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    if not x.dim():
        return x
    dim = _dim(rng, x)
    at = rng.randrange(x.shape[dim])
    return torch.cat([x.narrow(dim, at, x.shape[dim] - at), x.narrow(dim, 0, at)], dim)


def paired(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    if not x.dim() or x.shape[0] % 2:
        return x
    halves = x.chunk(2)
    return torch.stack(halves, rng.randint(-1, x.dim()))


def extended(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    if not x.dim():
        return x
    dim = _dim(rng, x)
    shape = [*x.shape[:dim], 2, *x.shape[dim + 1 :]]
    more = rng.choice(
        [x.new_zeros(shape), torch.zeros(shape, dtype=x.dtype), torch.full(shape, 2.0, dtype=x.dtype)]
    )
    return torch.cat([x, more], dim)


def as_bits(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    kind = KINDS[x.dtype]
    return x.view(kind).clone().view(x.dtype)


MOVES = [
    narrow,
    stepped,
    selected,
    chunked,
    parted,
    unbound,
    transposed,
    permuted,
    reshaped,
    flattened,
    copied,
    gathered,
    gathered_apart,
    masked,
    padded,
    spread,
    repeated,
    squeezed,
    rotated,
    paired,
    extended,
    as_bits,
]


@pytest.mark.parametrize("seed", range(60))
def test_a_random_loader_does_what_its_trace_says(seed: int) -> None:
    loader = RandomLoader(seed)
    assert_exact(Scene(loader.model, loader, loader.weights))


# What loaders of known models do.


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


def test_a_row_gather_by_a_known_index_is_followed() -> None:
    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        model.p.data.copy_(w[torch.tensor([5, 0, 1, 7])].transpose(-1, -2).contiguous())

    assert_copied(check(model_of(p=(4, 3, 2)), write, checkpoint(w=(8, 2, 3))), "w")


def test_indices_that_are_moved_to_where_the_weights_are_stay_known() -> None:
    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        expert_map = torch.tensor([-1, 0, 1, -1])
        mine = (expert_map != -1).nonzero().flatten().to(w.device)
        first = mine[0].item()
        for e, rows in enumerate(w[mine]):
            model.p.data[first - 1 + e].copy_(rows)

    assert_copied(check(model_of(p=(2, 3)), write, checkpoint(w=(4, 3))), "w")


def test_a_transposed_and_halved_stack_of_experts_is_followed() -> None:
    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        gate, up = w.transpose(-1, -2).contiguous().chunk(2, dim=-2)
        for e, (g, u) in enumerate(zip(gate, up, strict=True)):
            model.p.data[e, :3].copy_(g)
            model.p.data[e, 3:].copy_(u)

    assert_copied(check(model_of(p=(4, 6, 5)), write, checkpoint(w=(4, 5, 6))), "w")


def test_a_padded_slice_of_a_permutation_is_followed() -> None:
    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        part = w.permute(0, 2, 1).contiguous().narrow(1, 4, 4)
        model.p.data.zero_()
        model.p.data[:, : part.shape[1]].copy_(functional.pad(part, (0, 1)))

    assert_copied(check(model_of(p=(2, 6, 4)), write, checkpoint(w=(2, 3, 8))), "w")


def test_interleaved_heads_are_followed_through_a_view_and_a_concatenation() -> None:
    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        q, k, v = (each.reshape(-1, 5) for each in w.view(4, 3, 2, 5).unbind(1))
        model.p.data.copy_(torch.cat([q, k, v])[4:20])

    assert_copied(check(model_of(p=(16, 5)), write, checkpoint(w=(24, 5))), "w")


def test_replicated_heads_are_followed() -> None:
    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        model.p.data.copy_(w.view(2, 3, 4).repeat_interleave(2, dim=0).reshape(12, 4))

    assert_copied(check(model_of(p=(12, 4)), write, checkpoint(w=(6, 4))), "w")


def test_a_convolution_that_gains_a_dimension_is_followed() -> None:
    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        model.p.data.copy_(w.unsqueeze(1))

    assert_copied(check(model_of(p=(6, 1, 4)), write, checkpoint(w=(6, 4))), "w")


def test_gate_and_up_may_interleave() -> None:
    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        model.p.data[int(name == "up") :: 2].copy_(w)

    assert_copied(check(model_of(p=(8, 3)), write, checkpoint(gate=(4, 3), up=(4, 3))), "gate", "up")


def test_a_tied_name_leads_to_the_same_elements() -> None:
    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        getattr(model, name).data.copy_(w)

    weights = checkpoint(embed=(4, 3))
    assert_copied(check(model_of(embed=(4, 3), head=(4, 3)), write, weights, {"head": "embed"}), "embed")


def test_parameters_that_share_memory_are_covered_each_by_its_own() -> None:
    model = model_of(whole=(8, 3))
    model.lower = torch.nn.Parameter(model.whole.data[4:], requires_grad=False)

    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        model.whole.data[:4].copy_(w)

    assert check(model, write, checkpoint(w=(4, 3))).uncovered == {"whole": 12, "lower": 12}


def test_calculated_names_are_listed_with_what_they_are_written_to() -> None:
    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        if name == "a":
            model.a.data.copy_(-torch.exp(w))
        else:
            model.b.data.copy_(w)

    found = check(model_of(b=(3,), a=(4,)), write, checkpoint(a=(4,), b=(3,)))
    assert found.computed == ((frozenset({"a"}), frozenset({1})),)
    assert sorted(found.regions) == ["b"]


def test_what_is_written_over_in_part_is_loaded_together() -> None:
    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        model.p.data[:3].copy_(w) if name == "a" else model.p.data[2:].copy_(w)

    found = check(model_of(p=(5,)), write, checkpoint(a=(3,), b=(3,)))
    assert [names for names, _ in found.computed] == [{"a", "b"}]


def test_a_calculated_name_that_clears_others_is_loaded_with_them() -> None:
    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        if name == "a":
            model.p.data.zero_()
        model.p.data[int(name == "b")] = w + 1 if name == "a" else w

    found = check(model_of(p=(2, 3)), write, checkpoint(a=(3,), b=(3,)))
    assert [names for names, _ in found.computed] == [{"a", "b"}]


def test_a_buffer_of_the_loaders_own_is_followed_from_its_first_element() -> None:
    def load(model: torch.nn.Module, given: Iterator[tuple[str, torch.Tensor]]) -> None:
        buffer = torch.empty(3, 4)
        for i, (_, tensor) in enumerate(given):
            buffer[i].copy_(tensor)
        model.p.data.copy_(buffer)

    scene = Scene(model_of(p=(3, 4)), load, checkpoint(a=(4,), b=(4,), c=(4,)))
    assert_exact(scene)
    assert_copied(scene.trace, "a", "b", "c")


def test_a_sum_in_a_buffer_names_all_that_went_in() -> None:
    def load(model: torch.nn.Module, given: Iterator[tuple[str, torch.Tensor]]) -> None:
        buffer = torch.zeros(4)
        for _, tensor in given:
            buffer.add_(tensor.to(torch.float64).float())
        model.p.data.copy_(buffer)

    scene = Scene(model_of(p=(4,)), load, checkpoint(a=(4,), b=(4,), c=(4,)))
    assert [names for names, _ in scene.trace.computed] == [{"a", "b", "c"}]


def test_numbers_that_a_loader_keeps_are_listed_when_it_uses_them() -> None:
    def load(model: torch.nn.Module, given: Iterator[tuple[str, torch.Tensor]]) -> None:
        scales = {name: tensor.item() for name, tensor in given}
        model.a.data.fill_(scales["a"])
        model.b.data.copy_(torch.tensor([scales["b"]]))

    scene = Scene(model_of(a=(1,), b=(1,)), load, checkpoint(a=(1,), b=()))
    assert {name for names, _ in scene.trace.computed for name in names} == {"a", "b"}


def test_a_copy_from_another_parameter_names_where_that_came_from() -> None:
    def load(model: torch.nn.Module, given: Iterator[tuple[str, torch.Tensor]]) -> None:
        read = dict(given)
        if "b" in read:
            model.q.data.copy_(read["b"])
        if "a" in read:
            model.p.data.copy_(read["a"])
            model.r.data.copy_(model.p.data)

    scene = Scene(model_of(p=(4,), q=(4,), r=(4,)), load, checkpoint(a=(4,), b=(4,)))
    assert_exact(scene)
    assert [names for names, _ in scene.trace.computed] == [{"a"}]
    assert sorted(scene.trace.regions) == ["b"]


def test_a_loader_may_stop_early() -> None:
    def load(model: torch.nn.Module, given: Iterator[tuple[str, torch.Tensor]]) -> None:
        model.p.data.copy_(next(given)[1])

    scene = Scene(model_of(p=(4,)), load, checkpoint(a=(4,), b=(4,)))
    assert scene.trace.unread == {"b"}
    assert_copied(scene.trace, "a")


def test_tensors_of_no_elements_and_of_no_dimensions_are_followed() -> None:
    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        getattr(model, name).data.copy_(w)

    found = check(model_of(none=(0, 4), one=()), write, checkpoint(none=(0, 4), one=()))
    assert found.regions["one"][0][1].num_elements == 1
    assert not found.uncovered


def test_elements_that_nothing_reaches_are_counted() -> None:
    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        model.p.data[:3].copy_(w)
        model.p.data[3].zero_()

    assert check(model_of(p=(6, 2)), write, checkpoint(w=(3, 2))).uncovered == {"p": 4}


def test_values_of_the_models_own_buffers_may_steer_a_loader() -> None:
    model = model_of(p=(2, 3))
    model.register_buffer("rows", torch.tensor([3, 1]))

    def write(model: torch.nn.Module, name: str, w: torch.Tensor) -> None:
        if (model.rows >= 0).all():
            model.p.data.copy_(w[model.rows])

    assert_copied(check(model, write, checkpoint(w=(4, 3))), "w")


def test_a_tensor_that_is_no_parameter_is_followed_too() -> None:
    model = model_of(p=(3,))
    model.plain = torch.ones(3)

    def load(model: torch.nn.Module, given: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in given:
            model.plain.copy_(tensor)
            model.plain[0].fill_(2)

    found = trace([model], schema_of(checkpoint(w=(3,))), load)
    assert torch.equal(model.plain, torch.ones(3))
    assert [found.runtimes[i].names for _, indices in found.computed for i in indices] == [("plain",)]


def makes_anew(model: torch.nn.Module, given: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Load as vLLM does the bias of an output layer, in its backend for models of transformers."""
    for _, tensor in given:
        model.bias = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        model.bias.data[:3].copy_(tensor)
        model.bias.data[3:].fill_(0)


def test_a_parameter_that_is_made_anew_is_followed_into_the_one_that_was_there() -> None:
    model, weights = model_of(bias=(4,)), checkpoint(w=(3,))
    parameter = model.bias
    found = trace([model], schema_of(weights), makes_anew)
    assert_copied(found, "w")
    assert found.runtimes[0].storage.data_ptr() == parameter.data_ptr()
    with same_parameters(model):
        makes_anew(model, iter(weights.items()))
    assert model.bias is parameter
    assert torch.equal(bits(parameter[:3]), bits(weights["w"]))
    assert parameter[3] == 0


def test_a_parameter_that_only_loading_makes_is_refused_by_name() -> None:
    model = model_of(p=(4,))
    model.bias = None
    with pytest.raises(UsageError, match=r"does not have 'bias' before its loader makes it"):
        trace([model], schema_of(checkpoint(w=(3,))), makes_anew)
    assert model.bias is None


REFUSED = {
    "decides": lambda model, w: model.p.data.zero_() if (w > 0).any() else None,
    "compares": lambda model, w: torch.equal(w, w),
    "reads": lambda model, w: w.tolist(),
    "rebinds": lambda model, w: setattr(model.p, "data", w),
    "replaces": lambda model, w: setattr(model, "p", torch.nn.Parameter(w, requires_grad=False)),
    "keeps": lambda model, w: setattr(model, "kept", w),
    "resizes": lambda model, w: model.p.data.resize_(40),
    "sets": lambda model, w: model.p.data.set_(w),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_loader_that_cannot_be_traced_is_refused_and_leaves_the_model_alone(kind: str) -> None:
    model = model_of(p=(4,))
    parameter, before, attributes = model.p, bits(model.p).clone(), dict(vars(model))

    def load(model: torch.nn.Module, given: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in given:
            model.p.data.copy_(tensor)
            REFUSED[kind](model, tensor)

    with pytest.raises(UsageError) as refused:
        trace([model], schema_of(checkpoint(w=(4,))), load)
    assert refused.value.kind == "usage"
    assert model.p is parameter
    assert torch.equal(bits(model.p), before)
    assert vars(model) == attributes


@pytest.mark.parametrize("error", [KeyError, ValueError, AssertionError])
def test_a_loader_that_refuses_a_schema_leaves_the_model_alone(error: type[Exception]) -> None:
    model = model_of(p=(4,))
    before = bits(model.p).clone()

    def load(model: torch.nn.Module, given: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in given:
            model.p.data.copy_(tensor)
            raise error("no such parameter")

    with pytest.raises(SchemaMismatch) as refused:
        trace([model], schema_of(checkpoint(w=(4,))), load)
    assert refused.value.kind == "schema-mismatch"
    assert "'w'" in str(refused.value)
    assert torch.equal(bits(model.p), before)


def refusing(error: Exception) -> Callable[..., None]:
    def load(model: torch.nn.Module, given: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _ in given:
            raise error

    return load


def test_a_run_of_a_wrapped_model_is_explained_instead_of_listing_every_parameter() -> None:
    every = {f"layers.{number}.weight" for number in range(1000)}
    given = schema_of(checkpoint(**{"module.w": (4,), "module.b": (2,)}))
    with pytest.raises(SchemaMismatch) as refused:
        trace([model_of(p=(4,))], given, refusing(ValueError(f"no 'module' in Model, which has {every}")))
    assert "published from a wrapped model: its names have 'module.'" in str(refused.value)
    assert "Publish model.module" in str(refused.value)
    assert "layers." not in str(refused.value)


def test_of_a_loaders_long_list_of_names_a_few_are_shown() -> None:
    every = {f"layers.{number}.weight" for number in range(1000)}
    given = schema_of(checkpoint(w=(4,), b=(2,)))
    with pytest.raises(SchemaMismatch, match=r"of 2 names: ValueError: no 'b' in Model") as refused:
        trace([model_of(p=(4,))], given, refusing(ValueError(f"no 'b' in Model, which has {every}")))
    assert len(str(refused.value)) < 500


def test_shapes_that_do_not_fit_are_the_schemas_fault() -> None:
    with pytest.raises(SchemaMismatch):
        check(model_of(p=(4,)), lambda model, name, w: model.p.data.copy_(w), checkpoint(w=(5,)))


def test_models_may_be_given_as_an_iterator() -> None:
    models = [model_of(p=(4,)), model_of(p=(4,))]

    def load(model: torch.nn.Module, given: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in given:
            model.p.data.copy_(tensor)

    found = trace(iter(models), schema_of(checkpoint(w=(4,))), load)
    assert [index for index, _ in found.regions["w"]] == [0, 1]


def test_twenty_thousand_names_are_traced_in_seconds() -> None:
    experts, layers = 50, 400
    model = model_of(**{f"p{layer}": (experts, 2, 3) for layer in range(layers)})
    weights = {f"{layer}.{expert}": torch.empty(2, 3) for layer in range(layers) for expert in range(experts)}
    parameters = dict(model.named_parameters())

    def load(model: torch.nn.Module, given: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in given:
            layer, expert = name.split(".")
            parameters[f"p{layer}"].data[int(expert)].copy_(tensor)

    schema = schema_of(weights)
    trace([model_of()], Schema(tensors=()), load)  # imports what torch imports late
    begin = time.perf_counter()
    found = trace([model], schema, load)
    # 3 s on one busy core; what is quadratic takes minutes.
    assert time.perf_counter() - begin < 60
    assert len(found.regions) == experts * layers
    assert not found.uncovered
