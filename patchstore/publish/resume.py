"""Open a run for a publisher: create one, or find the version that has the publisher's weights.

Nothing is ever deleted or overwritten to make a resumption fit.
"""

import logging
import uuid
from collections.abc import Callable
from contextlib import closing, suppress
from typing import NamedTuple

from patchstore.errors import (
    ResumeMismatch,
    RunExists,
    SchemaMismatch,
    Unsigned,
    VersionNotFound,
    VersionRetired,
    WrongSignature,
)
from patchstore.format import history, kept
from patchstore.format.hashing import digest
from patchstore.format.records import Manifest, Schema, StoreHeader
from patchstore.format.state_sums import Sums, state_total
from patchstore.publish.committer import now
from patchstore.publish.options import Resume
from patchstore.publish.signatures import own
from patchstore.signing.signers import Signer
from patchstore.stores.base import Store

logger = logging.getLogger(__name__)


class Found(NamedTuple):
    """A run, and what to build on."""

    header: StoreHeader
    head: Manifest | None = None
    parent: Manifest | None = None
    """The version to build on; None, as the head, in a run without versions."""
    parent_digest: str | None = None
    """Of that version's manifest, as it was read."""
    sums: dict[str, Sums] | None = None
    """Its digest sums; None where the publisher has other weights, or may have."""
    is_signed: bool = True
    """Without a signer, or if the publisher's has signed the version to build on."""


def open_run(
    store: Store,
    schema: Schema,
    sums_now: Callable[[], dict[str, Sums]],
    resume: Resume,
    signer: Signer | None = None,
) -> Found:
    """Create a run, or find the version that these weights are.

    Args:
        sums_now: returns the digest sums of the weights as they are served; called at most once.
        signer: versions that it has not signed are not built on: see `signatures`.

    Raises:
        As `Publisher`; nothing was written then.
    """
    header = history.read_header(store)
    if header is None:
        if not resume.may_begin:
            raise ResumeMismatch(f"{store.url} holds no run to resume; open it without resume")
        header = StoreHeader(run_id=uuid.uuid4().hex, created_at=now(), schema=schema)
        history.create_header(store, header)
        return Found(header)
    if resume.how == "new":
        raise RunExists(
            f"{store.url} already holds run {header.run_id}, created {header.created_at}; "
            'use another prefix, or resume=True or "auto" to go on with that run'
        )
    ours, theirs = schema.by_name(), header.schema.by_name()
    for name in sorted(ours.keys() | theirs.keys()):
        if (our := ours.get(name)) != (their := theirs.get(name)):
            raise SchemaMismatch(
                f"tensor {name!r} is {'missing' if our is None else our.kind} here, and the run has "
                f"{'none of that name' if their is None else their.kind}; a run keeps its names, shapes "
                "and dtypes, and so its dtype=, files= and quantization=, which decide them: give those that "
                "it was begun with, or another store; dtype={name: dtype} says it of single tensors"
            )
    if schema.tied != header.schema.tied:
        raise SchemaMismatch(f"tensors are tied as {schema.tied}, but the run has {header.schema.tied}")
    head = history.head(store)
    # A version number that was used must not be used again for other weights.
    history.check_newest(store, head)
    if head is None:
        return Found(header)
    versions = _Versions(store, header, head, own(signer, store, header))
    if resume.how == "anchor":
        return versions.behind_head()
    sums = sums_now()
    total = state_total(header.schema, sums)
    if resume.version is not None:
        return versions.named(resume.version, total, sums)
    found = versions.newest_with(total, sums)
    if found is not None:
        return found
    which = "and is kept" if signer is None else f"and is kept, and was signed by {signer.name}"
    if resume.how == "auto":
        logger.warning(
            "no version in %s has these weights (state digest %s) %s, so the next publication will be the "
            "whole model, behind version %d",
            store.url,
            total,
            which,
            head.version,
        )
        return versions.behind_head()
    advice = "" if signer is None else "sign the one that has them with `patchstore sign`, if it is yours, "
    raise ResumeMismatch(
        f"none of the {head.version + 1} versions in {store.url} has these weights {which}; their state "
        f"digest is {total}; {advice}"
        'load one of them first, or use resume="anchor" to publish these weights whole'
    )


class _Versions:
    """The versions of a run, as candidates to build on."""

    def __init__(
        self, store: Store, header: StoreHeader, head: Manifest, check: history.Check | None
    ) -> None:
        self._store, self._header, self._head, self._check = store, header, head, check

    def behind_head(self) -> Found:
        """Build on the newest version, with other weights than it has."""
        found, data, refused = self._read(self._head.version)
        return Found(self._header, self._head, found, digest(data), None, refused is None)

    def named(self, version: int, total: str, sums: dict[str, Sums]) -> Found:
        """Build on a version, which must have these weights.

        Raises:
            ResumeMismatch: it has others, or the signer has not signed it.
            VersionNotFound, VersionRetired: it is not there.
        """
        found, data, refused = self._read(version)
        kept.check(self._store, version)
        if found.state.total != total:
            raise ResumeMismatch(
                f"version {version} has state digest {found.state.total}, these weights {total}; "
                'load that version first, or use resume="anchor" to publish these weights whole'
            )
        if refused is not None:
            raise ResumeMismatch(
                f"version {version} has these weights, but it may be forged: {refused}. Sign it with "
                '`patchstore sign` if it is yours, or use resume="anchor" to publish these weights whole'
            )
        return Found(self._header, self._head, found, digest(data), sums)

    def newest_with(self, total: str, sums: dict[str, Sums]) -> Found | None:
        """Build on the newest version with this state digest; the search ends at a manifest that was lost.

        One that the signer has not signed does not count, and none that is retired.
        """
        with (
            closing(history.read_back(self._store, self._head.version)) as versions,
            suppress(VersionNotFound),
        ):
            for each in versions:
                if each.state.total != total:
                    continue
                found, data, refused = self._read(each.version)
                if refused is None and found.state.total == total:
                    if _is_retired(self._store, found.version):
                        return None
                    return Found(self._header, self._head, found, digest(data), sums)
                logger.warning("version %d is not built on: %s", each.version, refused)
        return None

    def _read(self, version: int) -> tuple[Manifest, bytes, Exception | None]:
        """Return a version, its manifest's bytes, and why the signer does not vouch for it, if so.

        It is read once: what is built on is what was checked, whatever the store answers later.
        """
        found, data = history.read_stored(self._store, version)
        if self._check is not None:
            try:
                self._check(found, data)
            except (Unsigned, WrongSignature) as exc:
                return found, data, exc
        return found, data, None


def _is_retired(store: Store, version: int) -> bool:
    try:
        kept.check(store, version)
    except VersionRetired:
        return True
    return False
