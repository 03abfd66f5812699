"""`model.sig` beside an anchor's files: a copy of the folder can be verified alone, by the stock command."""

import hashlib

from patchstore.errors import CorruptObject, NotFound
from patchstore.format import hashing, history, layout
from patchstore.format.records import Payload, StoreHeader
from patchstore.signing import statement, stored
from patchstore.signing.signers import Signer
from patchstore.stores.base import Store
from patchstore.support import host


def sign_anchor(store: Store, signer: Signer, header: StoreHeader, version: int) -> bool:
    """Sign the files of a version's anchor; False if it has no anchor, or one that is signed.

    Reads the anchor once, and checks it against the manifest: the stock command compares SHA-256, and a
    manifest has BLAKE3.

    Raises:
        VersionNotFound: there is no such version.
        CorruptObject: the version is of another run, or a file is missing or damaged; nothing was stored.
        StoreUnavailable: calling again is safe.
    """
    found = history.read_manifest(store, version)
    if found.run_id != header.run_id:
        raise CorruptObject(
            f"version {version} is of run {found.run_id}, but the store of run {header.run_id}"
        )
    if found.anchor is None:
        return False
    files = (*found.anchor.payloads, *found.anchor.files)
    folder = files[0].key.rpartition("/")[0]
    key = layout.anchor_signature_key(folder)
    if stored.read(store, key) is not None:
        return False
    digests = {each.key.rpartition("/")[2]: _sha256(store, each) for each in files}
    content = statement.of_folder(folder.rpartition("/")[2], digests, (layout.ANCHOR_SIGNATURE,))
    bundle = signer.sign(content)
    return stored.create(store, key, bundle) == bundle


def _sha256(store: Store, wanted: Payload) -> str:
    """Digest a file, and verify it on the way; few parts of it are in memory at a time."""
    digest = hashlib.sha256()
    try:
        with host.reading(wanted.key):
            for chunk in hashing.verified(store.read(wanted.key, end=wanted.size + 1), wanted):
                digest.update(chunk)
    except NotFound as exc:
        raise CorruptObject(f"{wanted.key} is missing from {store.url}, though its version names it") from exc
    return digest.hexdigest()
