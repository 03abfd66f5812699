"""Wait until servers serve a version: of their own answers, or of a `patchstore follow`'s."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from patchstore.errors import OtherRun, PatchstoreError, ServerUnavailable, UsageError, WaitTimeout
from patchstore.follow.adapter_server import AdapterServer
from patchstore.follow.http_client import FollowClient
from patchstore.follow.server import Server
from patchstore.follow.vllm_server import VllmServer
from patchstore.support.arguments import version_number

logger = logging.getLogger(__name__)

_CALL_S = 30.0
"""Limit for one call, which waits for the server's current step."""
_NUM_AT_ONCE = 16
_POLL_S = 0.2
SAY_AFTER_S, SAY_EVERY_S = 2.0, 60.0
"""When the log says what is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """One server at one moment."""

    serving: int | None = None
    run_id: str | None = None
    error: PatchstoreError | None = None
    """Why it did not answer."""

    def __str__(self) -> str:
        if self.error is not None:
            return f"does not answer: {self.error}"
        return (
            "serves no version"
            if self.serving is None
            else f"serves version {self.serving} of run {self.run_id}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """All servers at one moment."""

    servers: Mapping[str, _Seen]
    run_id: str | None = None
    """The store's run, if a `follow` says it."""
    note: str = ""
    """What may keep servers from the version."""


def wait_until(
    version: int,
    *,
    servers: str | Iterable[str] = (),
    follow: str | None = None,
    adapter: str | None = None,
    exactly: bool = False,
    run_id: str | None = None,
    timeout_s: float = 600.0,
    patience_s: float = 120.0,
    headers: Mapping[str, str] | None = None,
) -> dict[str, int]:
    """Wait until all servers serve a version, or a later one, at the same moment.

    What is waited for is in the log, at level INFO, after two seconds and then each minute.

    Args:
        servers: URLs of vLLM servers with the delta backend, which are asked themselves. This process must
            reach their routes that update weights.
        follow: instead, where a `patchstore follow` listens; it is asked for all servers that it follows, as
            it last saw them: at most `--max-poll-interval` seconds ago, if nothing failed.
        adapter: the name of the adapter that servers are to serve the version of; None for whole weights. A
            `follow` knows that itself.
        exactly: a later version does not count, as after a pin to an older one.
        run_id: the run of the version, such as `publisher.run_id`. Each run counts from 0. By default the run
            that `follow` reports, or the one that all servers have.
        timeout_s: how long to wait; a call under way is waited for, up to 30 seconds more.
        patience_s: how long a server may be gone, or serve another run, before that is an error.
        headers: are sent to each server, or to the `follow`, for a gateway in front of it; see `VllmServer`.

    Returns:
        The version that each server serves, by URL.

    Raises:
        WaitTimeout: some server does not serve the version yet; the message names each server's version.
        ServerUnavailable: a server, or the `follow`, was gone for `patience_s`.
        OtherRun: a server served another run for `patience_s`.
        UsageError: an argument is impossible; no server was asked.
    """
    version = version_number(version)
    urls = [servers] if isinstance(servers, str) else list(servers)
    if not all(isinstance(url, str) for url in urls):
        raise UsageError(f"servers must be URLs, not {urls!r:.100}")
    if bool(urls) == (follow is not None):
        raise UsageError("name servers, or the address of a patchstore follow, and not both")
    if adapter is not None and follow is not None:
        raise UsageError("a patchstore follow knows its adapter itself: leave out adapter")
    for name, seconds in (("timeout_s", timeout_s), ("patience_s", patience_s)):
        if type(seconds) not in (int, float) or not seconds >= 0:
            raise UsageError(f"{name} must be a number of seconds from 0 on, not {seconds!r:.100}")
    with ExitStack() as stack:
        if follow is not None:
            client = stack.enter_context(FollowClient(follow, timeout_s=_CALL_S, headers=headers))
            look: Callable[[], _Round] = partial(_ask_follow, client)
        else:
            clients = [
                stack.enter_context(closing(_client(url, adapter, headers))) for url in dict.fromkeys(urls)
            ]
            pool = stack.enter_context(ThreadPoolExecutor(min(len(clients), _NUM_AT_ONCE), "wait"))
            look = partial(_ask_servers, clients, pool)
        wait = _Wait(version, exactly=exactly, run_id=run_id, patience_s=patience_s)
        return wait.until_done(look, timeout_s)


