"""What vLLM's engine core does for updates: caches, labels, pauses, and who drives the server.

An engine core is the process with the scheduler. Its workers, in which the `delta` engine runs, do not know
of requests or caches. So wrappers around some methods of `EngineCore` see what passes on its way to the
workers. The core runs one call at a time and schedules no request meanwhile: what a wrapper does before and
after a call, no request sees half of.

`install` is called by vLLM in each of its processes (see `plugin`), and when a worker loads the extension.
Cores of servers without the `delta` backend stay as they are.
"""

import functools
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from patchstore.errors import OtherServer, PatchstoreError, StaleCaches, UsageError
from patchstore.follow.settings import PrefixCache
from vllm_plugin import boot
from vllm_plugin.admission import Admission, named
from vllm_plugin.caches import Caches
from vllm_plugin.waiting import BELL_KEY, WAIT_KEY, when_rung

CACHES_KEY = "prefix_cache"
"""Key of `update_info` and `init_info`: a `PrefixCache`, what updates do to caches; `reset` if missing."""
ENGINE_KEY = "engine"
"""Key of `update_info` and `init_info`, and keyword of any collective call: the engine that is meant."""
DRIVER_KEY = "driver"
"""Keyword of any collective call: who makes it; see `Drivers.hear`."""

NOT_LOADED = (
    "vLLM's engine core did not load patchstore's plugin, which empties its caches when weights change and "
    "keeps the replies of several workers in step: install patchstore into vLLM's environment "
    "(pip install patchstore), and if VLLM_PLUGINS is set, add patchstore to it"
)

_KEEPING = frozenset({"start_weight_update", "update_weights"})
"""Methods of workers, beside those of the extension, after which they serve what they did."""
_MOST_S = 60.0
"""So long a call waits at most."""
_UNLABELLED = "default"
"""vLLM's own label of tokens, before it was told another."""
_STATE = "_patchstore"
_WRAPPED = "_patchstore_wrapped"


def install() -> None:
    """Have vLLM's engine cores do their part of updates. Calling it again changes nothing."""
    from vllm.v1.engine.core import EngineCore

    if is_wrapped(EngineCore.collective_rpc):
        return
    _in_core("collective_rpc", lambda core, call, *args, **kwargs: core.called(call, *args, **kwargs))
    # It also makes the core's `Caches` before the first request is scheduled.
    _in_core("add_request", lambda core, add, *args, **kwargs: core.added(add, *args, **kwargs))
    _in_core("resume_scheduler", lambda core, resume: core.resumed(resume))
    _in_core("wake_up", lambda core, wake_up, *args, **kwargs: core.woken(wake_up, *args, **kwargs))
    # 0.26 has no labels.
    if hasattr(EngineCore, "set_weight_version"):
        _in_core("set_weight_version", lambda core, put, label: core.labelled(put, label))
        # As `add_request`: a server that starts at a version has its label from the beginning.
        _in_core("get_weight_version", lambda _core, get: get())
    if hasattr(EngineCore, "_attach_weight_version"):
        _in_core("_attach_weight_version", lambda core, attach, out: core.admission.attached(attach, out))


