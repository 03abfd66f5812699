"""The keys of objects in a bucket: every key of the format is made or checked here."""

import re

from patchstore.errors import UsageError
from patchstore.support.arguments import version_number

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
RESERVATIONS = "reservations/"
UNNAMED = "unnamed/"

_VERSION_DIGITS = 8
_MAX_NUMBER = 2**53 - 1
"""The largest integer of the format; it has 16 digits."""
_DIGITS = r"([0-9]{8,16})"
_MANIFEST = re.compile(rf"versions/{_DIGITS}\.json")
_SHORTCUT = re.compile(rf"shortcuts/{_DIGITS}-(?:anchor|from-{_DIGITS})\.json")
_SUMS = re.compile(rf"states/{_DIGITS}-[A-Za-z0-9._+=@-]+\.sums")
_KEY = re.compile(r"[A-Za-z0-9._+=@-]+(/[A-Za-z0-9._+=@-]+)*")
_SIGNATURE = re.compile(rf"signatures/{_DIGITS}-[0-9a-f]{{32}}-[0-9a-z]{{1,64}}\.sig")
_RECORD = re.compile(rf"{_DIGITS}\.json")
_RESERVATION = re.compile(r"reservations/[0-9a-f]{32}\.json")
_TAG = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,99}")
_FILE_NAME = re.compile(r"[A-Za-z0-9._+=@-]+")
_ATTEMPT_ID = rf"{_DIGITS}-[0-9a-f]{{16}}"
_ATTEMPT = re.compile(
    rf"anchors/{_ATTEMPT_ID}/(?={_FILE_NAME.pattern}\Z)"
    rf"|(?:deltas|pieces)/{_ATTEMPT_ID}/(?=[0-9]{{5,}}(?:-of-[0-9]{{5,}})?\.safetensors\Z)"
    rf"|states/{_ATTEMPT_ID}\.sums\Z"
)
"""What all objects of an attempt begin with, where the key is one that our writers give."""


def _spelled(number: int) -> str:
    """Spell the number of a version or of a record: 8 digits with leading zeros, more where it needs more."""
    return f"{number:0{_VERSION_DIGITS}d}"


def _number(match: re.Match[str] | None) -> int | None:
    """Return the number in a key, or None where it is no such key, or the number is spelled otherwise."""
    number = None if match is None else int(match[1])
    if match is None or number is None or number > _MAX_NUMBER or _spelled(number) != match[1]:
        return None
    return number


def manifest_key(version: int) -> str:
    """Key of a version's manifest: the slot. All that names a version by its number comes through here."""
    return f"{VERSIONS}{_spelled(version_number(version))}.json"


def manifest_version(key: str) -> int | None:
    """Return the version that a manifest's key belongs to, or None for any other key."""
    return _number(_MANIFEST.fullmatch(key))


def anchor_prefix(version: int, write_id: str) -> str:
    """Folder of one attempt at an anchor.

    The attempt is part of the name: a publisher that lost the version must never overwrite what
    the winner's manifest names.
    """
    return f"anchors/{_spelled(version)}-{write_id}/"


def delta_prefix(version: int, write_id: str) -> str:
    return f"deltas/{_spelled(version)}-{write_id}/"


def delta_key(version: int, write_id: str, part: int, num_parts: int) -> str:
    """Key of one part of a delta; `part` counts from 1."""
    return f"{delta_prefix(version, write_id)}{part:05d}-of-{num_parts:05d}.safetensors"


def piece_key(version: int, write_id: str, place: int) -> str:
    """Key of what one rank of a publisher has of an anchor's tensors, until the anchor is stored."""
    return f"{PIECES}{_spelled(version)}-{write_id}/{place:05d}.safetensors"


def rollup_key(version: int, write_id: str, part: int) -> str:
    """Key of one part of the delta of a shortcut; `part` counts from 1."""
    return f"{delta_prefix(version, write_id)}{part:05d}.safetensors"


def shortcut_key(version: int, parent: int | None) -> str:
    """Key of another way to reach a version: from an older version, or by an anchor (`parent` is None)."""
    how = "anchor" if parent is None else f"from-{_spelled(parent)}"
    return f"{SHORTCUTS}{_spelled(version)}-{how}.json"


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
    return f"states/{_spelled(version)}-{write_id}.sums"


