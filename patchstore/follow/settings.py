"""The settings of `patchstore follow`, and their defaults.

Defaults are written here and nowhere else: the command line and the classes of this package take them from
`DEFAULTS`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from patchstore.signing.required import RequiredKeys


class PauseMode(StrEnum):
    """What happens to running requests while a server's weights are written."""

    KEEP = "keep"
    """Generation is paused. Requests wait, and continue with the new weights."""
    WAIT = "wait"
    """Generation is paused after the requests have finished with the old weights."""
    ABORT = "abort"
    """Generation is paused, and the requests are aborted."""
    NONE = "none"
    """Generation is not paused: weights are written between two tokens. An answer may come from two versions,
    and so may the keys and values behind it."""


class PrefixCache(StrEnum):
    """What happens to keys and values that older weights computed, and to all else that vLLM keeps of them.

    A server that cannot do it is refused; `vllm_plugin.caches` lists the caches.
    """

    RESET = "reset"
    """They are forgotten. Running requests compute theirs again."""
    VERSION = "version"
    """Running requests keep theirs, and later requests reuse only what newer weights computed."""
    KEEP = "keep"
    """Running requests keep theirs, and later requests reuse them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to follow; times are seconds."""

    servers: Sequence[str] = ()
    """URLs."""
    servers_file: Path | None = None
    """A file with one URL per line; see `Fleet`."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers that are sent to each server, for a gateway in front of it; see `VllmServer`."""
    required_keys: RequiredKeys | None = None
    """Keys, one of which must have signed each version that servers are brought to; None for none."""
    floor_file: Path | None = None
    """With required keys: a file that keeps the newest version that servers were to serve, for the next
    process."""
    run_id: str | None = None
    """The run that servers follow; None for the one that the store holds, unless they serve another one from
    there."""
    allow_rollback: bool = False
    """Accept an older version than that; see `DesiredVersion`."""
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    """Options that servers need to open the store."""
    at: int | None = None
    """The version to pin servers to at the start; None to follow the newest. See `DesiredVersion`."""
    pin_file: Path | None = None
    """A file that stores the pin for the next process."""
    adapter: str | None = None
    """The name under which servers serve the run, which is one of an adapter; None for whole weights."""
    keep: int = 2
    """With an adapter: how many versions a server holds; see `AdapterServer`."""
    pause_mode: PauseMode = PauseMode.KEEP
    prefix_cache: PrefixCache = PrefixCache.RESET
    update_interval_s: float = 0.0
    """Least time between two updates of one server."""
    verify_every_s: float | None = None
    """How often a server's weights are verified; None for never."""
    listen: str | None = None
    """`HOST:PORT` or `PORT` for metrics, health and pins; None for no listener."""
    max_head_age_s: float | None = None
    """How old the store's newest version may be, by the trainer's clock, before it is reported; None for any
    age."""
    unhealthy_after_s: float = 60.0
    """How long a failure may last before `/healthz` reports it."""
    grace_s: float = 30.0
    """How long updates under way may take at the end."""
    timeout_s: float = 600.0
    """How long a server may take to answer a call, and to open a store or fetch a version."""
    min_poll_interval_s: float = 0.1
    """Wait between polls of the store, and of a server, after something changed; doubled by each poll that
    finds nothing new, and by each failure."""
    max_poll_interval_s: float = 2.0
    """Longest time between polls of the store, and of a server."""


DEFAULTS = Settings()
