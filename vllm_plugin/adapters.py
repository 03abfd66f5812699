"""Adapters of runs in vLLM's API server: versions are loaded when a request, or a driver, names them.

Each version is an adapter of its own to vLLM, `NAME@VERSION`, and is never loaded in place: running answers
keep the version with which they began. `NAME` alone, and `NAME@TAG`, mean one of them, which is looked up
when a request arrives, before vLLM looks for the model that it names.

    | a request names              | it means                                                                |
    |------------------------------|-------------------------------------------------------------------------|
    | `NAME@12`                    | this version                                                            |
    | `NAME@TAG`                   | the version that the tag names now                                      |
    | `NAME@head`                  | the store's newest                                                      |
    | `NAME`                       | the chosen version; without one the newest that is held; without any,   |
    |                              | the store's newest                                                      |

What waits for the store, or for the disk, runs on threads. What is refused is answered in a sentence, with
404 for what is not there, 400 for what cannot be, 409 for what is in use, and 503 for what may succeed later.
"""

import asyncio
import json
import os
import re
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from fastapi import HTTPException
from vllm import __version__ as vllm_version
from vllm import envs
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from patchstore.bucket.records import Adapter, Base, Schema
from patchstore.errors import LoadFailed, NotFound, PatchstoreError, SchemaMismatch, StoreReplaced, UsageError
from patchstore.follow.vllm_protocol import FUSED_EXPERTS
from patchstore.read.run import Run
from patchstore.stores import Store, layout, open_store
from patchstore.support.arguments import number_in, version_number
from patchstore.tensors import elements
from vllm_plugin.adapter_folders import AdapterFolders, Lent
from vllm_plugin.core import has_delta, is_wrapped, replace
from vllm_plugin.permission import check_store, default_scratch, required_keys, unquoted

ADAPTERS = "PATCHSTORE_ADAPTERS"
"""Environment variable: names and stores, as `policy=s3://bucket/run, judge=/runs/judge@best`. Requests may
name their versions."""
SCHEME = "patchstore:"
"""What the path of an adapter begins with that is a store, and may end with `@VERSION` or `@TAG`."""

_UPDATES = frozenset({"update_weights", "delta_prove"})
"""Methods of engines that stage another version of the base."""
_STATE = "_patchstore_adapters"
IDLE_S = 60.0
"""A version that nothing asked for so long may be unloaded to make room."""
_NUM_THREADS = 8
_MAX_SENTENCE = 600

T = TypeVar("T")


def install() -> None:
    """Have this process's API server know adapters of runs. Calling it again changes nothing."""
    if is_wrapped(OpenAIServingModels.load_lora_adapter):
        return

    def on_models(name: str, instead: Callable[..., Awaitable[Any]]) -> None:
        replace(
            OpenAIServingModels, name, lambda models, *args, **kwargs: instead(_of(models), *args, **kwargs)
        )

    on_models("init_static_loras", Adapters.begin)
    on_models("load_lora_adapter", Adapters.load)
    on_models("unload_lora_adapter", Adapters.unload)
    on_models("show_available_models", Adapters.show)
    # Pooling has a check of its own.
    for kind in (BaseServing, PoolingBaseServing):
        replace(kind, "_check_model", _check_model)
    replace(AsyncLLM, "collective_rpc", update_base)


async def update_base(
    engine: Any, call: Callable[..., Awaitable[Any]], method: Any, *args: Any, **kwargs: Any
) -> Any:
    """Let the base be updated if the adapters that are held allow it."""
    ours = getattr(engine, _STATE, None)
    if ours is not None and method in _UPDATES:
        ours.check_base_may_change()
    return await call(method, *args, **kwargs)


async def _check_model(serving: Any, check: Callable[[Any], Awaitable[Any]], request: Any) -> Any:
    """Let a request name the version that it means; then vLLM's own check finds it."""
    if request.model and isinstance(serving.models, OpenAIServingModels):
        request.model = await _of(serving.models).resolve(request.model)
    return await check(request)


def _of(models: Any) -> "Adapters":
    if (ours := getattr(models, _STATE, None)) is None:
        ours = Adapters(models)
        setattr(models, _STATE, ours)
    return ours


class _Request(LoRARequest, weakref=True):  # type: ignore[call-arg]
    """vLLM's own, of a version. Its folder is held for as long as anything in this process has it."""


