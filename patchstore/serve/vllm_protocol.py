"""Answers of a vLLM server with the `delta` backend: its status, its version, and its errors."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from patchstore import errors
from patchstore.errors import PatchstoreError, ServerUnavailable

_REASON = re.compile(r"\[([a-z]+(?:-[a-z]+)*)\] (.*)", re.DOTALL)
_VLLM_SUFFIX = "', please check the stack trace"
ERRORS = {
    error.kind: error
    for error in vars(errors).values()
    if isinstance(error, type) and issubclass(error, PatchstoreError) and error is not PatchstoreError
}
"""Kind -> class."""

Switch = Literal["resume", "stay-paused"]
"""How an update ends: generation is resumed, or stays as it is, paused or not."""

SAME_IN_ENGINES = (
    "initialised",
    "run_id",
    "serving",
    "state_digest",
    "half_applied",
    "switch",
    "update_open",
)
"""Keys of `delta_status` that must have one value in all engines of a server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """The statuses of all ranks of a server, combined into one."""

    initialised: bool
    """Every rank has a store open."""
    num_engines: int
    """Data-parallel engines of the server. One answered; the others reported whether they agree."""
    engines_differ: bool
    """Some engine serves another version, or is at another point of an update, than the one that answered.
    Then `serving` is None, and `initialised` is False if they follow different runs."""
    run_id: str | None
    store: str | None
    """URL of the store that it follows."""
    serving: int | None
    """The version that every rank of every engine serves; None where one serves none, or they differ."""
    state_digest: str | None
    """Of that version."""
    update_open: bool
    """An update was started and neither finished nor failed."""
    switch: Switch | None
    """An update was begun and not ended, and how it must end; see `VllmServer.apply`."""
    half_applied: bool
    """Some rank serves parts of two versions."""
    last_error: str | None
    """`[kind] message` of the last call, where it failed."""
    required_keys: tuple[str, ...] = ()
    """Names of the public keys of which every rank requires a signature; empty if some rank requires none."""
    prefetched: int | None = None
    """The requested version that every rank has fetched and verified, or has failed to."""
    ranks: tuple[Mapping[str, Any], ...]
    """Each rank's own status, as `DeltaWorkerExtension.delta_status` returns it."""

    @property
    def may_answer(self) -> bool:
        """Whether generation may continue: no rank serves parts of two versions, and all engines agree."""
        return not (self.half_applied or self.engines_differ)


def fold(
    ranks: Sequence[Mapping[str, Any]], *, num_engines: int, engines_differ: bool, is_other_run: bool
) -> ServerStatus:
    """Combine the statuses of one engine's ranks.

    Args:
        engines_differ: other engines reported something else.
        is_other_run: they follow another run.
    """

    def agreed(key: str) -> Any:
        first = ranks[0].get(key)
        return first if all(rank.get(key) == first for rank in ranks) else None

    failed = [rank["last_error"] for rank in ranks if rank["last_error"]]
    return ServerStatus(
        initialised=all(rank["initialised"] for rank in ranks) and not is_other_run,
        num_engines=num_engines,
        engines_differ=engines_differ,
        run_id=None if is_other_run else agreed("run_id"),
        store=agreed("store"),
        serving=None if engines_differ else agreed("serving"),
        state_digest=None if engines_differ else agreed("state_digest"),
        update_open=any(rank["update_open"] for rank in ranks),
        switch=agreed("switch"),
        half_applied=any(rank["half_applied"] for rank in ranks),
        required_keys=tuple(agreed("required_keys") or ()),
        last_error=f"[{failed[0]['kind']}] {failed[0]['message']}" if failed else None,
        ranks=tuple(ranks),
    )


def only(rank: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return a few fields of a rank's status."""
    return {key: rank[key] for key in keys}


def version_of(answer: httpx.Response) -> str | None:
    """Return the version that vLLM reports at `/version`; None if something else answered."""
    try:
        version = answer.json()["version"]
    except (ValueError, KeyError, TypeError):
        return None
    return version if isinstance(version, str) else None


class NoSuchRoute(ServerUnavailable):
    """vLLM does not serve this path."""


def refusal(call: str, response: httpx.Response) -> PatchstoreError:
    """Turn an error answer into the error that the server meant."""
    try:
        text = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = one_line(response.text)
    if found := _REASON.search(text):
        kind, message = found[1], found[2].partition(_VLLM_SUFFIX)[0]
        if kind in ERRORS:
            return ERRORS[kind](f"{call}: {message}")
        return ServerUnavailable(f"{call}: [{kind}] {message}")
    if response.status_code == httpx.codes.NOT_FOUND:
        return NoSuchRoute(f"{call}: no such route; is the server vLLM with VLLM_SERVER_DEV_MODE=1?")
    return ServerUnavailable(f"{call}: HTTP {response.status_code}: {text:.300}")


def one_line(text: str) -> str:
    """A page of several lines, on one line."""
    return " ".join(text.split())
