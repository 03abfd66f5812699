"""Open a run for a publisher: create one, or find the version that has the publisher's weights.

Nothing is ever deleted or overwritten to make a resumption fit.
"""

import logging
import uuid
from collections.abc import Callable
from contextlib import closing, suppress

from patchstore.errors import ResumeMismatch, RunExists, SchemaMismatch, VersionNotFound, VersionRetired
from patchstore.format import history, kept
from patchstore.format.records import Manifest, Schema, StoreHeader
from patchstore.format.state_sums import Sums, state_total
from patchstore.publish.committer import now
from patchstore.stores.base import Store

logger = logging.getLogger(__name__)


def open_run(
    store: Store, schema: Schema, sums_now: Callable[[], dict[str, Sums]], resume: bool | int | str
) -> tuple[StoreHeader, Manifest | None, Manifest | None, dict[str, Sums] | None]:
    """Create a run, or find the version that these weights are.

    Args:
        sums_now: returns the digest sums of the weights as they are served; called at most once.
        resume: as `Publisher` takes it.

    Returns:
        The run's header, its head, and the version to build on; these two are None in a run without
        versions. Last the digest sums of the version to build on; None where they are not known.

    Raises:
        As `Publisher`; nothing was written then.
    """
    header = history.read_header(store)
    if header is None:
        if resume is not False and resume != "auto":
            raise ResumeMismatch(f"{store.url} holds no run to resume; open it without resume")
        header = StoreHeader(run_id=uuid.uuid4().hex, created_at=now(), schema=schema)
        history.create_header(store, header)
        return header, None, None, None
    if resume is False:
        raise RunExists(
            f"{store.url} already holds run {header.run_id}, created {header.created_at}; "
            'use another prefix, or resume=True or "auto" to go on with that run'
        )
    ours, theirs = schema.by_name(), header.schema.by_name()
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise SchemaMismatch(f"tensor {name!r} is {ours.get(name)}, but the run has {theirs.get(name)}")
    if schema.tied != header.schema.tied:
        raise SchemaMismatch(f"tensors are tied as {schema.tied}, but the run has {header.schema.tied}")
    head = history.head(store)
    # A version number that was used must not be used again for other weights.
    history.check_newest(store, head)
    if head is None or resume == "anchor":
        return header, head, head, None
    sums = sums_now()
    total = state_total(header.schema, sums)
    if resume is not True and resume != "auto":
        parent = history.read_manifest(store, int(resume))
        kept.check(store, parent.version)
        if parent.state.total != total:
            raise ResumeMismatch(
                f"version {resume} has state digest {parent.state.total}, these weights {total}; "
                'load that version first, or use resume="anchor" to publish these weights whole'
            )
        return header, head, parent, sums
    found = _newest_with(store, head, total)
    if found is not None and not _is_retired(store, found.version):
        return header, head, found, sums
    if resume == "auto":
        logger.warning(
            "no version that is kept in %s has these weights (state digest %s), so the next publication will "
            "be the whole model, behind version %d",
            store.url,
            total,
            head.version,
        )
        return header, head, head, None
    raise ResumeMismatch(
        f"none of the {head.version + 1} versions in {store.url} has these weights and is kept; their state "
        f"digest is {total}; "
        'load one of them first, or use resume="anchor" to publish these weights whole'
    )


def _is_retired(store: Store, version: int) -> bool:
    try:
        kept.check(store, version)
    except VersionRetired:
        return True
    return False


def _newest_with(store: Store, head: Manifest, total: str) -> Manifest | None:
    """Return the newest version with this state digest; the search ends at a manifest that was lost."""
    with closing(history.read_back(store, head.version)) as versions, suppress(VersionNotFound):
        for found in versions:
            if found.state.total == total:
                return found
    return None
