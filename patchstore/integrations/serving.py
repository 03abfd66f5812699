"""Have the server of an on-policy trainer serve what was just published, before it generates again."""

import time
from collections.abc import Mapping
from typing import Any

from patchstore.errors import ServerUnavailable, StoreUnavailable, UsageError, WaitTimeout
from patchstore.format.records import Manifest
from patchstore.serve.reconcile import Reconciler
from patchstore.serve.vllm_server import VllmServer
from patchstore.serve.wait import wait_until
from patchstore.stores.base import Store

_MAY_PASS = (ServerUnavailable, StoreUnavailable)
"""Failures after which it is tried again until the time is over."""
_NUM_TRIES = 3
"""Of what fails otherwise: a step may repair what the one before found, such as expired credentials."""


class Serving:
    """Brings a server to versions of a store, or waits until a `patchstore follow` has; of one thread."""

    def __init__(
        self, url: str, *, via: str, storage_options: Mapping[str, Any] | None, timeout_s: float
    ) -> None:
        """Connect lazily.

        Args:
            via: "apply", "follow", or the URL at which a `patchstore follow` listens; see `ServerSync`.
            storage_options: what the server needs to open the store.
            timeout_s: how long a version may take.

        Raises:
            UsageError: `via` or the URL is none.
        """
        self.url, self._via, self._timeout_s = url, via, timeout_s
        self._storage_options = storage_options
        self._server = VllmServer(url, timeout_s=timeout_s)
        self._reconciler: Reconciler | None = None
        self._desired: Manifest | None = None

    def check(self) -> None:
        """Refuse a server that was started without the delta backend.

        Raises:
            UsageError, ServerUnavailable: says how to start it.
        """
        if self._via in {"apply", "follow"}:
            self._server.check_backend()

    def bring(self, store: Store, manifest: Manifest) -> float:
        """Return once the server serves a version.

        Returns:
            For how many seconds the trainer waited.

        Raises:
            WaitTimeout: it does not yet, after `timeout_s`.
            PatchstoreError: why it cannot. The server serves the version that it did.
        """
        began = time.monotonic()
        if self._via == "apply":
            self._apply(store, manifest, began)
        else:
            where: dict[str, Any] = {"servers": self.url} if self._via == "follow" else {"follow": self._via}
            wait_until(manifest.version, run_id=manifest.run_id, timeout_s=self._timeout_s, **where)
        return time.monotonic() - began

    def close(self) -> None:
        self._server.close()

    def _apply(self, store: Store, manifest: Manifest, began: float) -> None:
        if self._reconciler is None or self._reconciler.store is not store:
            self._reconciler = Reconciler(
                store,
                self._server,
                desired=lambda: self._desired,
                storage_options=self._storage_options,
                # Verified while the trainer waits, a model would cost more than the update.
                verify_every_s=None,
            )
        self._desired = manifest
        num_failed = 0
        while True:
            done = self._reconciler.step()
            if done.outcome != "failed" and done.version == manifest.version:
                return
            error = done.error if done.outcome == "failed" else None
            if error is not None and not isinstance(error, _MAY_PASS):
                num_failed += 1
                if num_failed == _NUM_TRIES:
                    raise error
            if time.monotonic() - began > self._timeout_s:
                raise WaitTimeout(
                    f"{self.url} does not serve version {manifest.version} after {self._timeout_s:g} s; "
                    f"the last step: {done}"
                ) from error
            if error is not None:
                time.sleep(self._reconciler.interval_s)


def check_via(via: object) -> str:
    """Return who has servers serve a version.

    Raises:
        UsageError: this is none.
    """
    if isinstance(via, str) and (via in {"apply", "follow"} or via.startswith(("http://", "https://"))):
        return via
    raise UsageError(
        'via must be "apply" (this process applies versions), "follow" (a `patchstore follow` does, and the '
        f"server is asked), or the URL at which a `patchstore follow` listens, not {via!r:.100}"
    )
