"""The encodings of a delta, by the name that a manifest gives them.

`raw` and `gap` are *index encodings*: a tensor's changes are positions and new values, and mean the same
whatever the parent is. `context` is *relative*: it can be read only beside the parent's tensors.
"""

from patchstore.encodings.base import EncodedTensor, Encoding
from patchstore.encodings.gap import Gap
from patchstore.encodings.raw import Raw
from patchstore.errors import UnsupportedFormat

__all__ = ["CHOICES", "ENCODINGS", "RELATIVE", "EncodedTensor", "Encoding", "named"]

ENCODINGS: dict[str, Encoding] = {"raw": Raw(), "gap": Gap()}
"""The index encodings."""

RELATIVE = "context"

CHOICES = (*ENCODINGS, RELATIVE, "auto")
"""What a publisher may be told; `auto` is `context` or `gap`, whichever is smaller, each time."""


def named(name: str) -> Encoding:
    """Return the index encoding of this name; of `context`, that of tensors which it does not code.

    Raises:
        UnsupportedFormat: this release has none of that name.
    """
    if name == RELATIVE:
        return ENCODINGS["gap"]
    if name not in ENCODINGS:
        known = ", ".join((*ENCODINGS, RELATIVE))
        raise UnsupportedFormat(f"encoding {name!r} is unknown; this release has {known}")
    return ENCODINGS[name]
