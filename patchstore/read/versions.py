"""The versions of a run as a list: what each manifest says, and what records beside the versions say.

Without torch, so that `patchstore log` starts at once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import pairwise
from typing import Any

from patchstore.bucket import digests, history, kept, manifest_json, notes, shortcuts
from patchstore.bucket.records import Ends, Manifest, StoreHeader
from patchstore.errors import DataError, PatchstoreError, UsageError, VersionNotFound
from patchstore.stores import layout
from patchstore.stores.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """One version of a run."""

    number: int
    step: int
    """The trainer's count."""
    time: datetime
    """When it was created, by the trainer's clock."""
    share_changed: float | None
    """Elements whose bits differ from the parent's, of all; from 0 to 1. None where there is no delta."""
    num_bytes: int
    """Of what was published with it: the delta, and the anchor if it has one."""
    is_resumed: bool
    """Whether a publisher began with it that continues the run of another one, or went back to an older
    version."""
    read_marks: "Callable[[], Marks | None]" = field(repr=False, compare=False)
    """Reads, or has read, what `marks` are."""
    manifest: Manifest = field(repr=False)
    digest: str = field(repr=False)
    """Of the manifest, byte for byte."""

    @property
    def marks(self) -> "Marks | None":
        """What is said of all versions; None where this user may not list the store."""
        return self.read_marks()

    @property
    def tags(self) -> tuple[str, ...] | None:
        """Its tags. This and what follows is None where this user may not list the store."""
        return None if self.marks is None else tuple(self.marks.tags.get(self.number, ()))

    @property
    def signed_by(self) -> tuple[str, ...] | None:
        """Names of the keys that signed it, as the bucket claims. `required_keys` of `open` verifies that."""
        return None if self.marks is None else self.marks.signers(self.number, self.digest)

    @property
    def is_retired(self) -> bool | None:
        """Whether it was given up."""
        return None if self.marks is None else self.number in self.marks.retired

    @property
    def has_anchor(self) -> bool | None:
        """Whether it can be read in full, without the versions before it."""
        if self.manifest.anchor is not None:
            return True
        return None if self.marks is None else self.marks.has_added_anchor(self.number)

    @property
    def words(self) -> list[str]:
        """What is said of it, in words: its tags first."""
        is_so = {"retired": self.is_retired, "resumed": self.is_resumed, "signed": self.signed_by}
        return [*(self.tags or ()), *(word for word, is_true in is_so.items() if is_true)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A version whose manifest cannot be read."""

    number: int
    error: PatchstoreError

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"version": self.number, "error": {"kind": self.error.kind, "message": str(self.error)}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What records beside the versions say of them."""

    retired: frozenset[int] = frozenset()
    shortcuts: frozenset[Ends] = frozenset()
    tags: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """Names, by version."""
    signatures: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """Keys of signatures, by version; those of attempts that were not committed too."""

    @classmethod
    def read(cls, store: Store, newest: int) -> "Marks | None":
        """Read all records; None where this user may not list the store. Raises DataError.

        Costs four listings, and a read for each tag and each record of retirements.
        """
        tags: dict[int, list[str]] = {}
        signatures: dict[int, list[str]] = {}
        try:
            for name, tag in notes.read_tags(store).items():
                if tag.version is not None:
                    tags.setdefault(tag.version, []).append(name)
            for key in notes.keys(store, layout.SIGNATURES):
                if (version := layout.signed_version(key)) is not None:
                    signatures.setdefault(version, []).append(key)
            return cls(
                retired=frozenset(kept.retired_versions(store, newest)),
                shortcuts=shortcuts.listed(store),
                tags=tags,
                signatures=signatures,
            )
        except UsageError:
            return None

    def has_added_anchor(self, version: int) -> bool:
        """Whether an anchor of a version was added after it was committed."""
        return Ends(version, None) in self.shortcuts

    def signers(self, version: int, digest: str) -> tuple[str, ...]:
        """Return the names of the keys under which the store has a signature of a manifest."""
        begin, end = layout.signature_key(version, digest, "*").split("*")
        keys = (key for key in self.signatures.get(version, ()) if key.startswith(begin))
        return tuple(key.removeprefix(begin).removesuffix(end) for key in keys)


def read_versions(
    store: Store,
    header: StoreHeader,
    newest: int,
    *,
    last: int | None = None,
    marks: Callable[[], Marks | None],
    known: Mapping[int, Version] | None = None,
) -> list[Version | Unreadable]:
    """Read versions up to the newest, oldest first: all, or so many. What cannot be read is among them.

    `known` are those that were read before: a manifest never changes.
    """
    first = 0 if last is None else max(0, newest + 1 - last)
    # One more: a publisher that resumed shows beside the version before.
    wanted = range(max(0, first - 1), newest + 1)
    slots: dict[int, _Slot] = {number: (each.manifest, each.digest) for number, each in (known or {}).items()}
    new = [number for number in wanted if number not in slots]
    slots |= zip(new, history.read_many(partial(_slot, store, header.run_id), new), strict=True)
    ordered = [*([None] if first == 0 else []), *(slots[number] for number in wanted)]
    return [*_listed(header, ordered, first, marks)]


_Slot = tuple[Manifest, str] | PatchstoreError | None


def _slot(store: Store, run_id: str, version: int) -> _Slot:
    try:
        found, data = history.read_stored(store, version)
        history.check_same_run(store, found, run_id)
    except (DataError, VersionNotFound) as exc:
        return exc
    return found, digests.digest(data)


def _listed(
    header: StoreHeader, slots: Sequence[_Slot], first: int, marks: Callable[[], Marks | None]
) -> Iterator[Version | Unreadable]:
    for number, (before, slot) in enumerate(pairwise(slots), first):
        if not isinstance(slot, tuple):
            assert slot is not None
            yield Unreadable(number=number, error=slot)
            continue
        found, digest = slot
        is_other = isinstance(before, tuple) and before[0].writer.epoch < found.writer.epoch
        yield Version(
            number=number,
            step=found.step,
            time=manifest_json.time_of(found.created_at),
            share_changed=None if found.delta is None else found.delta.share_changed(header.schema),
            num_bytes=found.num_bytes,
            is_resumed=is_other or (number > 0 and found.parent != number - 1),
            read_marks=marks,
            manifest=found,
            digest=digest,
        )
