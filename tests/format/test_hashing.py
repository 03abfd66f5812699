"""Digests over chunks are those of the whole, however it is cut."""

import random

import pytest

from patchstore.bucket.digests import Hasher, digest

MIB = 1 << 20


@pytest.mark.parametrize("size", [0, 1, 1000, MIB - 1, MIB, MIB + 1, 5_000_000])
@pytest.mark.parametrize("seed", range(3))
def test_a_digest_is_that_of_the_whole(size: int, seed: int) -> None:
    source = random.Random(seed)
    data, hasher, at = source.randbytes(size), Hasher(), 0
    while at < size:
        chunk = memoryview(data)[at : at + source.choice([1 + size // 1000, MIB // 2, MIB, 3 * MIB])]
        hasher.update(chunk)
        at += len(chunk)
        # Asking on the way changes nothing.
        if source.random() < 0.1:
            assert hasher.digest() == digest(data[:at])

    assert (hasher.digest(), hasher.num_bytes) == (digest(data), size)
