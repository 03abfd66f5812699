"""One rank's side of an update: a version is served whole, or the one before it is.

Keeps a copy of the checkpoint's tensors on the host. An update is proved and applied to that copy
first, and then the tensors that changed are loaded into the live model in full, by the model's own
loader. What undoes a failed load is the same loader and the copy's old bits.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from patchstore.errors import TornModel, UsageError
from patchstore.follower import Follower, Staged, Undo
from patchstore.model import Manifest, Schema
from patchstore.stores.base import Store
from patchstore.tensors import spec_of
from vllm_plugin.live import LiveWeights
from vllm_plugin.origin import find_version


class Updater:
    """Moves the live weights from version to version: `stage`, `commit`, then `accept` or `roll_back`."""

    def __init__(self, store: Store, live: LiveWeights, follower: Follower) -> None:
        """Start from what `open_updater` found out.

        Args:
            follower: over the host's copy; of no tensors when it is unknown what `live` serves.
        """
        self.store = store
        self.torn = False
        """The live weights are parts of two versions; the next update starts from an anchor."""
        self.timings: dict[str, float] = {}
        """Seconds of the last update: `fetch`, `decode`, `verify`, `commit`, `load`."""
        self._live = live
        self._follower = follower
        self._staged: Staged | None = None
        self._ahead: tuple[int, Future[Staged]] | None = None
        """A version that is being staged, or was, before anybody asked for it with `stage`."""
        self._background = ThreadPoolExecutor(1, thread_name_prefix="patchstore-prefetch")
        self._undo: Undo | None = None
        self._saved: dict[str, torch.Tensor] | None = None
        tied = follower.header.schema.tied
        self._aliases: dict[str, list[str]] = {}
        for alias, name in tied.items():
            self._aliases.setdefault(name, []).append(alias)

    @property
    def run_id(self) -> str:
        return self._follower.header.run_id

    @property
    def held(self) -> Manifest | None:
        """The version that the live weights are known to have."""
        return self._follower.manifest

    @property
    def staged(self) -> Manifest | None:
        return None if self._staged is None else self._staged.manifest

    def copy(self) -> dict[str, torch.Tensor]:
        """The host's copy of what is served, by checkpoint name; empty when that is unknown."""
        return dict(self._follower.tensors)

    def prefetch(self, version: int) -> bool:
        """Begin to fetch and prove a version on a thread, or see how that stands; returns at once.

        What goes wrong is not said here, but by `stage`.

        Returns:
            Whether nothing is under way any more, so that `stage` will not be the one to fetch.
        """
        if self._staged is not None:
            if self._staged.manifest.version == version:
                return True
            # Whoever staged it did not come back to finish.
            self.drop()
        if self._ahead is not None and (self._ahead[0] == version or not self._ahead[1].done()):
            return self._ahead[1].done()
        self._ahead = version, self._background.submit(self._follower.stage, version)
        return False

    def stage(self, version: int) -> None:
        """Fetch and prove a version, unless `prefetch` did. What was staged before is dropped.

        The live weights are not touched.

        Raises:
            As `Follower.stage`; nothing is staged then.
        """
        self.drop()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            # Waited for even if it is another version's: the follower serves one thread at a time.
            wait([ahead[1]])
            if ahead[0] == version:
                found = ahead[1].result()
                self._staged = found if found.plan.held == self._follower.held else None
        if self._staged is None:
            self._staged = self._follower.stage(version)
        self.timings = dict(self._staged.timings)

    def drop(self) -> None:
        """Forget what is staged."""
        self._staged = None

    def commit(self) -> set[str]:
        """Load what is staged into the live weights. Ends with `accept` or `roll_back`, also if it raises.

        Returns:
            Names that the model's loader never read on this rank.

        Raises:
            UsageError: nothing is staged.
            SchemaMismatch, LoadFailed: the model's loader raised; `roll_back` puts the weights back.
        """
        if self._staged is None:
            raise UsageError("no version is staged; call update_weights with a version before finishing")
        began = time.monotonic()
        if not self._follower.tensors:
            # No old bits of the checkpoint are known, so the model's own are what undoes this one load.
            self._saved = self._live.save()
        self._undo = self._follower.commit(self._staged)
        committed = time.monotonic()
        unread = self._live.load(dict(self._changed()))
        self.timings |= {"commit": committed - began, "load": time.monotonic() - committed}
        return unread

    def _changed(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert self._staged is not None
        for name in self._staged.names:
            for each in (name, *self._aliases.get(name, ())):
                yield each, self._follower.tensors[name]

    def accept(self) -> None:
        """Make the commit final."""
        self.torn = False
        self._forget()

    def roll_back(self) -> None:
        """Put back the weights, and the version held, from before `commit`.

        Raises:
            TornModel: that failed too. `torn` is set, and the next update loads an anchor.
        """
        try:
            if self._undo is not None:
                self._undo.rollback()
                if self._saved is not None:
                    self._live.restore(self._saved)
                else:
                    self._live.load(dict(self._changed()))
        except Exception as exc:
            self.torn = True
            self._follower.tensors.clear()
            self._follower.manifest = None
            raise TornModel(
                f"undoing a failed update failed too, so the weights are parts of two versions: {exc}; "
                "update again, which will load an anchor, or restart the server"
            ) from exc
        finally:
            self._forget()

    def close(self) -> None:
        """Let go of the store. `copy` and `held` still tell what is served."""
        self._background.shutdown(wait=True, cancel_futures=True)
        self.store.close()

    def _forget(self) -> None:
        self._staged = self._undo = self._saved = None


def open_updater(
    store: Store, live: LiveWeights, served: Callable[[Schema], dict[str, torch.Tensor]]
) -> Updater:
    """Open a store for a model.

    Args:
        served: returns the checkpoint tensors that `live` has now, or none where they are unknown. They
            become the host's copy if they are a version of the run, and are not used otherwise.

    Raises:
        VersionNotFound: the store holds no run.
    """
    unknown = Follower(store, {})
    schema = unknown.header.schema
    tensors = served(schema)
    follows = {name: spec_of(name, tensor) for name, tensor in tensors.items()} == schema.by_name()
    held = find_version(store, schema, tensors) if follows else None
    return Updater(store, live, unknown if held is None else Follower(store, tensors, held=held))
