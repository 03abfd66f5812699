"""The loader of `--load-format patchstore`: a version of a run, into a model that vLLM has just made.

The anchor and the deltas come through the host's cache, once for all ranks of the host. Then the tensors of
the version are rebuilt one after the other, handed to the model's own loader, and digested. A server whose
tensors are not those of the version does not start.
"""

import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import LoadConfig, ModelConfig, VllmConfig
from vllm.distributed.parallel_state import get_world_group
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from patchstore.bucket.records import Plan, Schema
from patchstore.errors import DataError, HostError, LoadFailed, UsageError
from patchstore.kernels import are_usable
from patchstore.read.anchors import open_anchor
from patchstore.read.deltas import open_deltas
from patchstore.read.host_cache import HostCache
from patchstore.read.rebuild import patched
from patchstore.read.run import Run
from patchstore.tensors import state_digest
from vllm_plugin.boot import LOAD_FORMAT, logger, number_of, opened
from vllm_plugin.live.models import explained

if TYPE_CHECKING:
    from vllm_plugin.gpu.rebuild import DeviceRebuilder

Tensors = Iterator[tuple[str, torch.Tensor]]


class VersionLoader(DefaultModelLoader):
    """Loads a version where vLLM's default loader reads a folder, and does the rest as that does."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="auto", model_loader_extra_config={}))
        # The loader of a draft model is given the same.
        self._given = load_config.model_loader_extra_config
        self._is_of_run: bool | None = None
        """None before it is known which model is loaded."""
        self._is_draft = False
        self._weights: Tensors | None = None
        """What is loaded; None before and after."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Do nothing: `load_weights` downloads."""

    def load_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, *args: Any, **kwargs: Any
    ) -> torch.nn.Module:
        target = getattr(vllm_config.speculative_config, "target_model_config", None)
        # A draft of another checkpoint is loaded from there.
        self._is_of_run = model_config.model == (target or vllm_config.model_config).model
        self._is_draft = model_config.runner_type == "draft"
        model: torch.nn.Module = super().load_model(vllm_config, model_config, *args, **kwargs)
        return model

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Load the version, the same in all ranks.

        Raises:
            SchemaMismatch, LoadFailed: the model does not take the run's tensors.
            As `Run.reach`. After any error parts of the model may be loaded.
        """
        if self._is_of_run is False:
            super().load_weights(model, model_config)
            return
        with opened(self._given) as (run, cache):
            version = number_of(run, self._given)
            if not self._is_draft:
                # Of several hosts each reads its own command line, perhaps when the head was another one.
                # A draft may be in some ranks only, and comes second.
                version = self._given["version"] = get_world_group().broadcast_object(version)
            run.reach(version, partial(self._load, model, model_config, run, cache))
            logger.info("loaded version %d of run %s", version, run.header.run_id)

    def _load(
        self, model: torch.nn.Module, model_config: ModelConfig, run: Run, cache: HostCache, plan: Plan
    ) -> None:
        with explained(run.schema, rebuilt(run, cache, plan, *memory_of(model))) as weights:
            # vLLM logs how long it took.
            self._weights, self.counter_before_loading_weights = weights, time.perf_counter()
            try:
                super().load_weights(model, model_config)
                # No loader has to take all. What it took is proved with the rest.
                deque(weights, maxlen=0)
            finally:
                self._weights = None

    def get_all_weights(self, model_config: ModelConfig, model: torch.nn.Module) -> Tensors:
        if self._is_of_run is False:
            weights: Tensors = super().get_all_weights(model_config, model)
            return weights
        if self._weights is None:
            raise UsageError(
                f"a server with --load-format {LOAD_FORMAT} does not reload weights by itself: have "
                "patchstore follow, or update_weights, bring it to a version"
            )
        return self._weights


def rebuilt(
    run: Run, cache: HostCache, plan: Plan, device: torch.device, later_bytes: int = 0
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yield the tensors of a version under all their names; they are proved when this ends.

    Args:
        later_bytes: as of `memory_of`. If there are any, a model that took some tensors cannot begin anew.

    Raises:
        LoadFailed: it would have to. Where it can, this is the DataError that says what is damaged.
    """
    assert plan.anchor is not None
    sums = np.zeros((len(run.schema.tensors), 2), dtype=np.uint64)
    aliases: dict[str, list[str]] = {}
    for alias, name in run.schema.tied.items():
        aliases.setdefault(name, []).append(alias)
    with ExitStack() as held:
        # All files at once, and all proved before the first tensor is handed out.
        by_name = run.schema.by_name()
        begun, in_loader = time.perf_counter(), 0.0
        beside = held.enter_context(ThreadPoolExecutor(1, thread_name_prefix="patchstore-compile"))
        making = beside.submit(_rebuilder, run.schema, device, later_bytes)
        anchor = dict(held.enter_context(open_anchor(run.store, plan.anchor, by_name, cache)))
        deltas = held.enter_context(open_deltas(run.store, plan.deltas, run.schema, None, cache))
        downloaded = time.perf_counter()
        rebuilder, contents = making.result(), deltas.contents()
        compiled = time.perf_counter()
        specs = [by_name[name] for name in anchor]
        if rebuilder is None or contents is None:
            # A mapped file is not written to: each page that is would be kept twice.
            copies = (tensor.clone() for tensor in anchor.values())
            files = patched([("", specs, copies)], run.schema, deltas, sums)
        else:
            rebuilder.contents = contents
            mapped = [("", specs, iter(anchor.values()))]
            files = patched(mapped, run.schema, deltas, sums, elsewhere=rebuilder)
        with _only_once() if later_bytes else nullcontext():
            for _, specs, tensors in files:
                for spec, tensor in zip(specs, tensors, strict=True):
                    handed = time.perf_counter()
                    if tensor.is_cuda:
                        # Made on another stream than the loader may copy from it on.
                        tensor.record_stream(torch.cuda.current_stream(tensor.device))
                    for alias in aliases.get(spec.name, ()):
                        # Some loaders write to what they are given.
                        yield alias, tensor.clone()
                    yield spec.name, tensor
                    in_loader += time.perf_counter() - handed
            state_digest.check_state(run.store, run.schema, sums, plan.target)
        logger.info(
            "version %d: %.1f s to download it, %.1f more until kernels were compiled, %.1f to rebuild it, "
            "%.1f in the model's own loader",
            *(plan.target.version, downloaded - begun, compiled - downloaded),
            *(time.perf_counter() - compiled - in_loader, in_loader),
        )
        # On a thread: to give back all of a model's memory takes seconds.
        Thread(target=_let_go, args=(held.pop_all(), anchor), name="patchstore-let-go").start()


