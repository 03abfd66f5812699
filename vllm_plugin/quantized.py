"""Quantized checkpoints: which form a run and a server have, and where codes and scales are served.

A server takes a run of its own form only: another would have to be calculated, and would not be what the
trainer published. Which forms it takes is no list: a trace proves that vLLM only moves what it loads, or the
server is refused.

vLLM loads a quantized layer into parameters of one layout, and then hands it to its quantization method,
which may put others in their place: transposed, in another order, or calculated. Here both happen again, to
tensors without elements: vLLM keeps the shapes of the first parameters for its own reload. What comes of
that is copied to the parameters that are served, which a trace sees and does not execute.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from patchstore.bucket.records import DTYPE_BYTES, Schema, TensorSpec
from patchstore.errors import SchemaMismatch, UsageError
from patchstore.quantization import FORMS
from patchstore.tensors.bits import spec_of
from vllm_plugin.live.models import ADVICE
from vllm_plugin.map.provenance import within
from vllm_plugin.map.trace import trace

PLAIN = "plain"
"""The form of weights that are not quantized; the others are those of `patchstore.quantization`."""

_WORDS: Mapping[str | None, str] = {
    PLAIN: "weights that are not quantized",
    "fp8-block": "FP8 with one scale a block (fp8-block)",
    "fp8-channel": "FP8 with one scale a row (fp8-channel)",
    None: "codes in a form that Publisher(quantization=) does not have",
}
_GROUPS: Mapping[tuple[object, ...], str] = {
    ("float", 8, "block"): "fp8-block",
    ("float", 8, "channel"): "fp8-channel",
}
"""By the type, bits and strategy of compressed-tensors."""


def of_run(schema: Schema) -> str | None:
    """Tell a run's form from its tensors; None if it has codes with scales of no form that is known."""
    specs = schema.by_name()
    if not any(_holds_codes(spec) for spec in schema.tensors):
        return PLAIN
    codes = [spec for spec in schema.tensors if spec.dtype == "F8_E4M3"]
    found = {
        form.name
        for form in FORMS.values()
        for spec in codes
        if len(spec.shape) == 2
        and (scale := specs.get(form.scale_name(spec.name))) is not None
        and scale.shape == form.scale_shape(spec.shape)
    }
    return found.pop() if len(found) == 1 else None


def _holds_codes(spec: TensorSpec) -> bool:
    """Whether a tensor may be a matrix of codes, alone or several in one number."""
    is_narrow = DTYPE_BYTES[spec.dtype] == 1 and spec.dtype != "BOOL"
    return (is_narrow or spec.dtype == "I32") and len(spec.shape) > 1


def of_checkpoint(config: object) -> str | None:
    """Tell a checkpoint's form from its `quantization_config`; None if it is none that is known."""
    if config is None:
        return PLAIN
    known: Mapping[str, Any] = config if isinstance(config, Mapping) else vars(config)
    if known.get("quant_method") == "fp8":
        return "fp8-block" if known.get("weight_block_size") else None
    if known.get("quant_method") != "compressed-tensors":
        return None
    groups = [each.get("weights") or {} for each in (known.get("config_groups") or {}).values()]
    found = {(each.get("type"), each.get("num_bits"), each.get("strategy")) for each in groups}
    return _GROUPS.get(found.pop()) if len(found) == 1 else None


def check_pair(schema: Schema, served: str | None, *, is_calculated: bool) -> None:
    """Refuse a run of another form than the server's checkpoint, if that is known. With `is_calculated` vLLM
    quantizes what it loads, and the error says so.
    """
    run = of_run(schema)
    if served is None or run == served or (run is None and not is_calculated):
        return
    if run == PLAIN:
        advice = (
            f'serve the checkpoint that is trained, or publish with Publisher(..., quantization="{served}")'
        )
    else:
        advice = (
            "start vllm from a checkpoint of this run, as `patchstore replay` writes them, and without "
            "--quantization"
        )
        if served == PLAIN:
            advice += ", or publish without quantization="
    serves = "quantizes what it loads (--quantization)" if is_calculated else f"serves {_WORDS[served]}"
    raise SchemaMismatch(f"the run publishes {_WORDS[run]}, and this server {serves}: {advice}")


