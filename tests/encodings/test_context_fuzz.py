"""Damaged tables and streams of encoding `context`: refused, or read to what the state digest refuses.

`python -m tests.encodings.test_context_fuzz --num 1000000 --seed 1` runs more than the tests do.
"""

import argparse
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from patchstore.bucket.records import Schema, TensorSpec
from patchstore.codec.context import pack, unpack
from patchstore.codec.context.classes import WIDTHS
from patchstore.codec.context.rows import DENSE, SILENT, SWAP
from patchstore.errors import CorruptObject
from patchstore.tensors import state_digest
from patchstore.tensors.state_digest import Sums
from tests.format import independent_context
from tests.support.coded import CodedPart, coded_of, decode, encode, parts_of

Array = npt.NDArray[Any]
Entries = tuple[bytes, bytes]
"""`table` and `tiles`."""

OUTCOMES = ("refused", "caught", "harmless")
"""By the reader; by the state digest; the truth in other bytes."""


@dataclass(frozen=True, kw_only=True)
class Payload:
    """A change of some tensors: what was, what is stored, and what it must come to."""

    specs: list[TensorSpec]
    olds: list[Array]
    news: list[Array]
    sums: list[Sums]
    """Digest sums of `news`."""
    parts: list[CodedPart]
    entries: Entries


def payload(*changes: tuple[str, tuple[int, ...], float, list[int]]) -> Payload:
    """Weights of which a part changes by one of `sizes`, up or down; an F32 tensor behind each of several.

    A density below 0 is that of changes among small weights; the others stay.
    """
    specs: list[TensorSpec] = []
    olds: list[Array] = []
    news: list[Array] = []
    parts: list[CodedPart] = []
    for number, (dtype, shape, density, sizes) in enumerate(changes):
        rng = np.random.default_rng([number, *shape])
        num, width = prod(shape), WIDTHS[dtype]
        weights = (rng.standard_normal(num) * 0.02).astype("f4")
        old = (weights.view("u4") >> (32 - 8 * width)).astype(f"u{width}")
        may = np.abs(weights) < 1 / 128 if density < 0 else True
        positions = np.flatnonzero((rng.random(num) < abs(density)) & may)
        by = rng.choice(sizes, len(positions)) * rng.choice([-1, 1], len(positions))
        new = old.copy()
        new[positions] += by.astype(old.dtype)
        specs.append(TensorSpec(name=f"{len(specs)}", dtype=dtype, shape=shape))
        parts.append(encode(specs[-1], old, positions, new[positions], len(olds)))
        olds.append(old)
        news.append(new)
        if len(changes) > 1:
            specs.append(TensorSpec(name=f"{len(specs)}", dtype="F32", shape=(2,)))
            olds.append(np.zeros(2, dtype="u4"))
            news.append(olds[-1])
    return Payload(
        specs=specs,
        olds=olds,
        news=news,
        sums=[sums_of(new) for new in news],
        parts=parts,
        entries=entries_of(parts),
    )


def entries_of(parts: list[CodedPart]) -> Entries:
    coded = coded_of(parts)
    return pack(coded), coded.data.tobytes()


@cache
def payloads() -> list[Payload]:
    """Small ones with rows of every kind; one of several tensors."""
    small, large = [1, 1, 1, 2, 3], [1, 2, 5, 9, 17]
    return [
        payload(("BF16", (60,), 0.05, [1])),
        payload(("BF16", (40,), 0.1, small)),
        payload(("BF16", (16, 40), -0.5, [1])),
        payload(("BF16", (16, 6), 0.2, large)),
        payload(("F16", (14,), 0.8, large)),
        payload(("F8_E4M3", (16, 2), 0.95, [1, 1, 1, 2, 3])),
        payload(("F8_E5M2", (16,), 0.5, [1, 100])),
        payload(("BF16", (50,), 0.2, [1, 1, 1, 1, 1, 5000])),
        payload(("F16", (32, 3), 0.1, small), ("BF16", (9,), 0.5, [1]), ("F8_E4M3", (16, 2), 0.3, [1, 2])),
    ]


