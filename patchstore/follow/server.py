"""What `follow` and `wait` need of a server, whichever kind of weights it is kept at a version of."""

from dataclasses import dataclass
from typing import Protocol

from patchstore.bucket.records import Manifest
from patchstore.follow.vllm_protocol import ServerStatus
from patchstore.stores.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTimings:
    """How long the two halves of an update took, in seconds."""

    stage_s: float
    """Fetching and verifying; generation went on, but for its last part."""
    apply_s: float
    """From the pause, if any, until requests are answered with the new weights."""


class Server(Protocol):
    """A client of one server: `VllmServer` for whole weights, `AdapterServer` for an adapter.

    Calls block, and are for one thread, except `release`. All but that raise `PatchstoreError`.
    """

    @property
    def url(self) -> str: ...

    @property
    def wants(self) -> str | None:
        """What the server is told that is to be served; None if it is told nothing."""

    def status(self, *, desired: Manifest | None = None) -> ServerStatus:
        """Ask what is served. The server may begin to fetch the desired version."""

    def apply(
        self, version: int, status: ServerStatus | None = None, *, allow_rollback: bool = False
    ) -> UpdateTimings | None:
        """Have a version served, whole; None if it was stopped before. After an error the server serves what
        it did, or its status says what is amiss.
        """

    def keep(self, status: ServerStatus) -> bool:
        """Do what is left to do where the desired version is served.

        Returns:
            Whether answers had another version's label, which was corrected.
        """

    def verify(self, store: Store) -> int:
        """Compare the bits that are served with those of the version, and return its number.

        Raises:
            StateMismatch: they differ.
        """

    def release(self) -> bool:
        """Let requests be answered, although an `apply` on another thread does not end. For any thread.

        Returns:
            False if the server may be left paused.
        """

    def close(self) -> None: ...
