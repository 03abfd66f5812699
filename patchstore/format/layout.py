"""The keys of objects in a bucket: every key of the format is made or checked here."""

import re

from patchstore.errors import UsageError

HEADER = "store.json"
HEAD = "head.json"
REPLICA = "replica.json"
VERSIONS = "versions/"
PROBES = "probes/"
PIECES = "pieces/"
SHORTCUTS = "shortcuts/"
SIGNATURES = "signatures/"
TAGS = "tags/"
RETIRED = "retired/"
LEASES = "leases/"
UNNAMED = "unnamed/"
ANCHOR_SIGNATURE = "model.sig"
"""Name of the signature in an anchor's folder."""

_VERSION_DIGITS = 8
_MANIFEST = re.compile(r"versions/(\d{8,})\.json")
_SHORTCUT = re.compile(r"shortcuts/(\d{8,})-(?:anchor|from-(\d{8,}))\.json")
_SUMS = re.compile(r"states/([0-9]{8,})-[A-Za-z0-9._+=@-]+\.sums")
_KEY = re.compile(r"[A-Za-z0-9._+=@-]+(/[A-Za-z0-9._+=@-]+)*")
_SIGNATURE = re.compile(r"signatures/([0-9]{8,})-[0-9a-f]{32}-[0-9a-z]{1,64}\.sig")
_RECORD = re.compile(r"([0-9]{8,})\.json")
_HOLDER = re.compile(r"[A-Za-z0-9-]{1,64}")
_TAG = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,99}")
_ATTEMPT = re.compile(r"(?:anchors|deltas|pieces)/([0-9]{8,})-[A-Za-z0-9._+=@-]+/")
_FILE_NAME = re.compile(r"[A-Za-z0-9._+=@-]+")


def manifest_key(version: int) -> str:
    return f"{VERSIONS}{version:0{_VERSION_DIGITS}d}.json"


def manifest_version(key: str) -> int | None:
    """Return the version that a manifest's key belongs to, or None for any other key."""
    match = _MANIFEST.fullmatch(key)
    if match is None or manifest_key(int(match[1])) != key:
        return None
    return int(match[1])


def anchor_prefix(version: int, write_id: str) -> str:
    """Folder of one attempt at an anchor.

    The attempt is part of the name: a publisher that lost the version must never overwrite what
    the winner's manifest names.
    """
    return f"anchors/{version:0{_VERSION_DIGITS}d}-{write_id}/"


def delta_prefix(version: int, write_id: str) -> str:
    """Folder of one attempt at a delta."""
    return f"deltas/{version:0{_VERSION_DIGITS}d}-{write_id}/"


def delta_key(version: int, write_id: str, part: int, num_parts: int) -> str:
    """Key of one part of a delta; `part` counts from 1."""
    return f"{delta_prefix(version, write_id)}{part:05d}-of-{num_parts:05d}.safetensors"


def piece_key(version: int, write_id: str, place: int) -> str:
    """Key of what one rank of a publisher has of an anchor's tensors, until the anchor is stored."""
    return f"{PIECES}{version:0{_VERSION_DIGITS}d}-{write_id}/{place:05d}.safetensors"


def rollup_key(version: int, write_id: str, part: int) -> str:
    """Key of one part of the delta of a shortcut; `part` counts from 1."""
    return f"{delta_prefix(version, write_id)}{part:05d}.safetensors"


def shortcut_key(version: int, parent: int | None) -> str:
    """Key of another way to reach a version: from an older version, or by an anchor (`parent` is None)."""
    how = "anchor" if parent is None else f"from-{parent:0{_VERSION_DIGITS}d}"
    return f"{SHORTCUTS}{version:0{_VERSION_DIGITS}d}-{how}.json"


def shortcut_ends(key: str) -> tuple[int, int | None] | None:
    """Return the version and the parent that a shortcut's key names, or None for any other key."""
    match = _SHORTCUT.fullmatch(key)
    if match is None:
        return None
    version, parent = int(match[1]), None if match[2] is None else int(match[2])
    is_ours = shortcut_key(version, parent) == key and (parent is None or parent < version)
    return (version, parent) if is_ours else None


def sums_key(version: int, write_id: str) -> str:
    """Key of one attempt's digest sums of all tensors."""
    return f"states/{version:0{_VERSION_DIGITS}d}-{write_id}.sums"


def is_sums_key(key: str) -> bool:
    """Whether digest sums may have this key: `states/<version>-<write_id>.sums`."""
    match = _SUMS.fullmatch(key)
    return match is not None and f"{int(match[1]):0{_VERSION_DIGITS}d}" == match[1]


def signature_prefix(version: int) -> str:
    """What the keys of all signatures of a version begin with."""
    return f"{SIGNATURES}{version:0{_VERSION_DIGITS}d}-"


