"""The keys that a reader requires: a version is used only if one of them signed it."""

import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from patchstore.errors import Unsigned, UsageError
from patchstore.format import hashing, history, layout
from patchstore.format.records import Manifest, StoreHeader
from patchstore.signing import stored
from patchstore.signing.keys import PublicKey
from patchstore.stores.base import Store

_NUM_REMEMBERED = 1000
"""Manifests of which the signature was checked, so that asking again costs no request."""

Keys = str | os.PathLike[str] | PublicKey
"""A public key: the path of a PEM file, or one that was read."""


class RequiredKeys:
    """Public keys, one of which must have signed a version. For any thread."""

    def __init__(self, keys: Iterable[PublicKey]) -> None:
        """Require one of these keys.

        Raises:
            UsageError: there is none.
        """
        self._keys = tuple(dict.fromkeys(keys))
        if not self._keys:
            raise UsageError("no key is required: name the public key of who signs")
        self._checked: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._last = self._keys[0]
        """The key that signed the version before; tried first, so a version costs one request."""

    @classmethod
    def of(cls, given: "RequiredKeys | Keys | Sequence[Keys] | None") -> "RequiredKeys | None":
        """Take what a caller gives: nothing, one public key, several, or an object of this class.

        Raises:
            UsageError: a file is no public key, or the list is empty.
        """
        if given is None or isinstance(given, RequiredKeys):
            return given
        if isinstance(given, str | os.PathLike | PublicKey):
            given = (given,)
        if isinstance(given, bytes) or not isinstance(given, Iterable):  # type: ignore[redundant-expr, unused-ignore]
            raise UsageError(
                f"required keys must be paths of public keys in PEM, not a {type(given).__name__}"
            )
        return cls(each if isinstance(each, PublicKey) else PublicKey.read(each) for each in given)

    @property
    def pems(self) -> list[str]:
        """The keys in PEM, for another process."""
        return [key.pem for key in self._keys]

    @property
    def names(self) -> list[str]:
        """What keys of signatures call them, ascending."""
        return sorted(key.name for key in self._keys)

    def check(self, store: Store, header: str, found: Manifest, data: bytes) -> None:
        """Check that one of the keys signed a version; costs one small request, none if it was asked before.

        With several keys, a version that another of them signed costs one request for each that did not.

        Args:
            header: `stored.header_digest` of the run, as the reader uses it.
            data: the manifest's bytes, of which `found` was made.

        Raises:
            Unsigned: none did.
            WrongSignature: there is a signature under the name of one, and it is wrong.
            StoreUnavailable: the store did not answer; nothing is known.
        """
        digest = hashing.digest(data)
        known = digest, header
        if known in self._checked:
            return
        for key in sorted(self._keys, key=lambda each: each is not self._last):
            where = layout.signature_key(found.version, digest, key.name)
            bundle = stored.read(store, where)
            if bundle is None:
                continue
            stored.check(bundle, key, header, found.version, data, where)
            self._last = key
            self._checked[known] = None
            while len(self._checked) > _NUM_REMEMBERED:
                self._checked.popitem(last=False)
            return
        raise Unsigned(
            f"version {found.version} of {store.url} (manifest {digest}) has no signature by "
            f"{' or '.join(self.names)}: it may be forged, and was not used. If it is yours, sign it with "
            "`patchstore sign`"
        )


def checks(required: RequiredKeys | None, store: Store, header: StoreHeader) -> history.Check | None:
    """Return what `lineage.read` calls with its target; None if no key is required."""
    if required is None:
        return None
    digest = stored.header_digest(header)
    return lambda found, data: required.check(store, digest, found, data)