def is_sums_key(key: str) -> bool:
    """Whether digest sums may have this key: `states/<version>-<write_id>.sums`."""
    return _number(_SUMS.fullmatch(key)) is not None


def signature_prefix(version: int) -> str:
    """What the keys of all signatures of a version begin with."""
    return f"{SIGNATURES}{_spelled(version)}-"


def signature_key(version: int, manifest_digest: str, signer: str) -> str:
    """Key of a signer's signature of a manifest.

    Half of the manifest's digest is part of the name: a writer that lost the version leaves a signature that
    no reader asks for. A signer has 1 to 64 characters of `0-9 a-z`.
    """
    digits = manifest_digest.removeprefix("blake3:")[:32]
    return f"{signature_prefix(version)}{digits}-{signer}.sig"


def is_signature_key(key: str) -> bool:
    """Whether a signature of a version may have this key."""
    return signed_version(key) is not None


def signed_version(key: str) -> int | None:
    """Return the version that a signature's key belongs to, or None for any other key."""
    return _number(_SIGNATURE.fullmatch(key))


def attempt_of(key: str) -> tuple[int, str] | None:
    """Return the version and the attempt at it that an object is stored for; None for any other key.

    Of the attempt it is what all of its objects begin with: its folder, or the key of its sums. Collectors
    delete by this answer, so a key is an attempt's only if all of it is as our writers spell it: people keep
    things of their own in the same places.
    """
    match = _ATTEMPT.match(key)
    if match is None or match.lastindex is None:
        return None
    number = match[match.lastindex]
    return (int(number), match[0]) if _spelled(int(number)) == number else None


def record_key(prefix: str, number: int) -> str:
    """Key of a record of a series, such as `retired/00000003.json`; the prefix is that of the series."""
    return f"{prefix}{_spelled(number)}.json"


def record_number(prefix: str, key: str) -> int | None:
    """Return which record of a series has this key, or None for any other key."""
    return _number(_RECORD.fullmatch(key.removeprefix(prefix))) if key.startswith(prefix) else None


def tag_prefix(name: str) -> str:
    return f"{TAGS}{name}/"


def tag_name(key: str) -> str | None:
    """Return the tag that a record under `tags/` belongs to, or None for any other key."""
    name = key.removeprefix(TAGS).partition("/")[0]
    return name if is_tag_name(name) and record_number(tag_prefix(name), key) is not None else None


def is_tag_name(name: str) -> bool:
    """Whether a tag may be called so: a letter, then letters, digits, `.`, `_` and `-`, and not `head`."""
    return _TAG.fullmatch(name) is not None and name.lower() != "head"


def is_reservation_key(key: str) -> bool:
    """Whether a reservation may have this key: `reservations/<32 hex digits>.json`."""
    return _RESERVATION.fullmatch(key) is not None


ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""The one file of an adapter's weights that PEFT and vLLM read."""
ADAPTER_CONFIG = "adapter_config.json"


def shard_name(shard: int, num_shards: int) -> str:
    """File name of one shard of an anchor, as Hugging Face names them; `shard` counts from 1."""
    if num_shards == 1:
        return "model.safetensors"
    return f"model-{shard:05d}-of-{num_shards:05d}.safetensors"


def is_key(key: str) -> bool:
    """Whether an object of a store may have this key: see `check_key`."""
    return _KEY.fullmatch(key) is not None and not any(part in {".", ".."} for part in key.split("/"))


def check_key(key: str) -> str:
    """Return the key, or refuse one that could leave the bucket or differ between stores."""
    if not is_key(key):
        raise UsageError(f"{key!r} is not a key: use parts of A-Z a-z 0-9 . _ + = @ - joined by '/'")
    return key


def check_file_name(name: str) -> str:
    """Return the name of a file of a checkpoint folder, or refuse one with a folder in it."""
    if not _FILE_NAME.fullmatch(name) or name in {".", ".."}:
        raise UsageError(f"{name!r} is not a plain file name of A-Z a-z 0-9 . _ + = @ -")
    return name
