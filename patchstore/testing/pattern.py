"""Contents of large objects, of which any part can be told without the rest."""

from array import array
from collections.abc import Iterator


def pattern(start: int, end: int) -> bytes:
    """Bytes `start` to `end` of an endless object in which every 8 bytes say where they are."""
    first = start // 8
    words = array("Q", range(first, (end + 7) // 8)).tobytes()
    return words[start - 8 * first : end - 8 * first]


def patterned(size: int) -> Iterator[bytes]:
    """The pattern's first `size` bytes, in chunks that are no divisor of a part."""
    step = 3_000_008
    for offset in range(0, size, step):
        yield pattern(offset, min(offset + step, size))