def _in_core(name: str, instead: Callable[..., Any]) -> None:
    from vllm.v1.engine.core import EngineCore

    def answer(core: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if (ours := getattr(core, _STATE, None)) is None:
            ours = UpdateCore(core)
            setattr(core, _STATE, ours)
        return instead(ours, method, *args, **kwargs)

    wrap(EngineCore, name, answer)


def wrap(kind: Any, name: str, instead: Callable[..., Any]) -> None:
    """Replace a method in servers with the backend `delta`; others go on calling the method itself."""

    def if_delta(owner: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if has_delta(owner.vllm_config):
            return instead(owner, call, *args, **kwargs)
        return call(*args, **kwargs)

    replace(kind, name, if_delta)


def has_delta(config: Any) -> bool:
    """Whether a server with this `VllmConfig` has the backend `delta`."""
    transfer = config.weight_transfer_config
    return transfer is not None and transfer.backend == "delta"


def replace(kind: Any, name: str, instead: Callable[..., Any]) -> None:
    """Replace a method by one that gets its owner, and the method itself, before the arguments."""
    method = getattr(kind, name)

    @functools.wraps(method)
    def wrapped(owner: Any, *args: Any, **kwargs: Any) -> Any:
        return instead(owner, functools.partial(method, owner), *args, **kwargs)

    setattr(wrapped, _WRAPPED, True)
    setattr(kind, name, wrapped)


def is_wrapped(method: Callable[..., Any]) -> bool:
    return hasattr(method, _WRAPPED)


class Drivers:
    """The processes that keep this server at a version, and what each of them wants it to serve."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, float]] = {}
        """Id -> what it wants, and until when it counts, in seconds of the monotonic clock."""

    def hear(self, given: Any) -> str:
        """Note a driver, and return its id. `wants` differs where drivers want different versions; without
        further news it counts for so many `seconds`, 0 to forget it.
        """
        types = {"id": str, "wants": str, "seconds": int | float}
        is_one = isinstance(given, Mapping) and given.keys() == types.keys()
        if not is_one or not all(isinstance(given[key], kind) for key, kind in types.items()):
            raise _told(UsageError("a driver is an object with id, wants (texts) and seconds (a number)"))
        name: str = given["id"]
        self._known[name] = (given["wants"], time.monotonic() + given["seconds"])
        return name

    def others(self, name: str | None = None) -> list[dict[str, str]]:
        """Return all drivers that count now, but for one."""
        now = time.monotonic()
        self._known = {each: known for each, known in self._known.items() if known[1] > now}
        return [{"id": each, "wants": wants} for each, (wants, _) in self._known.items() if each != name]

    def extend(self, seconds: float) -> None:
        """Let all count longer: none could be heard of for some time."""
        self._known = {each: (wants, until + seconds) for each, (wants, until) in self._known.items()}


class UpdateCore:
    """One engine core of a server with the `delta` backend, and what it knows beside vLLM."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.id = uuid.uuid4().hex
        """Another one after each start, so that a client notices which server answers."""
        self.caches = Caches(core)
        self.drivers = Drivers()
        self.admission = Admission(core, self._served)
        self._mode = PrefixCache.RESET
        """What the update under way is to do to caches."""
        self._version: int | None = None
        """That the update under way has staged."""
        self._switch: str | None = None
        """The mark of a driver that has not ended its switch; see `DeltaWorkerExtension.delta_switch`."""
        self._has_paused = False
        """`delta_pause` has paused generation, and nothing has resumed it since."""
        self._stale: str | None = None
        """Why a cache could not be emptied after a write. Nothing is generated until it is."""
        self._was_paused = False
        """Whether generation was paused before it was paused because of that."""
        booted = boot.version_of(core.vllm_config)
        if booted is not None:
            # Workers say so once a store is open.
            self._serves(booted, is_written=True)

    def called(
        self,
        call: Callable[..., Any],
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer a collective call, or pass it on to the workers."""
        if not isinstance(method, str):
            with self._changing():
                return call(method, timeout, args, kwargs)
        given = dict(kwargs or {})
        self._check_meant(given.pop(ENGINE_KEY, None))
        driver = self.drivers.hear(given.pop(DRIVER_KEY)) if DRIVER_KEY in given else None
        if method in {"delta_engine", "delta_prove", "delta_pause", "delta_resume"}:
            return getattr(self, method)(*args, **given)
        if method == "init_weight_transfer_engine" and "init_info" in given:
            self._check_meant_in(given["init_info"])
            given["init_info"], _ = self._taken(given["init_info"])
        elif method == "delta_open" and args:
            self._check_meant_in(args[0])
            args = (self._taken(args[0])[0], *args[1:])
        elif method == "start_weight_update":
            self._version = None
        elif method == "update_weights" and "update_info" in given:
            self._check_meant_in(given["update_info"])
            self._version = None
            with self._closing():
                given["update_info"], self._mode = self._taken(given["update_info"])
        elif method == "delta_switch" and args and args[0] is None and self._stale is not None:
            self._empty()
            if not self._was_paused:
                self._core.resume_scheduler()

        def ask(**more: Any) -> Any:
            began = time.monotonic()
            workers = functools.partial(call, method, timeout, args, given | more)
            answer = self._run(method, workers)
            self.drivers.extend(time.monotonic() - began)
            return self._noted(method, args, given, answer, driver)

        if method == "delta_prefetch":
            # A bell of a client's would be any file of this host.
            return when_rung(_seconds(given.pop(WAIT_KEY, 0)), lambda bell: ask(**{BELL_KEY: bell}))
        return ask()

    def _run(self, method: str, workers: Callable[[], Any]) -> Any:
        """Call a method of the workers."""
        if method == "finish_weight_update":
            return self._write(workers)
        if method.startswith("delta_") or method in _KEEPING:
            return workers()
        with self._changing():
            return workers()

    def _check_meant(self, engine: object) -> None:
        if engine not in (None, self.id):
            raise _told(
                OtherServer(
                    "another server than before answers at this address: it was restarted, or the address is "
                    "a load balancer's; then name each server itself. Nothing was changed by this call"
                )
            )

    def _check_meant_in(self, info: Any) -> None:
        self._check_meant(info.get(ENGINE_KEY) if isinstance(info, Mapping) else None)

    def _taken(self, info: Any) -> tuple[Any, PrefixCache]:
        """Take out of `update_info` or `init_info` what is this core's."""
        if not isinstance(info, Mapping):
            return info, PrefixCache.RESET
        given, mode = info.get(CACHES_KEY), PrefixCache.RESET
        if given is not None:
            try:
                mode = PrefixCache(given)
            except ValueError:
                modes = ", ".join(PrefixCache)
                raise _told(UsageError(f"{CACHES_KEY} is one of {modes}, not {given!r:.80}")) from None
        if (reason := self.caches.uncovered(mode)) is not None:
            raise _told(UsageError(reason))
        return {key: value for key, value in info.items() if key not in {ENGINE_KEY, CACHES_KEY}}, mode

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """Close the update in the workers, which do not hear of what this core refuses."""
        try:
            yield
        except Exception:
            self._core.collective_rpc("delta_drop")
            raise

    def _write(self, workers: Callable[[], Any]) -> Any:
        """Have the workers write what they staged, and no cache answer for what was there before."""
        mode, self._mode = self._mode, PrefixCache.RESET
        version, self._version = self._version, None
        if version is not None:
            with self._closing():
                try:
                    self.caches.before_write(mode)
                except Exception as exc:
                    raise _told(StaleCaches(f"version {version} was not applied: {exc}")) from exc
        self.admission.written(getattr(self._core, "_weight_version", ""))
        with self._changing(version):
            answer = workers()
            self.admission.is_stale = mode is PrefixCache.KEEP
        try:
            if mode is PrefixCache.RESET:
                self.caches.reset()
        except Exception as exc:
            self._stale = f"version {version} is served, but a cache of older weights is not empty: {exc}"
            self._was_paused = self._core.is_scheduler_paused()
            self._core.pause_scheduler("keep", False)
            raise self._held() from exc
        if self._stale is not None and mode is PrefixCache.RESET:
            self._stale = None
        return answer

    def _empty(self) -> None:
        try:
            self.caches.reset()
        except Exception as exc:
            raise self._held() from exc
        self._stale = None

    def _held(self) -> Exception:
        return _told(
            StaleCaches(
                f"{self._stale}. Generation is paused until it is: /resume tries again, or restart vLLM"
            )
        )

    @contextmanager
    def _changing(self, version: int | None = None) -> Iterator[None]:
        """Note what the workers serve after a call, and label tokens with it.

        That is `version` if it is given and the call succeeds, and else what they say. It is done in the call
        of the write, so that no token has the label of other weights, and before caches are emptied, because
        a request that starts over does not look begun.
        """
        written = None
        try:
            yield
            written = version
        finally:
            self._serves(self._served() if written is None else written, is_written=written is not None)

    def _serves(self, serving: int | None, *, is_written: bool) -> None:
        """Label tokens from here on, and let requests know."""
        if hasattr(self._core, "set_weight_version"):
            kind = type(self._core)
            label = kind.get_weight_version.__wrapped__(self._core)
            # Any other text is a client's.
            if is_written or label == _UNLABELLED or label.isdecimal():
                label = _UNLABELLED if serving is None else str(serving)
                kind.set_weight_version.__wrapped__(self._core, label)
        self.admission.serves(serving)

    def _noted(
        self, method: str, args: tuple[Any, ...], given: Mapping[str, Any], answer: Any, driver: str | None
    ) -> Any:
        """Take note of what the workers did, and add to their answer what only this core knows."""
        if method == "update_weights":
            info = given.get("update_info")
            if isinstance(info, Mapping):
                self._version, self._switch = info.get("version"), info.get("switch", self._switch)
        elif method == "delta_switch" and not any(answer):
            # A rank that refused the mark has answered why.
            self._switch = args[0] if args else given.get("switch")
        elif method in {"delta_status", "delta_prefetch"}:
            ours = {
                "engine": self.id,
                "drivers": self.drivers.others(driver),
                "stale": self._stale,
                "keeps": self.caches.uncovered(PrefixCache.RESET),
            }
            return [each if each.keys() == {"error"} else each | ours for each in answer]
        return answer

    def _served(self) -> int | None:
        """Return the version that the workers say they serve; None for none, where they differ or fail."""
        try:
            # A rank that hangs must not keep the error of a call from its client.
            ranks = self._core.collective_rpc("delta_status", timeout=_MOST_S)
        except Exception:  # noqa: BLE001  (it must not end the engine core)
            return None
        versions = {rank.get("serving") for rank in ranks}
        return versions.pop() if len(versions) == 1 else None

    def added(self, add: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> None:
        """Take a request, and answer it if it accepts what is served."""
        add(request, *args, **kwargs)
        self.admission.check(request)

    # Calls that this core answers itself: see `DeltaWorkerExtension`.

    def delta_engine(self) -> list[dict[str, Any]]:
        salts = self.caches.salts
        return [{ENGINE_KEY: self.id, "salt": None if salts is None else salts.current}]

    def delta_prove(self, update_info: Any) -> list[dict[str, Any]]:
        if isinstance(update_info, Mapping) and "switch" not in update_info:
            # As it is now: no other call comes between this and the mark.
            switch = "stay-paused" if self._core.is_scheduler_paused() else "resume"
            update_info = {**update_info, "switch": switch}
        self._core.collective_rpc("start_weight_update")
        self._core.collective_rpc("update_weights", kwargs={"update_info": update_info})
        return [{"switch": self._switch}]

    def delta_pause(self) -> "list[dict[str, Any]] | Future[Any]":
        paused = self._core.pause_scheduler("keep", False)
        self._has_paused = True
        if paused is None:
            return [{}]
        answer: Future[Any] = Future()

        def end(done: "Future[Any]") -> None:
            error = done.exception()
            answer.set_result([{}]) if error is None else answer.set_exception(error)

        # vLLM answers a call that returns a future when that is done.
        paused.add_done_callback(end)
        return answer

    def delta_resume(self) -> list[dict[str, Any]]:
        self._core.resume_scheduler()
        refused = [each for each in self._core.collective_rpc("delta_switch", args=(None,)) if each]
        return refused or [{}]

    # Other methods of vLLM's core.

    def resumed(self, resume: Callable[[], None]) -> None:
        """Let generation go on, unless a cache would answer for older weights."""
        if self._stale is not None:
            self._empty()
        resume()
        self._has_paused = False

    def woken(self, wake_up: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wake up from sleep. Generation stays paused where `delta_pause` or a switch paused it."""
        has_paused = self._has_paused
        is_held = (has_paused or self._switch == "resume") and self._core.is_scheduler_paused()
        with self._changing():
            answer = wake_up(*args, **kwargs)
        if is_held and not self._core.is_scheduler_paused():
            # vLLM resumes its scheduler also if a client had paused it. No step was made since.
            self._core.pause_scheduler("keep", False)
            self._has_paused = has_paused
        return answer

    def labelled(self, put: Callable[[str], None], label: str) -> None:
        if label.isdecimal() and label != str(serving := self._served()):
            raise _told(UsageError(f"{named(serving)} is served, so answers are not labelled {label:.40}"))
        put(label)


def _seconds(given: object) -> float:
    if not isinstance(given, int | float) or not 0 <= given <= _MOST_S:
        raise _told(UsageError(f"{WAIT_KEY} is a number of seconds up to {_MOST_S:g}, not {given!r:.80}"))
    return given


def _told(error: PatchstoreError) -> PatchstoreError:
    """Return an error whose text names its kind, which is all that vLLM passes on to its client."""
    return type(error)(f"[{error.kind}] {error}")
