"""Keys on elliptic curves: the only module that imports the package `cryptography`."""

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from patchstore.errors import UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey

_CURVES = ("secp256r1", "secp384r1", "secp521r1")
_MAX_PEM_BYTES = 100_000
_NO_PACKAGE = "signatures need the package cryptography: pip install cryptography"


class PublicKey:
    """A public key."""

    def __init__(self, pem: str | bytes, where: str) -> None:
        """Read a key.

        Args:
            pem: the key in PEM (`-----BEGIN PUBLIC KEY-----`).
            where: what errors call it; they do not quote it.

        Raises:
            UsageError: it is no public key on P-256, P-384 or P-521, or `cryptography` is not installed.
        """
        try:
            from cryptography.exceptions import UnsupportedAlgorithm
            from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
            from cryptography.hazmat.primitives.serialization import (
                Encoding,
                PublicFormat,
                load_pem_public_key,
            )
        except ImportError as exc:
            raise UsageError(_NO_PACKAGE) from exc
        data = pem.encode(errors="replace") if isinstance(pem, str) else pem
        try:
            found = load_pem_public_key(data)
        except (ValueError, UnsupportedAlgorithm) as exc:
            hint = "; that is a private key: give the public one" if b"PRIVATE KEY" in data else ""
            raise UsageError(f"{where} is no public key in PEM (-----BEGIN PUBLIC KEY-----){hint}") from exc
        if not isinstance(found, EllipticCurvePublicKey) or found.curve.name not in _CURVES:
            raise UsageError(f"{where} must be a key on the elliptic curve P-256, P-384 or P-521")
        self._key = found
        self.pem = self._key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
        self.identity = hashlib.sha256(self.pem.encode()).hexdigest()
        """SHA-256 of the PEM, as Model Signing identifies a key."""

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "PublicKey":
        """Read a key from a file. Raises UsageError, as above or if it cannot be read."""
        return cls(_read_pem(path), os.fspath(path))

    @property
    def name(self) -> str:
        """What the names of signatures in a bucket call the key."""
        return self.identity[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PublicKey) and other.identity == self.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    def has_signed(self, data: bytes, signature: bytes) -> bool:
        """Whether a signature over these bytes is by this key."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(signature, data, _ecdsa(self._key))
        except InvalidSignature:
            return False
        return True


class Signer(Protocol):
    """Signs versions: a `KeySigner`, or an object of yours that asks whatever holds the private key.

    May be called from any thread, one call at a time.
    """

    @property
    def public_key(self) -> PublicKey:
        """What verifies its signatures."""
        ...

    def sign(self, data: bytes) -> bytes:
        """Return an ECDSA signature of these bytes, in DER.

        The hash is SHA-256 with a key on P-256, SHA-384 with P-384, and SHA-512 with P-521.
        """
        ...


class KeySigner:
    """Signs with a private key on an elliptic curve. Readers require its public key."""

    def __init__(self, path: str | os.PathLike[str], *, password: str | bytes | None = None) -> None:
        """Read the key; the file is not read again.

        Args:
            path: a PEM file with a private key on P-256, P-384 or P-521.
            password: of the file; None if it is not encrypted.

        Raises:
            UsageError: the file cannot be read, the password is wrong or missing, it is no such key, or
                `cryptography` is not installed. The message quotes nothing of the file.
        """
        try:
            from cryptography.exceptions import UnsupportedAlgorithm
            from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
            from cryptography.hazmat.primitives.serialization import (
                Encoding,
                PublicFormat,
                load_pem_private_key,
            )
        except ImportError as exc:
            raise UsageError(_NO_PACKAGE) from exc
        secret = password.encode() if isinstance(password, str) else password
        data, where = _read_pem(path), os.fspath(path)
        try:
            found = load_pem_private_key(data, secret)
        except TypeError as exc:
            needs = "needs a password" if secret is None else "is not encrypted, so give no password"
            raise UsageError(f"the private key {where} {needs}") from exc
        except (ValueError, UnsupportedAlgorithm) as exc:
            wrong = "" if secret is None else ", or the password is wrong"
            raise UsageError(
                f"{where} is no private key in PEM (-----BEGIN EC PRIVATE KEY-----){wrong}"
            ) from exc
        public = found.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        self.public_key = PublicKey(public, where)
        """What verifies its signatures."""
        assert isinstance(found, EllipticCurvePrivateKey)
        self._key = found

    def sign(self, data: bytes) -> bytes:
        """Return an ECDSA signature of these bytes, in DER."""
        return self._key.sign(data, _ecdsa(self._key.public_key()))


def _ecdsa(key: "EllipticCurvePublicKey") -> "ECDSA":
    """Return the signature algorithm of a key: the hash is as long as the curve, as Sigstore has it."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA

    by_size = {256: hashes.SHA256(), 384: hashes.SHA384(), 521: hashes.SHA512()}
    return ECDSA(by_size[key.curve.key_size])


def _read_pem(path: str | os.PathLike[str]) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return file.read(_MAX_PEM_BYTES)
    except (OSError, TypeError) as exc:
        raise UsageError(f"the key {path!r:.200} cannot be read: {exc}") from exc
