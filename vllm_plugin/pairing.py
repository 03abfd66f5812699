"""Which form a run and a server have: weights as numbers, or as FP8 codes and scales.

A server takes a run of its own form only: another would have to be calculated, and would not be what the
trainer published.
"""

from collections.abc import Mapping
from typing import Any

from patchstore.errors import SchemaMismatch
from patchstore.format.records import Schema
from patchstore.quantization import FORMS

PLAIN = "plain"
"""The form of weights that are not quantised; the others are those of `patchstore.quantization`."""

ADVICE = (
    "choose kernels that use FP8 weights as they are loaded: set VLLM_USE_DEEP_GEMM=0, and for experts "
    "--moe-backend triton"
)
"""What to do where vLLM makes something else of the weights."""

_WORDS = {
    PLAIN: "weights that are not quantised",
    "fp8-block": "FP8 with one scale a block (fp8-block)",
    "fp8-channel": "FP8 with one scale a row (fp8-channel)",
}
_GROUPS: Mapping[tuple[object, ...], str] = {
    ("float", 8, "block"): "fp8-block",
    ("float", 8, "channel"): "fp8-channel",
}
"""By the type, bits and strategy of compressed-tensors."""


def of_run(schema: Schema) -> str | None:
    """Tell a run's form from its tensors; None if it has FP8 codes with scales of no form that is known."""
    specs = schema.by_name()
    codes = [spec for spec in schema.tensors if spec.dtype == "F8_E4M3"]
    if not codes:
        return PLAIN
    found = {
        form.name
        for form in FORMS.values()
        for spec in codes
        if len(spec.shape) == 2
        and (scale := specs.get(form.scale_name(spec.name))) is not None
        and scale.shape == form.scale_shape(spec.shape)
    }
    return found.pop() if len(found) == 1 else None


def of_checkpoint(config: object) -> str | None:
    """Tell a checkpoint's form from its `quantization_config`; None if it is one that cannot be followed.

    Args:
        config: as the model's configuration has it, None where it has none.
    """
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
    """Refuse a run of another form than the server's.

    Args:
        served: of the checkpoint that the server loaded; None where that is not known.
        is_calculated: whether vLLM quantises while it loads, and so takes weights that are not quantised.

    Raises:
        SchemaMismatch: with both forms, and what to do.
    """
    run = of_run(schema)
    if run is None or served is None or run == served:
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
    serves = "quantises what it loads (--quantization)" if is_calculated else f"serves {_WORDS[served]}"
    raise SchemaMismatch(f"the run publishes {_WORDS[run]}, and this server {serves}: {advice}")