def sums_of(elements: Array) -> Sums:
    return state_digest.of_tensor(torch.from_numpy(elements.view(f"i{elements.itemsize}")))


def flipped(of: Payload, rng: np.random.Generator, part: int) -> Entries:
    """One bit, or two or three."""
    entries = [bytearray(entry) for entry in of.entries]
    data = entries[part]
    for _ in range(rng.choice([1, 1, 2, 3])):
        at = int(rng.integers(8 * len(data)))
        data[at >> 3] ^= 1 << (at & 7)
    return bytes(entries[0]), bytes(entries[1])


def cut(of: Payload, rng: np.random.Generator, part: int) -> Entries:
    """Without some bytes at the end or elsewhere."""
    entries = list(of.entries)
    num = int(rng.integers(1, 4))
    at = int(rng.choice([len(entries[part]) - num, int(rng.integers(len(entries[part])))]))
    entries[part] = entries[part][:at] + entries[part][at + num :]
    return entries[0], entries[1]


def grown(of: Payload, rng: np.random.Generator, part: int) -> Entries:
    """With more bytes somewhere."""
    entries = list(of.entries)
    at = int(rng.integers(len(entries[part]) + 1))
    entries[part] = entries[part][:at] + rng.bytes(int(rng.integers(1, 4))) + entries[part][at:]
    return entries[0], entries[1]


def corrected(of: Payload, rng: np.random.Generator, cuts: bool) -> Entries:
    """A tile shorter or longer, and a table that says so."""
    parts = list(of.parts)
    chosen = int(rng.integers(len(parts)))
    coded = parts[chosen]
    lengths = coded.lengths.copy()
    tile = int(rng.choice(np.flatnonzero(lengths))) if cuts else int(rng.integers(len(lengths)))
    end = int(lengths[: tile + 1].sum())
    num = int(rng.integers(1, 4))
    if cuts:
        num = min(num, int(lengths[tile]))
        data = np.delete(coded.data, np.s_[end - num : end])
        lengths[tile] -= num
    else:
        more = np.frombuffer(rng.bytes(num), dtype=np.uint8)
        at = end - int(rng.integers(int(lengths[tile]) + 1))
        data = np.insert(coded.data, at, more)
        lengths[tile] += num
    parts[chosen] = replace(coded, data=data, lengths=lengths)
    return entries_of(parts)


Damage = Callable[[Payload, np.random.Generator], Entries]
DAMAGES: dict[str, Damage] = {
    "bits of the table flipped": lambda of, rng: flipped(of, rng, 0),
    "bits of streams flipped": lambda of, rng: flipped(of, rng, 1),
    "table cut": lambda of, rng: cut(of, rng, 0),
    "streams cut": lambda of, rng: cut(of, rng, 1),
    "bytes put into the table": lambda of, rng: grown(of, rng, 0),
    "bytes put into streams": lambda of, rng: grown(of, rng, 1),
    "a stream cut, its length corrected": lambda of, rng: corrected(of, rng, True),
    "bytes put into a stream, its length corrected": lambda of, rng: corrected(of, rng, False),
}
_WEIGHTS = np.array([6, 8, 1, 1, 1, 1, 4, 4])
"""Most damage whose lengths no longer add up is refused for that alone."""


def read(of: Payload, entries: Entries) -> list[Array] | None:
    """The tensors after a damaged change; None if it is refused."""
    table, tiles = (np.frombuffer(entry, dtype=np.uint8) for entry in entries)
    state = list(of.olds)
    try:
        for part in parts_of(unpack("payload", table, tiles, Schema(tensors=tuple(of.specs)))):
            place = part.number
            at, new = decode(of.specs[place], part, state[place])
            state[place] = state[place].copy()
            state[place][at] = new
    except CorruptObject:
        return None
    return state


