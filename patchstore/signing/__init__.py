"""Signatures of versions: made by the trainer, required by readers.

`KeySigner` signs what a publisher commits. `RequiredKeys` is what a reader requires.
"""

from patchstore.signing.keys import PublicKey
from patchstore.signing.required import RequiredKeys
from patchstore.signing.signers import CertificateSigner, KeySigner, Signer

__all__ = ["CertificateSigner", "KeySigner", "PublicKey", "RequiredKeys", "Signer"]
