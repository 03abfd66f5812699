"""From which anchors the versions of a run are rebuilt, and over which other versions."""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass

from patchstore.errors import CorruptObject
from patchstore.format.records import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The ways to some versions."""

    versions: Set[int]
    """These versions, and all that they are rebuilt from."""
    anchors: Set[int]
    """Of these the ones where the ways begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """The way to a version begins at its nearest anchor.

    An anchor that was added later counts, except for a version that is signed: no signature covers that
    anchor, so readers that require keys do not use it.
    """

    manifests: Mapping[int, Manifest]
    """Of the run, by version."""
    added: Set[int]
    """Versions that have an anchor among the shortcuts."""
    signed: Set[int]

    def to(self, wanted: Iterable[int]) -> Found:
        """Return what versions are rebuilt from.

        Raises:
            CorruptObject: one of them has no anchor among its ancestors.
        """
        wanted = set(wanted)
        signed, plain = self.to_signed(wanted & self.signed), self.to_plain(wanted - self.signed)
        return Found(versions=signed.versions | plain.versions, anchors=signed.anchors | plain.anchors)

    def to_plain(self, wanted: Iterable[int]) -> Found:
        """Return the same for readers that require no keys. Raises CorruptObject."""
        return self._walked(wanted, self.is_anchor)

    def to_signed(self, wanted: Iterable[int]) -> Found:
        """Return the same for readers that use no shortcuts. Raises CorruptObject."""
        return self._walked(wanted, lambda manifest: manifest.anchor is not None)

    def is_anchor(self, manifest: Manifest) -> bool:
        """Whether a version has an anchor, of its own or among the shortcuts."""
        return manifest.anchor is not None or manifest.version in self.added

    def before(self, version: int) -> list[int]:
        """Return the versions from a version's parent back to the next anchor; none without a parent."""
        parent = self.manifests[version].parent
        return [] if parent is None else sorted(self.to_plain([parent]).versions)

    def _walked(self, wanted: Iterable[int], is_anchor: Callable[[Manifest], bool]) -> Found:
        versions, anchors = set[int](), set[int]()
        for version in sorted(wanted):
            at: int | None = version
            # Most versions share their way with one before, so each step is taken once.
            while at not in versions:
                found = None if at is None else self.manifests.get(at)
                if found is None:
                    raise CorruptObject(
                        f"version {version} cannot be rebuilt: there is no anchor among its ancestors"
                    )
                versions.add(found.version)
                if is_anchor(found):
                    anchors.add(found.version)
                    break
                at = found.parent
        return Found(versions=versions, anchors=anchors)
