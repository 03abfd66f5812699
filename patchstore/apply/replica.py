"""Keep named tensors at a version of a store, whole or not at all.

An update has two halves. Staging plans, fetches, checks and decodes, and compares the state digest
that the tensors would have with the manifest's: all of it without writing to them. Applying
writes, and returns what undoes it.
"""

import logging
import os
from collections.abc import MutableMapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from patchstore.apply.staged import Staged, Undo
from patchstore.apply.tensor_weights import TensorWeights
from patchstore.apply.update import Update
from patchstore.errors import HalfApplied, StateMismatch, UsageError, VersionNotFound
from patchstore.format import history, kept, tags
from patchstore.format.records import Manifest
from patchstore.read.host_cache import HostCache
from patchstore.signing.required import Keys, RequiredKeys
from patchstore.stores import Store, opened
from patchstore.support import host
from patchstore.support.arguments import version_number

logger = logging.getLogger(__name__)


class Replica:
    """A holder of one version of a run's tensors."""

    @torch.inference_mode(mode=False)
    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        tensors: MutableMapping[str, torch.Tensor],
        *,
        held: int | None = None,
        scratch: Path | None = None,
        cache: HostCache | None = None,
        required_keys: RequiredKeys | Keys | Sequence[Keys] | None = None,
    ) -> None:
        """Open a store to follow.

        Args:
            store: an open store, or the URL or path of one, which `close` closes.
            tensors: by checkpoint name, contiguous; written in place. Empty to have the first
                anchor fill it with tensors on the CPU.
            held: the version whose weights `tensors` has now, which is verified by digest; None when
                unknown, and the first update starts from an anchor.
            scratch: folder for temporary files of a delta's size; None for the system's.
            cache: what to fetch through instead, if given, so that replicas of a host share their downloads.
            required_keys: PEM files with public keys. Only versions that one of them has signed are applied.

        Raises:
            VersionNotFound: the store holds no run, or not the version `held`.
            SchemaMismatch: the tensors are not those of the run.
            UsageError: `tensors` is no dict of tensors by name, or `held` is no version.
            StateMismatch: they are not what version `held` has.
            StoreReplaced: version `held` is of another run than the store.
            Unsigned, WrongSignature: no required key has signed version `held`.
        """
        if not isinstance(tensors, MutableMapping):
            raise UsageError(
                "tensors must be a dict of names to tensors, such as model.state_dict(), "
                f"not {type(tensors).__name__}"
            )
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):  # type: ignore[redundant-expr, unused-ignore]
                raise UsageError(
                    f"tensors must be a dict of names to tensors, but {name!r:.100} is a "
                    f"{type(tensor).__name__} in it"
                )
        held = None if held is None else version_number(held)
        required = RequiredKeys.of(required_keys)
        with ExitStack() as closing:
            self.store = closing.enter_context(opened(store))
            header = history.read_header(self.store)
            if header is None:
                raise VersionNotFound(f"{self.store.url} holds no run; open a publisher on it first")
            self.header = header
            self._weights = TensorWeights(self.store, header.schema, tensors, scratch=scratch, cache=cache)
            self._update = Update(
                self.store, header, self._weights, reopen="open a new Replica", required=required
            )
            if held is not None:
                manifest, data = history.read_stored(self.store, held)
                self._update.check_run(manifest)
                if self._update.check_signed is not None:
                    self._update.check_signed(manifest, data)
                self._weights.adopt(manifest)
                self._update.held = manifest
            self._closing = closing.pop_all()

    @property
    def tensors(self) -> MutableMapping[str, torch.Tensor]:
        """What was given, as it is now."""
        return self._weights.tensors

    @property
    def manifest(self) -> Manifest | None:
        """Of the held version; None while that is unknown."""
        return self._update.held

    @property
    def held(self) -> int | None:
        """The version that the tensors have, or None while that is unknown."""
        return self._update.version

    def close(self) -> None:
        """Close the store if this opened it, which it did where it was given a URL. The tensors stay."""
        self._closing.close()

    def head(self) -> int | None:
        """Return the newest version in the store, or None before the first.

        Raises:
            StoreReplaced: as `stage`, or the versions end before the held one.
        """
        newest = self._update.head()
        return None if newest is None else newest.version

    def update(self, version: int | str | None = None) -> Manifest:
        """Stage and apply a version, named by its number or by a tag; None for the head.

        Raises as `stage` and `apply` do.

        Tensors that turn out not to be the held version's are brought to the version from an anchor.

        Raises:
            VersionNotFound: no such version or tag, or none at all yet.
            VersionRetired: the version is retired. One that is newer than the held version is only refused if
                its payloads are deleted, so that an update costs no further request.
            StoreReplaced: as `stage`, or, where the head is wanted, the versions end before the held one.
        """
        if version is not None:
            version = tags.version_of(self.store, version)
            if self.held is None or version < self.held:
                kept.check(self.store, version)
        if version is None:
            newest = self._update.head()
            if newest is None:
                raise VersionNotFound(f"{self.store.url} has no version yet")
            version = newest.version
        elif version == self.held:
            # Also where there is nothing to do, what is held must be what the store means by that number.
            self._update.check_held()
        if version != self.held:
            self.apply(self._staged_from_anywhere(version))
        assert self.manifest is not None
        return self.manifest

    def _staged_from_anywhere(self, version: int) -> Staged:
        """`stage`; where the held tensors turn out to be no version's, once more from an anchor."""
        try:
            return self.stage(version)
        except StateMismatch as exc:
            if self.manifest is None:
                raise
            logger.warning(
                "version %d does not build on what is held, so it starts from an anchor: %s", version, exc
            )
        before, self._update.held = self._update.held, None
        try:
            return self.stage(version)
        except BaseException:
            self._update.held = before
            raise

    # Tensors that an anchor makes here are written to later, which inference mode would forbid outside of it.
    @torch.inference_mode(mode=False)
    @host.asked("staging an update")
    def stage(self, version: int) -> Staged:
        """Make an update ready and verify it. The tensors are read, not written.

        Memory: an anchor is held in full, deltas as their changed elements.

        Raises:
            VersionNotFound, WrongParent: the store has no way to that version.
            VersionRetired: the version is retired, and its payloads are deleted.
            CorruptObject, StateMismatch: what it has is wrong; nothing may be applied.
            Unsigned, WrongSignature: keys are required, and none has signed the version.
            StoreReplaced: it has another run than when it was opened, or another version of the held number.
            SchemaMismatch: one of the followed tensors was taken out of the dict.
            HostError: this host is short of memory, disk or open files.
        """
        staged = self._update.prepare(version_number(version))
        self._weights.verify(staged)
        return staged

    def apply(self, staged: Staged) -> Undo:
        """Write a staged update into the tensors; afterwards they hold its version.

        Memory: the replaced values are kept in what is returned.

        Raises:
            UsageError: the tensors moved to another version since it was staged.
            HalfApplied: writing failed, and so did putting back what was written. No version is held.
            Anything else that writing raises, after all that was written has been put back.
        """
        update, weights, before = self._update, self._weights, self._update.held
        update.put(staged)
        try:
            update.apply()
        except BaseException:
            try:
                update.roll_back()
            except HalfApplied:
                update.mark_half_applied()
                raise
            raise
        update.accept()
        logger.info(
            "applied version %d: %d tensors, %.1f MiB, fetch %.2f s, decode %.2f s, verify %.2f s",
            staged.manifest.version,
            len(staged.names),
            staged.plan.num_bytes / 2**20,
            *(staged.timings[part] for part in ("fetch", "decode", "verify")),
        )
        after, replaced = update.held, weights.replaced

        def restore() -> None:
            if update.held is not after:
                raise UsageError(
                    f"the tensors are at version {self.held} by now: what this replaced cannot return"
                )
            weights.restore(replaced)
            update.held = before

        return Undo(restore)
