"""`CertificateSigner` with a certification authority of our own: the stock command verifies the chain."""

import datetime as dt
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    load_pem_private_key,
    load_pem_public_key,
)
from cryptography.x509.oid import NameOID

from patchstore import Replica
from patchstore.errors import Unsigned, UsageError
from patchstore.format import layout
from patchstore.signing import CertificateSigner
from tests.support.keys import key_pair
from tests.support.weights import Run

_NOW = dt.datetime.now(dt.UTC)


@dataclass
class Holder:
    """A key with a certificate, as files."""

    private: Path
    public: Path
    certificate: Path


def certified(folder: Path, name: str, by: Holder | None, *, is_authority: bool) -> Holder:
    """Make a key, and have another holder certify it; None to have it certify itself."""
    private, public = key_pair(folder, name)
    certificate = folder / f"{name}.crt"
    issuer = by or Holder(private, public, certificate)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer.private.stem)]))
        .public_key(_public(public))
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOW - dt.timedelta(days=1 if is_authority else 0))
        .not_valid_after(_NOW + dt.timedelta(days=30))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=not is_authority,
                key_cert_sign=is_authority,
                crl_sign=is_authority,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
    )
    signed = builder.sign(_private(issuer.private), hashes.SHA256())
    certificate.write_bytes(signed.public_bytes(Encoding.PEM))
    return Holder(private, public, certificate)


def _private(path: Path) -> ec.EllipticCurvePrivateKey:
    found = load_pem_private_key(path.read_bytes(), None)
    assert isinstance(found, ec.EllipticCurvePrivateKey)
    return found


def _public(path: Path) -> ec.EllipticCurvePublicKey:
    found = load_pem_public_key(path.read_bytes())
    assert isinstance(found, ec.EllipticCurvePublicKey)
    return found


@dataclass
class Chain:
    """Who certifies whom."""

    root: Holder
    between: Holder
    trainer: Holder


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    root = certified(tmp_path, "root", None, is_authority=True)
    between = certified(tmp_path, "between", root, is_authority=True)
    return Chain(root, between, certified(tmp_path, "trainer", between, is_authority=False))


@pytest.fixture
def signed(run: Run, chain: Chain) -> Run:
    run.open(
        signer=CertificateSigner(
            chain.trainer.private, chain.trainer.certificate, [chain.between.certificate]
        )
    )
    run.publish_versions(2)
    return run


def stock(run: Run, folder: Path, *authorities: Holder) -> subprocess.CompletedProcess[str]:
    """Download version 1 and its signature, and give both to the stock command with some roots of trust."""
    manifest, signature = folder / "00000001.json", folder / "00000001.sig"
    manifest.write_bytes(run.store.get(layout.manifest_key(1)))
    (key,) = run.store.list(layout.signature_prefix(1))
    signature.write_bytes(run.store.get(key))
    trusted = [each for holder in authorities for each in ("--certificate_chain", str(holder.certificate))]
    command = [sys.executable, "-m", "model_signing", "verify", "certificate", str(manifest)]
    return subprocess.run(
        [*command, "--signature", str(signature), *trusted],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ},
    )


def test_the_stock_command_verifies_the_chain_to_its_root(signed: Run, chain: Chain, tmp_path: Path) -> None:
    good = stock(signed, tmp_path, chain.root)
    assert good.returncode == 0, good.stdout + good.stderr


@pytest.mark.exhaustive
def test_the_stock_command_refuses_another_root_and_another_manifest(
    signed: Run, chain: Chain, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    other = certified(tmp_path / "elsewhere", "root", None, is_authority=True)
    assert stock(signed, tmp_path, other).returncode != 0
    key = layout.manifest_key(1)
    signed.store.put(key, signed.store.get(key).replace(b'"step": 1', b'"step": 7'))
    assert stock(signed, tmp_path, chain.root).returncode != 0


@pytest.mark.exhaustive
def test_the_stock_command_needs_the_certificate_in_between(run: Run, chain: Chain, tmp_path: Path) -> None:
    run.open(signer=CertificateSigner(chain.trainer.private, chain.trainer.certificate))
    run.publish_versions(2)
    assert stock(run, tmp_path, chain.root).returncode != 0
    assert stock(run, tmp_path, chain.root, chain.between).returncode == 0


def test_to_readers_it_is_a_signature_by_the_certificates_key(signed: Run, chain: Chain) -> None:
    for version in range(2):
        Replica(signed.store, {}, required_keys=chain.trainer.public).update(version)
    # An authority is not believed in the place of a key.
    with pytest.raises(Unsigned):
        Replica(signed.store, {}, required_keys=[chain.root.public, chain.between.public]).update(1)


def test_a_certificate_of_another_key_is_refused(chain: Chain, tmp_path: Path) -> None:
    trainer = chain.trainer
    for certificate in (chain.root.certificate, trainer.public, trainer.private, tmp_path / "none"):
        with pytest.raises(UsageError):
            CertificateSigner(trainer.private, certificate)
    with pytest.raises(UsageError):
        CertificateSigner(trainer.private, trainer.certificate, [trainer.public])
