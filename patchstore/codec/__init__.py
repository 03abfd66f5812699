"""The encodings of a delta, by the name that a manifest gives them.

`raw` and `gap` are *index encodings*: a tensor's changes are positions and new values, and mean the same
whatever the parent is. `context` can be read only beside the parent's tensors.
"""

from patchstore.codec.context import Context
from patchstore.codec.index import Gap, Listed, Raw
from patchstore.errors import UnsupportedFormat

__all__ = ["CHOICES", "ENCODINGS", "Encoding", "IndexEncoding", "Listed", "encoding"]

IndexEncoding = Raw | Gap
Encoding = IndexEncoding | Context

ENCODINGS: dict[str, Encoding] = {each.name: each for each in (Raw(), Gap(), Context())}

CHOICES = (*ENCODINGS, "auto")
"""The choices of a publisher; `publish.options.chosen_encoding` says what `auto` is."""


def encoding(name: str) -> Encoding:
    """Return the encoding of this name."""
    if name not in ENCODINGS:
        raise UnsupportedFormat(f"encoding {name!r} is unknown; this release has {', '.join(ENCODINGS)}")
    return ENCODINGS[name]
