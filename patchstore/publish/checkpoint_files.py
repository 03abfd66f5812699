"""The files of a checkpoint folder that are no weights: config, tokenizer, code. Anchors hold copies."""

import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from patchstore.errors import UsageError
from patchstore.format.layout import check_file_name
from patchstore.format.records import Schema
from patchstore.publish.base_checkpoint import BaseCheckpoint
from patchstore.quantization import FORMS

CONFIG = "config.json"

_ENDINGS = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
"""Of config and tokenizer files, and of code that a config refers to."""

_WHOLE_VALUES = frozenset({"F64", "F32", "F16", "BF16", "BOOL", "I64"})
"""Dtypes that quantised weights are never stored in."""

_SCALES = tuple(form.suffix for form in FORMS.values())
"""How names of scales end: a checkpoint in FP8 has them, and its model in bf16 has not."""
_OTHER_FILES = (
    "give the folder of this model's checkpoint, or one with its config and tokenizer alone: "
    "model.config.save_pretrained(folder) writes its config"
)
_SHAPE_KEYS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)
"""Entries of a config about its tensors, or about what a model computes with them."""


def read_folder(folder: Any) -> dict[str, bytes]:
    """Return the contents of a folder's files that are no weights, by name; nothing for None.

    Raises:
        UsageError: it is no checkpoint folder, or one of the files cannot be read.
    """
    if folder is None:
        return {}
    if not isinstance(folder, str | os.PathLike):
        raise UsageError(f"files must be the path of a checkpoint folder, not {folder!r}")
    path = Path(folder)
    # An empty text would name the working directory, whose files must not be uploaded by mistake.
    if not os.fspath(folder) or not path.is_dir():
        raise UsageError(f"files={str(folder)!r} is not a folder; give a checkpoint folder, or None")
    try:
        names = sorted(entry.name for entry in path.iterdir())
        wanted = [name for name in names if name.endswith(_ENDINGS) and not name.endswith(".index.json")]
        if CONFIG not in wanted:
            raise UsageError(
                f"files={str(folder)!r} has no {CONFIG}, so it is not a checkpoint folder; "
                "model.config.save_pretrained(folder) writes one"
            )
        if "adapter_config.json" in wanted:
            raise UsageError(
                f"files={str(folder)!r} is the folder of an adapter: it has adapter_config.json, which would "
                "make readers of a replay look for the adapter's weights; give the base model's folder"
            )
        found = {check_file_name(name): _read(path / name) for name in wanted if not (path / name).is_dir()}
    except OSError as exc:
        raise UsageError(f"files={str(folder)!r} cannot be read: {exc}") from exc
    _config(found)
    return found


def _read(path: Path) -> bytes:
    # Opening a pipe would wait for a writer.
    if not stat.S_ISREG(path.stat().st_mode):
        raise UsageError(f"{path} is not a regular file; remove it from the folder that files= names")
    return path.read_bytes()


def _config(files: dict[str, bytes]) -> dict[str, Any]:
    """Return a checkpoint's config; an empty one if there is none.

    Raises:
        UsageError: it is not a JSON object.
    """
    if CONFIG not in files:
        return {}
    try:
        config = json.loads(files[CONFIG])
    except ValueError as exc:
        raise UsageError(f"the {CONFIG} in files= is not JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise UsageError(f"the {CONFIG} in files= is not a JSON object, so it is no model's config")
    return config


def check_fits(
    files: dict[str, bytes], source: object, schema: Schema, base: BaseCheckpoint, untied: Sequence[str]
) -> None:
    """Refuse the config of another model than the one that is published.

    Args:
        source: what is published; where it has a `config` as Transformers' models do, that is compared.
        base: the weights in the folder of the config, if there are any.
        untied: output layers that the model would not store if they were tied.

    Raises:
        UsageError: a server that loads a replay with this config would not serve what was trained.
    """
    config = _config(files)
    _check_tensors(schema, base)
    if "quantization_config" in config and _WHOLE_VALUES.issuperset(spec.dtype for spec in schema.tensors):
        raise UsageError(
            f"the {CONFIG} in files= has a quantization_config, but none of the published tensors is "
            "quantised, so a replay could not be loaded; give a folder with the unquantised model's config"
        )
    parts = (config, config.get("text_config"))
    if any(isinstance(part, dict) and part.get("tie_word_embeddings") is False for part in parts):
        for alias, name in schema.tied.items():
            if "lm_head.weight" in {alias, name}:
                raise UsageError(
                    f"the {CONFIG} in files= says tie_word_embeddings false, but {alias!r} and {name!r} are "
                    "one tensor in this model, so a replay would lack the weights of one; give a config that "
                    "says true"
                )
    if untied and any(isinstance(part, dict) and part.get("tie_word_embeddings") is True for part in parts):
        raise UsageError(
            f"the {CONFIG} in files= says tie_word_embeddings true, but {untied[0]!r} is a tensor of its own "
            "in this model, so a server of a replay would take the embedding in its place; set "
            "model.config.tie_word_embeddings = False before, and give a config that says so"
        )
    to_dict = getattr(getattr(source, "config", None), "to_dict", None)
    if not config or to_dict is None:
        return
    trained = to_dict()
    if not isinstance(trained, dict):
        return
    for key in _SHAPE_KEYS:
        if key in config and key in trained and config[key] != trained[key]:
            raise UsageError(
                f"the {CONFIG} in files= is of another model: its {key} is {config[key]!r}, and that of the "
                f"model to publish is {trained[key]!r}; its config.save_pretrained(folder) writes its own"
            )


def _check_tensors(schema: Schema, base: BaseCheckpoint) -> None:
    """Raises UsageError where a checkpoint has other tensors than those that are published.

    Either may have more than the other, such as a head of its own. Where each lacks some that the other has,
    they are of different models, or in different layouts.
    """
    specs = schema.by_name()
    called = {name: {name} for name in specs}
    for alias, name in schema.tied.items():
        called[name].add(alias)
    theirs = base.named_as([*specs, *schema.tied])
    if not theirs:
        return
    for name, our in sorted(specs.items()):
        for their in (theirs[each] for each in sorted(called[name] & theirs.keys())):
            # Codes in FP8 are of the same shape, and of weights that the folder may have as they were.
            are_codes = {
                dtype in _WHOLE_VALUES or dtype.startswith("F8_") for dtype in (our.dtype, their.dtype)
            }
            if our.shape != their.shape or len(are_codes) > 1:
                raise UsageError(
                    f"{name!r} is published as {our.kind}, and the folder in files= has it as {their.kind}, "
                    f"so its {CONFIG} is that of another model; {_OTHER_FILES}"
                )
    more = sorted(name for name, names in called.items() if names.isdisjoint(theirs))
    fewer = sorted(theirs.keys() - set().union(*called.values()))
    more, fewer = ([name for name in names if not name.endswith(_SCALES)] for names in (more, fewer))
    if more and fewer and base.unread is None:
        raise UsageError(
            f"{len(more):,} of the published tensors are not in the folder of files=, such as {more[0]!r}, "
            f"and {len(fewer):,} of its tensors are not published, such as {fewer[0]!r}: its {CONFIG} is "
            "that of another model, or the trainer names or fuses tensors otherwise: pass the model itself, "
            f"and not its state_dict, or see patchstore.mapped; {_OTHER_FILES}"
        )
