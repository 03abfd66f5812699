"""The encodings of a delta, by the name that a manifest gives them.

`raw` and `gap` are *index encodings*: a tensor's changes are positions and new values, and mean the same
whatever the parent is. `context` can be read only beside the parent's tensors.
"""

from patchstore.encodings.base import EncodedTensor, Encoding, IndexEncoding
from patchstore.encodings.context import Context
from patchstore.encodings.gap import Gap
from patchstore.encodings.raw import Raw
from patchstore.errors import UnsupportedFormat

__all__ = ["CHOICES", "ENCODINGS", "EncodedTensor", "Encoding", "IndexEncoding", "encoding"]

ENCODINGS: dict[str, Encoding] = {each.name: each for each in (Raw(), Gap(), Context())}

CHOICES = (*ENCODINGS, "auto")
"""The choices of a publisher; `publish.encode` says what `auto` is."""


def encoding(name: str) -> Encoding:
    """Return the encoding of this name.

    Raises:
        UnsupportedFormat: this release has none of that name.
    """
    if name not in ENCODINGS:
        raise UnsupportedFormat(f"encoding {name!r} is unknown; this release has {', '.join(ENCODINGS)}")
    return ENCODINGS[name]
