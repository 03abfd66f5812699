"""Store the signature of a version that is about to exist."""

from patchstore.errors import PublishFailed
from patchstore.format import manifest_json
from patchstore.format.records import Manifest, StoreHeader
from patchstore.publish.uploads import Uploads
from patchstore.signing import stored
from patchstore.signing.signers import Signer
from patchstore.stores.base import Store


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
