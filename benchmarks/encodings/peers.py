"""Other encodings of a step, for comparison: short implementations of published descriptions, not their code.

Each makes one file per step, and the whole file counts: the number of changed tensors, the name and the
number of changes of each (once per file; unchanged tensors are absent), lengths of streams, parameters, and
the streams with their own headers. Shapes and the old bits do not count, because a reader has them. There
are no digests and no manifest, so each figure is a lower bound of a system.

| name | streams |
|---|---|
| `gaps+zstd-N` | the uint16 gaps of `gap`, with its bridges, of all tensors; then their new values |
| `xor+zstd-N` | old ^ new of every element of the tensors that changed |
| `xor-planes+zstd-N` | the high bytes of that; then its low bytes |
| `rice` | a tensor's gaps and zigzag differences of bit patterns, as PULSEPT v2 describes; k of either |
| `class-rice` | the same for each old exponent of a tensor with changes, as PULSEPT v3 describes: \
gaps among elements of the class, signs, and apart from them the differences beyond one step |

A zstd frame holds all streams of one kind of a file, at level N on one thread. Numbers in headers have
7 bits per byte.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.encodings.entropy import Bits, Numbers, Step, apply_difference, difference, exponents
from benchmarks.encodings.rice import BitReader, BitWriter, from_zigzag, zigzag
from benchmarks.support import gaps as gaps_of

Weights = Mapping[str, Bits]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    name: str
    encode: Callable[[Step], bytes]
    decode: Callable[[bytes, Weights], dict[str, Bits]]
    """Returns the new bits of all tensors from a file and their old bits."""


class _Writer:
    def __init__(self) -> None:
        self.data = bytearray()

    def number(self, number: int) -> None:
        while number > 0x7F:
            self.data.append(number & 0x7F | 0x80)
            number >>= 7
        self.data.append(number)

    def stream(self, stream: bytes) -> None:
        self.number(len(stream))
        self.data += stream


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self) -> int:
        number = shift = 0
        while True:
            byte = self._data[self._at]
            self._at += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return number

    def stream(self) -> bytes:
        length = self.number()
        self._at += length
        return self._data[self._at - length : self._at]


def _changed(step: Step) -> dict[str, tuple[Bits, Bits]]:
    return {name: (old, new) for name, (old, new) in step.items() if not np.array_equal(old, new)}


def _zstd(data: npt.NDArray[np.generic], level: int) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=level).compress(data.tobytes())


def _unzstd(frame: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdDecompressor().decompress(frame)


def _encode_gaps(step: Step, *, level: int) -> bytes:
    file, changed = _Writer(), _changed(step)
    gaps, values = [], []
    file.number(len(changed))
    for name, (old, new) in changed.items():
        stated = gaps_of.bridge(torch.from_numpy(np.flatnonzero(old != new)))
        file.stream(name.encode())
        file.number(len(stated))
        gaps.append(gaps_of.to_gaps(stated).numpy())
        values.append(new[stated.numpy()])
    file.stream(_zstd(_joined(gaps), level))
    file.stream(_zstd(_joined(values), level))
    return bytes(file.data)


def _decode_gaps(data: bytes, old: Weights) -> dict[str, Bits]:
    file = _Reader(data)
    named = [(file.stream().decode(), file.number()) for _ in range(file.number())]
    gaps, values = (np.frombuffer(_unzstd(file.stream()), np.uint16) for _ in range(2))
    new, at = {name: bits.copy() for name, bits in old.items()}, 0
    for name, num in named:
        indices = gaps_of.from_gaps(torch.from_numpy(gaps[at : at + num].copy())).numpy()
        new[name][indices] = values[at : at + num]
        at += num
    return new


def _encode_xor(step: Step, *, level: int, planes: bool) -> bytes:
    file, changed = _Writer(), _changed(step)
    file.number(len(changed))
    for name in changed:
        file.stream(name.encode())
    xor = _joined([before ^ after for before, after in changed.values()])
    for stream in ((xor >> 8).astype(np.uint8), xor.astype(np.uint8)) if planes else (xor,):
        file.stream(_zstd(stream, level))
    return bytes(file.data)


def _decode_xor(data: bytes, old: Weights, *, planes: bool) -> dict[str, Bits]:
    file = _Reader(data)
    names = [file.stream().decode() for _ in range(file.number())]
    if planes:
        high, low = (np.frombuffer(_unzstd(file.stream()), np.uint8).astype(np.uint16) for _ in range(2))
        xor = high << 8 | low
    else:
        xor = np.frombuffer(_unzstd(file.stream()), np.uint16)
    new, at = {name: bits.copy() for name, bits in old.items()}, 0
    for name in names:
        new[name] ^= xor[at : at + new[name].size]
        at += new[name].size
    return new


def _encode_rice(step: Step) -> bytes:
    file, changed = _Writer(), _changed(step)
    file.number(len(changed))
    for name, (old, new) in changed.items():
        indices = np.flatnonzero(old != new)
        patterns = (new[indices] - old[indices]).view(np.int16).astype(np.int64)
        stream = BitWriter()
        file.stream(name.encode())
        for number in len(indices), stream.rice(_gaps(indices)), stream.rice(zigzag(patterns)):
            file.number(number)
        file.stream(stream.to_bytes())
    return bytes(file.data)


def _decode_rice(data: bytes, old: Weights) -> dict[str, Bits]:
    file = _Reader(data)
    new = {name: bits.copy() for name, bits in old.items()}
    for _ in range(file.number()):
        name = file.stream().decode()
        num, gap_k, value_k = (file.number() for _ in range(3))
        stream = BitReader(file.stream())
        indices = _positions(stream.rice(num, gap_k))
        new[name][indices] += from_zigzag(stream.rice(num, value_k)).astype(np.uint16)
    return new


def _encode_class_rice(step: Step) -> bytes:
    file, changed = _Writer(), _changed(step)
    file.number(len(changed))
    for name, (old, new) in changed.items():
        stream, headers = BitWriter(), []
        for exponent, members in _classes(old):
            differences = difference(old[members], new[members])
            indices = np.flatnonzero(differences)
            if indices.size == 0:
                continue
            differences = differences[indices]
            far = np.flatnonzero(np.abs(differences) > 1)
            gap_k = stream.rice(_gaps(indices))
            stream.bits(differences < 0)
            far_k, beyond_k = stream.rice(_gaps(far)), stream.rice(np.abs(differences[far]) - 2)
            headers.append((exponent, indices.size, gap_k, far.size, far_k, beyond_k))
        file.stream(name.encode())
        file.number(len(headers))
        for number in (number for header in headers for number in header):
            file.number(number)
        file.stream(stream.to_bytes())
    return bytes(file.data)


def _decode_class_rice(data: bytes, old: Weights) -> dict[str, Bits]:
    file = _Reader(data)
    new = {name: bits.copy() for name, bits in old.items()}
    for _ in range(file.number()):
        name = file.stream().decode()
        headers = [[file.number() for _ in range(6)] for _ in range(file.number())]
        classes = dict(_classes(old[name]))
        stream = BitReader(file.stream())
        for exponent, num, gap_k, num_far, far_k, beyond_k in headers:
            indices = classes[exponent][_positions(stream.rice(num, gap_k))]
            signs = np.where(stream.bits(num), -1, 1)
            magnitudes = np.ones(num, np.int64)
            far = _positions(stream.rice(num_far, far_k))
            magnitudes[far] = stream.rice(num_far, beyond_k) + 2
            new[name][indices] = apply_difference(old[name][indices], signs * magnitudes)
    return new


def _classes(old: Bits) -> Iterator[tuple[int, Numbers]]:
    """Yield every exponent that occurs, with the ascending positions of its elements."""
    of = exponents(old).astype(np.uint8)
    order, ends = np.argsort(of, kind="stable"), np.bincount(of, minlength=256).cumsum()
    for exponent, members in enumerate(np.split(order, ends[:-1])):
        if members.size:
            yield exponent, members


def _gaps(indices: Numbers) -> Numbers:
    return np.diff(indices, prepend=-1) - 1


def _positions(gaps: Numbers) -> Numbers:
    return (gaps + 1).cumsum() - 1


def _joined(parts: list[Bits]) -> Bits:
    return np.concatenate(parts) if parts else np.empty(0, np.uint16)


_LEVELS = (1, 19)

PEERS = (
    *(
        Peer(name=f"gaps+zstd-{level}", encode=partial(_encode_gaps, level=level), decode=_decode_gaps)
        for level in _LEVELS
    ),
    *(
        Peer(
            name=f"{name}+zstd-{level}",
            encode=partial(_encode_xor, level=level, planes=planes),
            decode=partial(_decode_xor, planes=planes),
        )
        for name, planes in (("xor", False), ("xor-planes", True))
        for level in _LEVELS
    ),
    Peer(name="rice", encode=_encode_rice, decode=_decode_rice),
    Peer(name="class-rice", encode=_encode_class_rice, decode=_decode_class_rice),
)