_ROUNDED = (
    "vLLM rounds scales {}to powers of two for DeepGEMM, so what it serves is not what was published: set "
    "VLLM_USE_DEEP_GEMM_E8M0=0, or VLLM_USE_DEEP_GEMM=0"
)


def methods(models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module, QuantizeMethodBase]]:
    """Yield the layers whose weights are quantized: names, layers, and what vLLM calls after loading them."""
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    for model in models:
        for name, module in model.named_modules():
            method = getattr(module, "quant_method", None)
            is_other = isinstance(method, BaseKVCacheMethod) or "Unquantized" in type(method).__name__
            if isinstance(method, QuantizeMethodBase) and not is_other:
                yield name, module, method


def cache_scales(model: torch.nn.Module) -> set[str]:
    """Names of the scales of keys and values, which most checkpoints leave out."""
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    return {
        f"{name}.{each}"
        for name, module in model.named_modules()
        if isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod)
        for each in module._parameters
    }


def check_kept(models: Sequence[torch.nn.Module]) -> None:
    """Refuse models in which vLLM makes something else of what it loads into a quantized layer.

    Each layer is traced alone, as if a checkpoint had the parameters that it is constructed with. So a server
    is refused when it starts, and not by the first run that it is to follow.
    """
    from vllm.utils import deep_gemm

    for name, layer, method in methods(models):
        kernels = _kernels(layer, method)
        backend = getattr(getattr(method, "fp8_backend", None), "name", "")
        rounds = any(getattr(each, "use_deep_gemm_e8m0", False) for each in kernels)
        if rounds or ("DEEPGEMM" in backend and deep_gemm.is_deep_gemm_e8m0_used()):
            raise UsageError(_ROUNDED.format(f"of {name!r} "))
        first = _first(layer)
        if not first:
            continue
        schema = Schema(tensors=tuple(spec_of(each, first[each]) for each in sorted(first)))
        called = backend or ", ".join(type(each).__name__ for each in kernels) or type(method).__name__
        where = f"of {name!r}, which {called} multiplies by,"
        try:
            found = trace([layer], schema, _load_parameters)
        except (SchemaMismatch, UsageError) as exc:
            reason = str(exc).removesuffix(f": {ADVICE}")
            raise UsageError(f"vLLM makes something else {where} after loading ({reason}): {ADVICE}") from exc
        if missing := sorted(n for n, each in first.items() if each.numel() and n not in found.regions):
            raise UsageError(
                f"vLLM makes something else {where} after loading, of {', '.join(missing)}, so versions "
                f"cannot be written to it: {ADVICE}"
            )


