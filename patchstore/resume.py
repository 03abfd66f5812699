"""Where a publisher stands when it opens a store: a new run, or behind a version that it proves to have.

Nothing is ever deleted or overwritten to make a resumption fit.
"""

import logging
import uuid
from collections.abc import Mapping

import torch

from patchstore import digest, log
from patchstore.committer import now
from patchstore.errors import ResumeMismatch, RunExists, SchemaMismatch, VersionNotFound
from patchstore.model import Manifest, Schema, StateDigest, StoreHeader
from patchstore.stores.base import Store

logger = logging.getLogger(__name__)


def open_run(
    store: Store, schema: Schema, snapshot: Mapping[str, torch.Tensor], resume: bool | int | str
) -> tuple[StoreHeader, Manifest | None, Manifest | None, bool]:
    """Create a run, or find the version that these weights are.

    Args:
        snapshot: the weights as they are served.
        resume: as `Publisher` takes it.

    Returns:
        The run's header, its head, the version to build on, and whether the weights are that version's;
        head and version are None in a run without versions.

    Raises:
        As `Publisher`; nothing was written then.
    """
    header = log.read_header(store)
    if header is None:
        if resume is not False and resume != "auto":
            raise ResumeMismatch(f"{store.url} holds no run to resume; open it without resume")
        header = StoreHeader(run_id=uuid.uuid4().hex, created_at=now(), schema=schema)
        log.create_header(store, header)
        return header, None, None, False
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
    head = log.head(store)
    if head is None or resume == "anchor":
        return header, head, head, False
    state = digest.of_tensors(header.schema, snapshot.items())
    if resume is not True and resume != "auto":
        parent = log.read_manifest(store, int(resume))
        if parent.state != state:
            raise ResumeMismatch(
                f"version {resume} has state digest {parent.state.total}, these weights {state.total}; "
                'load that version first, or use resume="anchor" to publish these weights whole'
            )
        return header, head, parent, True
    found = _newest_with(store, head, state)
    if found is not None:
        return header, head, found, True
    if resume == "auto":
        logger.warning(
            "no version in %s has these weights (state digest %s), so the next publication will be the whole "
            "model, behind version %d",
            store.url,
            state.total,
            head.version,
        )
        return header, head, head, False
    raise ResumeMismatch(
        f"none of the {head.version + 1} versions in {store.url} has these weights, whose state digest is "
        f"{state.total}; "
        'load one of them first, or use resume="anchor" to publish these weights whole'
    )


def _newest_with(store: Store, head: Manifest, state: StateDigest) -> Manifest | None:
    """Return the newest version with this state digest."""
    for version in range(head.version, -1, -1):
        try:
            found = log.read_manifest(store, version)
        except VersionNotFound:
            # Old versions may have been deleted.
            continue
        if found.state == state:
            return found
    return None
