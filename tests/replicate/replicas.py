"""What must be true of a replica, at any moment and at the end."""

from patchstore.format import hashing, history, layout
from patchstore.stores.base import Store

OWN = {layout.REPLICA, layout.HEAD}
"""Objects of a replica that the source does not have, or has otherwise."""


def objects(store: Store) -> dict[str, bytes]:
    """All objects of a small store, by key, without probes."""
    return {key: store.get(key) for key in store.list() if not key.startswith(layout.PROBES)}


def assert_whole(source: Store, target: Store) -> int:
    """Fail unless each object of the target is the source's, and each version there has all it names.

    Returns:
        How many versions the target has.
    """
    there = objects(target)
    for key, data in there.items():
        if key not in OWN:
            assert data == source.get(key), key
    versions = sorted(v for v in map(layout.manifest_version, there) if v is not None)
    assert versions == list(range(len(versions)))
    for version in versions:
        for wanted in history.read_manifest(target, version).objects:
            assert hashing.digest(there[wanted.key]) == wanted.digest
    if versions:
        assert {layout.HEADER, layout.REPLICA} <= there.keys()
    return len(versions)


def assert_equal(source: Store, target: Store) -> None:
    """Fail unless the target has every object that a version of the source needs, and nothing else."""
    newest = history.head(source)
    assert newest is not None
    assert assert_whole(source, target) == newest.version + 1
    needed = {layout.HEADER}
    for found in history.read_back(source, newest.version):
        needed |= {layout.manifest_key(found.version), *(each.key for each in found.objects)}
    assert objects(target).keys() - OWN == needed
    assert history.head(target) == newest
