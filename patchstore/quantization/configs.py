"""Which tensors of a checkpoint are in FP8, and what its config says of that."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from patchstore.bucket.records import Schema, TensorSpec
from patchstore.errors import SchemaMismatch, UsageError
from patchstore.quantization.forms import FORMS, Form, form_of

CONFIG = "config.json"
ENTRY = "quantization_config"
_OLD_ENTRY = "compression_config"
"""What compressed-tensors called it."""
_NAME = re.compile(r"(^|\.)weight$")
_HEAD = "lm_head.weight"
"""A model has this layer, which is not quantized, whether or not its checkpoint has the tensor."""
_KEPT = re.compile(
    r"(^|[._])(embed\w*|wte|wpe|lm_head|head|embed_out|output_layer|norm\w*|\w*norm|ln_\w+|layernorm\w*"
    r"|router|gate|shared_expert_gate|score|classifier|rotary_emb|patch_embed\w*|pos_emb\w*|conv1d|conv\w*"
    r"|relative_attention_bias)$"
    # Within a router or a head; InternLM's head, and T5's embedding.
    r"|(^|\.)(router|gate|(v|value|score|reward)_head)\.|^(model\.)?(output|shared)$"
)
"""Modules that are usually not quantized: embeddings, heads, norms, routers and convolutions."""
_FUSED = re.compile(
    r"(^|\.)experts\.(gate_up_proj|down_proj|gate_proj|up_proj)$|(^|\.)\w*(experts|moe)\.(?!.*conv).*weight$"
)
"""Experts of a layer in one tensor, as transformers' models have them, and checkpoints in FP8 do not."""


_PACKED = frozenset({"awq", "gptq", "bitsandbytes", "mxfp4"})
"""Methods whose weights are several in one number."""
_BYTES = frozenset({"F8_E4M3", "F8_E5M2", "U8", "I8"})
"""Dtypes in which FP8 may be stored."""
_MORE = ("kv_cache_scheme", "transform_config")
"""What compressed-tensors can say beyond how weights and their inputs are rounded."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """A form, and the tensors that are stored in it."""

    form: Form
    patterns: tuple[str, ...] = ()
    """What a base checkpoint's config says is not quantized."""
    names: frozenset[str] | None = None
    """The weights that the base checkpoint itself has in this form; None if that is not known."""
    others: frozenset[str] = frozenset()
    """Its further tensors, if `names` are known."""
    _known: dict[tuple[str, tuple[int, ...]], bool] = field(default_factory=dict, repr=False, compare=False)

    def quantizes(self, spec: TensorSpec) -> bool:
        """Whether a tensor is stored in FP8: the weight of a linear layer that no pattern excludes."""
        key = spec.name, spec.shape
        if key not in self._known:
            self._known[key] = self._decided(spec)
        return self._known[key]

    def _decided(self, spec: TensorSpec) -> bool:
        if len(spec.shape) == 3 and _FUSED.search(spec.name):
            raise SchemaMismatch(
                f"{spec.name!r} holds the experts of a layer in one tensor, but a checkpoint in FP8 has one "
                "tensor per expert; pass the model itself, whose experts are then those of its own "
                "checkpoints, or publish without quantization="
            )
        if len(spec.shape) != 2 or spec.dtype not in {"BF16", "F16", "F32"}:
            return False
        if not _NAME.search(spec.name) or 0 in spec.shape:
            return False
        module = spec.name.removesuffix("weight").removesuffix(".")
        usual = not _KEPT.search(module) and not any(_excludes(each, module) for each in self.patterns)
        if self.names is None or (not usual and spec.name not in self.names):
            return usual
        if spec.name not in self.names and spec.name not in self.others:
            raise SchemaMismatch(
                f"the checkpoint in files= has no tensor {spec.name!r}, so it does not say whether that is "
                "quantized; give the folder of a checkpoint with these names, or one with the unquantized "
                "model's config"
            )
        return spec.name in self.names

    def complete(self, files: Mapping[str, bytes], stored: Schema) -> dict[str, bytes]:
        """Return a checkpoint's files, with a config that says how the tensors are stored."""
        if CONFIG not in files:
            return dict(files)
        config = json.loads(files[CONFIG])
        specs = stored.by_name()
        kept = {
            name
            for name, spec in specs.items()
            if name.endswith(".weight")
            and len(spec.shape) == 2
            and self.form.scale_name(name) not in specs
            and "norm" not in name
        }
        # A layer that is tied to one of these has no tensor, but a module that would be made a quantized one.
        kept |= {alias for alias, name in stored.tied.items() if name in kept and alias.endswith(".weight")}
        if self.form.scale_name(_HEAD) not in specs and self.form.scale_name(_HEAD) not in stored.tied:
            kept.add(_HEAD)
        # What the base excludes may have no matrix here either, such as its part for images.
        modules = {name.removesuffix(".weight") for name in kept} | set(self.patterns)
        config.pop(_OLD_ENTRY, None)
        config[ENTRY] = self.form.config(sorted(modules))
        return {**files, CONFIG: json.dumps(config, indent=2).encode()}

    def described(self) -> str:
        """Return what must be equal on all ranks that publish together."""
        names = None if self.names is None else [sorted(self.names), sorted(self.others)]
        return json.dumps([self.form.name, self.patterns, names])


