"""Signatures in a bucket: create one beside a version, find one."""

from patchstore.errors import AlreadyExists, CorruptObject, NotFound, StoreUnavailable, WrongSignature
from patchstore.format import hashing, history, layout, manifest_json
from patchstore.format.records import StoreHeader
from patchstore.signing import statement
from patchstore.signing.keys import PublicKey
from patchstore.signing.signers import Signer
from patchstore.stores.base import Store
from patchstore.support import host


def header_digest(header: StoreHeader) -> str:
    """Digest of a run's header with the fields that every release knows, spelled as `store.json` is."""
    return hashing.digest(manifest_json.header_to_json(header))


def signed(signer: Signer, header: StoreHeader, version: int, data: bytes) -> tuple[str, bytes]:
    """Sign a version; nothing is stored.

    Args:
        data: its manifest, as it is stored or is going to be.

    Returns:
        The key of the signature, and its bytes.

    Raises:
        WrongSignature: the signer returned what readers would refuse.
    """
    key = layout.signature_key(version, hashing.digest(data), signer.name)
    if not layout.is_signature_key(key):
        raise WrongSignature(f"the signer's name {signer.name!r:.100} must be 1 to 64 characters of 0-9 a-z")
    name = layout.manifest_key(version).rpartition("/")[2]
    return key, signer.sign(statement.of_manifest(name, data, header_digest(header)))


def create(store: Store, key: str, bundle: bytes) -> bytes:
    """Store a signature unless its key is taken; return what is stored under the key then.

    Raises:
        StoreUnavailable: no answer, and the key is still free; calling again is safe.
    """
    try:
        store.put(key, bundle, if_absent=True)
    except (AlreadyExists, StoreUnavailable) as exc:
        found = read(store, key)
        if found is None:
            raise StoreUnavailable(f"{key} was not stored: {exc}") from exc
        return found
    return bundle


def read(store: Store, key: str) -> bytes | None:
    """Return a signature as it is stored, or None; at most one byte more than readers take."""
    try:
        with host.reading(key):
            return store.get(key, 0, statement.MAX_BYTES + 1)
    except NotFound:
        return None


def check(bundle: bytes, key: PublicKey, header: str, version: int, data: bytes, where: str) -> None:
    """Check that a bundle is a key's signature of a version.

    Args:
        header: the run's `header_digest`, as the reader uses it.
        data: the version's manifest as it was read.
        where: the signature's key in the bucket.

    Raises:
        WrongSignature: it is not.
    """
    try:
        envelope = statement.read_bundle(where, bundle)
        # First, so that nothing that others wrote is read as a statement.
        if not key.has_signed(statement.to_sign(envelope.payload), envelope.signature):
            raise WrongSignature(f"{where} is no signature by the key {key.name}: it was damaged, or forged")
        found = statement.read_statement(where, envelope.payload)
    except CorruptObject as exc:
        raise WrongSignature(f"version {version}: {exc}") from exc
    if found.manifest != statement.sha256(data):
        raise WrongSignature(f"{where} signs another manifest than that of version {version}")
    if found.header != header:
        raise WrongSignature(
            f"{where} was made for another {layout.HEADER} than the one that was read: expected "
            f"{found.header}, found {header}"
        )


def sign_version(store: Store, signer: Signer, header: StoreHeader, version: int) -> bool:
    """Sign a version that exists. False if this signer's signature was there already.

    Raises:
        VersionNotFound, CorruptObject: there is no such version of this run.
        StoreUnavailable: calling again is safe.
    """
    found, data = history.read_stored(store, version)
    if found.run_id != header.run_id:
        raise CorruptObject(
            f"version {version} is of run {found.run_id}, but the store of run {header.run_id}"
        )
    key = layout.signature_key(version, hashing.digest(data), signer.name)
    if read(store, key) is not None:
        return False
    key, bundle = signed(signer, header, version, data)
    return create(store, key, bundle) == bundle
