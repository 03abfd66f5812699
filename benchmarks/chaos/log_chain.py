"""Whether the log of a store is one chain of versions."""

import sys
from itertools import pairwise

from patchstore import PatchstoreError, Store
from patchstore.bucket import history
from patchstore.stores import layout


def is_one_chain(store: Store, head: int) -> bool:
    """Return whether the log has all versions up to `head` and no other, each the parent of the next."""
    if [*store.list(layout.VERSIONS)] != [layout.manifest_key(version) for version in range(head + 1)]:
        return False
    try:
        chain = [history.read_manifest(store, version) for version in range(head + 1)]
        digests = [history.stored_digest(store, version) for version in range(head)]
    except PatchstoreError as exc:
        print(exc, file=sys.stderr)
        return False
    return (chain[0].version, chain[0].parent) == (0, None) and all(
        (child.version, child.parent, child.parent_digest) == (number, number - 1, digests[number - 1])
        and child.run_id == parent.run_id
        and child.writer.epoch >= parent.writer.epoch
        for number, (parent, child) in enumerate(pairwise(chain), 1)
    )
