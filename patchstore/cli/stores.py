"""Open stores for commands, and read the run and the newest version."""

from pathlib import Path

from patchstore.cli.options import parsed
from patchstore.errors import DataError, UsageError, VersionNotFound
from patchstore.format import history, layout, tags
from patchstore.format.records import Manifest, StoreHeader
from patchstore.stores import Store, open_store


def open_with(url: str, options: list[str] | None) -> Store:
    """Open a store with options as they are given on the command line."""
    return open_store(url, **parsed(options))


def header(store: Store) -> StoreHeader:
    """Read the header of the run in a store.

    Raises:
        VersionNotFound: there is none.
    """
    found = history.read_header(store)
    if found is None:
        path = None if "://" in store.url else Path(store.url)
        what = "is no folder" if path is not None and not path.is_dir() else "holds no run"
        raise VersionNotFound(f"{store.url} {what}; check the URL, or publish a version there")
    return found


def head(store: Store) -> Manifest:
    """Read the newest version.

    Raises:
        VersionNotFound: there is none yet.
    """
    newest = history.head(store)
    if newest is None:
        raise VersionNotFound(f"{store.url} holds a run without a version yet; publish one")
    return newest


def number_or_tag(version: str) -> int | str:
    """Return what a VERSION of the command line is: a number, or the name of a tag.

    Raises:
        UsageError: neither.
    """
    if version.isascii() and version.isdecimal():
        return int(version)
    if not version[:1].isalpha():
        raise UsageError(f"{version!r:.100} is no version: give a number from 0 on, or a tag")
    return tags.check_name(version)


def version_named(store: Store, version: str | None) -> int | None:
    """Return the number of the version that the command line names; None where it names none.

    Raises:
        UsageError: no number, and no name of a tag.
        VersionNotFound: there is no such tag.
    """
    wanted = None if version is None else number_or_tag(version)
    return tags.version_of(store, wanted) if isinstance(wanted, str) else wanted


def newest_slot(store: Store) -> int:
    """Return the number of the newest version, also where its manifest cannot be read."""
    try:
        return head(store).version
    except DataError:
        # Perhaps the newest manifest itself is damaged. The keys of manifests also tell their versions.
        listed = (layout.manifest_version(key) for key in store.list(layout.VERSIONS))
        newest = max((version for version in listed if version is not None), default=None)
        if newest is None:
            raise
        return newest
