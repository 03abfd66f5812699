"""One adapter of a PEFT model as a source: the tensors, names and config that PEFT itself would save.

What a run says of its adapter (`records.Adapter`) is worked out here too: to which base it belongs.
"""

import copy
import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from patchstore.bucket import history
from patchstore.bucket.records import Adapter, Base
from patchstore.errors import SchemaMismatch, UsageError
from patchstore.publish.sources.names import look_into, without_engine
from patchstore.publish.sources.pieces import class_of
from patchstore.stores import layout, opened
from patchstore.support.arguments import number_in, version_number

CONFIG = layout.ADAPTER_CONFIG

_LEAVE_BASE = {"eva", "gaussian", "mica", "orthogonal", "true", "false"}
"""Values of `init_lora_weights` that set the adapter alone. Others, such as PiSSA, also change the base."""
_MERGED = "publish merged weights instead: leave adapter= out"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftAdapter:
    """Which adapter of a PEFT model a publisher publishes, and what it says of the base.

    Args:
        name: what PEFT calls the adapter, in `model.peft_config`.
        base: the version whose weights the base has, as URL@NUMBER, if the base is published too. Its state
            digest goes into the run, and servers that serve another version refuse the adapter.
        base_may_change: whether servers may update the base while they serve the adapter.
    """

    name: str = "default"
    base: str | None = None
    base_may_change: bool = False

    @classmethod
    def of(cls, value: Any) -> "PeftAdapter | None":
        """Read the argument of `Publisher`. Raises UsageError."""
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, str) or not value:
            raise UsageError(
                'adapter must be the name of an adapter, such as "default", or a PeftAdapter, not '
                f"{value!r:.100}"
            )
        return cls(name=value)


class AdapterSource:
    """An adapter of a model, or of a mapping that has PEFT's names; a source that is read at each call."""

    def __init__(self, source: Any, wanted: PeftAdapter) -> None:
        """Look for the adapter. Raises UsageError where there is none, or none that servers could load."""
        self._wanted = wanted
        self._model = _with_adapters(source) if isinstance(source, torch.nn.Module) else None
        self._source = source
        if self._model is None:
            return
        # Refuses wrappers of which the names cannot be told.
        look_into(self._model)
        known = self._model.peft_config
        if wanted.name not in known:
            raise UsageError(
                f"the model has no adapter {wanted.name!r}; it has {', '.join(map(repr, known))}"
            )
        check_config(self._config())
        self._begun = self._computed()

    def __call__(self) -> Any:
        """Return the adapter's tensors by the names under which PEFT saves them."""
        if self._model is None:
            return self._source() if callable(self._source) else self._source
        from peft import get_peft_model_state_dict

        self._check_unchanged()
        # Parameters themselves: DeepSpeed has attributes on them.
        found = get_peft_model_state_dict(
            self._model,
            state_dict=self._model.state_dict(keep_vars=True),
            adapter_name=self._wanted.name,
            # Otherwise PEFT asks the Hub whether the vocabulary has grown, in each call.
            save_embedding_layers=False,
        )
        if not found:
            raise SchemaMismatch(
                f"PEFT has no tensors of the adapter {self._wanted.name!r} any more, as after unload() and "
                "merge_and_unload(); merge a copy of the model, copy.deepcopy(model)"
            )
        prefix = "" if _is_whole(self._model) else "base_model.model."
        return {prefix + name: tensor for name, tensor in found.items()}

    def _computed(self) -> dict[str, Any]:
        """Return the live config, without what PEFT writes into it when it saves a checkpoint."""
        assert self._model is not None
        config = copy.deepcopy(self._model.peft_config[self._wanted.name].to_dict())
        return {key: config[key] for key in config.keys() - {"base_model_name_or_path", "inference_mode"}}

    def _check_unchanged(self) -> None:
        """Raises SchemaMismatch where the adapter is gone, or has another config than full versions get."""
        name = self._wanted.name
        assert self._model is not None
        if name not in self._model.peft_config:
            raise SchemaMismatch(
                f"the model has no adapter {name!r} any more: it was deleted or renamed; close the "
                "publisher, and open another one with the name that it has now"
            )
        if changes := differing(self._computed(), self._begun):
            raise SchemaMismatch(
                f"the config of the adapter {name!r} changed while a publisher was open ({changes}): close "
                'it, and open another one with resume="auto", or for another store if shapes changed'
            )
        self._check_scaling()

    def _check_scaling(self) -> None:
        """Raises SchemaMismatch where a layer multiplies by another factor than the config says."""
        from peft.tuners.lora import LoraLayer

        assert self._model is not None
        name, is_stabilized = self._wanted.name, self._model.peft_config[self._wanted.name].use_rslora
        for path, layer in self._model.named_modules():
            if not isinstance(layer, LoraLayer) or name not in layer.scaling:
                continue
            rank = layer.r[name]
            said = layer.lora_alpha[name] / (math.sqrt(rank) if is_stabilized else rank)
            if not math.isclose(layer.scaling[name], said, rel_tol=1e-6):
                raise SchemaMismatch(
                    f"{path} multiplies the adapter {name!r} by {layer.scaling[name]:g} now, as after "
                    f"set_scale() or scale_layer(), and servers by {said:g}, as its config says: undo that "
                    "with set_scale(name, 1), or multiply its weights lora_B instead"
                )

    def files(self, beside: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the files of each full version: those of a folder, and the adapter's config.

        Raises UsageError where no config is known.
        """
        # The folder may be that of the base, whose config would make of the adapter's folder one of a model.
        files = {name: data for name, data in beside.items() if name != "config.json"}
        if self._model is not None:
            files[CONFIG] = json.dumps(self._config(), indent=2, sort_keys=True).encode()
        elif CONFIG not in files:
            raise UsageError(
                f"an adapter needs its {CONFIG}, which a mapping does not have: pass the PEFT model, or "
                "files= with a folder that has it, as model.peft_config[name].save_pretrained(folder) writes"
            )
        check_config(parsed(files[CONFIG]))
        return files

    def described(self, files: Mapping[str, bytes]) -> Adapter:
        """Return what the run says of the adapter. Reads the base's store, if one is named."""
        config = parsed(files[CONFIG])
        name, revision = (config.get(key) or None for key in ("base_model_name_or_path", "revision"))
        base = Base(name=name, revision=revision, state=_state_of(self._wanted.base))
        return Adapter(base=base, base_may_change=self._wanted.base_may_change)

    def _config(self) -> dict[str, Any]:
        """Return the adapter's config as PEFT saves it."""
        assert self._model is not None
        config = copy.deepcopy(self._model.peft_config[self._wanted.name])
        # As `PeftModel.save_pretrained` does.
        config.inference_mode = True
        inner = self._model.get_base_model() if _is_whole(self._model) else self._model
        if config.base_model_name_or_path is None:
            config.base_model_name_or_path = getattr(inner, "name_or_path", None) or None
        mapping = None
        if config.task_type is None:
            mapping = {"base_model_class": type(inner).__name__, "parent_library": type(inner).__module__}
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder, auto_mapping_dict=mapping)
            return parsed((Path(folder) / CONFIG).read_bytes())


