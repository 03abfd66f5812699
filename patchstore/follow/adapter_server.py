"""A vLLM server that is kept at a version of an adapter, by vLLM's own routes for adapters.

Each version is an adapter of its own, such as `policy@12`, and `policy` is switched between them. A version
is loaded beside the one that is served, so nothing is ever paused or half done. What a server holds it says
in `/v1/models`: the folder of each version names its run, its number and its manifest.
"""

import logging
import os
import re
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any, Self

import httpx

from patchstore.bucket import digests, history
from patchstore.bucket.records import Manifest
from patchstore.errors import (
    DriverConflict,
    OtherRun,
    PatchstoreError,
    ServerUnavailable,
    StateMismatch,
    StoreReplaced,
    UsageError,
)
from patchstore.follow.desired import check_kind
from patchstore.follow.http_client import json_object, one_line
from patchstore.follow.server import UpdateTimings
from patchstore.follow.settings import DEFAULTS
from patchstore.follow.vllm_protocol import ADDRESS, Connection, NoSuchRoute, ServerStatus, refusal
from patchstore.signing.required import Keys, RequiredKeys, checks
from patchstore.stores import Store, open_store
from patchstore.support.arguments import version_number
from patchstore.support.tracing import span

logger = logging.getLogger(__name__)

_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_SOURCE = "patchstore:"
"""Begins what a server is told to load in the place of a folder."""
_FOLDER = re.compile(r".*/adapters/(?P<run_id>[^/]+)/(?P<version>\d+)-(?P<digest>[0-9a-f]{16})/?")
_STOP_S = 0.1
"""How long it may take until a stop is noticed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A version of an adapter, as a server names its folder."""

    run_id: str
    version: int
    digest: str
    """The first 16 hex digits of its manifest's digest."""
    folder: str | None = field(default=None, compare=False)
    """Where it is on the server's host; None of a version in a store."""
    number: int | None = field(default=None, compare=False)
    """What the server's ranks call it."""

    def __str__(self) -> str:
        return f"version {self.version} of run {self.run_id} (manifest {self.digest})"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cards:
    """What a server says that it has under one name."""

    chosen: _Held | None = None
    """The version that answers to the name; None for none."""
    versions: Mapping[int, _Held] = field(default_factory=dict)
    """All versions that it holds, by number."""