class _Wait:
    """One wait, from round to round."""

    def __init__(self, version: int, *, exactly: bool, run_id: str | None, patience_s: float) -> None:
        self._version, self._is_exact, self._run_id = version, exactly, run_id
        self._patience_s = patience_s
        self._amiss: dict[str, float] = {}
        """Server -> since when it is gone, or serves another run."""

    def until_done(self, look: Callable[[], _Round], timeout_s: float) -> dict[str, int]:
        began, say_after_s = time.monotonic(), SAY_AFTER_S
        while True:
            found = look()
            served = {url: seen.serving for url, seen in found.servers.items() if self._is_there(seen, found)}
            if found.servers and len(served) == len(found.servers):
                return {url: version for url, version in served.items() if version is not None}
            self._lose_patience(found)
            so_far_s = time.monotonic() - began
            if so_far_s >= timeout_s:
                raise WaitTimeout(f"after {timeout_s:g} s {self._told(found)}")
            left_s = timeout_s - so_far_s
            if so_far_s >= say_after_s:
                say_after_s += SAY_EVERY_S
                logger.info("waiting for up to %.0f s more, as %s", left_s, self._told(found))
            time.sleep(max(0.0, min(_POLL_S, left_s)))

    def _is_there(self, seen: _Seen, found: _Round) -> bool:
        if seen.serving is None or seen.error is not None or self._other_run(seen, found) is not None:
            return False
        return seen.serving == self._version if self._is_exact else seen.serving >= self._version

    def _other_run(self, seen: _Seen, found: _Round) -> str | None:
        """The run that is wanted, if a server serves another one."""
        if seen.serving is None:
            return None
        runs = {each.run_id for each in found.servers.values() if each.serving is not None}
        wanted = self._run_id or found.run_id
        if wanted is None:
            return " and ".join(sorted(str(run) for run in runs)) if len(runs) > 1 else None
        return wanted if seen.run_id != wanted else None

    def _lose_patience(self, found: _Round) -> None:
        """Raise if a server is gone, or serves another run, for too long."""
        now = time.monotonic()
        since = {}
        for url, seen in found.servers.items():
            other = self._other_run(seen, found)
            if seen.error is None and other is None:
                continue
            since[url] = self._amiss.get(url, now)
            if now - since[url] < self._patience_s:
                continue
            if seen.error is not None:
                raise ServerUnavailable(f"{url} is gone for {self._patience_s:g} s: {seen.error}")
            raise OtherRun(
                f"{url} {seen}, but version {self._version} is of run {other}. Versions of each run count "
                "from 0, so equal numbers are other weights. Let the server follow that run"
            )
        self._amiss = since

    def _told(self, found: _Round) -> str:
        lacking = [f"{url} {seen}" for url, seen in found.servers.items() if not self._is_there(seen, found)]
        what = f"version {self._version}" if self._is_exact else f"version {self._version} or a later one"
        states = "; ".join(lacking) or "no server is followed"
        return f"not all servers serve {what}: {states}{found.note}"


def _client(url: str, adapter: str | None, headers: Mapping[str, str] | None) -> Server:
    if adapter is None:
        return VllmServer(url, timeout_s=_CALL_S, headers=headers)
    return AdapterServer(url, adapter, timeout_s=_CALL_S, headers=headers)


def _ask_servers(clients: list[Server], pool: ThreadPoolExecutor) -> _Round:
    return _Round(
        servers=dict(zip([client.url for client in clients], pool.map(_ask_server, clients), strict=True))
    )


def _ask_server(client: Server) -> _Seen:
    try:
        status = client.status()
    except PatchstoreError as exc:
        return _Seen(error=exc)
    return _Seen(serving=status.serving if status.may_answer else None, run_id=status.run_id)


def _ask_follow(client: FollowClient) -> _Round:
    try:
        state = client.state()
        pinned, run_id = state["pinned"], state["run_id"]
        servers = {url: _seen(view) for url, view in state["servers"].items()}
    except (KeyError, TypeError, AttributeError) as exc:
        error = ServerUnavailable(f"{client.url} answers unlike patchstore follow of this release: {exc!r}")
        return _Round(servers={client.url: _Seen(error=error)})
    except PatchstoreError as exc:
        return _Round(servers={client.url: _Seen(error=exc)})
    note = "" if pinned is None else f". They are pinned to version {pinned}"
    return _Round(servers=servers, run_id=run_id, note=note)


def _seen(view: Mapping[str, Any]) -> _Seen:
    if not view["up"]:
        error = view["error"] or {"message": "it was not asked yet"}
        return _Seen(error=ServerUnavailable(error["message"]))
    is_whole = not (view["half_applied"] or view["engines_differ"])
    # Without a run it opened the store just now, and its next status tells.
    is_known = view["run_id"] is not None
    return _Seen(serving=view["serving"] if is_whole and is_known else None, run_id=view["run_id"])
