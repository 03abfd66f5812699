"""What must be true of a replica, at any moment and at the end."""

import threading

from patchstore.bucket import digests, history
from patchstore.follow.loop import Event
from patchstore.ops.replicate import service
from patchstore.ops.retention import Retention, collect, retire
from patchstore.signing import RequiredKeys
from patchstore.stores import layout
from patchstore.stores.base import Store
from tests.retention.kept_runs import later
from tests.support.copies import objects_of
from tests.support.weights import Run

OWN = {layout.REPLICA, layout.HEAD}
"""Objects of a replica that the source does not have, or has otherwise."""


def replicate(source: Store, target: Store, required: RequiredKeys | None = None) -> list[Event]:
    """Make the target equal to the source as it is now."""
    return list(service.replicate(source, target, threading.Event(), required=required))


def give_up(target: Store, keep_last: int = 2) -> None:
    """Retire and collect versions in a bucket alone, as its operator does."""
    retire(target, Retention(keep_last=keep_last), dry_run=False)
    assert collect(target, dry_run=False, clock=later(25)).num_objects > 0


def go_back(run: Run, version: int, count: int = 3, anchor_every: int = 100) -> list[int]:
    """Let the trainer go on from an older version; return the numbers of the new ones, with the claim."""
    for name, tensor in run.history[version].items():
        run.model[name].copy_(tensor)
    run.model["head.weight"] = run.model["embed.weight"]
    first = max(run.history) + 1
    run.open(resume=version, anchor_every=anchor_every)
    run.history[first] = run.history[version]
    run.publish_versions(count)
    run.close()
    return list(range(first, first + count + 1))


def objects(store: Store) -> dict[str, bytes]:
    """All objects of a small store, by key, without probes."""
    return {key: data for key, data in objects_of(store).items() if not key.startswith(layout.PROBES)}


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
            assert digests.digest(there[wanted.key]) == wanted.digest
    if versions:
        assert {layout.HEADER, layout.REPLICA} <= there.keys()
    return len(versions)


def assert_equal(source: Store, target: Store) -> None:
    """Fail unless the target has every object that a version of the source needs, and nothing else."""
    newest = history.head(source)
    assert assert_whole(source, target) == newest.version + 1
    needed = {layout.HEADER}
    for found in history.read_back(source, newest.version):
        needed |= {layout.manifest_key(found.version), *(each.key for each in found.objects)}
    assert objects(target).keys() - OWN == needed
    assert history.head(target) == newest
