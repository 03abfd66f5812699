"""Digests of stored objects: BLAKE3, the fastest cryptographic hash at hand (about 2 GB/s a core).

SHA-256 does 0.4 GB/s on the same core, which would be slower than the network it guards.
"""

from collections.abc import Iterable, Iterator

from blake3 import blake3

from patchstore.errors import CorruptObject
from patchstore.model import Payload
from patchstore.stores.base import Chunk


def digest(data: Chunk) -> str:
    """`blake3:` and 64 hex digits."""
    return f"blake3:{blake3(data).hexdigest()}"


class Hasher:
    """A digest over chunks; counts their bytes."""

    def __init__(self) -> None:
        self._hash = blake3()
        self.num_bytes = 0

    def update(self, chunk: Chunk) -> None:
        self._hash.update(chunk)
        self.num_bytes += len(chunk)

    def through(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Pass chunks on, counting them into the digest."""
        for chunk in chunks:
            self.update(chunk)
            yield chunk

    def digest(self) -> str:
        return f"blake3:{self._hash.hexdigest()}"


def verified(chunks: Iterable[bytes], payload: Payload) -> Iterator[bytes]:
    """Pass chunks on, and check at the end that they were the payload's bytes.

    A consumer must not make anything of them visible before the iterator has ended.

    Raises:
        CorruptObject: more bytes than the payload has (at once), or at the end too few or others.
    """
    hasher = Hasher()
    for chunk in chunks:
        hasher.update(chunk)
        if hasher.num_bytes > payload.size:
            break
        yield chunk
    if hasher.num_bytes != payload.size:
        found = (
            f"at least {hasher.num_bytes:,}" if hasher.num_bytes > payload.size else f"{hasher.num_bytes:,}"
        )
        raise CorruptObject(f"{payload.key} should have {payload.size:,} bytes but has {found}")
    if hasher.digest() != payload.digest:
        raise CorruptObject(f"{payload.key} should have digest {payload.digest} but has {hasher.digest()}")
