"""Store the signature of a version that is about to exist, and find out which versions a signer has signed.

A signature covers what a version builds on. So a publisher with a signer builds only on versions that this
signer has signed. Others may be forged, also with the digest of the publisher's own weights: that digest is a
sum, and somebody who tries can find other weights with the same one.
"""

from patchstore.errors import PublishFailed, Unsigned
from patchstore.format import history, manifest_json
from patchstore.format.records import Manifest, StoreHeader
from patchstore.publish.uploads import Uploads
from patchstore.signing import stored
from patchstore.signing.keys import PublicKey
from patchstore.signing.required import RequiredKeys, checks
from patchstore.signing.signers import Signer
from patchstore.stores.base import Store


def own(signer: Signer | None, store: Store, header: StoreHeader) -> history.Check | None:
    """Return what raises for a version that this signer has not signed; None without a signer.

    Of a signer without `public_key` nothing can be verified, so it raises for each version.
    """
    if signer is None:
        return None
    key = getattr(signer, "public_key", None)
    if isinstance(key, PublicKey):
        return checks(RequiredKeys([key]), store, header)

    def unknown(found: Manifest, _data: bytes) -> None:
        raise Unsigned(f"whether {signer.name} has signed version {found.version} cannot be verified")

    return unknown


def store_signature(
    uploads: Uploads, store: Store, signer: Signer, header: StoreHeader, new: Manifest
) -> None:
    """Sign a version and store the signature, before its manifest is created.

    If another writer takes the version, no reader asks for this signature: its key has the digest of a
    manifest that was never stored.

    Raises:
        PublishFailed: the store did not take it, or the signer failed; the version does not exist.
    """
    try:
        key, bundle = stored.signed(signer, header, new.version, manifest_json.to_json(new))
    except Exception as exc:
        raise PublishFailed(
            f"version {new.version} could not be signed, and the next publication will be an anchor: {exc}"
        ) from exc
    there = uploads.retried(f"storing {key}", lambda: stored.create(store, key, bundle))
    if there != bundle:
        raise PublishFailed(
            f"{key} holds something else, which another program wrote, so version {new.version} was not "
            "committed; the next publication will be an anchor"
        )
