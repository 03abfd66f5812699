"""Rebuild any version, bit for bit, as a checkpoint folder.

Nothing appears under the output's name before every payload digest and the state digest have been checked.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from patchstore.bucket import history, kept, notes
from patchstore.bucket.digests import PayloadMissing
from patchstore.bucket.records import Manifest, Plan
from patchstore.codec import tensor_file
from patchstore.errors import UsageError
from patchstore.read import download
from patchstore.read.download import unfinished, write_file
from patchstore.read.rebuild import Progress, prove, rebuild
from patchstore.read.run import Around, Run
from patchstore.signing.required import Keys, RequiredKeys
from patchstore.stores import Store
from patchstore.support import host
from patchstore.support.arguments import local_path, version_number

__all__ = ["Progress", "replay", "verify"]


@host.asked("rebuilding a version", kinds=host.SHORT_OF_MEMORY)
def replay(
    store: Store | str | os.PathLike[str],
    version: int | str | None = None,
    *,
    out: str | os.PathLike[str],
    progress: Progress | None = None,
    required_keys: RequiredKeys | Keys | Sequence[Keys] | None = None,
) -> Manifest:
    """Write a version as a Hugging Face checkpoint folder.

    Args:
        store: an open store, or the URL or path of one.
        version: its number, or a tag; None for the head.
        out: a folder that does not exist yet. Its parent needs room for the checkpoint and the
            deltas.
        required_keys: PEM files with public keys, one of which must have signed the version.

    Returns:
        The version's manifest.

    Raises:
        UsageError: `out` exists, or cannot be created.
        VersionNotFound: no such version, or no such tag.
        VersionRetired: the version is retired, or was retired while it was read.
        WrongParent: the version cannot be reached from an anchor.
        CorruptObject, StateMismatch: the bucket's bytes are wrong. As after every error, nothing
            exists under `out`.
        Unsigned, WrongSignature: no required key has signed the version; no payload was read.
        HostError: there is no space for it, or the system refuses something else.
    """
    target = local_path("out", out)
    version = _checked(version)
    required = RequiredKeys.of(required_keys)
    if os.path.lexists(target):
        raise UsageError(f"{target} exists; name a folder that does not")
    with Run.open(store, required) as run:
        number = run.named(version)
        return run.reach(number, lambda route: write(run, route, target, progress))


def _checked(version: int | str | None) -> int | str | None:
    """Return a version's number, or a tag as it is. Raises UsageError before a store is opened."""
    if isinstance(version, str):
        return notes.check_version_name(version)
    return None if version is None else version_number(version)


@host.asked("rebuilding a version", kinds=host.SHORT_OF_MEMORY)
def write(
    run: Run, route: Plan, target: Path, progress: Progress | None = None, *, is_durable: bool = True
) -> Manifest:
    """Write the version that a plan leads to, which begins at an anchor, as a folder that does not exist.

    `is_durable` as of `download.unfinished`.
    """
    assert route.anchor is not None and route.anchor.anchor is not None
    with unfinished(target, is_folder=True, is_durable=is_durable) as partial:
        metadata = tensor_file.anchor_metadata(route.target.version, route.target.step, run.header.run_id)
        for name, specs, tensors in rebuild(run, route, partial, progress):
            write_file(partial / name, tensor_file.write(specs, tensors, metadata))
        for wanted in route.anchor.anchor.files:
            download.download(run.store, wanted, partial / wanted.key.rsplit("/", 1)[1])
    return route.target


@host.asked("rebuilding a version", kinds=host.SHORT_OF_MEMORY)
def verify(
    store: Store | str | os.PathLike[str],
    version: int | str | None = None,
    *,
    progress: Progress | None = None,
    required_keys: RequiredKeys | Keys | Sequence[Keys] | None = None,
) -> Manifest:
    """Rebuild a version without keeping it, and check every object it names, needed for that or not.

    Checks the chain of manifests from it back to its anchor, and from there to the anchor's parent. Raises
    what `replay` raises.

    Args:
        store: an open store, or the URL or path of one.
        version: its number, or a tag; None for the head.
        required_keys: PEM files with public keys, one of which must have signed the version.
    """
    version = _checked(version)
    required = RequiredKeys.of(required_keys)
    with Run.open(store, required) as run:
        number = run.named(version)
        return run.reach(number, lambda route: _prove(run, route, progress))


def _prove(run: Run, route: Plan, progress: Progress | None) -> Manifest:
    assert route.anchor is not None and route.anchor.anchor is not None
    if route.anchor.parent is not None:
        # Rebuilding needs nothing that is older, but the anchor's version claims to descend from it.
        history.read_parent(run.store, route.anchor)
    prove(run, route, progress)
    # They combine to the total, like those of the rebuilt tensors, so each tensor's sums are the same too.
    run.sums(route.target)
    for wanted in route.anchor.anchor.files:
        download.check(run.store, wanted)
    if route.target.delta is not None and route.target not in route.deltas:
        # Rebuilding did not need the delta, but readers at the parent take it.
        try:
            _prove_delta(run, route.target)
        except PayloadMissing as exc:
            # No reader can be at the parent any more, if what it was rebuilt from was given up.
            if not kept.is_of_retired(run.store, exc):
                raise
    return route.target


def _prove_delta(run: Run, target: Manifest) -> None:
    """Rebuild a version from its parent, which need not be signed: the chain of digests covers it."""
    assert target.parent is not None, "a manifest with a delta has a parent"
    unsigned, parent = Run(run.store, run.header), target.parent

    def use(before: Plan) -> None:
        prove(unsigned, replace(before, target=target, deltas=(*before.deltas, target)))

    Around(run.store).tried(lambda without: unsigned.plan(parent, without=without), use)
