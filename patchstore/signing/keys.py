"""Keys on elliptic curves: the only module that imports the package `cryptography`."""

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from patchstore.errors import UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import (
        ECDSA,
        EllipticCurvePrivateKey,
        EllipticCurvePublicKey,
    )

_CURVES = ("secp256r1", "secp384r1", "secp521r1")
_MAX_PEM_BYTES = 100_000
_NO_PACKAGE = 'signatures need the package cryptography: pip install "patchstore[sign]"'
NAME_DIGITS = 16
"""Of a key's identity, in the keys of its signatures."""


class PublicKey:
    """A public key; `name` is what keys of signatures call it."""

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
            from cryptography.hazmat.primitives.asymmetric import ec
            from cryptography.hazmat.primitives.serialization import load_pem_public_key
        except ImportError as exc:
            raise UsageError(_NO_PACKAGE) from exc
        data = pem.encode(errors="replace") if isinstance(pem, str) else pem
        try:
            found = load_pem_public_key(data)
        except (ValueError, UnsupportedAlgorithm) as exc:
            hint = "; that is a private key: give the public one" if b"PRIVATE KEY" in data else ""
            raise UsageError(f"{where} is no public key in PEM (-----BEGIN PUBLIC KEY-----){hint}") from exc
        if not isinstance(found, ec.EllipticCurvePublicKey) or found.curve.name not in _CURVES:
            raise UsageError(f"{where} must be a key on the elliptic curve P-256, P-384 or P-521")
        self._key: EllipticCurvePublicKey = found
        self.pem = public_pem(found)
        self.identity = hashlib.sha256(self.pem.encode()).hexdigest()
        """SHA-256 of the PEM, as Model Signing identifies a key."""

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "PublicKey":
        """Read a key from a file. Raises UsageError, as above or if it cannot be read."""
        return cls(read_pem(path), os.fspath(path))

    @property
    def name(self) -> str:
        return self.identity[:NAME_DIGITS]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PublicKey) and other.identity == self.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    def has_signed(self, data: bytes, signature: bytes) -> bool:
        """Whether a signature over these bytes is by this key."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(signature, data, ecdsa(self._key))
        except InvalidSignature:
            return False
        return True


def public_pem(key: "EllipticCurvePublicKey") -> str:
    """Spell a public key in PEM."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def ecdsa(key: "EllipticCurvePublicKey") -> "ECDSA":
    """Return the signature algorithm of a key: the hash is as long as the curve, as Sigstore has it."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    by_size = {256: hashes.SHA256(), 384: hashes.SHA384(), 521: hashes.SHA512()}
    return ec.ECDSA(by_size[key.curve.key_size])


def private_key(
    path: str | os.PathLike[str], password: str | bytes | None = None
) -> "EllipticCurvePrivateKey":
    """Read a private key from a PEM file.

    Raises:
        UsageError: it cannot be read, the password is wrong or missing, or it is no key on P-256, P-384 or
            P-521. The message quotes nothing of the file.
    """
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError as exc:
        raise UsageError(_NO_PACKAGE) from exc
    secret = password.encode() if isinstance(password, str) else password
    data, where = read_pem(path), os.fspath(path)
    try:
        found = load_pem_private_key(data, secret)
    except TypeError as exc:
        needs = "needs a password" if secret is None else "is not encrypted, so give no password"
        raise UsageError(f"the private key {where} {needs}") from exc
    except (ValueError, UnsupportedAlgorithm) as exc:
        wrong = "" if secret is None else ", or the password is wrong"
        raise UsageError(f"{where} is no private key in PEM (-----BEGIN EC PRIVATE KEY-----){wrong}") from exc
    if not isinstance(found, ec.EllipticCurvePrivateKey) or found.curve.name not in _CURVES:
        raise UsageError(f"{where} must be a key on the elliptic curve P-256, P-384 or P-521")
    return found


def certificates(path: str | os.PathLike[str]) -> list[tuple[bytes, str | None]]:
    """Read the certificates of a PEM file: each in DER, and its public key in PEM; None for other kinds.

    Raises:
        UsageError: there are none.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import Encoding
    except ImportError as exc:
        raise UsageError(_NO_PACKAGE) from exc
    try:
        found = x509.load_pem_x509_certificates(read_pem(path))
    except ValueError as exc:
        raise UsageError(f"{os.fspath(path)} has no certificate in PEM") from exc
    return [
        (
            each.public_bytes(Encoding.DER),
            public_pem(key) if isinstance(key := each.public_key(), ec.EllipticCurvePublicKey) else None,
        )
        for each in found
    ]


def read_pem(path: str | os.PathLike[str]) -> bytes:
    """Read a small file. Raises UsageError if that fails."""
    try:
        with Path(path).open("rb") as file:
            return file.read(_MAX_PEM_BYTES)
    except (OSError, TypeError) as exc:
        raise UsageError(f"the key {path!r:.200} cannot be read: {exc}") from exc
