"""A fleet that runs while a test changes the world around it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from patchstore.serve.desired import DesiredVersion, HeadWatcher
from patchstore.serve.fleet import Fleet
from patchstore.serve.fleet_status import FollowEvent
from patchstore.serve.reconcile import Reconciler
from patchstore.serve.vllm_server import VllmServer


class FleetThread:
    """A fleet on a thread, and what it told."""

    def __init__(
        self, store, urls, *, grace_s=30.0, max_poll_interval_s=0.05, max_head_age_s=None, **options
    ) -> None:
        self.desired = DesiredVersion(HeadWatcher(store, recheck_s=0), max_head_age_s=max_head_age_s)

        def begin(url, target, stop):
            server = VllmServer(url, timeout_s=30, stop=stop)
            return Reconciler(
                store,
                server,
                desired=target,
                min_poll_interval_s=0.01,
                max_poll_interval_s=max_poll_interval_s,
            )

        self.fleet = Fleet(
            self.desired,
            begin,
            urls,
            min_poll_interval_s=0.01,
            max_poll_interval_s=max_poll_interval_s,
            **options,
        )
        self.stop = threading.Event()
        self.told: list[FollowEvent] = []
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(grace_s,))
        self._thread.start()

    def _run(self, grace_s: float) -> None:
        for told in self.fleet.run(self.stop, grace_s=grace_s):
            with self._changed:
                self.told.append(told)
                self._changed.notify_all()

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for events until something is the case."""
        with self._changed:
            assert self._changed.wait_for(is_so, timeout=60), self.told

    def did(self, server: str | None) -> list[str]:
        return [told.step.outcome for told in self.told if told.server == server]

    def applied(self, server: str, version: int) -> bool:
        return any(
            told.server == server and told.step.outcome == "applied" and told.step.version == version
            for told in self.told
        )

    def end(self) -> None:
        self.stop.set()
        self._thread.join()


@contextmanager
def running(*args, **options) -> Iterator[FleetThread]:
    fleet = FleetThread(*args, **options)
    try:
        yield fleet
    finally:
        fleet.end()