def memory_of(model: torch.nn.Module) -> tuple[torch.device, int]:
    """Return the device of a model, and how many bytes of parameters are to come.

    Where vLLM quantises what it loads, a layer has no memory (`meta`) until all of it was loaded. Parts of a
    model on a GPU may be in the host's memory.
    """
    devices = {each.device: None for each in model.parameters() if not each.is_meta}
    device = next((each for each in devices if each.type == "cuda"), next(iter(devices), torch.device("cpu")))
    return device, sum(each.nbytes for each in model.parameters() if each.is_meta)


@contextmanager
def _only_once() -> Iterator[None]:
    """Raise what is damaged as an error after which no other way to the version is tried."""
    try:
        yield
    except DataError as exc:
        raise LoadFailed(
            f"{exc}; vLLM may have quantised what the model was given before, so no other way to the version "
            "can be tried: `patchstore verify STORE --all` says what is damaged, and what to do"
        ) from exc


def _let_go(held: ExitStack, anchor: dict[str, torch.Tensor]) -> None:
    anchor.clear()
    try:
        held.close()
    except HostError as exc:
        logger.warning("what the server started from may be left on this host: %s", exc)


def _rebuilder(schema: Schema, device: torch.device, later_bytes: int) -> "DeviceRebuilder | None":
    """Return what rebuilds tensors on a device, with its kernels compiled; None where the CPU has to."""
    if not are_usable(device):
        return None
    from vllm_plugin.gpu.rebuild import DeviceRebuilder

    found = DeviceRebuilder(schema, device, later_bytes)
    try:
        found.warm_up()
    except torch.OutOfMemoryError as exc:
        logger.info("the CPU rebuilds the version, as the device has no room for it: %s", exc)
        return None
    return found


def register() -> None:
    """Make `--load-format patchstore` known to this process. Again it changes nothing."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER

    if LOAD_FORMAT not in _LOAD_FORMAT_TO_MODEL_LOADER:
        register_model_loader(LOAD_FORMAT)(VersionLoader)