class AdapterServer:
    """A client of one server, which loads versions of an adapter there. Calls block; use from one thread.

    Any method raises `ServerUnavailable` where the server cannot be reached, or refuses for a
    reason that is not ours; and otherwise the error whose kind the server names.
    """

    wants: str | None = None
    """A server is not told what is wanted: it has no place where other drivers would hear of it."""

    def __init__(
        self,
        url: str,
        adapter: str,
        store: Store | str | os.PathLike[str] | None = None,
        *,
        run_id: str | None = None,
        required_keys: RequiredKeys | Keys | None = None,
        keep: int = DEFAULTS.keep,
        timeout_s: float = DEFAULTS.timeout_s,
        stop: Event | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Connect lazily; a store is opened.

        Args:
            adapter: the name by which requests ask for the adapter.
            store: the run, or its URL or path, which the server must reach too; None if the server is only
                asked.
            run_id: a run that may take the place of another one under that name.
            required_keys: one of them must have signed each version that is applied.
            keep: how many versions a server holds, the chosen one among them; more while requests use them.
            timeout_s: for one call; must be longer than fetching a version in full takes.
            stop: while this is set, `apply` chooses no version.
            headers: are sent with each request, for a gateway in front of the server; see `VllmServer`.

        Raises:
            UsageError: no URL of a server, no name of an adapter, or as of `VllmServer` and `open_store`.
        """
        if not adapter or "@" in adapter or not adapter.isprintable():
            raise UsageError(
                f"the name of an adapter is a text without @, such as policy, not {adapter!r:.80}"
            )
        if type(keep) is not int or keep < 1:
            raise UsageError(f"a server keeps at least one version, not {keep!r:.80}")
        self.adapter = adapter
        self._opened = open_store(store) if isinstance(store, str | os.PathLike) else None
        """The store, if this client opened it; it is closed with the client."""
        self._store = store if isinstance(store, Store) else self._opened
        self._run_id, self._required_keys = run_id, RequiredKeys.of(required_keys)
        self._num_kept = keep
        self._stop = stop or Event()
        self._http = Connection(url, timeout_s=timeout_s, headers=headers)
        self.url = self._http.url
        self._cards = _Cards()
        """What the server said last."""
        self._chose: _Held | None = None
        """What this client chose; None if the server may have forgotten it since."""

    def status(self, *, desired: Manifest | None = None) -> ServerStatus:
        """Ask what answers to the adapter's name. `desired` is for servers that fetch it ahead."""
        chosen = self._look().chosen
        return ServerStatus(
            initialised=True,
            num_engines=1,
            engines_differ=False,
            run_id=None if chosen is None else chosen.run_id,
            store=None if self._store is None else self._store.url,
            serving=None if chosen is None else chosen.version,
            state_digest=None,
            update_open=False,
            switch=None,
            half_applied=False,
            last_error=None,
            ranks=(),
        )

    def apply(
        self, version: int, status: ServerStatus | None = None, *, allow_rollback: bool = False
    ) -> UpdateTimings | None:
        """Have later requests for the adapter answered by a version. Those under way keep theirs.

        The server fetches, verifies and loads the version first, while it serves what it did.

        Args:
            status: what the server said just now; None to ask it.
            allow_rollback: is for servers that remember what they served.

        Returns:
            How long it took; None if it was stopped before the version was chosen.

        Raises:
            OtherRun: a version of another run answers to the name; it still does.
            StoreReplaced: the server holds, or finds, another version of that number than the store has here.
            UsageError: `version` is no version's number; the server was not asked.
            Any error of the calls it makes. The server serves the version it did, or this one.
        """
        wanted = self._wanted(self._source, version_number(version))
        if status is None:
            self._look()
        self._check_run(wanted)
        began = time.monotonic()
        if self._cards.versions.get(version) != wanted:
            with span("stage"):
                is_loaded = self._load(wanted)
            if not is_loaded:
                return None
            if (held := self._cards.versions.get(version)) != wanted:
                # Where nothing was chosen, a server answers by the newest that it holds.
                self._drop(version)
                raise StoreReplaced(
                    f"{self.url} has {held or 'nothing'} as {self._name(version)}, and this process finds "
                    f"{wanted} at {self._source.url}: is the URL the same place for both, and were its "
                    "objects replaced? The server answers as before"
                )
        if self._stop.is_set():
            return None
        loaded = time.monotonic()
        with span("write"):
            self._choose(wanted)
        chosen = time.monotonic()
        # What cannot be unloaded now is unloaded later, or said then.
        with suppress(PatchstoreError):
            self._unload()
        return UpdateTimings(stage_s=loaded - began, apply_s=chosen - loaded)

    def keep(self, status: ServerStatus) -> bool:
        """Unload versions that are too many. Choose the one that is served, if no driver did: else a server
        takes the newest that it holds, which another request may change.
        """
        chosen = self._cards.chosen
        if chosen is not None and chosen != self._chose:
            wanted = self._wanted(self._source, chosen.version)
            if chosen != wanted:
                raise StoreReplaced(
                    f"{self.url} serves {chosen}, and {self._source.url} has {wanted}: its objects were "
                    "replaced. The server was left as it is"
                )
            self._choose(wanted)
        self._unload()
        return False

    @property
    def _source(self) -> Store:
        if self._store is None:
            raise UsageError("name the store of the run, from which the server is to load versions")
        return self._store

    def verify(self, store: Store) -> int:
        """Have each rank compare what it computes with, bit for bit, with the chosen version's folder.

        The folder was proved when it was made. The server needs `VLLM_SERVER_DEV_MODE=1` and the worker
        extension; of several data-parallel engines one is asked.

        Returns:
            The version that is served.

        Raises:
            StateMismatch: a rank computes with other bits, or the version is not the store's.
        """
        chosen = self._look().chosen
        if chosen is None:
            raise UsageError(f"{self.url} serves no version as {self.adapter}")
        if chosen != (wanted := self._wanted(store, chosen.version)):
            raise StateMismatch(f"{self.url} serves {chosen} as {self.adapter}, and {store.url} has {wanted}")
        ranks = self._http.every_rank("delta_adapter", chosen.number, chosen.folder)
        differing = sorted({module for rank in ranks for module in rank["differing"]})
        if differing:
            raise StateMismatch(
                f"{self.url} does not serve {chosen} as {self.adapter}, as it says: {len(differing)} modules "
                f"differ from its folder, such as {', '.join(differing[:3])}; start the server again"
            )
        return chosen.version

    def _wanted(self, store: Store, version: int) -> _Held:
        """Read which manifest a version has, as the server must find it too."""
        header = history.run_header(store)
        check_kind(store, header, self.adapter)
        manifest, data = history.read_stored(store, version)
        history.check_same_run(store, manifest, header.run_id)
        if (check := checks(self._required_keys, store, header)) is not None:
            check(manifest, data)
        digest = digests.digest(data).partition(":")[2][:16]
        return _Held(run_id=header.run_id, version=version, digest=digest)

    def _check_run(self, wanted: _Held) -> None:
        chosen = self._cards.chosen
        if chosen is not None and wanted.run_id not in {chosen.run_id, self._run_id}:
            raise OtherRun(
                f"{self.url} serves version {chosen.version} of run {chosen.run_id} as {self.adapter}, and "
                f"{self._source.url} has run {wanted.run_id}. The server was left as it is: to put that run "
                f"in the place of the other, name it (--run {wanted.run_id}, in Python run_id=); or take "
                "another name for it"
            )

    def _look(self) -> _Cards:
        """Ask what the server has under the adapter's name."""
        try:
            response = self._http.request("GET", "/v1/models")
        except ServerUnavailable:
            # It may come back without what it had.
            self._chose = None
            raise
        answer = json_object(response) or {}
        if not response.is_success and "error" in answer:
            raise refusal(f"GET {self.url}/v1/models", response)
        try:
            cards = {str(card["id"]): dict(card) for card in answer["data"]}
        except (KeyError, TypeError, ValueError):
            said = f"{self.url} answers /v1/models with HTTP {response.status_code}, unlike vLLM; {ADDRESS}"
            raise ServerUnavailable(said) from None
        card = cards.get(self.adapter, {})
        root, chosen = card.get("root"), _held(card)
        if chosen is None and root and not str(root).startswith(_SOURCE):
            raise UsageError(
                f"{self.url} has the name {self.adapter} for {root!r:.200}, which is no version of a run: "
                "take another name"
            )
        found = {name: _held(card) for name, card in cards.items()}
        versions = {
            each.version: each
            for name, each in found.items()
            if each is not None and name == self._name(each.version)
        }
        if chosen is None:
            self._chose = None
        self._cards = _Cards(chosen=chosen, versions=versions)
        return self._cards

    def _load(self, wanted: _Held) -> bool:
        """Have the server fetch, verify and load a version beside what it serves.

        Returns:
            Whether it did; False if we are to stop: what was begun goes on without us.
        """
        version = wanted.version
        if version in self._cards.versions:
            # It is another one of that number.
            self._drop(version)
        body = {"lora_name": self._name(version), "lora_path": self._path(version)}
        loading: Future[None] = Future()

        def load() -> None:
            try:
                self._post(_LOAD, body)
                loading.set_result(None)
            except BaseException as exc:  # noqa: BLE001  (the waiting thread raises it)
                loading.set_exception(exc)

        # A daemon: fetching a version takes long, and the end of the process does not wait for it. It makes
        # its request within the span of this thread.
        Thread(target=copy_context().run, args=(load,), name="follow-load", daemon=True).start()
        while not wait([loading], _STOP_S).done:
            if self._stop.is_set():
                return False
        error = loading.exception()
        # The answer may have been lost.
        if self._look().versions.get(version) != wanted and error is not None:
            raise error
        return True

    def _choose(self, wanted: _Held) -> None:
        """Have requests for the adapter answered by a version that the server holds."""
        path = self._path(wanted.version)
        self._post(_LOAD, {"lora_name": self.adapter, "lora_path": path, "load_inplace": True})
        if (chosen := self._look().chosen) != wanted:
            raise DriverConflict(
                f"{self.url} was told to answer by {wanted} as {self.adapter}, and answers by "
                f"{chosen or 'none'}: does another process drive this name, or do several servers answer at "
                "this address?"
            )
        self._chose = wanted

    def _unload(self) -> None:
        """Unload all but the newest versions, the chosen one, and those that requests use."""
        chosen, versions = self._cards.chosen, self._cards.versions
        if chosen is None:
            return
        # Those of another run go first.
        others = sorted(
            (held.run_id == chosen.run_id, number) for number, held in versions.items() if held != chosen
        )
        for _, number in others[: max(0, len(others) + 1 - self._num_kept)]:
            self._drop(number)

    def _drop(self, version: int) -> None:
        """Unload a version, unless requests use it."""
        response = self._http.request("POST", _UNLOAD, json={"lora_name": self._name(version)})
        # In use, or gone.
        if not (response.is_success or response.status_code in {httpx.codes.CONFLICT, httpx.codes.NOT_FOUND}):
            raise _refusal(f"POST {self.url}{_UNLOAD}", response)

    def _name(self, version: int) -> str:
        return f"{self.adapter}@{version}"

    def _path(self, version: int) -> str:
        return f"{_SOURCE}{self._source.url}@{version}"

    def _post(self, path: str, body: Mapping[str, Any]) -> None:
        response = self._http.request("POST", path, json=body)
        if not response.is_success:
            raise _refusal(f"POST {self.url}{path}", response)

    def release(self) -> bool:
        """Nothing is ever paused."""
        return True

    def close(self) -> None:
        self._http.close()
        if self._opened is not None:
            self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _held(card: Mapping[str, Any]) -> _Held | None:
    """Read what a server says of an adapter; None if it is no version of a run."""
    root = card.get("root")
    found = _FOLDER.fullmatch(root) if isinstance(root, str) else None
    if found is None:
        return None
    return _Held(
        run_id=found["run_id"],
        version=int(found["version"]),
        digest=found["digest"],
        folder=root,
        number=card.get("lora_int_id"),
    )


def _refusal(call: str, response: httpx.Response) -> PatchstoreError:
    """Turn an error answer into the error that the server meant, or say how to start it."""
    found = refusal(call, response)
    if not isinstance(found, ServerUnavailable):
        return found
    said = f"HTTP {response.status_code}: {one_line(response.text):.300}"
    if isinstance(found, NoSuchRoute) and "error" not in (json_object(response) or {}):
        return NoSuchRoute(
            f"{call}: there is no such route: start vllm serve with --enable-lora, and with "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
        )
    if "LoRA is not enabled" in response.text:
        return NoSuchRoute(f"{call}: the server serves no adapters: start vllm serve with --enable-lora")
    if f"No adapter found for {_SOURCE}" in response.text:
        # vLLM itself took it for a folder.
        return NoSuchRoute(
            f"{call}: install patchstore, with its plugin for vLLM, beside the server, and start it again "
            f"({said})"
        )
    return ServerUnavailable(f"{call}: {said}")
