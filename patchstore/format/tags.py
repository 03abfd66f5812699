"""Tags: names of versions, such as `best`. A tag may move, and its versions are never retired.

The records of a tag are a series under `tags/<name>/`. The newest one counts; a tag that was deleted has one
without a version.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from patchstore.errors import UsageError, VersionNotFound
from patchstore.format import history, layout, series
from patchstore.format.manifest_json import dump
from patchstore.format.records import FORMAT_VERSION
from patchstore.stores.base import Store

_KIND = "tag"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """The content of one record of a tag."""

    name: str
    run_id: str
    version: int | None
    """None: the tag was deleted."""
    created_at: str
    """When it was set so. UTC, ISO 8601."""


def check_name(name: Any) -> str:
    """Return the name of a tag.

    Raises:
        UsageError: no tag can have this name.
    """
    if not isinstance(name, str):
        raise UsageError(f"a tag is a name, not {name!r:.100} ({type(name).__name__})")
    if name.lower() == "head":
        raise UsageError(f"a tag cannot be called {name!r}, which stands for the newest version")
    if not layout.is_tag_name(name):
        raise UsageError(
            f"{name!r:.120} cannot name a tag: begin with a letter, and go on with letters, digits, '.', '_' "
            "and '-', at most 100 in all"
        )
    return name


def to_json(tag: Tag) -> bytes:
    """Spell a record."""
    return dump(
        {
            "format_version": FORMAT_VERSION,
            "kind": _KIND,
            "run_id": tag.run_id,
            "name": tag.name,
            "version": tag.version,
            "created_at": tag.created_at,
        }
    )


def from_json(key: str, data: bytes, run_id: str | None = None) -> Tag:
    """Read a record.

    Raises:
        CorruptObject: not a record of that tag, or of another run; the message names the field.
        UnsupportedFormat: of another format version or kind.
    """
    record = series.parse(key, data, _KIND, run_id)
    name = record.text("name")
    if layout.tag_name(key) != name:
        raise record.corrupt("name", f"is {name!r:.120}, which does not belong under this key")
    return Tag(
        name=name,
        run_id=record.text("run_id"),
        version=None if record.is_null("version") else record.count("version"),
        created_at=record.time("created_at"),
    )


def read(store: Store, name: str, run_id: str | None = None) -> Tag | None:
    """Return a tag; None if there is none of that name, or it was deleted.

    Raises:
        UsageError: no tag can have this name.
        CorruptObject, UnsupportedFormat: its newest record cannot be understood.
    """
    found = series.newest(store, layout.tag_prefix(check_name(name)))
    tag = None if found is None else from_json(*found, run_id)
    return None if tag is None or tag.version is None else tag


def read_all(store: Store, run_id: str | None = None) -> dict[str, Tag]:
    """Return all tags that have a version, by name in ascending order. Costs and raises as `read_newest`."""
    return {name: tag for name, tag in read_newest(store, run_id).items() if tag.version is not None}


def read_newest(store: Store, run_id: str | None = None) -> dict[str, Tag]:
    """Return the newest record of each tag, also of deleted ones, by name in ascending order.

    Costs a listing, and a read for each tag.

    Raises:
        CorruptObject, UnsupportedFormat: a newest record cannot be understood.
    """
    newest: dict[str, str] = {}
    for key in series.keys(store, layout.TAGS):
        if (name := layout.tag_name(key)) is not None:
            prefix = layout.tag_prefix(name)
            before = layout.record_number(prefix, newest[name]) if name in newest else None
            number = layout.record_number(prefix, key)
            assert number is not None
            if before is None or number > before:
                newest[name] = key
    found = series.get_all(store, newest.values(), partial(from_json, run_id=run_id))
    return {tag.name: tag for tag in found}


def put(store: Store, tag: Tag) -> str:
    """Create the next record of a tag, and return its key.

    Raises:
        UsageError: no tag can have this name.
        StoreUnavailable: unknown whether it was created; calling again is safe.
    """
    return series.append(store, layout.tag_prefix(check_name(tag.name)), to_json(tag))


def withdraw(store: Store, key: str, tag: Tag) -> None:
    """Take back a record: the next one has no version, unless another process set the tag meanwhile.

    Args:
        key: of the record.
    """
    prefix = layout.tag_prefix(tag.name)
    number = layout.record_number(prefix, key)
    assert number is not None
    history.create(store, layout.record_key(prefix, number + 1), to_json(replace(tag, version=None)))


def version_of(store: Store, version: Any) -> int:
    """Return the number of a version that is named by its number or by a tag.

    Costs nothing for a number, and for a tag a listing and two reads.

    Raises:
        UsageError: neither.
        VersionNotFound: there is no such tag.
    """
    if not isinstance(version, str):
        # It imports numpy, which commands that only look at a bucket do without.
        from patchstore.support.arguments import version_number

        return version_number(version)
    header = history.read_header(store)
    found = read(store, version, None if header is None else header.run_id)
    if found is None or found.version is None:
        raise VersionNotFound(f"{store.url} has no tag {version!r}; `patchstore tag STORE` lists the tags")
    return found.version
