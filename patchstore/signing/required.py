"""What a reader requires of versions: a signature by one of its keys, and that none is older than the last.

An old version keeps its signature. So a program that may write to a bucket, or answers in its place, could
offer an old state of it as the present one. A signature does not reveal that; a reader that remembers does.
"""

import json
import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from patchstore.bucket import digests, history, manifest_json
from patchstore.bucket.records import Manifest, StoreHeader
from patchstore.errors import RollbackRefused, StoreReplaced, Unsigned, UsageError
from patchstore.signing import statement
from patchstore.signing.keys import PublicKey
from patchstore.stores.base import Store
from patchstore.support import host
from patchstore.support.arguments import version_number
from patchstore.support.host import replace_text

_NUM_REMEMBERED = 1000
"""Manifests of which the signature was checked, so that asking again costs no request."""

Keys = str | os.PathLike[str] | PublicKey
"""A public key: the path of a PEM file, or one that was read."""


class RequiredKeys:
    """Public keys, one of which must have signed a version. For any thread."""

    def __init__(self, keys: Iterable[PublicKey]) -> None:
        """Require one of these keys."""
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
    def names(self) -> list[str]:
        """What keys of signatures call them, ascending."""
        return sorted(key.name for key in self._keys)

    def check(self, store: Store, header: str, found: Manifest, data: bytes) -> None:
        """Check that one of the keys signed a version; costs one small request, none if it was asked before.

        With several keys, a version that another of them signed costs one request for each that did not.

        Raises:
            Unsigned: none did.
            WrongSignature: there is a signature under the name of one, and it is wrong.
            StoreUnavailable: the store did not answer; nothing is known.
        """
        digest = digests.digest(data)
        known = digest, header
        if known in self._checked:
            return
        for key in sorted(self._keys, key=lambda each: each is not self._last):
            if not statement.has_signed(store, key, header, found.version, data):
                continue
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
    digest = statement.header_digest(header)
    return lambda found, data: required.check(store, digest, found, data)


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
            VersionNotFound: the store no longer has the version.
            StoreReplaced: the store has another run, or another version of that number, by now.
            StoreUnavailable: nothing is known; calling again is safe.
        """
        if found == self._last:
            return
        header = history.read_header(self._store)
        history.check_run(self._store, header, found.run_id, "Nothing of it was used; put the objects back")
        assert header is not None
        there, data = history.read_stored(self._store, found.version)
        if there != found:
            raise StoreReplaced(
                f"{self._store.url} has another version {found.version} than a moment ago; it was replaced"
            )
        self._required.check(self._store, statement.header_digest(header), found, data)
        self._last = found


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What is remembered of a version."""

    run_id: str
    version: int
    created_at: str
    """By the trainer's clock, as its manifest says."""

    def is_after(self, found: Manifest) -> bool:
        """Whether a version is older. Versions of two runs are compared by the times of their creation."""
        if found.run_id == self.run_id:
            return found.version < self.version
        return manifest_json.time_of(found.created_at) <= manifest_json.time_of(self.created_at)


class Floor:
    """Remembers the newest version that was used, and refuses older ones. One thread raises it at a time."""

    def __init__(self, path: Path | None = None) -> None:
        """Begin where an earlier process ended."""
        self._path = path
        self.newest: Mark | None = None
        """None before the first version."""
        if path is None:
            return
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise UsageError(f"{path} cannot be kept: {path.parent} is no folder to write to")
        if path.exists():
            self.newest = _read(path)

    def check(self, found: Manifest) -> None:
        """Check that a version is not older than the newest one that was used.

        Raises:
            RollbackRefused: it is.
        """
        newest = self.newest
        if newest is None or not newest.is_after(found):
            return
        was = f"version {newest.version} was used before"
        if found.run_id != newest.run_id:
            was = (
                f"version {newest.version} of run {newest.run_id} was used before, created at "
                f"{newest.created_at}, and this one is of run {found.run_id}, created at {found.created_at}"
            )
        raise RollbackRefused(
            f"version {found.version} is signed, but {was}: the store was set back, or something answers "
            "with an old state of it. The weights were left as they are. If it is meant, say so with "
            "--allow-rollback (allow_rollback)"
        )

    def raise_to(self, found: Manifest) -> None:
        """Take note that a version is used, if it is the newest so far."""
        if self.newest is None or not self.newest.is_after(found):
            self.set(found)

    def set(self, found: Manifest) -> None:
        """Begin anew from a version, older or newer. Raises as `raise_to`."""
        mark = Mark(run_id=found.run_id, version=found.version, created_at=found.created_at)
        if mark == self.newest:
            return
        if self._path is not None:
            with host.asked(f"writing {self._path}"):
                replace_text(self._path, json.dumps({"floor": asdict(mark)}))
        self.newest = mark


def _read(path: Path) -> Mark:
    try:
        found = json.loads(path.read_text())["floor"]
        mark = Mark(run_id=found["run_id"], version=found["version"], created_at=found["created_at"])
        manifest_json.time_of(mark.created_at)
        version_number(mark.version)
        if not isinstance(mark.run_id, str):  # type: ignore[redundant-expr, unused-ignore]
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError, UsageError) as exc:
        raise UsageError(
            f"{path} does not say which version was used last: put it back, or remove it to accept the store "
            "as it is now"
        ) from exc
    return mark
