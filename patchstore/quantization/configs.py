"""Which tensors of a checkpoint are in FP8, and what its config says of that."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from patchstore.errors import SchemaMismatch, UsageError
from patchstore.format.records import TensorSpec
from patchstore.quantization.forms import Form, form_of

CONFIG = "config.json"
ENTRY = "quantization_config"
_NAME = re.compile(r"(^|\.)weight$")
_KEPT = re.compile(
    r"(^|[._])(embed\w*|wte|wpe|lm_head|head|embed_out|output_layer|norm\w*|\w*norm|ln_\w+|layernorm\w*"
    r"|router|gate|shared_expert_gate|score|classifier|rotary_emb|patch_embed\w*|pos_emb\w*|conv1d|conv\w*)$"
)
"""Modules that are usually not quantised: embeddings, heads, norms, routers and convolutions."""
_FUSED = re.compile(r"(^|\.)experts\.(gate_up_proj|down_proj|gate_proj|up_proj)$")
"""Experts of a layer in one tensor, as transformers' models have them, and checkpoints do not."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """A form, and the tensors that are stored in it."""

    form: Form
    patterns: tuple[str, ...] = ()
    """What a base checkpoint's config says is not quantised."""
    names: frozenset[str] | None = None
    """The weights that the base checkpoint itself has in this form; None if that is not known."""
    _known: dict[tuple[str, tuple[int, ...]], bool] = field(default_factory=dict, repr=False, compare=False)

    def quantizes(self, spec: TensorSpec) -> bool:
        """Whether a tensor is stored in FP8: the weight of a linear layer that no pattern excludes.

        Raises:
            SchemaMismatch: it holds the experts of a layer in one tensor, which no checkpoint does.
        """
        key = spec.name, spec.shape
        if key not in self._known:
            self._known[key] = self._decided(spec)
        return self._known[key]

    def _decided(self, spec: TensorSpec) -> bool:
        if len(spec.shape) == 3 and _FUSED.search(spec.name):
            raise SchemaMismatch(
                f"{spec.name!r} holds the experts of a layer in one tensor, but a checkpoint in FP8 has one "
                "tensor per expert; pass patchstore.as_saved(model), which splits them"
            )
        if len(spec.shape) != 2 or spec.dtype not in {"BF16", "F16", "F32"}:
            return False
        if not _NAME.search(spec.name) or 0 in spec.shape:
            return False
        if self.names is not None:
            return spec.name in self.names
        module = spec.name.removesuffix("weight").removesuffix(".")
        return not _KEPT.search(module) and not any(_excludes(each, module) for each in self.patterns)

    def complete(self, files: Mapping[str, bytes], stored: Iterable[TensorSpec]) -> dict[str, bytes]:
        """Return a checkpoint's files, with a config that says how the tensors are stored.

        Args:
            files: of the base checkpoint; its `config.json` may say so already.
            stored: the tensors as they are published: codes and scales.

        Raises:
            UsageError: the config is of another quantization.
        """
        if CONFIG not in files:
            return dict(files)
        config = json.loads(files[CONFIG])
        specs = {spec.name: spec for spec in stored}
        kept = sorted(
            name.removesuffix(".weight")
            for name, spec in specs.items()
            if name.endswith(".weight")
            and len(spec.shape) == 2
            and self.form.scale_name(name) not in specs
            and "norm" not in name
        )
        config[ENTRY] = self.form.config(kept)
        return {**files, CONFIG: json.dumps(config, indent=2).encode()}

    def described(self) -> str:
        """Return what must be equal on all ranks that publish together."""
        names = None if self.names is None else sorted(self.names)
        return json.dumps([self.form.name, self.patterns, names])


def quantization_of(name: object, files: Mapping[str, bytes], base: Iterable[TensorSpec]) -> Quantization:
    """Return which quantization a publisher asks for.

    Args:
        name: a form's name.
        files: of the base checkpoint, without weights.
        base: its tensors, as far as they are there. If they are in this form, they say which weights are
            quantised. Otherwise the usual rule does, without the modules that the config excludes.

    Raises:
        UsageError: there is no such form, or the checkpoint is in another one, or its config and its tensors
            disagree.
    """
    form = form_of(name)
    config = json.loads(files[CONFIG]).get(ENTRY) if CONFIG in files else None
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
            f"{_short(config)}; give the quantization= of that checkpoint, or a folder with the unquantised "
            "model's config"
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
            "folder with the unquantised model's config"
        )
    return Quantization(form, tuple(sorted(patterns)), frozenset(coded))


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
    groups = config.get("config_groups")
    if config.get("quant_method") != "compressed-tensors" or not isinstance(groups, dict) or len(groups) != 1:
        return False
    (group,) = groups.values()
    weights = group.get("weights") or {}
    return group.get("targets") == ["Linear"] and (
        weights.get("num_bits"),
        weights.get("type"),
        weights.get("strategy"),
        weights.get("symmetric", True),
        weights.get("dynamic", False),
    ) == (8, "float", "channel", True, False)


def _short(config: object) -> str:
    if not isinstance(config, dict):
        return repr(config)
    keys: Sequence[str] = ("quant_method", "fmt", "weight_block_size", "activation_scheme", "scale_fmt")
    return ", ".join(f"{key} {config[key]!r}" for key in keys if key in config) or "nothing that is known"


def _excludes(pattern: str, module: str) -> bool:
    """Whether an entry of `modules_to_not_convert` or `ignore` means a module."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return module == pattern or module.startswith(f"{pattern}.") or module.endswith(f".{pattern}")
