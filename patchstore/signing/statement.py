"""What a signature says: an in-toto statement in a Sigstore bundle. Their JSON is spelled and read here.

The statement is that of OpenSSF Model Signing 1.0 over one file, the manifest. So the stock command line
verifies it. Beside it the predicate has one object of ours, which other verifiers ignore.
"""

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from patchstore.errors import CorruptObject
from patchstore.format.json_fields import Record, json_object

PAYLOAD_TYPE = "application/vnd.in-toto+json"
_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://model_signing/signature/v1.0"
_BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_OURS = "patchstore"
_SINGLE = "."
"""The name that Model Signing gives to a model that is one file."""
_IGNORED = (".git", ".gitattributes", ".github", ".gitignore")
"""What Model Signing leaves out by default."""
MAX_BYTES = 1_000_000
"""Of a version's signature; readers ask for no more. One by a key has about 1,700 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signed:
    """What a statement of ours says."""

    manifest: str
    """SHA-256 of the manifest's bytes, 64 hex digits."""
    header: str
    """Digest of the run's `store.json`; see `header_digest` in `patchstore.signing.stored`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """A signature by a key, and the bytes that it is over."""

    payload: bytes
    """The statement, as JSON."""
    signature: bytes


def of_manifest(name: str, data: bytes, header: str) -> bytes:
    """Return the statement about a version's manifest.

    Args:
        name: the manifest's file name; verifiers do not compare it.
        data: the manifest as it is stored.
        header: as `Signed.header`.
    """
    digests = {_SINGLE: sha256(data)}
    return _statement(name, digests, _IGNORED, {_OURS: {"header": header}})


def of_folder(name: str, digests: Mapping[str, str], ignored: Sequence[str]) -> bytes:
    """Return the statement about a folder of files.

    Args:
        name: the folder's.
        digests: file name -> SHA-256, 64 hex digits.
        ignored: names of files that are in the folder and not signed.
    """
    return _statement(name, digests, (*_IGNORED, *ignored), {})


def _statement(
    name: str, digests: Mapping[str, str], ignored: Sequence[str], extra: Mapping[str, Any]
) -> bytes:
    ordered = sorted(digests.items())
    root = hashlib.sha256(b"".join(bytes.fromhex(digest) for _, digest in ordered)).hexdigest()
    value = {
        "_type": _STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": root}}],
        "predicateType": _PREDICATE,
        "predicate": {
            "resources": [
                {"name": each, "algorithm": "sha256", "digest": digest} for each, digest in ordered
            ],
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": list(ignored),
            },
            **extra,
        },
    }
    return json.dumps(value, separators=(",", ":")).encode()


def read_statement(where: str, data: bytes) -> Signed:
    """Read what a verified statement says of a version.

    Raises:
        CorruptObject: it is no statement of ours about one file.
    """
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
    return Signed(manifest=resources[0].text("digest"), header=predicate.item(_OURS).digest("header"))


def sha256(data: bytes) -> str:
    """64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def to_sign(statement: bytes) -> bytes:
    """Return the bytes that a key signs: DSSE's encoding of a statement and its type."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(statement), statement)


def bundle(statement: bytes, signature: bytes, material: Mapping[str, Any]) -> bytes:
    """Spell a Sigstore bundle.

    Args:
        material: what verifies it: `publicKey` or `x509CertificateChain`.
    """
    value = {
        "mediaType": _BUNDLE,
        "verificationMaterial": {**material, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(statement).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }
    return json.dumps(value, separators=(",", ":")).encode()


def read_bundle(where: str, data: bytes) -> Envelope:
    """Read a bundle with one signature. Nothing of it is verified yet.

    Raises:
        CorruptObject: it is none.
    """
    if len(data) > MAX_BYTES:
        raise CorruptObject(f"{where} has more than {MAX_BYTES:,} bytes, which no reader takes")
    record = Record(where, "", json_object(where, data))
    envelope = record.item("dsseEnvelope")
    if (kind := envelope.text("payloadType")) != PAYLOAD_TYPE:
        raise envelope.corrupt("payloadType", f"must be {PAYLOAD_TYPE}, not {kind!r:.80}")
    signatures = envelope.items("signatures")
    if len(signatures) != 1:
        raise envelope.corrupt("signatures", f"must be one, not {len(signatures)}")
    return Envelope(payload=_base64(envelope, "payload"), signature=_base64(signatures[0], "sig"))


def _base64(record: Record, field: str) -> bytes:
    try:
        return base64.b64decode(record.text(field), validate=True)
    except (ValueError, binascii.Error) as exc:
        raise record.corrupt(field, f"is no base64: {exc}") from exc