def quantization_of(
    name: object, files: Mapping[str, bytes], base: Iterable[TensorSpec], unread: str | None = None
) -> Quantization:
    """Return which quantization a publisher asks for.

    Args:
        name: a form's name.
        files: of the base checkpoint, without weights.
        base: its tensors, as far as they are there. If they are in this form, they say which weights are
            quantized. Otherwise the usual rule does, without the modules that the config excludes.
        unread: why some of its tensors are not in `base`, if so.
    """
    form = form_of(name)
    config = _entry(files)
    specs = {spec.name: spec for spec in base}
    coded = {each for each, spec in specs.items() if spec.dtype.startswith("F8_") and _NAME.search(each)}
    if config is None:
        if coded:
            raise UsageError(
                f"the folder in files= has weights in FP8, such as {min(coded)!r}, but its {CONFIG} has no "
                f"{ENTRY}; one of the two is of another checkpoint"
            )
        return Quantization(form)
    if not isinstance(config, dict) or not _is_of(form, config):
        raise UsageError(
            f"quantization={name!r} does not fit the {CONFIG} in files=, whose {ENTRY} says "
            f"{_short(config)}; give the quantization= of that checkpoint, or a folder with the unquantized "
            "model's config"
        )
    if unread is not None:
        raise UsageError(
            f"the {CONFIG} in files= has a {ENTRY}, and the weights there say which layers are quantized, "
            f"but {unread}; complete the folder, or give one with the unquantized model's config"
        )
    key = "ignore" if form.block is None else "modules_to_not_convert"
    patterns = config.get(key) or config.get("ignored_layers") or ()
    if not isinstance(patterns, list | tuple) or not all(isinstance(each, str) for each in patterns):
        raise UsageError(f"the {ENTRY} in files= has {key} {patterns!r}, which is no list of names")
    if not any(_NAME.search(each) for each in specs):
        return Quantization(form, tuple(sorted(patterns)))
    for each in sorted(coded):
        scale = specs.get(form.scale_name(each))
        if scale is None or scale.shape != form.scale_shape(specs[each].shape):
            raise UsageError(
                f"the {ENTRY} in files= says {_short(config)}, but the scales of {each!r} in that folder are "
                f"{'missing' if scale is None else f'of shape {scale.shape}'}; one of the two is of another "
                "checkpoint"
            )
    if not coded:
        raise UsageError(
            f"the {ENTRY} in files= says {_short(config)}, but no weight in that folder is in FP8; give a "
            "folder with the unquantized model's config"
        )
    return Quantization(form, tuple(sorted(patterns)), frozenset(coded), frozenset(specs.keys() - coded))


