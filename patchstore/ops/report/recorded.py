"""What a run's bucket says of all its versions, read once and renewed: manifests, and records beside them."""

import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial

from patchstore.bucket import digests, history, kept, notes, shortcuts
from patchstore.bucket.records import Ends, Manifest, StoreHeader
from patchstore.errors import DataError, UsageError, VersionNotFound
from patchstore.stores import layout
from patchstore.stores.base import Store

logger = logging.getLogger(__name__)

MOST_VERSIONS = 10_000
"""Of a page: of a longer run the newest are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What records beside the versions say of them."""

    retired: Set[int] = frozenset()
    tags: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """Names by version."""
    shortcuts: Set[Ends] = frozenset()
    signed: Set[int] = frozenset()
    """Versions with a signature of their manifest, which is not verified here."""

    def of(self, version: int) -> list[str]:
        """Return what is said of a version in words: its tags first."""
        added = Ends(version, None) in self.shortcuts
        return [
            *self.tags.get(version, ()),
            *(["retired"] if version in self.retired else []),
            *(["signed"] if version in self.signed else []),
            *(["added anchor"] if added else []),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A run at one moment."""

    url: str
    header: StoreHeader
    versions: Sequence[Manifest]
    """Ascending, without those that cannot be read."""
    num_left_out: int
    """Older versions that are not shown."""
    marks: Marks
    errors: Sequence[DataError | VersionNotFound | UsageError]
    """What could not be read; the rest is shown."""

    @property
    def resumed(self) -> list[Manifest]:
        """Versions with which another publisher than that of the version before went on with the run."""
        pairs = zip(self.versions, self.versions[1:], strict=False)
        return [each for before, each in pairs if each.writer.epoch != before.writer.epoch]

    @property
    def branched(self) -> list[Manifest]:
        """Versions whose parent is not the version before: the trainer went back."""
        return [each for each in self.versions if each.parent not in {None, each.version - 1}]


class Reader:
    """Reads a run again and again. A manifest never changes, so each is read once."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._run_id = ""
        self._known: dict[int, tuple[Manifest, str]] = {}

    def read(self) -> Recorded:
        """Read what is new.

        Raises:
            VersionNotFound: the store holds no run.
            DataError, StoreUnavailable: what every version depends on cannot be read.
        """
        header = history.run_header(self.store)
        if header.run_id != self._run_id:
            self._run_id, self._known = header.run_id, {}
        newest = self._newest()
        oldest = max(0, newest + 1 - MOST_VERSIONS)
        wanted = range(oldest, newest + 1)
        errors: list[DataError | VersionNotFound | UsageError] = []
        read = partial(self._stored, header.run_id)
        for version, found in history.read_many(read, (each for each in wanted if each not in self._known)):
            if isinstance(found, Exception):
                errors.append(found)
            else:
                self._known[version] = found
        shown = {version: self._known[version] for version in wanted if version in self._known}
        try:
            marks = self._marks(newest, {version: digest for version, (_, digest) in shown.items()})
        except (DataError, UsageError) as exc:
            # Without the right to list, or beside a damaged record, the versions are known all the same.
            marks = Marks()
            errors.append(exc)
        return Recorded(
            url=self.store.url,
            header=header,
            versions=[found for found, _ in shown.values()],
            num_left_out=oldest,
            marks=marks,
            errors=errors,
        )

    def _newest(self) -> int:
        """Return the newest version, also if its manifest is damaged; -1 for none."""
        try:
            found = history.head(self.store, max(self._known, default=None))
        except DataError:
            return max(history.listed(self.store), default=-1)
        return -1 if found is None else found.version

    def _stored(
        self, run_id: str, version: int
    ) -> tuple[int, tuple[Manifest, str] | DataError | VersionNotFound]:
        try:
            found, data = history.read_stored(self.store, version)
            history.check_same_run(self.store, found, run_id)
        except (DataError, VersionNotFound) as exc:
            return version, exc
        return version, (found, digests.digest(data))

    def _marks(self, newest: int, known: Mapping[int, str]) -> Marks:
        tags: dict[int, list[str]] = {}
        for name, tag in notes.read_tags(self.store).items():
            if tag.version is not None:
                tags.setdefault(tag.version, []).append(name)
        # The name of a signer is what the key ends with: of a manifest that lost its slot, another digest
        # stands before it.
        signed = {key.rpartition("-")[0] for key in notes.keys(self.store, layout.SIGNATURES)}
        return Marks(
            retired=kept.retired_versions(self.store, newest),
            tags=tags,
            shortcuts=shortcuts.listed(self.store),
            signed={
                version
                for version, digest in known.items()
                if signed and layout.signature_key(version, digest, "0").rpartition("-")[0] in signed
            },
        )
