"""The keys of objects in a bucket: every key of the format is made or checked here."""

import re

from patchstore.errors import UsageError

HEADER = "store.json"
HEAD = "head.json"
VERSIONS = "versions/"
PROBES = "probes/"

_VERSION_DIGITS = 8
_MANIFEST = re.compile(r"versions/(\d{8,})\.json")
_SUMS = re.compile(r"states/([0-9]{8,})-[A-Za-z0-9._+=@-]+\.sums")
_KEY = re.compile(r"[A-Za-z0-9._+=@-]+(/[A-Za-z0-9._+=@-]+)*")
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


def sums_key(version: int, write_id: str) -> str:
    """Key of one attempt's digest sums of all tensors."""
    return f"states/{version:0{_VERSION_DIGITS}d}-{write_id}.sums"


def is_sums_key(key: str) -> bool:
    """Whether digest sums may have this key: `states/<version>-<write_id>.sums`."""
    match = _SUMS.fullmatch(key)
    return match is not None and f"{int(match[1]):0{_VERSION_DIGITS}d}" == match[1]


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
