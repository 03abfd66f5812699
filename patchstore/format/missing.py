"""The error about a payload that a manifest names and the store lacks.

Code that handles errors sees a `CorruptObject`. Readers tell it apart, because the payload may have been
deleted after its version was retired, which is no damage.
"""

from patchstore.errors import CorruptObject
from patchstore.format import layout
from patchstore.format.records import Payload
from patchstore.stores.base import Store


class PayloadMissing(CorruptObject):
    """A payload is not in the store, though its version names it."""

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key

    @property
    def version(self) -> int | None:
        """The version that the payload was stored for, if its key says so."""
        found = layout.attempt_of(self.key)
        return None if found is None else found[0]


def missing(store: Store, wanted: Payload) -> PayloadMissing:
    """Return the error about a payload that a store lacks."""
    what = f"{wanted.key} is missing from {store.url}, though its version names it"
    return PayloadMissing(what, wanted.key)
