"""The checkpoint folder that a run starts from.

Anchors hold copies of its files that are no weights: config, tokenizer, code. Its weights say in which dtype
tensors are served, and what is equal to them is not sent between ranks.
"""

import json
import mmap
import os
import stat
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from patchstore.bucket.records import Schema, TensorSpec
from patchstore.codec import tensor_file
from patchstore.codec.checkpoint import INDEX, weight_files
from patchstore.errors import DataError, UsageError
from patchstore.quantization import FORMS
from patchstore.stores.layout import ADAPTER_CONFIG, check_file_name

CONFIG = "config.json"

_ENDINGS = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
"""Of config and tokenizer files, and of code that a config refers to."""

_WHOLE_VALUES = frozenset({"F64", "F32", "F16", "BF16", "BOOL", "I64"})
"""Dtypes that quantized weights are never stored in."""

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


class _Place(NamedTuple):
    file: Path
    spec: TensorSpec
    start: int
    """Bytes from the file's beginning."""


class BaseCheckpoint:
    """A folder: its tensors, mapped one at a time, and its other files."""

    def __init__(self, folder: Any) -> None:
        """List a folder's tensors; a folder that cannot be read has none, and None is an empty one."""
        self._folder = folder
        self._places: dict[str, _Place] = {}
        self.unread: str | None = None
        """Why some of its tensors are not known, if so."""
        if folder is None:
            return
        if not isinstance(folder, str | os.PathLike):
            raise UsageError(f"files must be the path of a checkpoint folder, not {folder!r}")
        try:
            files = weight_files(Path(folder))
        except (OSError, DataError) as exc:
            self.unread = f"{INDEX} cannot be read: {exc}"
            return
        for file in files:
            try:
                self._list(file)
            except FileNotFoundError:
                self.unread = f"{file.name} is missing, which {INDEX} lists"
            except (OSError, DataError) as exc:
                self.unread = f"{file.name} cannot be read: {exc}"

    def _list(self, file: Path) -> None:
        with file.open("rb") as opened:

            def beginning(num_bytes: int) -> bytes:
                opened.seek(0)
                return opened.read(num_bytes)

            header = tensor_file.read_header(file.name, file.stat().st_size, beginning)
        for entry in header.entries:
            start = header.data_start + entry.start
            self._places[entry.spec.name] = _Place(file, entry.spec, start)

    @property
    def specs(self) -> list[TensorSpec]:
        return [place.spec for place in self._places.values()]

    def named_as(self, names: Collection[str]) -> dict[str, TensorSpec]:
        """Return what the folder has as a model names it that has one module more around it, or one less.

        Example: "wte.weight" of GPT-2's checkpoint is "transformer.wte.weight" in a model with a head.
        """
        theirs = {spec.name: spec for spec in self.specs}
        ours = frozenset(names)
        if not theirs.keys().isdisjoint(ours):
            return theirs
        for name in ours:
            prefix, _, rest = name.partition(".")
            if rest in theirs:
                return {f"{prefix}.{each}": spec for each, spec in theirs.items()}
        for each in theirs:
            prefix, _, rest = each.partition(".")
            if rest in ours:
                return {name.removeprefix(f"{prefix}."): spec for name, spec in theirs.items()}
        return theirs

    def has(self, spec: TensorSpec) -> bool:
        """Whether the folder has a tensor of this name, dtype and shape, with elements."""
        return spec.name in self._places and self._places[spec.name].spec == spec and spec.num_bytes > 0

    def read(self, spec: TensorSpec) -> torch.Tensor | None:
        """Return a tensor of this name, dtype and shape; None if the folder has none."""
        if not self.has(spec):
            return None
        place = self._places[spec.name]
        try:
            with place.file.open("rb") as opened:
                view = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            data = memoryview(view)[place.start : place.start + spec.num_bytes]
            return tensor_file.tensor_of(place.file.name, spec, data)
        except (OSError, ValueError, DataError):
            return None

    def files(self, *, of_adapter: bool = False) -> dict[str, bytes]:
        """Read the files that are no weights, by name; `of_adapter`: of a folder that PEFT may have saved."""
        folder = self._folder
        if folder is None:
            return {}
        path = Path(folder)
        # An empty text would name the working directory, whose files must not be uploaded by mistake.
        if not os.fspath(folder) or not path.is_dir():
            raise UsageError(f"files={str(folder)!r} is not a folder; give a checkpoint folder, or None")
        try:
            names = sorted(entry.name for entry in path.iterdir())
            wanted = [name for name in names if name.endswith(_ENDINGS) and not name.endswith(".index.json")]
            if CONFIG not in wanted and not of_adapter:
                raise UsageError(
                    f"files={str(folder)!r} has no {CONFIG}, so it is not a checkpoint folder; "
                    "model.config.save_pretrained(folder) writes one"
                )
            if ADAPTER_CONFIG in wanted and not of_adapter:
                raise UsageError(
                    f"files={str(folder)!r} is the folder of an adapter: it has {ADAPTER_CONFIG}, which "
                    "would make readers of a replay look for the adapter's weights; give the base model's "
                    "folder, or publish the adapter itself with adapter="
                )
            found = {
                check_file_name(name): _read(path / name) for name in wanted if not (path / name).is_dir()
            }
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
    """Return a checkpoint's config; an empty one if there is none."""
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

    If the source has a `config` as models of transformers have, that is compared. `untied` are output layers
    that the model would not store if they were tied.
    """
    config = _config(files)
    _check_tensors(schema, base)
    if "quantization_config" in config and _WHOLE_VALUES.issuperset(spec.dtype for spec in schema.tensors):
        raise UsageError(
            f"the {CONFIG} in files= has a quantization_config, but none of the published tensors is "
            "quantized, so a replay could not be loaded; give a folder with the unquantized model's config"
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
    theirs = base.named_as([*specs, *schema.tied])
    if not theirs:
        return
    called = {name: {name} for name in specs}
    for alias, name in schema.tied.items():
        called[name].add(alias)
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
