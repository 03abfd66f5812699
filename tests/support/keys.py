"""Keys for tests of signatures: made anew, on an elliptic curve."""

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)


def key_pair(
    folder: Path, name: str = "trainer", curve: ec.EllipticCurve | None = None, password: bytes | None = None
) -> tuple[Path, Path]:
    """Write a private key and its public key in PEM; return both paths."""
    key = ec.generate_private_key(curve or ec.SECP256R1())
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    secret = NoEncryption() if password is None else BestAvailableEncryption(password)
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, secret))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public
