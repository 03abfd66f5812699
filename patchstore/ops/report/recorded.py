"""What a run's bucket says of its versions, read once and renewed."""

from collections.abc import Sequence
from dataclasses import dataclass

from patchstore.bucket import history
from patchstore.bucket.records import StoreHeader
from patchstore.errors import DataError, PatchstoreError, UsageError
from patchstore.read.versions import Marks, Version, read_versions
from patchstore.stores.base import Store

MOST_VERSIONS = 10_000
"""Of a page: of a longer run the newest are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A run at one moment."""

    url: str
    header: StoreHeader
    versions: Sequence[Version]
    """Ascending, without those that cannot be read."""
    num_left_out: int
    """Older versions that are not shown."""
    marks: Marks
    errors: Sequence[PatchstoreError]
    """What could not be read; the rest is shown."""

    @property
    def resumed(self) -> list[Version]:
        """Versions with which another publisher than that of the version before went on with the run."""
        return [each for each in self.versions if each.is_resumed]

    @property
    def branched(self) -> list[Version]:
        """Versions whose parent is not the version before: the trainer went back."""
        return [each for each in self.versions if each.manifest.parent not in {None, each.number - 1}]


class Reader:
    """Reads a run again and again. A manifest never changes, so each is read once."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._run_id = ""
        self._known: dict[int, Version] = {}

    def read(self) -> Recorded:
        """Read what is new.

        Raises:
            VersionNotFound: the store holds no run.
            DataError, StoreUnavailable: what every version depends on cannot be read.
        """
        header = history.run_header(self.store)
        if header.run_id != self._run_id:
            self._run_id, self._known = header.run_id, {}
        newest = history.newest_slot(self.store, max(self._known, default=None))
        if newest is None:
            newest = -1
        errors: list[PatchstoreError] = []
        marks = Marks()
        try:
            if (found := Marks.read(self.store, newest)) is not None:
                marks = found
            else:
                what = "tags, signatures, shortcuts and retired versions are not known"
                errors.append(UsageError(f"{what}: this user may not list {self.store.url}"))
        except DataError as exc:
            errors.append(exc)
        versions = list[Version]()
        for each in read_versions(
            self.store, header, newest, last=MOST_VERSIONS, marks=lambda: marks, known=self._known
        ):
            if isinstance(each, Version):
                versions.append(each)
            else:
                errors.append(each.error)
        self._known = {each.number: each for each in versions}
        return Recorded(
            url=self.store.url,
            header=header,
            versions=versions,
            num_left_out=max(0, newest + 1 - MOST_VERSIONS),
            marks=marks,
            errors=errors,
        )