def _with_adapters(model: torch.nn.Module) -> Any:
    """Return the model in wrappers that has adapters: PEFT's own, or one of transformers."""
    inner: Any = without_engine(model)
    while not isinstance(getattr(inner, "peft_config", None), Mapping):
        inside = getattr(inner, "module", None)
        if inside is None:
            inside = getattr(inner, "_orig_mod", None)
        if not isinstance(inside, torch.nn.Module):
            raise UsageError(
                f"{class_of(model)} has no adapters of PEFT: pass what peft.get_peft_model returned, or a "
                "mapping by PEFT's names; a model without adapters is published without adapter="
            )
        inner = without_engine(inside)
    return inner


def _is_whole(model: Any) -> bool:
    """Whether this is PEFT's model around another, whose names PEFT saves; not adapters in a model."""
    return hasattr(model, "get_base_model")


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return in which settings two configs of an adapter differ; an empty text for none."""
    return ", ".join(
        f"{key}={ours.get(key)!r}, and was {theirs.get(key)!r}"
        for key in sorted(ours.keys() | theirs.keys())
        if _unordered(ours.get(key)) != _unordered(theirs.get(key))
    )


def _unordered(value: Any) -> Any:
    """Return names of modules in one order: PEFT has them in sets, and writes these in any order."""
    return sorted(value, key=str) if isinstance(value, list | tuple | set) else value


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse an adapter that no server of ours loads. Raises UsageError."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UsageError(f"servers load adapters of the type LORA, and this one is {kind}; {_MERGED}")
    if config.get("use_dora"):
        raise UsageError(f"servers load LoRA without DoRA, and this adapter has use_dora; {_MERGED}")
    for name in ("bias", "lora_bias"):
        if config.get(name) not in {None, "none", False}:
            raise UsageError(
                f"servers load LoRA without biases, and this adapter has {name}={config[name]!r}; {_MERGED}"
            )
    for name in ("alora_invocation_tokens", "layer_replication", "use_bdlora", "use_qalora"):
        if config.get(name):
            raise UsageError(f"servers load plain LoRA, and this adapter has {name}={config[name]!r:.100}")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in _LEAVE_BASE:
        raise UsageError(
            f"init_lora_weights={init!r} may have changed the base under the adapter, and servers have it "
            f"unchanged; {_MERGED}"
        )
    if config.get("trainable_token_indices"):
        raise UsageError(f"servers load no single tokens (trainable_token_indices); {_MERGED}")


def parsed(data: bytes) -> dict[str, Any]:
    try:
        config = json.loads(data)
    except ValueError as exc:
        raise UsageError(f"the {CONFIG} in files= is not JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise UsageError(f"the {CONFIG} in files= is not a JSON object, so it is no adapter's config")
    return config


def _state_of(named: str | None) -> str | None:
    """Return the state digest of the version that a base has, given as URL@NUMBER."""
    if named is None:
        return None
    url, _, text = named.rpartition("@")
    number = number_in(text)
    if not url or number is None:
        raise UsageError(f"base must be the URL of a store, @ and a version's number, not {named!r:.200}")
    with opened(url) as store:
        return history.read_manifest(store, version_number(number)).state.total