def signature_key(version: int, manifest_digest: str, signer: str) -> str:
    """Key of a signer's signature of a manifest.

    The manifest's digest is part of the name: a writer that lost the version leaves a signature that no
    reader asks for.

    Args:
        manifest_digest: `blake3:` and 64 hex digits; half of them are used.
        signer: 1 to 64 characters of `0-9 a-z`.
    """
    digits = manifest_digest.removeprefix("blake3:")[:32]
    return f"{signature_prefix(version)}{digits}-{signer}.sig"


def anchor_signature_key(folder: str) -> str:
    """Key of the signature of an anchor's files, which lies beside them.

    Args:
        folder: theirs, such as `anchors/00000000-5b1e90c2d7f3a868`.
    """
    return f"{folder}/{ANCHOR_SIGNATURE}"


def is_signature_key(key: str) -> bool:
    """Whether a signature of a version may have this key."""
    return signed_version(key) is not None


def signed_version(key: str) -> int | None:
    """Return the version that a signature's key belongs to, or None for any other key."""
    match = _SIGNATURE.fullmatch(key)
    if match is None or f"{int(match[1]):0{_VERSION_DIGITS}d}" != match[1]:
        return None
    return int(match[1])


def attempt_of(key: str) -> tuple[int, str] | None:
    """Return which attempt at a version an object is stored for.

    Returns:
        The version, and what all objects of the attempt begin with: its folder, or the key of its sums. None
        for any key that no attempt has.
    """
    if is_sums_key(key):
        return int(key.removeprefix("states/").partition("-")[0]), key
    match = _ATTEMPT.match(key)
    if match is None or f"{int(match[1]):0{_VERSION_DIGITS}d}" != match[1]:
        return None
    return int(match[1]), match[0]


def record_key(prefix: str, number: int) -> str:
    """Key of a record of a series, such as `retired/00000003.json`.

    Args:
        prefix: of the series: `RETIRED`, `UNNAMED`, or what `tag_prefix` and `lease_prefix` return.
    """
    return f"{prefix}{number:0{_VERSION_DIGITS}d}.json"


def record_number(prefix: str, key: str) -> int | None:
    """Return which record of a series has this key, or None for any other key."""
    match = _RECORD.fullmatch(key.removeprefix(prefix))
    if match is None or record_key(prefix, int(match[1])) != key:
        return None
    return int(match[1])


def tag_prefix(name: str) -> str:
    """Prefix of the records of a tag."""
    return f"{TAGS}{name}/"


def tag_name(key: str) -> str | None:
    """Return the tag that a record under `tags/` belongs to, or None for any other key."""
    name = key.removeprefix(TAGS).partition("/")[0]
    return name if is_tag_name(name) and record_number(tag_prefix(name), key) is not None else None


def is_tag_name(name: str) -> bool:
    """Whether a tag may be called so: a letter, then letters, digits, `.`, `_` and `-`, and not `head`."""
    return _TAG.fullmatch(name) is not None and name.lower() != "head"


def lease_prefix(holder: str) -> str:
    """Prefix of the records of a lease."""
    return f"{LEASES}{holder}/"


def lease_holder(key: str) -> str | None:
    """Return who holds the lease that a record under `leases/` belongs to, or None for any other key."""
    holder = key.removeprefix(LEASES).partition("/")[0]
    is_one = _HOLDER.fullmatch(holder) is not None and record_number(lease_prefix(holder), key) is not None
    return holder if is_one else None


def shard_name(shard: int, num_shards: int) -> str:
    """File name of one shard of an anchor, as Hugging Face names them; `shard` counts from 1."""
    if num_shards == 1:
        return "model.safetensors"
    return f"model-{shard:05d}-of-{num_shards:05d}.safetensors"


def check_key(key: str) -> str:
    """Return the key, or refuse one that could leave the bucket or differ between stores.

    Raises:
        UsageError: the key is empty, absolute, has an empty, `.` or `..` part, or a character
            outside `A-Z a-z 0-9 . _ + = @ - /`.
    """
    if not _KEY.fullmatch(key) or any(part in {".", ".."} for part in key.split("/")):
        raise UsageError(f"{key!r} is not a key: use parts of A-Z a-z 0-9 . _ + = @ - joined by '/'")
    return key


def check_file_name(name: str) -> str:
    """Return the name of a file of a checkpoint folder, or refuse one with a folder in it.

    Raises:
        UsageError: not a plain file name.
    """
    if not _FILE_NAME.fullmatch(name) or name in {".", ".."}:
        raise UsageError(f"{name!r} is not a plain file name of A-Z a-z 0-9 . _ + = @ -")
    return name
