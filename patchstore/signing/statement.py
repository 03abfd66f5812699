"""A version's signature: what it says, how it is spelled, and where it lies in the bucket.

It is an in-toto statement in a Sigstore bundle. The statement is that of OpenSSF Model Signing 1.0 over one
file, the manifest, so the stock command line verifies it. Its predicate has one object more, of ours, which
other verifiers ignore.
"""

import base64
import binascii
import hashlib
import json
from typing import Any

from patchstore.bucket import digests, history, manifest_json
from patchstore.bucket.manifest_json import Record, json_object
from patchstore.bucket.records import StoreHeader
from patchstore.errors import CorruptObject, NotFound, WrongSignature
from patchstore.signing.keys import PublicKey, Signer
from patchstore.stores import layout
from patchstore.stores.base import Store

_PAYLOAD_TYPE = "application/vnd.in-toto+json"
_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://model_signing/signature/v1.0"
_BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_OURS = "patchstore"
_SINGLE = "."
"""The name that Model Signing gives to a model that is one file."""
_IGNORED = (".git", ".gitattributes", ".github", ".gitignore")
"""What Model Signing leaves out by default."""
_MAX_BYTES = 1_000_000
"""Readers ask for no more. A signature has about 1,700 bytes."""


def header_digest(header: StoreHeader) -> str:
    """Digest of a run's header with the fields that every release knows, spelled as `store.json` is."""
    return digests.digest(manifest_json.header_to_json(header))


def signed(signer: Signer, header: StoreHeader, version: int, data: bytes) -> tuple[str, bytes]:
    """Sign a version; nothing is stored.

    Returns:
        The key of the signature in the bucket, and its bytes.
    """
    key = layout.signature_key(version, digests.digest(data), signer.public_key.name)
    name = layout.manifest_key(version).rpartition("/")[2]
    statement = _statement(name, data, header_digest(header))
    return key, _bundle(statement, signer.sign(_to_sign(statement)), signer.public_key)


def sign_version(store: Store, signer: Signer, header: StoreHeader, version: int) -> bool:
    """Sign a version that exists. False if this signer's signature was there already."""
    found, data = history.read_stored(store, version)
    history.check_same_run(store, found, header.run_id)
    key, bundle = signed(signer, header, version, data)
    # A second signature of the same bytes has other bytes.
    return _read(store, key) is None and history.create(store, key, bundle) == bundle


def copy(source: Store, target: Store, version: int) -> None:
    """Copy all signatures of a version, which are not verified."""
    for key in source.list(layout.signature_prefix(version)):
        if layout.is_signature_key(key) and (bundle := _read(source, key)) is not None:
            history.create(target, key, bundle)


def has_signed(store: Store, key: PublicKey, header: str, version: int, data: bytes) -> bool:
    """Whether the store has a signature of a version by a key; costs one small request."""
    where = layout.signature_key(version, digests.digest(data), key.name)
    bundle = _read(store, where)
    if bundle is None:
        return False
    try:
        statement, signature = _read_bundle(where, bundle)
        # First, so that nothing that others wrote is read as a statement.
        if not key.has_signed(_to_sign(statement), signature):
            raise WrongSignature(f"{where} is no signature by the key {key.name}: it was damaged, or forged")
        of_manifest, of_header = _read_statement(where, statement)
    except CorruptObject as exc:
        raise WrongSignature(f"version {version}: {exc}") from exc
    if of_manifest != hashlib.sha256(data).hexdigest():
        raise WrongSignature(f"{where} signs another manifest than that of version {version}")
    if of_header != header:
        raise WrongSignature(
            f"{where} was made for another {layout.HEADER} than the one that was read: expected "
            f"{of_header}, found {header}"
        )
    return True


def _read(store: Store, key: str) -> bytes | None:
    """Return a signature as it is stored, or None; at most one byte more than readers take."""
    try:
        return history.small(store, key, _MAX_BYTES)
    except NotFound:
        return None


def _statement(name: str, data: bytes, header: str) -> bytes:
    """Spell the statement about a version's manifest."""
    sha256 = hashlib.sha256(data)
    # Model Signing digests the digests of all files; here there is one.
    root = hashlib.sha256(sha256.digest()).hexdigest()
    value = {
        "_type": _STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": root}}],
        "predicateType": _PREDICATE,
        "predicate": {
            "resources": [{"name": _SINGLE, "algorithm": "sha256", "digest": sha256.hexdigest()}],
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": list(_IGNORED),
            },
            _OURS: {"header": header},
        },
    }
    return _json(value)


def _read_statement(where: str, data: bytes) -> tuple[str, str]:
    """Return the digests of the manifest and of the header in a verified statement."""
    record = Record(where, "", json_object(where, data))
    for field, expected in (("_type", _STATEMENT), ("predicateType", _PREDICATE)):
        if (found := record.text(field)) != expected:
            raise record.corrupt(field, f"must be {expected}, not {found!r:.100}")
    predicate = record.item("predicate")
    resources = predicate.items("resources")
    if len(resources) != 1 or resources[0].text("name") != _SINGLE:
        raise predicate.corrupt("resources", "must be one file, the manifest")
    if (algorithm := resources[0].text("algorithm")) != "sha256":
        raise resources[0].corrupt("algorithm", f"must be sha256, not {algorithm!r:.80}")
    if _OURS not in predicate.value:
        raise predicate.corrupt(
            _OURS, "is missing, so another tool signed this: sign the version with `patchstore sign`"
        )
    return resources[0].text("digest"), predicate.item(_OURS).digest("header")


def _to_sign(statement: bytes) -> bytes:
    """Return the bytes that a key signs: DSSE's encoding of a statement and its type."""
    kind = _PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(statement), statement)


def _bundle(statement: bytes, signature: bytes, key: PublicKey) -> bytes:
    value = {
        "mediaType": _BUNDLE,
        "verificationMaterial": {"publicKey": {"hint": key.identity}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(statement).decode(),
            "payloadType": _PAYLOAD_TYPE,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }
    return _json(value)


def _read_bundle(where: str, data: bytes) -> tuple[bytes, bytes]:
    """Return the statement and the signature of a bundle; nothing is verified yet."""
    if len(data) > _MAX_BYTES:
        raise CorruptObject(f"{where} has more than {_MAX_BYTES:,} bytes, which no reader takes")
    record = Record(where, "", json_object(where, data))
    envelope = record.item("dsseEnvelope")
    if (kind := envelope.text("payloadType")) != _PAYLOAD_TYPE:
        raise envelope.corrupt("payloadType", f"must be {_PAYLOAD_TYPE}, not {kind!r:.80}")
    signatures = envelope.items("signatures")
    if len(signatures) != 1:
        raise envelope.corrupt("signatures", f"must be one, not {len(signatures)}")
    return _base64(envelope, "payload"), _base64(signatures[0], "sig")


def _base64(record: Record, field: str) -> bytes:
    try:
        return base64.b64decode(record.text(field), validate=True)
    except (ValueError, binascii.Error) as exc:
        raise record.corrupt(field, f"is no base64: {exc}") from exc


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
