"""Loaders made at random, each of steps that move tensors in ways that loaders of models do.

One seed makes the same loader for real and for meta tensors, since it asks only for shapes.
"""

import random
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.nn import functional
from trace_scene import KINDS, Weights, random_bits


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
        self.steps = []
        for _ in range(self.rng.randint(1, 6)):
            read = self.rng.sample(names, min(len(names), self.rng.choice([1, 1, 1, 2, 3])))
            self.steps.append((sorted(read), self.rng.random()))
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
            calculate = rng.choice(
                [lambda v: -torch.exp(v), lambda v: v + 1, lambda v: v.flip([*range(v.dim())])]
            )
            value = calculate(value)
        if rng.random() < 0.25:
            value = self.buffered(rng, value)
        self.written(rng, i, value)

    def moved(self, rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            made = rng.choice(OF_ANY + OF_DIMENSIONS if tensor.dim() else OF_ANY)(rng, tensor)
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
        made = {
            "like": torch.empty_like(value),
            "empty": torch.empty(shape, dtype=value.dtype),
            "new": value.new_empty(shape),
        }[kind]
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
        write(rng, new, value.reshape(value.shape or (1,)))


New = Callable[..., torch.Tensor]
Rng = random.Random


def part_of_more(rng: Rng, new: New, value: torch.Tensor) -> None:
    shape, dim = list(value.shape), _dim(rng, value)
    shape[dim] += 2
    new(shape).narrow(dim, 1, value.shape[dim]).copy_(value)


def with_padding(rng: Rng, new: New, value: torch.Tensor) -> None:
    shape, dim = list(value.shape), _dim(rng, value)
    n = shape[dim]
    shape[dim] += 2
    target = new(shape)
    target.narrow(dim, 0, n).copy_(value)
    target.narrow(dim, n, 2).zero_()


def transposition(rng: Rng, new: New, value: torch.Tensor) -> None:
    order = rng.sample(range(value.dim()), value.dim())
    new([value.shape[k] for k in order]).copy_(value.permute(order))


def experts(rng: Rng, new: New, value: torch.Tensor) -> None:
    target = new([3, *value.shape])
    for e in rng.sample(range(3), 2):
        target[e].copy_(value)


def interleaved(rng: Rng, new: New, value: torch.Tensor) -> None:
    target = new([2 * value.shape[0], *value.shape[1:]])
    target[0::2].copy_(value)
    target[1::2] = value


def rows(rng: Rng, new: New, value: torch.Tensor) -> None:
    n = value.shape[0]
    target = new([n + 2, *value.shape[1:]])
    target[rng.sample(range(n + 2), n)] = value.to(target.dtype)


def overlapping(rng: Rng, new: New, value: torch.Tensor) -> None:
    shape, dim = list(value.shape), _dim(rng, value)
    shape[dim] += 2
    target = new(shape)
    for first in (0, 1):
        target.narrow(dim, first, value.shape[dim]).copy_(value)


def spoilt(rng: Rng, new: New, value: torch.Tensor) -> None:
    target = new(value.shape)
    target.copy_(value)
    target.reshape(-1)[:1].fill_(1)


def shared(rng: Rng, new: New, value: torch.Tensor) -> None:
    target, dim = new(value.shape, is_shared=True), _dim(rng, value)
    if rng.random() < 0.3:
        target.zero_()
    first = rng.randrange(value.shape[dim])
    n = value.shape[dim] - first
    target.narrow(dim, first, n).copy_(value.narrow(dim, first, n))


COPIES: list[Callable[[Rng, New, torch.Tensor], object]] = [
    lambda rng, new, value: new(value.shape).copy_(value),
    lambda rng, new, value: torch._foreach_copy_([new(value.shape)], [value]),
    lambda rng, new, value: new([2, *value.shape]).copy_(value),
    *(part_of_more, with_padding, transposition, experts, interleaved, rows),
]
OTHERS: list[Callable[[Rng, New, torch.Tensor], object]] = [
    lambda rng, new, value: new((1,)).fill_(value.reshape(-1)[0].item()),
    lambda rng, new, value: new(value.shape).zero_().add_(value),
    *(overlapping, spoilt, shared),
]


def _dim(rng: Rng, x: torch.Tensor) -> int:
    return rng.randrange(x.dim()) if x.dim() else 0


def reshaped(rng: Rng, x: torch.Tensor) -> torch.Tensor:
    n, shape = x.numel(), []
    while n > 1 and len(shape) < 4:
        shape.append(rng.choice([d for d in range(1, n + 1) if n % d == 0]))
        n //= shape[-1]
    return x.reshape([*shape, n])


def spread(rng: Rng, x: torch.Tensor) -> torch.Tensor:
    dim = rng.randint(0, x.dim())
    made = x.unsqueeze(dim).expand([*x.shape[:dim], 2, *x.shape[dim:]])
    return made if rng.random() < 0.5 else made.reshape(-1)


def narrow(rng: Rng, x: torch.Tensor) -> torch.Tensor:
    dim = _dim(rng, x)
    start = rng.randrange(x.shape[dim])
    return x.narrow(dim, start, rng.randint(1, x.shape[dim] - start))


def gathered(rng: Rng, x: torch.Tensor) -> torch.Tensor:
    dim = _dim(rng, x)
    rows = [rng.randrange(x.shape[dim]) for _ in range(rng.randint(1, 5))]
    if rng.random() < 0.5:
        return x.index_select(dim, torch.tensor(rows))
    return x[(slice(None),) * dim + (rng.choice([rows, torch.tensor(rows)]),)]


def gathered_apart(rng: Rng, x: torch.Tensor) -> torch.Tensor:
    rows = torch.tensor([[rng.randrange(-x.shape[0], x.shape[0]) for _ in range(2)] for _ in range(2)])
    return x[rng.choice([rows, rows[0, 0]])]


def padded(rng: Rng, x: torch.Tensor) -> torch.Tensor:
    pad = [rng.randint(0, 2) for _ in range(2 * rng.randint(1, x.dim()))]
    if x.shape[-1] > 1 and rng.random() < 0.2:
        pad[0] = -1
    return functional.pad(x, pad, value=rng.choice([0, 1.5]))


def rotated(rng: Rng, x: torch.Tensor) -> torch.Tensor:
    dim = _dim(rng, x)
    at = rng.randrange(x.shape[dim])
    return torch.cat([x.narrow(dim, at, x.shape[dim] - at), x.narrow(dim, 0, at)], dim)


def paired(rng: Rng, x: torch.Tensor) -> torch.Tensor:
    return x if x.shape[0] % 2 else torch.stack(x.chunk(2), rng.randint(-1, x.dim()))


def extended(rng: Rng, x: torch.Tensor) -> torch.Tensor:
    dim = _dim(rng, x)
    shape = [*x.shape[:dim], 2, *x.shape[dim + 1 :]]
    made = [x.new_zeros(shape), torch.zeros(shape, dtype=x.dtype), torch.full(shape, 2.0, dtype=x.dtype)]
    return torch.cat([x, rng.choice(made)], dim)


Move = Callable[[Rng, torch.Tensor], torch.Tensor]

OF_ANY: list[Move] = [
    lambda rng, x: x.permute(rng.sample(range(x.dim()), x.dim())),
    lambda rng, x: x.flatten(_dim(rng, x)),
    lambda rng, x: rng.choice([torch.clone, torch.Tensor.contiguous, torch.detach])(x),
    lambda rng, x: x.to("cpu"),
    lambda rng, x: x.squeeze() if rng.random() < 0.5 else x.unsqueeze(rng.randint(0, x.dim())),
    lambda rng, x: x.repeat([rng.randint(1, 2) for _ in range(x.dim() + rng.randint(0, 1))] or [1]),
    lambda rng, x: x.view(KINDS[x.dtype]).clone().view(x.dtype),
    *(reshaped, spread),
]
OF_DIMENSIONS: list[Move] = [
    lambda rng, x: x[rng.randint(0, 1) :: 2],
    lambda rng, x: x.select(dim := _dim(rng, x), rng.randrange(x.shape[dim])),
    lambda rng, x: rng.choice(x.chunk(2, _dim(rng, x))),
    lambda rng, x: rng.choice(x.split(2, _dim(rng, x))),
    lambda rng, x: rng.choice(x.unbind(_dim(rng, x))),
    lambda rng, x: x.transpose(_dim(rng, x), _dim(rng, x)),
    lambda rng, x: x[torch.tensor([rng.random() < 0.6 for _ in range(x.shape[0])])],
    lambda rng, x: x.repeat_interleave(2, _dim(rng, x)),
    *(narrow, gathered, gathered_apart, padded, rotated, paired, extended),
]
