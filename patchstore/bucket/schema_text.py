"""What to tell people about a run's tensors: their dtypes, and why a model does not accept them.

vLLM's loaders list every parameter of the model when one name is unknown to them. And the most frequent cause
is visible in the run itself: it was published from a wrapper around the model.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from patchstore.bucket.records import Schema

_OUTERMOST = {"module.": "module", "base_model.model.": "merge_and_unload()"}
"""Prefixes of DistributedDataParallel and PEFT before every name -> what to publish instead of the
wrapper."""
_ANYWHERE = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Prefixes of torch.compile, FSDP and activation checkpointing before the names of each wrapped module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapped:
    """What a run's names show about the model that it was published from."""

    found: str
    advice: str
    """What to publish instead."""

    def __str__(self) -> str:
        return f"{self.found}. {self.advice[0].upper()}{self.advice[1:]}"


def of_wrapper(schema: Schema) -> Wrapped | None:
    """Return what to publish instead if the run's names are those of a wrapped model; None otherwise.

    Only the names are considered, and a model may have a module that is called `module`. So call this for
    runs that a model has refused.
    """
    names = [spec.name for spec in schema.tensors]
    found, publish = list[str](), "model"
    while prefix := next((each for each in (*_OUTERMOST, *_ANYWHERE) if _all_begin(names, each)), None):
        found.append(prefix)
        publish += "." + _OUTERMOST.get(prefix, prefix[:-1])
        names = [name.removeprefix(prefix) for name in names]
    inner = [each for each in _ANYWHERE if any(f".{each}" in f".{name}" for name in names)]
    if not found and not inner:
        return None
    prefixes = " and ".join(repr(each) for each in dict.fromkeys([*found, *inner]))
    if inner:
        publish = f"a dict of its tensors without {prefixes} in their names"
    return Wrapped(
        found=f"this run was published from a wrapped model: its names have {prefixes}",
        advice=f"publish {publish}, to another prefix, as a run keeps its names",
    )


def explain(schema: Schema, otherwise: str) -> str:
    """Return why a model refused a run: it was published from a wrapped model, or the given reason."""
    wrapped = of_wrapper(schema)
    return otherwise if wrapped is None else str(wrapped)


_BRIEF = 320
"""Characters: the longest advice of ours is within it."""


def brief(reason: str) -> str:
    """Cut a loader's message, which may list every parameter of the model, and keep it on one line."""
    line = " ".join(reason.split())
    return line if len(line) <= _BRIEF else f"{line[:_BRIEF]}... ({len(line):,} characters)"


def _all_begin(names: list[str], prefix: str) -> bool:
    return bool(names) and all(name.startswith(prefix) for name in names)


_NUM_LISTED = 8


def alike(names: Iterable[str]) -> str:
    """List names: of those that differ in numbers alone one, with * in their place, and how many there are.

    Example: "layers.*.mlp.gate.bias (58), norm.weight".
    """
    counts = Counter(re.sub(r"\d+", "*", name) if re.search(r"\d", name) else name for name in names)
    listed = [f"{name} ({count:,})" if count > 1 else name for name, count in sorted(counts.items())]
    more = f" and {len(listed) - _NUM_LISTED} more" if len(listed) > _NUM_LISTED else ""
    return ", ".join(listed[:_NUM_LISTED]) + more


def of_schema(schema: Schema) -> str:
    """Say how many tensors have the dtype of most elements, and which have another one.

    Example: "305 tensors as BF16; as F32: layers.*.mlp.gate.bias (58)".
    """
    sizes = Counter[str]()
    names: dict[str, list[str]] = {}
    for spec in schema.tensors:
        sizes[spec.dtype] += spec.num_elements
        names.setdefault(spec.dtype, []).append(spec.name)
    most, *others = sorted(names, key=lambda dtype: (-sizes[dtype], dtype))
    said = f"{len(names[most]):,} tensor{'s' if len(names[most]) > 1 else ''} as {most}"
    return "; ".join([said, *(f"as {dtype}: {alike(names[dtype])}" for dtype in others)])
