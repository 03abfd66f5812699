"""Measure what versions of many processes take more than those of one: bytes per change, file by file.

A sharded trainer's process writes a file of its own, with its own header, table and tiles. This encodes what
sampled processes of a trainer would publish, for any number of processes, on one CPU. One process that has
everything is measured by some of its layers, whole.

Weights are normal with another scale in each tensor. A step adds a small random number to weights in float32
and rounds them to bfloat16, so small weights change more often, as they do under an optimiser.
"""

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.support.shapes import SHAPES
from patchstore.bucket.records import Part, Schema, TensorSpec
from patchstore.codec import ENCODINGS
from patchstore.codec.delta import DeltaEncoder, EncodedDelta
from patchstore.codec.part_table import PartTable
from patchstore.tensors.bits import bits
from patchstore.tensors.columns import Block

Row = dict[str, Any]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-8b", help="of the model")
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512], help="numbers of processes")
    parser.add_argument("--sampled", type=int, default=2, help="processes of each number that are measured")
    parser.add_argument("--layers", type=int, nargs="+", default=[0], help="of one process, measured whole")
    parser.add_argument("--even", action="store_true", help="cut as evenly as possible, not as torch.chunk")
    parser.add_argument("--step", type=float, default=2.5e-7, help="standard deviation of a step")
    parser.add_argument("--encoding", choices=list(ENCODINGS), default="context")


def run(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for one process, and then one for each sampled process of each number of them."""
    schema = [
        TensorSpec(name=name, dtype="BF16", shape=shape)
        for name, shape in sorted(SHAPES[args.shape].tensors().items())
    ]
    layers = re.compile(rf"\.layers\.({'|'.join(map(str, args.layers))})\.")
    whole = [Part.whole(spec) for spec in schema if layers.search(spec.name)]
    alone = _row(args, 1, 0, schema, whole)
    yield alone
    for num in args.ranks:
        for rank in _spread(num, args.sampled):
            held = [
                part for spec in schema if (part := _part(spec, rank, num, is_even=args.even)).num_elements
            ]
            row = _row(args, num, rank, schema, held)
            more = row["bytes_per_change"] / alone["bytes_per_change"] - 1
            yield row | {"more_percent": round(100 * more, 2)}


def _spread(num: int, count: int) -> list[int]:
    """Return some of the processes: the first ones have parts of all tensors."""
    return sorted({number * num // (2 * count) for number in range(min(count, num))})


def _part(spec: TensorSpec, rank: int, num: int, *, is_even: bool) -> Part:
    """Return what a process has of a tensor that is cut along its first dimension."""
    side = spec.shape[0]
    if is_even:
        begin, end = rank * side // num, (rank + 1) * side // num
    else:
        size = -(-side // num)
        begin, end = min(side, rank * size), min(side, (rank + 1) * size)
    rest = spec.shape[1:]
    return Part(spec, (begin, *(0 for _ in rest)), (end - begin, *rest))


def _row(
    args: argparse.Namespace, num: int, rank: int, schema: Sequence[TensorSpec], held: Sequence[Part]
) -> Row:
    held = sorted(held, key=lambda part: part.key)
    places = {spec.name: place for place, spec in enumerate(schema)}
    table = PartTable(held, [places[part.spec.name] for part in held])
    whole = Schema(tensors=tuple(schema))
    encoder = DeltaEncoder(whole, table, ENCODINGS[args.encoding])
    generator = torch.Generator().manual_seed(rank)
    for number, part in enumerate(held):
        old, new = _change(part, args.step, generator)
        block = Block.of([number], [old])
        encoder.add(block.changed([new], block.numbers), block)
    delta = encoder.delta()
    num_elements = sum(part.num_elements for part in held)
    num_bytes = _size(whole, delta)
    return {
        "shape": args.shape,
        "encoding": delta.encoding,
        "ranks": num,
        "rank": rank,
        "cut": "whole" if num == 1 else "even" if args.even else "chunk",
        "num_parts": len(held),
        "num_changed": delta.num_changed,
        "density": delta.num_changed / num_elements,
        "bytes": num_bytes,
        "bytes_per_change": num_bytes / delta.num_changed,
        "more_percent": 0.0,
    }


def _change(part: Part, step: float, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a part of random weights, and the same after a step."""
    # The same scale in every process, and another in every tensor.
    scale = 0.02 * 2 ** (_number_of(part.spec.name) % 5 - 2)
    master = torch.randn(part.size, generator=generator) * scale
    old = master.to(torch.bfloat16)
    new = (master + torch.randn(part.size, generator=generator) * step * scale / 0.02).to(torch.bfloat16)
    if torch.equal(bits(old), bits(new)):
        bits(new)[0] += 1
    return old, new


def _number_of(name: str) -> int:
    """Return a number that is the same in every process, unlike `hash`."""
    return sum(name.encode())


def _size(schema: Schema, delta: EncodedDelta) -> int:
    """Return the bytes of a delta's file."""
    file = delta.file(schema, version=1, parent=0, step=1, run_id="0" * 32)
    return sum(memoryview(chunk).nbytes for chunk in file())
