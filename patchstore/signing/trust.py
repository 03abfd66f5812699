"""What a process that follows a store believes of it: versions that a required key has signed."""

from patchstore.errors import CorruptObject, VersionNotFound
from patchstore.format import history
from patchstore.format.records import Manifest
from patchstore.signing import stored
from patchstore.signing.required import RequiredKeys
from patchstore.stores.base import Store


class Trust:
    """Checks versions of whichever run a store holds. For any thread."""

    def __init__(self, store: Store, required: RequiredKeys) -> None:
        """Nothing is read yet."""
        self._store = store
        self._required = required
        self._last: Manifest | None = None
        """The version that was checked last, which costs no request to ask about again."""

    def check(self, found: Manifest) -> None:
        """Check that a required key has signed a version, as the store has it now.

        Raises:
            Unsigned, WrongSignature: none has, or its signature is wrong.
            VersionNotFound: the store no longer has the version, or its run.
            CorruptObject: the store has another version of that number by now.
            StoreUnavailable: nothing is known; calling again is safe.
        """
        if found == self._last:
            return
        header = history.read_header(self._store)
        if header is None or header.run_id != found.run_id:
            raise VersionNotFound(f"{self._store.url} no longer holds run {found.run_id}")
        there, data = history.read_stored(self._store, found.version)
        if there != found:
            raise CorruptObject(
                f"{self._store.url} has another version {found.version} than a moment ago; it was replaced"
            )
        self._required.check(self._store, stored.header_digest(header), found, data)
        self._last = found
