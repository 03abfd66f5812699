"""Signatures of versions: made by the trainer, required by readers.

`KeySigner` signs what a publisher commits. `RequiredKeys` is what a reader requires.
"""

from patchstore.signing.keys import KeySigner, PublicKey, Signer
from patchstore.signing.required import RequiredKeys

__all__ = ["KeySigner", "PublicKey", "RequiredKeys", "Signer"]
