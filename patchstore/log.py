"""The log of versions: reading manifests, finding the head, and the one create that commits.

A manifest's slot is created once and never again written or removed. Every client library may
report its own successful create as "already exists" (it retried after a lost answer), so a commit
that was refused or left unanswered is settled by reading the slot back.
"""

from patchstore import checksum, host, layout, lineage, manifest
from patchstore.errors import (
    AlreadyExists,
    CorruptObject,
    DataError,
    NotFound,
    RunExists,
    StoreUnavailable,
    VersionConflict,
    VersionNotFound,
)
from patchstore.model import Manifest, StoreHeader
from patchstore.stores.base import Store


def create_header(store: Store, header: StoreHeader) -> None:
    """Create a run.

    Raises:
        RunExists: the prefix holds another run; nothing was changed.
        StoreUnavailable: unknown whether it was created.
    """
    data = manifest.header_to_json(header)
    try:
        store.put(layout.HEADER, data, if_absent=True)
    except (AlreadyExists, StoreUnavailable) as exc:
        found = read_header(store)
        if found is None:
            raise
        if found.run_id != header.run_id:
            raise RunExists(
                f"{store.url} already holds run {found.run_id}, created {found.created_at}; "
                "use another prefix, or open the publisher with resume=... to go on with that run"
            ) from exc


def read_header(store: Store) -> StoreHeader | None:
    """Return the header of the run at this prefix, or None where there is no run.

    Raises:
        CorruptObject, UnsupportedFormat: `store.json` cannot be understood.
    """
    try:
        with host.reading(layout.HEADER):
            data = store.get(layout.HEADER)
    except NotFound:
        return None
    return manifest.header_from_json(data)


def read_manifest(store: Store, version: int) -> Manifest:
    """Return a version's manifest.

    Raises:
        VersionNotFound: not committed.
        CorruptObject, UnsupportedFormat: the object cannot be understood.
    """
    return _read(store, version)[0]


def stored_digest(store: Store, version: int) -> str:
    """Digest of a manifest as it is stored, which the next version names as its `parent_digest`.

    Not of the manifest spelled anew: another release may have written fields that this one drops.

    Raises:
        VersionNotFound: not committed.
    """
    return checksum.digest(_read(store, version)[1])


def _read(store: Store, version: int) -> tuple[Manifest, bytes]:
    key = layout.manifest_key(version)
    try:
        with host.reading(key):
            data = store.get(key)
    except NotFound as exc:
        raise VersionNotFound(f"{store.url} has no version {version}") from exc
    return manifest.from_json(key, data), data


def head(store: Store, hint: int | None = None) -> Manifest | None:
    """Return the highest committed version's manifest, or None where nothing is committed.

    Costs three reads when `hint` or `head.json` is right: that object, the slot, and the empty one after
    it; one more for each version that both are behind. Without either, the versions are listed once. A
    hint is never believed without its manifest.
    """
    found = None
    for guess in sorted({guess for guess in (hint, _stored_hint(store)) if guess is not None}, reverse=True):
        try:
            found = read_manifest(store, guess)
            break
        except VersionNotFound:
            continue
    if found is None:
        # Listings may lag behind, so what they show is a start for probing, not the answer.
        with host.reading(layout.VERSIONS):
            listed = [layout.manifest_version(key) for key in store.list(layout.VERSIONS)]
        last = max((version for version in listed if version is not None), default=None)
        try:
            found = read_manifest(store, 0 if last is None else last)
        except VersionNotFound:
            return None
    while (later := following(store, found)) is not None:
        found = later
    return found


def following(store: Store, found: Manifest) -> Manifest | None:
    """Return the version in the slot after this one, or None while there is nothing new."""
    try:
        return read_manifest(store, found.version + 1)
    except VersionNotFound:
        return None


def _stored_hint(store: Store) -> int | None:
    try:
        with host.reading(layout.HEAD):
            data = store.get(layout.HEAD)
    except NotFound:
        return None
    return manifest.hint_from_json(data)


def write_hint(store: Store, version: int) -> None:
    """Tell readers where the head was; losing this costs them a listing, nothing else."""
    store.put(layout.HEAD, manifest.hint_to_json(version))


def read_lineage(store: Store, target: int, held: int | None = None) -> dict[int, Manifest]:
    """Return what `lineage.plan` needs: the target and its ancestors.

    Goes back to the nearest anchor, and on to `held` where that is older and the way from there may still
    cost less, checking that every manifest is the one that its child names.

    Raises:
        VersionNotFound: the target, or an ancestor that the plan needs, is not in the store.
        CorruptObject: a manifest is not the one its child was built on.
    """
    found, _ = _read(store, target)
    known = {target: found}
    spent = 0  # as `Plan.cost`, from `found` to the target
    cheapest = None if found.anchor is None else lineage.anchor_cost(found)
    while found.parent is not None and found.delta is not None and found.version != held:
        spent += lineage.delta_cost(found)
        if cheapest is not None and (held is None or found.version < held or spent > cheapest):
            break
        try:
            parent, data = _read(store, found.parent)
        except VersionNotFound:
            if cheapest is None:
                raise
            break
        if checksum.digest(data) != found.parent_digest:
            raise CorruptObject(
                f"{layout.manifest_key(parent.version)} is not the manifest that version {found.version} "
                f"names as its parent: expected {found.parent_digest}, found {checksum.digest(data)}"
            )
        if parent.run_id != found.run_id or parent.writer.epoch > found.writer.epoch:
            raise CorruptObject(
                f"version {found.version} (run {found.run_id}, epoch {found.writer.epoch}) cannot descend "
                f"from version {parent.version} (run {parent.run_id}, epoch {parent.writer.epoch})"
            )
        known[parent.version] = found = parent
        if cheapest is None and parent.anchor is not None:
            cheapest = spent + lineage.anchor_cost(parent)
    return known


def commit(store: Store, new: Manifest) -> None:
    """Make a version exist. Its payloads must be stored already.

    Raises:
        VersionConflict: another writer has the slot; this one is fenced and must stop.
        StoreUnavailable: no answer, and the slot is still empty or cannot be read; calling again
            with the same manifest is safe.
    """
    key, data = layout.manifest_key(new.version), manifest.to_json(new)
    try:
        # Readers believe a version exists once its manifest does, so this comes last and never overwrites.
        store.put(key, data, if_absent=True)
    except (AlreadyExists, StoreUnavailable) as exc:
        try:
            stored = store.get(key)
        except NotFound:
            raise StoreUnavailable(f"{key} was not stored: {exc}") from exc
        if stored != data:
            raise VersionConflict(
                f"version {new.version} was committed by {_author(key, stored)}, not by {new.writer.id} "
                f"(epoch {new.writer.epoch}); another publisher has this run: stop this one"
            ) from exc


def _author(key: str, data: bytes) -> str:
    try:
        writer = manifest.from_json(key, data).writer
    except DataError:
        return "a publisher of another release"
    return f"{writer.id} (epoch {writer.epoch})"