def check_config(files: Mapping[str, bytes], stored: Schema) -> None:
    """Compare a checkpoint's config with weights that a trainer has quantized itself.

    Args:
        files: of the checkpoint, without weights.
        stored: the tensors as they are published.
    """
    if CONFIG not in files:
        return
    config = _entry(files)
    specs = stored.by_name()
    coded = [name for name, spec in specs.items() if spec.dtype.startswith("F8_") and _NAME.search(name)]
    if coded and not isinstance(config, dict):
        raise UsageError(
            f"{coded[0]!r} is in FP8, but the {CONFIG} in files= has no {ENTRY}, so a replay would be read "
            "as if it were not quantized; give the folder of a checkpoint in this form"
        )
    if not isinstance(config, dict):
        return
    if _says_fp8(config) and _BYTES.isdisjoint(spec.dtype for spec in specs.values()):
        raise UsageError(
            f"the {CONFIG} in files= has a quantization_config for FP8 ({_short(config)}), but none of the "
            "published tensors is in FP8; give a folder with the unquantized model's config"
        )
    for name in coded:
        form = next((each for each in FORMS.values() if each.scale_name(name) in specs), None)
        if form is None or len(specs[name].shape) != 2:
            continue
        scales = specs[form.scale_name(name)].shape
        if form.block is not None:
            fits = config.get("quant_method") == "fp8" and scales == _blocks(specs[name].shape, config)
        else:
            fits = config.get("weight_block_size") is None and config.get("quant_method") not in _PACKED
        if not fits:
            raise UsageError(
                f"{name!r} is in FP8 with scales {form.scale_name(name)!r} of shape {scales}, but the "
                f"{ENTRY} in files= says {_short(config)}; give the folder of a checkpoint in this form"
            )


def _entry(files: Mapping[str, bytes]) -> Any:
    """Return what a checkpoint's config says of quantization; None if it says nothing."""
    config = json.loads(files[CONFIG]) if CONFIG in files else {}
    return config.get(ENTRY, config.get(_OLD_ENTRY))


def _blocks(shape: tuple[int, ...], config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of a matrix's scales where a config says how large blocks are."""
    size = config.get("weight_block_size")
    if not isinstance(size, list) or not all(isinstance(each, int) and each > 0 for each in size):
        return None
    return tuple(-(-n // each) for n, each in zip(shape, size, strict=False))


def _says_fp8(config: Mapping[str, Any]) -> bool:
    rounded = [group.get("weights") for group in _groups(config)]
    return config.get("quant_method") == "fp8" or any(
        isinstance(each, dict) and (each.get("type"), each.get("num_bits")) == ("float", 8)
        for each in rounded
    )


def _groups(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return how compressed-tensors rounds each group of layers."""
    groups = config.get("config_groups")
    return [each for each in groups.values() if isinstance(each, dict)] if isinstance(groups, dict) else []


def _is_of(form: Form, config: Mapping[str, Any]) -> bool:
    """Whether a config describes weights in this form."""
    if form.block is not None:
        return (
            config.get("quant_method") == "fp8"
            and config.get("fmt", "e4m3") == "e4m3"
            and config.get("weight_block_size") == list(form.block)
            and config.get("activation_scheme", "dynamic") == "dynamic"
            and config.get("scale_fmt") is None
        )
    groups = _groups(config)
    if config.get("quant_method") != "compressed-tensors" or len(groups) != 1:
        return False
    (group,) = groups
    return (
        group.get("targets") == ["Linear"]
        and _rounds(group.get("weights"), "channel", dynamic=False)
        and _rounds(group.get("input_activations"), "token", dynamic=True)
        and not group.get("output_activations")
        and not any(config.get(key) for key in _MORE)
    )


def _rounds(found: object, strategy: str, *, dynamic: bool) -> bool:
    """Whether an entry of compressed-tensors means FP8 with a scale per row, or per token."""
    return isinstance(found, dict) and (
        found.get("num_bits"),
        found.get("type"),
        found.get("strategy"),
        found.get("symmetric", True),
        found.get("dynamic", False),
    ) == (8, "float", strategy, True, dynamic)


def _short(config: object) -> str:
    if not isinstance(config, dict):
        return repr(config)
    keys: Sequence[str] = (
        "quant_method",
        "fmt",
        "weight_block_size",
        "activation_scheme",
        "scale_fmt",
        *_MORE,
    )
    said = [f"{key} {config[key]!r}" for key in keys if config.get(key) is not None]
    for group in _groups(config):
        said += [
            f"{key} {group[key]!r}" for key in ("targets", "weights", "input_activations") if key in group
        ]
    return ", ".join(said)[:600] or "nothing that is known"


def _excludes(pattern: str, module: str) -> bool:
    """Whether an entry of `modules_to_not_convert` or `ignore` means a module."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return module == pattern or module.startswith(f"{pattern}.") or module.endswith(f".{pattern}")
