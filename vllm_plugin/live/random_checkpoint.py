"""A checkpoint of random numbers: a loader loads it to show where it puts each element.

Numbers and not a count of positions, as bfloat16 cannot count beyond 256. They are of the size of weights, as
loaders calculate with some. They are worked out when they are asked for, any part of a tensor alone.
"""

from collections.abc import Iterator

import torch

from patchstore.bucket.records import Schema
from patchstore.tensors.bits import TORCH_DTYPES, bits
from vllm_plugin.map.provenance import handed_names

_PERIOD = 4_194_301
"""Numbers that there are of each dtype. A prime, so that no stride of a tensor goes into it."""
_STEP = 1_000_003
"""By so many numbers each tensor begins later than the one before it."""


class RandomCheckpoint:
    """The tensors of a schema, under all their names. Two processes get the same."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._stored = dict(handed_names(schema))
        self._numbers: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def shapes(self) -> dict[str, torch.Tensor]:
        """Tensors without elements, in the order in which a loader was traced with them."""
        specs = self._schema.by_name()
        found = {}
        for name, stored in self._stored.items():
            spec = specs[stored]
            found[name] = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")
        return found

    def tensor(self, name: str, device: torch.device) -> torch.Tensor:
        """Return a tensor, which the caller may write to."""
        spec = self._schema.by_name()[self._stored[name]]
        return self.part(name, 0, spec.num_elements, device).view(TORCH_DTYPES[spec.dtype]).view(spec.shape)

    def part(self, name: str, start: int, end: int, device: torch.device) -> torch.Tensor:
        """Return the bits of elements `start` to `end` of a flattened tensor: integers [end - start]."""
        stored = self._stored[name]
        spec, place = self._schema.by_name()[stored], self._schema.places[stored]
        numbers = self._of(TORCH_DTYPES[spec.dtype], device)
        found = torch.empty(end - start, dtype=numbers.dtype, device=device)
        for at, number, count in _runs(place * _STEP + start, end - start):
            found[at : at + count] = numbers[number : number + count]
        return bits(found)

    def _of(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The numbers of a dtype, as bytes where torch copies no elements of it."""
        if (dtype, device) not in self._numbers:
            random = torch.Generator().manual_seed(0)
            if dtype.is_floating_point and dtype not in _BYTES:
                # vLLM sets another default dtype, and device, for its loaders.
                made = torch.randn(_PERIOD, generator=random, dtype=torch.float32, device="cpu").to(dtype)
            else:
                top = 2 if dtype == torch.bool else 128 if dtype.itemsize == 1 else 1 << 15
                integers = torch.uint8 if dtype in _BYTES else dtype
                made = torch.randint(top, (_PERIOD,), generator=random, dtype=torch.int32, device="cpu")
                made = made.to(integers)
            self._numbers[dtype, device] = made.to(device)
        return self._numbers[dtype, device]


_BYTES = frozenset({torch.float4_e2m1fn_x2, torch.float8_e8m0fnu})


def _runs(first: int, num: int) -> Iterator[tuple[int, int, int]]:
    """Cut `num` numbers from the `first` on into runs: where each begins, its first number, and how many."""
    at = 0
    while at < num:
        number = (first + at) % _PERIOD
        count = min(num - at, _PERIOD - number)
        yield at, number, count
        at += count
