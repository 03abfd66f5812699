"""Who signs versions: a key, a certificate, or any other object with `name` and `sign`."""

import base64
import os
from collections.abc import Sequence
from typing import Protocol

from patchstore.errors import UsageError
from patchstore.signing import keys, statement


class Signer(Protocol):
    """Signs statements. May be called from any thread, one call at a time.

    With an attribute `public_key`, a `PublicKey`, a publisher can verify which versions are this signer's,
    and resume from them. Without it a resumption publishes the whole model.
    """

    @property
    def name(self) -> str:
        """1 to 64 characters of `0-9 a-z`; part of the keys of its signatures."""
        ...

    def sign(self, statement: bytes) -> bytes:
        """Return a Sigstore bundle with a signature of an in-toto statement."""
        ...


class KeySigner:
    """Signs with a private key on an elliptic curve. Readers require its public key."""

    def __init__(self, path: str | os.PathLike[str], *, password: str | bytes | None = None) -> None:
        """Read the key; the file is not read again.

        Args:
            path: a PEM file with a private key on P-256, P-384 or P-521.
            password: of the file; None if it is not encrypted.

        Raises:
            UsageError: see `keys.private_key`.
        """
        self._key = keys.private_key(path, password)
        self.public_key = keys.PublicKey(keys.public_pem(self._key.public_key()), os.fspath(path))
        """What verifies its signatures."""

    @property
    def name(self) -> str:
        """The first 16 digits of the public key's identity."""
        return self.public_key.name

    def sign(self, statement: bytes) -> bytes:
        """Return a bundle that names the public key."""
        return self._bundle(statement, {"publicKey": {"hint": self.public_key.identity}})

    def _bundle(self, content: bytes, material: dict[str, object]) -> bytes:
        algorithm = keys.ecdsa(self._key.public_key())
        return statement.bundle(content, self._key.sign(statement.to_sign(content), algorithm), material)


class CertificateSigner(KeySigner):
    """Signs with a private key, and adds certificates of it to each signature.

    `model_signing verify certificate` verifies these signatures. Readers of patchstore require keys: to them
    this is a signature by the certificate's key.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        certificate: str | os.PathLike[str],
        chain: Sequence[str | os.PathLike[str]] = (),
        *,
        password: str | bytes | None = None,
    ) -> None:
        """Read the key and the certificates.

        Args:
            path: as `KeySigner` takes it.
            certificate: a PEM file with the certificate of that key.
            chain: PEM files with those that lead from it to a root; the root itself may be left out.

        Raises:
            UsageError: a file cannot be used, or the certificate is of another key.
        """
        super().__init__(path, password=password)
        own = keys.certificates(certificate)
        if own[0][1] != self.public_key.pem:
            raise UsageError(f"the certificate {os.fspath(certificate)} is not of the key {os.fspath(path)}")
        others = [each for file in chain for each in keys.certificates(file)]
        self._chain = [{"rawBytes": base64.b64encode(der).decode()} for der, _ in (*own, *others)]

    def sign(self, statement: bytes) -> bytes:
        """Return a bundle that has the certificates."""
        return self._bundle(statement, {"x509CertificateChain": {"certificates": self._chain}})