def _load_parameters(layer: torch.nn.Module, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Load a layer from tensors that are called as its parameters."""

    def copy() -> None:
        for name, tensor in weights:
            getattr(layer, name).data.copy_(tensor)

    load(layer, copy)


def _first(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters that a layer was constructed with, without elements; none if vLLM lacks them."""
    # Not with this module, as they import all of torch's compiler.
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    found = layerwise.get_layerwise_info(layer).restore_metadata[0]
    return {name: each for name, each in found.items() if name not in SKIP_TENSORS}


def load(model: torch.nn.Module, loader: Callable[[], object]) -> None:
    """Have a loader load a model as at a start, and copy what comes of it to what is served.

    Runs inside of a trace: nothing is executed. All is as before when it returns.
    """
    layers = [(name, layer, method, _first(layer)) for name, layer, method in methods([model])]
    layers = [each for each in layers if each[3]]
    served = {layer: dict(layer._parameters) for _, layer, _, _ in layers}
    objects = Objects(model)
    try:
        for _, layer, _, first in layers:
            _begin_anew(layer, first)
        loader()
        with _layouts_alone():
            for name, layer, method, _ in layers:
                method.process_weights_after_loading(layer)
                _check_numbers(name, layer, method)
                _copy(name, layer, served[layer])
    finally:
        for layer, parameters in served.items():
            layer._parameters.clear()
            layer._parameters.update(parameters)
        objects.restore()


def _begin_anew(layer: torch.nn.Module, first: dict[str, torch.Tensor]) -> None:
    """Give a layer the parameters that it was constructed with, without elements."""
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, materialize_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    for name in layer._parameters.keys() - SKIP_TENSORS:
        del layer._parameters[name]
    for name, shape in first.items():
        with torch.device("meta"):
            layer.register_parameter(name, restore_layer_refs(materialize_meta_tensor(shape), layer))


def _check_numbers(path: str, layer: torch.nn.Module, method: object) -> None:
    """Refuse what keeps a number that it read from weights, which no version would change.

    Tensors that are kept beside parameters are found in the live model; see `derived`.
    """
    for holder in _holders(layer, method):
        for name, value in vars(holder).items():
            if isinstance(value, float) and math.isnan(value):
                raise UsageError(
                    f"vLLM keeps {name!r} of {path!r} as a number that it read from weights, which no "
                    f"version changes: {ADVICE}"
                )


def _copy(path: str, layer: torch.nn.Module, served: dict[str, torch.nn.Parameter | None]) -> None:
    """Copy what a layer's parameters came out as to those that are served."""
    for name, held in served.items():
        now = getattr(layer, name, None)
        if held is None or now is held:
            continue
        if not isinstance(now, torch.Tensor) or (now.shape, now.dtype) != (held.shape, held.dtype):
            found = "gone" if now is None else f"{tuple(now.shape)} {now.dtype}"
            raise UsageError(
                f"{within(path, name)} is {tuple(held.shape)} {held.dtype}, and would be {found} if it were "
                f"loaded again, so versions cannot be written to it: {ADVICE}"
            )
        held.data.copy_(now.data)


class Objects:
    """What the methods and kernels of a model's quantized layers hold, to put it back."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._held: list[tuple[Any, dict[str, Any]]] = []
        for _, layer, method in methods([model]):
            self._held += [(each, dict(vars(each))) for each in _holders(layer, method)]

    def restore(self) -> None:
        for each, values in self._held:
            vars(each).clear()
            vars(each).update(values)


def _holders(layer: torch.nn.Module, method: object) -> list[object]:
    """What may keep something for a layer beside its parameters."""
    found = (layer, method, getattr(layer, "scheme", None), *_kernels(layer, method))
    return [each for each in found if hasattr(each, "__dict__")]


def _kernels(layer: torch.nn.Module, method: object) -> list[object]:
    """What multiplies by a layer's weights, wherever vLLM keeps it.

    One for small batches and one for large ones may share the weights: FlashInfer's and DeepGEMM's do.
    """
    holders = (method, getattr(layer, "scheme", None))
    found = [getattr(each, name, None) for each in holders for name in ("fp8_linear", "kernel")]
    found += [getattr(each, part, None) for each in found for part in ("base", "fallback")]
    return [each for each in found if each is not None]


@contextmanager
def _layouts_alone() -> Iterator[None]:
    """Let a trace through DeepGEMM's own functions, which take no tensors without elements.

    One arranges scales in columns, aligned: every scale keeps its index, and a copy goes by index. The other
    calculates.
    """

    def arranged(sf: torch.Tensor, **_: object) -> torch.Tensor:
        return sf

    def rounded(*_: object, **__: object) -> NoReturn:
        raise UsageError(_ROUNDED.format(""))

    # Not with this module, as it imports all of torch's compiler.
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    stand_ins = {"transform_sf_into_required_layout": arranged, "requant_weight_ue8m0_inplace": rounded}
    before = {name: vars(fp8_utils)[name] for name in stand_ins if name in vars(fp8_utils)}
    vars(fp8_utils).update({name: stand_ins[name] for name in before})
    try:
        yield
    finally:
        vars(fp8_utils).update(before)
