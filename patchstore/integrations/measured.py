"""What publications cost, for the logs of trainers."""

from collections import deque

from patchstore.format.records import Manifest
from patchstore.publish.beside import Compaction
from patchstore.publish.publisher import Publication


class Measured:
    """Publications under way, and what was committed since it was last taken. Use from one thread."""

    def __init__(self) -> None:
        self._pending: deque[Publication] = deque()
        self._committed: list[tuple[Publication, Manifest]] = []
        self._waited_s: float | None = None

    def add(self, publication: Publication) -> None:
        """Take note of a publication, which the trainer waited for while it was compared."""
        self._pending.append(publication)

    def add_wait(self, seconds: float) -> None:
        """Take note that the trainer waited for servers."""
        self._waited_s = (self._waited_s or 0.0) + seconds

    def wait(self) -> None:
        """Wait until everything is committed.

        Raises:
            As `Publication.result`.
        """
        while self._pending:
            self._end(self._pending.popleft())

    def take(self, num_elements: int, compaction: Compaction | None = None) -> dict[str, float]:
        """Return the figures of what was committed since the last call; empty if nothing was.

        Args:
            num_elements: of the run's tensors.
            compaction: what the process beside the publisher has done; None without one.

        Returns:
            `patchstore/version`, `/bytes` of payloads, `/changed`: the mean share of elements that deltas
            changed (absent if there was no delta), `/blocked_ms`: for how long the trainer waited to publish,
            and `/waited_s`: for servers (absent if it never did). With a process beside the publisher, also
            `/anchors_beside` and `/failures_beside`: how many anchors it has added, and how often it failed.

        Raises:
            As `Publication.result`, of a publication that failed.
        """
        while self._pending and self._pending[0].done():
            self._end(self._pending.popleft())
        committed, self._committed = self._committed, []
        waited_s, self._waited_s = self._waited_s, None
        found: dict[str, float] = {}
        if committed:
            manifests = [manifest for _, manifest in committed]
            changed = [each.delta.num_changed for each in manifests if each.delta is not None]
            found["patchstore/version"] = manifests[-1].version
            found["patchstore/bytes"] = sum(each.num_bytes for each in manifests)
            if changed:
                found["patchstore/changed"] = sum(changed) / len(changed) / max(1, num_elements)
            found["patchstore/blocked_ms"] = 1000 * sum(each.waited_s for each, _ in committed)
            if compaction is not None:
                found["patchstore/anchors_beside"] = compaction.num_anchors
                found["patchstore/failures_beside"] = compaction.num_failures
        if waited_s is not None:
            found["patchstore/waited_s"] = waited_s
        return found

    def _end(self, publication: Publication) -> None:
        manifest = publication.result()
        if not publication.is_unchanged:
            self._committed.append((publication, manifest))