class _Source:
    """The store of a run. For any thread; each call may wait for the store."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._store: Store | None = None
        self._lock = Lock()

    def run(self) -> Run:
        """Return the run that is there now."""
        with self._lock:
            if self._store is None:
                self._store = open_store(self.url)
        with unquoted(self.url):
            return Run.open(self._store, required_keys())

    def found(self, wanted: int | str | None) -> tuple[int, Path]:
        """Return the number of a version, and the folder that it has on this host."""
        run = self.run()
        version = wanted if isinstance(wanted, int) else run.named(wanted)
        return version, _folders().path(run, version)


@dataclass(frozen=True, slots=True)
class _Held:
    """A version that vLLM has."""

    source: _Source
    lent: Lent


class _Name:
    """A name, and the run whose versions it has."""

    def __init__(self, name: str, source: _Source, wanted: int | str | None = None) -> None:
        self.name, self.source, self.wanted = name, source, wanted
        self.is_known = False
        """Configured, or a version was loaded; before that, a first load is under way, or has failed."""
        self.chosen: int | None = None
        """The version that the name alone means."""
        self.held: dict[int, _Held] = {}
        self.asked: dict[int, float] = {}
        """When something asked for each of these last."""

    def full(self, version: int) -> str:
        return f"{self.name}@{version}"

    def meant(self) -> int | None:
        """The held version that the name alone means, if that is known without asking the store."""
        if self.chosen is not None or self.wanted is not None:
            return self.chosen
        return max(self.held, default=None)


class Adapters:
    """The adapters of runs that one API server has."""

    def __init__(self, models: Any) -> None:
        """Read what the environment says of vLLM's list of models."""
        self.models, self._engine = models, models.engine_client
        setattr(self._engine, _STATE, self)
        self._config = self._engine.vllm_config
        if self._config.lora_config is not None:
            elements.compile_ahead()
        self._names = {each.name: each for each in _configured()}
        self._under_way: dict[str, asyncio.Task[Any]] = {}
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "patchstore-adapters")
        self._fixed: dict[str, Adapter] = {}
        """Versions that are held or fetched under whose run the base may not change, by full name."""
        self._asking: weakref.WeakKeyDictionary[asyncio.Task[Any], str] = weakref.WeakKeyDictionary()
        """Which version each request means, that it may have no answer from yet."""

    # What vLLM calls.

    def check_base_may_change(self) -> None:
        """Refuse an update of the base where an adapter is held that was trained on the present one."""
        for full, adapter in self._fixed.items():
            raise HTTPException(
                400,
                f"[usage] {full} is of {adapter}: unload it before the base is updated, or publish it with "
                "adapter=PeftAdapter(base_may_change=True)",
            )

    async def begin(self, begin: Callable[[], Awaitable[None]]) -> None:
        """Check what the environment says, when the server starts."""
        required_keys()
        if self._names:
            self._check_enabled()
        if self._names and not envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
            raise UsageError(
                f"{ADAPTERS} is set, but adapters may not be loaded while the server runs: start it with "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            )
        for each in self._names.values():
            self._check_free(each.name)
            check_store(each.source.url, {})
        await begin()

    async def resolve(self, model: str) -> str:
        """Return the name of the version that a request means, which vLLM holds then.

        What is no adapter of a run is returned as it is.
        """
        name, at, wanted = model.partition("@")
        known = self._known(name)
        if known is None or self.models.is_base_model(model) or not envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
            return model
        with _answered():
            meant, source, folder = _version(wanted) if at else known.meant(), known.source, None
            if isinstance(meant, int):
                version = meant
                source = known.held[version].source if version in known.held else source
            else:
                asked = meant if at else known.wanted
                version, folder = await self._once(model, lambda: self._in_thread(source.found, asked))
                if not at and known.wanted is not None:
                    # What was configured holds until another version is chosen.
                    known.chosen = known.chosen if known.chosen is not None else version
            if (task := asyncio.current_task()) is not None:
                self._asking[task] = known.full(version)
            await self._hold(known, version, source, folder)
            return known.full(version)

    async def load(
        self, load: Callable[..., Awaitable[Any]], request: Any, base_model_name: str | None = None
    ) -> Any:
        """Load a version of a run; with `load_inplace` or for a new name, choose it."""
        full, path = request.lora_name, request.lora_path
        name, at, number = full.partition("@")
        with _answered():
            if not path.startswith(SCHEME):
                if (known := self._known(name)) is not None:
                    raise UsageError(
                        f"{name} is a run's adapter: give a version of its store as the path, as "
                        f"{SCHEME}{known.source.url}@12"
                    )
                return await load(request, base_model_name)
            self._check_enabled()
            self._check_free(name)
            url, wanted = _split(path.removeprefix(SCHEME))
            check_store(url, {})
            if not name or (at and not isinstance(_version(number), int)):
                raise UsageError(
                    f"an adapter is called NAME@VERSION, or NAME to choose one, not {full!r:.200}"
                )
            known = self._names.setdefault(name, _Name(name, _Source(url)))
            source = known.source if known.source.url == url else _Source(url)
            if not known.is_known:
                known.source = source
            version, folder = await self._in_thread(
                source.found, _version(number) if at and wanted is None else wanted
            )
            if at and version != _version(number):
                raise UsageError(f"{full} cannot be version {version} of {url}")
            if not at and known.chosen not in {None, version} and not request.load_inplace:
                raise UsageError(
                    f"{name} is version {known.chosen} now: load {known.full(version)}, or switch to it with "
                    '"load_inplace": true'
                )
            await self._hold(known, version, source, folder)
            known.is_known = True
            if not at:
                known.chosen, known.source = version, source
        return f"Success: LoRA adapter '{full}' added successfully."

    async def unload(self, unload: Callable[[Any], Awaitable[Any]], request: Any) -> Any:
        """Unload a version that is neither chosen nor in use."""
        full = request.lora_name
        name, at, number = full.partition("@")
        if (known := self._known(name)) is None:
            return await unload(request)
        with _answered():
            version = _version(number)
            if not at or not isinstance(version, int):
                raise UsageError(
                    f"{full} means a version of an adapter: unload the version, such as {name}@12"
                )
            if version not in known.held:
                raise NotFound(f"{full} is not loaded")
        if version == known.chosen:
            raise HTTPException(409, f"{full} is what {name} means: choose another version first")
        if known.full(version) in self._in_use():
            raise HTTPException(409, f"{full} is in use: try again when the requests that use it have ended")
        await self._drop(known, version)
        return f"Success: LoRA adapter '{full}' removed successfully."

    async def show(self, show: Callable[[], Awaitable[Any]]) -> Any:
        """Add `lora_int_id` to the cards of versions, and a card for each name."""
        shown = await show()
        requests, cards = self.models.lora_requests, {card.id: card for card in shown.data}
        for known in self._names.values():
            for version in known.held:
                card = cards[known.full(version)]
                card.lora_int_id = requests[card.id].lora_int_id
                if version == known.meant():
                    shown.data.append(card.model_copy(update={"id": known.name}))
        return shown

    # What is held.

    async def _hold(self, known: _Name, version: int, source: _Source, folder: Path | None) -> None:
        """Have vLLM hold a version. Of several that ask at once, one loads it.

        Args:
            folder: what the store has now is to have this one; None if the store was not asked.
        """
        full = known.full(version)
        while (held := known.held.get(version)) is None or not held.lent.is_whole():
            await self._once(full, lambda: self._load(known, version, source))
        if held.source.url != source.url:
            raise UsageError(f"{full} is of {held.source.url}, and not of {source.url}: unload it first")
        if folder not in {None, held.lent.path}:
            raise _replaced(full, source)
        known.asked[version] = time.monotonic()

    async def _load(self, known: _Name, version: int, source: _Source) -> None:
        full = known.full(version)
        if (held := known.held.get(version)) is not None:
            await self._restore(known, version, held)
            return
        if full in self.models.lora_requests or self.models.is_base_model(full):
            raise UsageError(f"{full} is a model of this server that is of no run: unload it first")
        try:
            run, adapter = await self._in_thread(self._opened, full, source)
            state = None if adapter.base_may_change else await self._base_state()
            lent = await self._in_thread(self._fetch, full, run, adapter, version, state)
            await self._add(full, lent, run.schema)
        except BaseException:
            self._fixed.pop(full, None)
            raise
        known.held[version], known.asked[version] = _Held(source, lent), time.monotonic()
        await self._make_room(full)

    async def _restore(self, known: _Name, version: int, held: _Held) -> None:
        """Make a folder again that was removed: vLLM may load it again at any step, and ends if it cannot."""
        lent = await self._in_thread(lambda: _folders().lend(held.source.run(), version))
        full = known.full(version)
        if known.held.get(version) is not held:
            lent.close()
        elif lent.path != held.lent.path:
            lent.close()
            raise _replaced(full, held.source)
        else:
            weakref.finalize(self.models.lora_requests[full], lent.close)
            known.held[version] = _Held(held.source, lent)

    async def _add(self, full: str, lent: Lent, schema: Schema) -> None:
        """Have vLLM load a folder."""
        request = _Request(
            lora_name=full, lora_int_id=self.models.lora_id_counter.inc(1), lora_path=str(lent.path)
        )
        # Older releases of vLLM do not ask.
        if any(FUSED_EXPERTS.search(spec.name) for spec in schema.tensors) and hasattr(
            request, "is_3d_lora_weight"
        ):
            request.is_3d_lora_weight = True
        weakref.finalize(request, lent.close)
        try:
            await self._engine.add_lora(request)
        except Exception as exc:
            if self._engine.errored:
                raise
            raise LoadFailed(f"{full} was not loaded: {_shortened(str(exc))}") from exc
        self.models.lora_requests[full] = request

    async def _make_room(self, new: str) -> None:
        """Drop versions that nothing asks for any more, where vLLM has no room for as many as are held."""
        held = [(when, known, each) for known in self._names.values() for each, when in known.asked.items()]
        spare = len(held) - self._config.lora_config.max_cpu_loras
        in_use, now = self._in_use() | {new}, time.monotonic()
        idle = [
            (when, known, version)
            for when, known, version in held
            if now - when > IDLE_S and version != known.meant() and known.full(version) not in in_use
        ]
        for when, known, version in sorted(idle, key=lambda each: each[0])[: max(0, spare)]:
            if known.asked.get(version) == when:
                await self._drop(known, version)

    async def _drop(self, known: _Name, version: int) -> None:
        del known.held[version], known.asked[version]
        request = self.models.lora_requests.pop(known.full(version))
        await self._engine.remove_lora(request.lora_int_id)
        self._fixed.pop(known.full(version), None)

    def _in_use(self) -> set[str | None]:
        """The adapters of all requests, from when they name one."""
        running = {each.lora_name for each in self._engine.output_processor.request_states.values()}
        return running | {full for task, full in self._asking.items() if not task.done()}

    # On threads.

    def _opened(self, full: str, source: _Source) -> tuple[Run, Adapter]:
        """Open the run of a version, and from here on refuse updates of the base that it excludes."""
        run = source.run()
        if (adapter := run.header.adapter) is None:
            raise UsageError(f"{source.url} holds whole models, and no adapters")
        if not adapter.base_may_change:
            self._fixed[full] = adapter
        return run, adapter

    def _fetch(self, full: str, run: Run, adapter: Adapter, version: int, state: str | None) -> Lent:
        """Return the folder of a version that this server can load."""
        self._check_base(run, adapter, state)
        lent = _folders().lend(run, version)
        try:
            self._check_modules(run.schema)
            _check_known(lent.path / layout.ADAPTER_CONFIG)
            PEFTHelper.from_local_dir(str(lent.path), None).validate_legal(self._config.lora_config)
        except (ValueError, TypeError) as exc:
            lent.close()
            raise LoadFailed(f"{full} was not loaded: {exc}") from exc
        except BaseException:
            lent.close()
            raise
        return lent

    def _check_base(self, run: Run, adapter: Adapter, state: str | None) -> None:
        """Refuse adapters that are not for what this server serves."""
        model = self._config.model_config
        names = [model.model, *(path.name for path in self.models.base_model_paths)]
        ours = [Base(name=name, revision=model.revision, state=state) for name in names]
        if all(adapter.base.differs(each) for each in ours):
            raise SchemaMismatch(
                f"{run.store.url} has {adapter}, but this server serves {ours[0]}"
                f"{f', called {names[-1]}' if names[-1] != names[0] else ''}"
            )

    def _check_modules(self, schema: Schema) -> None:
        """Refuse what vLLM would leave out without a word."""
        # Not above: it takes seconds to import all layers.
        from vllm.lora.utils import is_base_embedding_weights, is_in_target_modules
        from vllm.model_executor.model_loader import get_model_cls

        names = [spec.name for spec in schema.tensors]
        if whole := [name for name in names if is_base_embedding_weights(name)]:
            raise ValueError(f"it has embeddings of its own, which vLLM leaves out: {', '.join(whole)}")
        if (wanted := self._config.lora_config.target_modules) is None:
            return
        packed = getattr(get_model_cls(self._config.model_config), "packed_modules_mapping", {})
        modules = {name.rpartition(".lora_")[0].removeprefix("base_model.model.") for name in names}
        others = {each for each in modules if not is_in_target_modules(each, wanted, packed)}
        if others:
            left_out = ", ".join(sorted({each.rpartition(".")[2] for each in others}))
            raise ValueError(f"it adapts {left_out}, which this server's --lora-target-modules leaves out")

    # Helpers.

    def _known(self, name: str) -> _Name | None:
        known = self._names.get(name)
        return known if known is not None and known.is_known else None

    def _check_enabled(self) -> None:
        if self._config.lora_config is None:
            raise UsageError("this server has no adapters: start it with --enable-lora")

    def _check_free(self, name: str) -> None:
        """Refuse a name that means something else already."""
        if self.models.is_base_model(name) or name in self.models.lora_requests:
            raise UsageError(f"{name} is another model of this server: give the run's adapter another name")

    async def _base_state(self) -> str | None:
        """Return the state digest of the version that this server serves of its base, if it follows a run."""
        if not has_delta(self._config):
            return None
        ranks = await self._engine.collective_rpc("delta_status")
        if any(rank.get("update_open") for rank in ranks):
            raise HTTPException(503, "the base is being updated, and this adapter excludes that: try again")
        states = {rank.get("state_digest") for rank in ranks}
        return (states.pop() if len(states) == 1 else None) or "of no known version"

    async def _once(self, what: str, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do something once for all that ask for it meanwhile. It goes on if one of them gives up."""
        if (task := self._under_way.get(what)) is None:
            task = self._under_way[what] = asyncio.create_task(begin())
            task.add_done_callback(lambda _: self._under_way.pop(what))
        result: T = await asyncio.shield(task)
        return result

    async def _in_thread(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(call, *args))


def _configured() -> Iterator[_Name]:
    found: set[str] = set()
    for each in filter(None, map(str.strip, os.environ.get(ADAPTERS, "").split(","))):
        name, equals, place = (part.strip() for part in each.partition("="))
        if not name or not equals or not place or "@" in name or name in found:
            raise UsageError(
                f"{ADAPTERS} has pairs NAME=STORE with commas between, each name once, not {each!r}"
            )
        found.add(name)
        url, wanted = _split(place)
        known = _Name(name, _Source(url), wanted)
        known.is_known = True
        yield known


def _check_known(config: Path) -> None:
    """Refuse what an older vLLM would compute otherwise without a word."""
    said, known = json.loads(config.read_text()), {field.name for field in fields(PEFTHelper)}
    if ignored := [
        each for each in ("rank_pattern", "alpha_pattern") if said.get(each) and each not in known
    ]:
        raise ValueError(
            f"vLLM {vllm_version} leaves out its {' and '.join(ignored)}, and would scale some modules "
            "otherwise: serve it with a newer one, such as 0.32"
        )


def _folders() -> AdapterFolders:
    return AdapterFolders(default_scratch())


def _replaced(full: str, source: _Source) -> StoreReplaced:
    return StoreReplaced(
        f"{full} is not what {source.url} has now, whose objects were replaced: unload it first"
    )


def _split(place: str) -> tuple[str, int | str | None]:
    """Return a store's URL, and the version or tag that may follow it."""
    folder, slash, last = place.rpartition("/")
    last, at, wanted = last.partition("@")
    url = (folder + slash + last).rstrip("/")
    return (url, _version(wanted)) if at else (url, None)


def _version(text: str) -> int | str:
    """Return the number of a version, or a tag."""
    number = number_in(text)
    return text if number is None else version_number(number)


@contextmanager
def _answered() -> Iterator[None]:
    """Answer with what is refused: vLLM answers a request with such an exception's status and text."""
    try:
        yield
    except PatchstoreError as exc:
        is_final = isinstance(exc, UsageError | LoadFailed)
        status = 404 if isinstance(exc, NotFound) else 400 if is_final else 503
        raise HTTPException(status, f"[{exc.kind}] {exc}") from exc


def _shortened(said: str) -> str:
    """Return what vLLM says of an adapter that it does not load, without where it said so."""
    said = said.removeprefix("Call to add_lora method failed: ")
    if found := re.search(r"Worker failed with error '(.*)', please check", said, re.DOTALL):
        said = found[1]
    if found := re.search(r"but received \[([^\]]*)\]", said):
        modules = sorted({each.strip(" '").rpartition(".")[2] for each in found[1].split(",")})
        return f"vLLM does not adapt {', '.join(modules)} of this model"
    return said[:_MAX_SENTENCE]
