"""The encodings of a delta's positions, by the name that a manifest gives them."""

from patchstore.encodings.base import EncodedTensor, Encoding
from patchstore.encodings.gap import Gap
from patchstore.encodings.raw import Raw
from patchstore.errors import UnsupportedFormat

__all__ = ["ENCODINGS", "EncodedTensor", "Encoding", "named"]

ENCODINGS: dict[str, Encoding] = {"raw": Raw(), "gap": Gap()}


def named(name: str) -> Encoding:
    """Return the encoding of this name.

    Raises:
        UnsupportedFormat: this release has none of that name.
    """
    if name not in ENCODINGS:
        raise UnsupportedFormat(f"encoding {name!r} is unknown; this release has {', '.join(ENCODINGS)}")
    return ENCODINGS[name]
