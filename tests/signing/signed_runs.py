"""What happens to signed runs: a version is signed later, and others publish without the key."""

from patchstore import Publisher
from patchstore.bucket import history
from patchstore.signing import KeySigner, statement
from patchstore.stores.base import Store
from tests.support.weights import State, small_model


def sign(store: Store, signer: KeySigner, *versions: int) -> None:
    header = history.read_header(store)
    assert header is not None
    for version in versions:
        statement.sign_version(store, signer, header, version)


def forge(store: Store, state: State | None = None) -> int:
    """Publish weights of one's own, as somebody does who may write to the bucket: a claim and an anchor.

    Returns:
        The anchor's version.
    """
    with Publisher(store, state or small_model(), resume="anchor") as forger:
        return forger.publish_patch(9).result().version
