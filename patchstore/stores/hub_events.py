"""The Hub's feed of a bucket's changes: a hint to poll now."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from patchstore.stores.hub_api import BucketApi, is_followed

_FIRST_WAIT_S = 1.0
_LAST_WAIT_S = 60.0
_END_S = 5.0


class Feed:
    """Calls `wake` on a separate thread at every event, until `end`, or if the Hub has no feed."""

    def __init__(self, api: BucketApi, wake: Callable[[], None]) -> None:
        self._api = api
        self._wake = wake
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="patchstore-hub-feed", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Disconnect; `wake` is not called any more, except for a call that runs now."""
        self._ended.set()
        with self._lock:
            if self._socket is not None:
                # Closing it would leave a thread that reads from it waiting.
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            # Not longer: the thread may be connecting to a server that does not answer.
            self._thread.join(_END_S)

    def _run(self) -> None:
        wait_s = _FIRST_WAIT_S
        while not self._ended.is_set():
            try:
                heard = self._listen()
            except Exception:  # noqa: BLE001 - a hint is not worth an error; its caller also polls
                heard = False
            else:
                if heard is None:
                    return
            wait_s = _FIRST_WAIT_S if heard else min(2 * wait_s, _LAST_WAIT_S)
            self._ended.wait(wait_s)

    def _listen(self) -> bool | None:
        """Read one connection to its end; return whether an event came, or None if there is no feed."""
        heard = False
        with self._api.events() as response:
            if not is_followed(response):
                return None
            with self._lock:
                self._socket = response.extensions["network_stream"].get_extra_info("socket")
            try:
                if self._ended.is_set():
                    return heard
                for line in response.iter_lines():
                    if self._ended.is_set():
                        return heard
                    # The first event says that the feed has begun: before it something may have been missed.
                    if line.startswith("data:"):
                        heard = True
                        self._wake()
            finally:
                with self._lock:
                    self._socket = None
        return heard