def outcome(of: Payload, state: list[Array] | None) -> str:
    """Which of OUTCOMES it is.

    Raises:
        AssertionError: a tensor is wrong, and its digest sums are right.
    """
    if state is None:
        return "refused"
    wrong = [place for place, found in enumerate(state) if not np.array_equal(found, of.news[place])]
    assert all(sums_of(state[place]) != of.sums[place] for place in wrong)
    return "caught" if wrong else "harmless"


def run(num: int, seed: int, every: int = 0) -> Counter[tuple[str, str]]:
    """Damage and read; count by damage and outcome.

    Args:
        every: of how many one is also read by the independent reader, which must find the same; 0 for none.
    """
    rng = np.random.default_rng(seed)
    names = rng.choice(list(DAMAGES), num, p=_WEIGHTS / _WEIGHTS.sum())
    found: Counter[tuple[str, str]] = Counter()
    for number, name in enumerate(names.tolist()):
        of = payloads()[number % len(payloads())]
        entries = DAMAGES[name](of, rng)
        try:
            state = read(of, entries)
            if every and number % every == 0:
                check_independently(of, entries, state)
            found[name, outcome(of, state)] += 1
        except Exception as exc:
            where = f"damage {number} of seed {seed}, {name}, payload {number % len(payloads())}"
            exc.add_note(f"{where}: table {entries[0].hex()}, tiles {entries[1].hex()}")
            raise
    return found


def check_independently(of: Payload, entries: Entries, state: list[Array] | None) -> None:
    schema = {spec.name: (spec.dtype, spec.shape) for spec in of.specs}
    parent = {spec.name: old.tobytes() for spec, old in zip(of.specs, of.olds, strict=True)}
    expected = [bytearray(old) for old in parent.values()]
    try:
        for name, position, new in independent_context.changes(*entries, schema, parent):
            expected[int(name)][position * len(new) : (position + 1) * len(new)] = new
    except (LookupError, ValueError, struct.error):
        assert state is None, "only the independent reader refuses"
    else:
        assert state is not None or is_huge(of, entries), "the independent reader does not refuse"
        assert state is None or [found.tobytes() for found in state] == expected


def is_huge(of: Payload, entries: Entries) -> bool:
    """Whether a tile has more than 10 bytes an element, which a reader may refuse."""
    table, tiles = (np.frombuffer(entry, dtype=np.uint8) for entry in entries)
    return bool((unpack("payload", table, tiles, Schema(tensors=tuple(of.specs))).lengths > 10).any())


def test_the_payloads_have_rows_of_every_kind() -> None:
    rows = [row for of in payloads() for part in of.parts for row in part.rows.tolist()]
    assert any(row[0] < 63 and row[1] == 0 for row in rows)
    assert any(row[0] < 63 and row[1] > 0 for row in rows)
    assert any(row[0] == DENSE and row[2] < SWAP for row in rows)
    assert [DENSE, 0, SWAP] in rows
    assert [SILENT, 0, 0] in rows
    for of in payloads():
        assert outcome(of, read(of, of.entries)) == "harmless"


@pytest.mark.parametrize("seed", range(2))
def test_damage_is_refused_or_caught_by_the_digest(seed: int) -> None:
    found = run(2500, seed, every=5)
    assert {name for name, _ in found} == DAMAGES.keys()
    for kind in OUTCOMES:
        assert sum(num for (_, each), num in found.items() if each == kind) > 30


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=0, help="of how many the independent reader reads one")
    arguments = parser.parse_args()
    began = time.monotonic()
    found = run(arguments.num, arguments.seed, arguments.every)
    lines = [f"| damage | {' | '.join(OUTCOMES)} |", "|---" * 4 + "|"]
    lines += [f"| {name} | {' | '.join(f'{found[name, kind]:,}' for kind in OUTCOMES)} |" for name in DAMAGES]
    sums = [sum(found[name, kind] for name in DAMAGES) for kind in OUTCOMES]
    lines.append(f"| all {sum(sums):,} | {' | '.join(f'{each:,}' for each in sums)} |")
    sys.stdout.write("\n".join(lines) + f"\n\n{time.monotonic() - began:.0f} s\n")


if __name__ == "__main__":
    main()
