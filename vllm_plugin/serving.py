"""How vLLM serves a model: the parts of it that this package touches beside the engine's own interface.

Where versions 0.26 to 0.33 or platforms differ, the difference is here.

On CPUs weights are kept as they are loaded, which is how GPUs have them. By default vLLM packs Linear
weights for oneDNN or AMX and leaves an empty parameter, and reorders experts and convolutions in place:
nothing could be written into them afterwards. Here Linear layers multiply unpacked weights, and the kernels
that insist on packed ones get them packed anew in each forward pass. That is slower; the CPU is for trying
things out.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.platforms import current_platform

from patchstore.bucket.records import Schema
from patchstore.errors import UsageError
from vllm_plugin import quantized
from vllm_plugin.live.own_memory import check_own
from vllm_plugin.map.trace import Attributes
from vllm_plugin.quantized import Objects

REQUANTIZE = "PATCHSTORE_REQUANTIZE"
"""Environment variable: 1 has a server quantize whole layers anew for each version, see `check_layout`."""


class Serving:
    """The models of one rank, and how to call them."""

    def __init__(self, vllm_config: VllmConfig, model: torch.nn.Module) -> None:
        self._config, self._model = vllm_config, model
        config = vllm_config.model_config
        holders = (config.hf_config, config.hf_text_config)
        names = ("quantization_config", "compression_config")
        found = (getattr(holder, name, None) for holder in holders for name in names)
        checkpoint = next((each for each in found if each is not None), None)
        is_quantized = config.quantization is not None
        self.form = quantized.of_checkpoint(checkpoint)
        """Of the checkpoint that was loaded."""
        self.is_calculated = is_quantized and checkpoint is None
        """Whether vLLM quantizes weights while it loads them, so that only its reload can write them."""
        self.is_loaded_quantized = is_quantized and checkpoint is not None
        """Whether the checkpoint has codes and scales already, so that they can be written where they lie."""

    def models(self, worker: Any) -> list[torch.nn.Module]:
        draft = self.draft(worker)
        return [self._model] if draft is None or not self._is_from_checkpoint() else [self._model, draft]

    def draft(self, worker: Any) -> torch.nn.Module | None:
        runner = worker.model_runner
        if hasattr(runner, "get_draft_model"):
            found = runner.get_draft_model()
        else:
            found = getattr(getattr(runner, "drafter", None), "model", None)
        return found if isinstance(found, torch.nn.Module) else None

    def draft_source(self, worker: Any) -> str | None:
        """`followed` if the draft model is updated with the model, `separate` if never, None without one."""
        if self.draft(worker) is None:
            return None
        return "followed" if self._is_from_checkpoint() else "separate"

    def _is_from_checkpoint(self) -> bool:
        speculative = self._config.speculative_config
        draft = None if speculative is None else speculative.draft_model_config
        return draft is not None and draft.model == self._config.model_config.model

    def check_fits(self, schema: Schema) -> None:
        quantized.check_pair(schema, self.form, is_calculated=self.is_calculated)

    def load(self, model: torch.nn.Module, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        """Call a model's own loader, as vLLM does when it starts, or reloads. Returns the weights that
        nothing was loaded into, of a model that vLLM quantizes.
        """
        with self._surroundings():
            if self.is_calculated or self.is_loaded_quantized:
                return self._reload(model, weights)
            model.load_weights(weights)  # type: ignore[operator]
            return set()

    def load_traced(self, model: torch.nn.Module, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """As `load`, for a trace: nothing is executed. What layers become after loading is followed too."""
        with self._surroundings():
            quantized.load(model, lambda: model.load_weights(weights))  # type: ignore[operator]

    def _reload(self, model: torch.nn.Module, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        """Load layers in full, have vLLM quantize them, and copy the result to where it was."""
        # Not with this module, as it imports all of torch's compiler.
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
        from vllm.model_executor.model_loader.reload import layerwise

        plain = [
            layerwise.get_layerwise_info(layer)
            for layer in model.modules()
            if layer._parameters and not isinstance(getattr(layer, "quant_method", None), QuantizeMethodBase)
        ]
        before, objects = Attributes(model), Objects(model)
        places = {name: each.data_ptr() for name, each in model.named_parameters(remove_duplicate=False)}
        try:
            # vLLM collects what loaders of parameters are given. A model may write past these, as gpt-oss
            # does its sinks. Nothing is made of the weights of such layers: have vLLM leave them in place.
            for info in plain:
                info.load_numel_total = 0
            layerwise.initialize_layerwise_reload(model)
            for info in plain:
                info.reset()
            caches = quantized.cache_scales(model)
            wanted = {n for n, each in model.named_parameters() if each.dim() > 0 and n not in caches}
            loaded = set(model.load_weights(weights) or ())  # type: ignore[operator]
            owners = {name.rpartition(".")[0] for name in loaded}
            if partial := sorted(n for n in wanted - loaded if n.rpartition(".")[0] in owners):
                raise ValueError(f"{partial[0]!r} is not loaded with the rest of its layer")
            layerwise.finalize_layerwise_reload(model, self._config.model_config)
        except BaseException:
            before.restore()
            objects.restore()
            for module in model.modules():
                layerwise.get_layerwise_info(module).reset()
            raise
        if self.is_loaded_quantized:
            # Kernels were made anew over tensors of their own, to which no version would be written.
            before.restore()
            objects.restore()
            # What was loaded is read back through the map, which tells more than names.
            return set()
        # A tied weight is in the memory of the other, which was loaded.
        reached = {places.get(name) for name in loaded}
        return {name for name in wanted - loaded if places.get(name) not in reached}

    def refresh(self, module: torch.nn.Module) -> None:
        """Have a layer, or a model, calculate again what it made from its weights."""
        hook: Any = module.process_weights_after_loading
        with self._surroundings():
            # vLLM calls that of layers with a dtype, and that of models with nothing.
            hook(self._config.model_config.dtype) if inspect.signature(hook).parameters else hook()

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(self._config.model_config.dtype)
        try:
            with set_current_vllm_config(self._config):
                yield
        finally:
            torch.set_default_dtype(before)

    def check_layout(self, models: Sequence[torch.nn.Module]) -> None:
        """Refuse models whose weights are not this process's alone, or were rearranged after loading, so that
        they cannot be loaded into again.
        """
        config = self._config.model_config
        check_own(
            (name, each.untyped_storage()) for model in models for name, each in model.named_parameters()
        )
        if getattr(self._config.parallel_config, "enable_eplb", False):
            raise UsageError(
                "the delta backend needs experts where they were loaded, but --enable-eplb moves them "
                "between ranks; start vllm without it"
            )
        if self.is_calculated:
            if os.environ.get(REQUANTIZE) != "1":
                raise UsageError(
                    f"this server quantizes a bf16 checkpoint itself ({config.quantization}), so it would "
                    "load and quantize whole layers for each version, and generation would wait for seconds: "
                    'publish with Publisher(..., quantization="fp8-block") or "fp8-channel" instead, serve '
                    "a checkpoint of that run without --quantization, and versions are written in place. To "
                    f"follow a bf16 run slowly, start vllm with {REQUANTIZE}=1"
                )
            return
        if self.is_loaded_quantized:
            cache = str(self._config.cache_config.cache_dtype)
            if self._config.load_config.load_format == "dummy" and cache.startswith("fp8"):
                raise UsageError(
                    "with --load-format dummy vLLM makes up the scales of an FP8 cache, which no version "
                    "replaces: start it from a checkpoint, or without --kv-cache-dtype fp8"
                )
            with self._surroundings():
                quantized.check_kept(models)
        if getattr(current_platform, "is_zen_cpu", bool)():
            raise UsageError(
                "the delta backend needs Linear weights as loaded, but this platform packs them for ZenDNN"
            )
        for name, module in (each for model in models for each in model.named_modules()):
            backend = getattr(getattr(module, "quant_method", None), "unquantized_backend", None)
            # vLLM chooses Triton on CPUs too, for experts beside layers with LoRA adapters.
            kept = {"TRITON", "CPU"} if current_platform.is_cpu() else {"TRITON"}
            if backend is not None and not any(each in backend.name for each in kept):
                raise UsageError(
                    f"the delta backend needs experts as loaded, but {name!r} uses {backend.name}, which "
                    "rearranges them: choose --moe-backend triton"
                )
        parameters = [each for model in models for each in model.named_parameters()]
        packed = [name for name, parameter in parameters if parameter.numel() == 0]
        if packed:
            raise UsageError(
                f"the delta backend needs weights as loaded, but {len(packed)} were packed, such as "
                f"{packed[0]!r}"
            )


def groups() -> list[dist.ProcessGroup]:
    """CPU groups that span this engine's ranks, and no other data-parallel engine's."""
    found = [parallel_state.get_tp_group(), parallel_state.get_pcp_group(), parallel_state.get_pp_group()]
    return [group.cpu_group for group in found if group.world_size > 1]


def is_read_in_order(config: VllmConfig) -> bool:
    """Whether one process reads the replies of this engine's ranks from queues, one rank after the other.

    Otherwise each process reads its own (`external_launcher`), or Ray keeps each reply by itself.
    """
    # Not with this module: they import what starts processes.
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    return issubclass(Executor.get_class(config), MultiprocExecutor)


def watch(
    worker: Any,
    asleep: Callable[[int], None],
    awake: Callable[[], None],
    reloaded: Callable[[], None],
) -> None:
    """Be told when something else than the engine changes a worker's weights.

    `asleep` is called before their memory is given away: level 1 keeps a copy on the host, 2 nothing. `awake`
    when it is back; `reloaded` when vLLM has loaded or reset weights by itself, or failed to.
    """
    sleep, wake_up = worker.sleep, worker.wake_up

    def sleep_watched(level: int = 1, **kwargs: Any) -> Any:
        asleep(level)
        return sleep(level, **kwargs)

    def wake_up_watched(tags: list[str] | None = None) -> Any:
        answer = wake_up(tags)
        if tags is None or "weights" in tags:
            awake()
        return answer

    def watched(write: Callable[..., Any]) -> Callable[..., Any]:
        def write_watched(*args: Any, **kwargs: Any) -> Any:
            try:
                return write(*args, **kwargs)
            finally:
                reloaded()

        return write_watched

    worker.sleep, worker.wake_up = sleep_watched, wake_up_watched
    # `/weight_checker` zeroes all weights through the second; 0.26 lacks it.
    for name in ("reload_weights", "reset_weights"):
        if hasattr(worker, name):
            setattr(worker, name, watched(getattr(worker, name)))


def leave_order_to_engine(worker: Any) -> None:
    """Have the engine say what is out of order in an update, since all its ranks fail as one.

    vLLM's worker checks the order itself and raises in every rank, which confuses the replies to later calls;
    with several engines, of which one failed, its flags then differ and no call would be in order any more.
    """
    start, update, finish = worker.start_weight_update, worker.update_weights, worker.finish_weight_update

    def start_anew(*args: Any, **kwargs: Any) -> Any:
        worker._weight_update_active = False
        return start(*args, **kwargs)

    def update_checked(update_info: Any) -> Any:
        worker._weight_update_active = True
        # A list would be one for each rank, but ranks must never be told different things.
        return update({"list": update_info} if isinstance(update_info, list) else update_info)

    def finish_checked(*args: Any, **kwargs: Any) -> Any:
        worker._weight_update_active = True
        return finish(*args, **kwargs)

    worker.start_weight_update, worker.update_weights = start_anew, update_checked
    worker.finish_weight_update = finish_checked

    # 0.26 has no such route.
    if hasattr(worker, "shutdown_weight_transfer_engine"):
        shut_down = worker.shutdown_weight_transfer_engine

        def shut_down_anyway(*args: Any, **kwargs: Any) -> Any:
            # The flag stays set after an update that failed; the engine closes an open update with the store.
            worker._weight_update_active = False
            return shut_down(*args, **kwargs)

        worker.shutdown_weight_transfer_engine = shut_down_anyway


def keep_load_layout() -> None:
    """Set this up in a process that will load a model. Does nothing elsewhere than on CPUs, or again."""
    if not current_platform.is_cpu():
        return
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_, **__: False
    if hasattr(torch.cpu, "_is_amx_tile_supported"):
        # Latent attention would keep packed copies of its projections, and drop the parameter.
        torch.cpu._is_amx_tile_supported = lambda: False
    _keep_experts()
    _keep_convolutions(_custom_ops)


def _keep_experts() -> None:
    try:
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe

        pack = cpu_moe.cpu_prepack_moe_weight
    except (ImportError, AttributeError):
        from vllm.model_executor.layers.fused_moe import cpu_fused_moe as cpu_moe  # before 0.28

        pack = cpu_moe.cpu_prepack_moe_weight

    def packed(given: inspect.BoundArguments) -> None:
        for name in ("w13", "w2"):
            given.arguments[name] = pack(given.arguments[name], given.arguments["isa"])

    if _wrap(cpu_moe, "cpu_fused_moe", packed):
        cpu_moe.cpu_prepack_moe_weight = lambda weight, isa: weight  # noqa: ARG005  (its callers name it)


def _keep_convolutions(ops: ModuleType) -> None:
    pack = vars(ops).get("causal_conv1d_weight_pack")
    if pack is None:
        return
    # Weights are packed after loading only where this is found.
    del ops.causal_conv1d_weight_pack

    def packed(given: inspect.BoundArguments) -> None:
        given.arguments["weight"] = pack(given.arguments["weight"].squeeze(1))

    for name in ("causal_conv1d_fwd_cpu", "causal_conv1d_update_cpu"):
        _wrap(ops, name, packed)


def _wrap(module: ModuleType, name: str, change: Callable[[inspect.BoundArguments], None]) -> bool:
    """Change the arguments of a function before each call; returns whether that is new."""
    function = getattr(module, name)
    if hasattr(function, "__wrapped__"):
        return False
    signature = inspect.signature(function)

    @functools.wraps(function)
    def changed(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        change(given)
        return function(*given.args, **given.kwargs)

    setattr(module, name, changed)
    return True
