"""In which dtype each tensor is served: the one place that decides it.

A trainer may keep all weights in float32, of which servers hold most in bfloat16, but not all: biases of
routers and decays of recurrent layers stay in float32, in checkpoints and in vLLM. Rounded to bfloat16,
biases of 34.5 with a spread of 0.14 have three values left, and steps of 0.001 never change them. And scales
of weights that the trainer has quantized already would be other scales.
"""

import copy
import logging
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Self

import torch

from patchstore.bucket.records import Schema
from patchstore.errors import UsageError
from patchstore.publish.base_checkpoint import BaseCheckpoint
from patchstore.publish.sources.names import models_of_transformers, without_engine
from patchstore.publish.sources.pieces import holds_codes, is_scale
from patchstore.tensors.bits import TORCH_DTYPES
from patchstore.tensors.parts import name_of

logger = logging.getLogger(__name__)

DtypeLike = torch.dtype | str | None
"""A dtype or its name; None for a tensor's own."""

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""As configs of trainers spell them."""


def is_weight(dtype: torch.dtype) -> bool:
    """Whether tensors of a dtype may be served in another: numbers of 16 bits or more, and no codes."""
    return dtype.is_floating_point and dtype.itemsize >= 2


@dataclass(frozen=True, slots=True)
class Asked:
    """What `Publisher` takes as `dtype`."""

    default: torch.dtype | None
    """None: every tensor in its own."""
    patterns: tuple[tuple[str, torch.dtype | None], ...] = ()
    """Patterns of names with dtypes; the first that matches counts, before all else that says a dtype."""

    @classmethod
    def of(cls, value: Any, usual: torch.dtype | None = torch.bfloat16) -> Self:
        """Read the argument of `Publisher`; `usual` is what "auto" stands for. Raises UsageError."""
        if isinstance(value, str) and value == "auto":
            return cls(usual)
        if not isinstance(value, Mapping):
            return cls(_dtype_of(value))
        if not all(isinstance(pattern, str) for pattern in value):
            raise UsageError(f"dtype must map patterns of tensors' names to dtypes, not {value!r:.200}")
        return cls(usual, tuple((pattern, _dtype_of(each)) for pattern, each in value.items()))

    @property
    def usual(self) -> torch.dtype | None:
        """The dtype of most tensors, for a config; None if that is not known."""
        return dict(self.patterns).get("*", self.default)

    def __str__(self) -> str:
        return ", ".join([*(f"{pattern}: {dtype}" for pattern, dtype in self.patterns), str(self.default)])

    def check_used(self, schema: Schema) -> None:
        """Raises UsageError where a pattern matches no tensor of a run: it may be misspelt."""
        names = [*schema.by_name(), *schema.tied]
        for pattern, _ in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UsageError(
                    f"dtype has the pattern {pattern!r}, which matches none of the {len(names):,} names, "
                    f"such as {names[0]!r}; in a pattern * stands for any characters"
                )


def _dtype_of(value: Any) -> torch.dtype | None:
    if value is None:
        return None
    found = value
    if isinstance(value, str):
        name = value.removeprefix("torch.")
        found = getattr(torch, _SHORT.get(name, name), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageError(
            'dtype must be a floating-point dtype such as torch.bfloat16 or "bfloat16", a mapping of '
            "patterns of names to such dtypes, or None to publish every tensor in its own, not "
            f"{value!r:.200}"
        )
    if not is_weight(found):
        raise UsageError(
            f"dtype={value!r} has too few bits for weights without scales: numbers beyond its range would be "
            "cut off; quantization= publishes weights in FP8, with scales"
        )
    return found


class Held(NamedTuple):
    """What a process has of a source, as far as that decides dtypes."""

    weights: Mapping[str, tuple[str, int]]
    """By name: the dtype, as `str` says it, and the elements of the whole tensor. No integers, no codes."""
    tied: Mapping[str, str]
    """Further names of tensors -> those that they are under."""


@dataclass(frozen=True, slots=True)
class Known:
    """What decides dtypes beside the user and the model, the same in all processes that publish together."""

    base: Mapping[str, str]
    """Dtypes of the base checkpoint's weights, as safetensors names them, by the names that are published."""
    base_default: str
    """The dtype that most elements of the base checkpoint have."""
    most_bytes: int
    """Bytes of an element, of those of which the source has most."""
    aliases: Mapping[str, Sequence[str]]
    """Further names of tensors."""

    @classmethod
    def of(cls, base: BaseCheckpoint, held: Sequence[Held]) -> Self:
        """Join what is known; a tensor of which several processes have something counts once."""
        if base.unread is not None:
            logger.warning(
                "the weights in files= say in which dtype tensors are served, as far as they can be read: %s",
                base.unread,
            )
        weights = {name: each for its in held for name, each in its.weights.items()}
        sizes, counts = Counter[int](), Counter[str]()
        for dtype, num in weights.values():
            sizes[getattr(torch, dtype.removeprefix("torch.")).itemsize] += num
        aliases: dict[str, list[str]] = {}
        for alias, name in sorted({each for its in held for each in its.tied.items()}):
            aliases.setdefault(name, []).append(alias)
        dtypes = {}
        for name, spec in base.named_as([*weights, *(each for its in held for each in its.tied)]).items():
            if is_weight(TORCH_DTYPES[spec.dtype]):
                dtypes[name] = spec.dtype
                counts[spec.dtype] += spec.num_elements
        # Where two have as many elements, nothing is wider on purpose.
        most_bytes = max(sizes, key=lambda size: (sizes[size], size), default=8)
        return cls(dtypes, max(counts, key=lambda each: counts[each], default=""), most_bytes, aliases)


class Choice(NamedTuple):
    """In which dtype a tensor is served."""

    dtype: torch.dtype | None
    """None: in its own, whatever that is."""
    why: str = ""
    """Who says so; empty if that is the default or its own."""

    def of(self, own: torch.dtype) -> torch.dtype:
        """Return the dtype in which a tensor of some dtype is served: what is no weight is not converted."""
        return self.dtype if self.dtype is not None and is_weight(own) else own


OWN = Choice(None)
SOURCE = "the source"
"""Who says it where a source has some tensors in more bits than most."""


class Served:
    """What says in which dtypes tensors are served.

    In this order: a pattern of the user; the base checkpoint, which has some weights in another dtype than
    most; the model, which keeps some in float32; the source, if most of it is as narrow as what is served,
    and some is wider. All else is served in the user's dtype.
    """

    def __init__(self, asked: Asked, known: Known, source: object) -> None:
        self._asked, self._known, self._source = asked, known, source
        self._kept: Kept | None = None

    def of(self, name: str, origin: str, own: torch.dtype) -> Choice:
        """Return in which dtype a tensor is served, which the model calls `origin`, and has as `own`."""
        default, base = self._asked.default, self._known.base
        names = [name, *self._known.aliases.get(name, ())]
        for pattern, asked in self._asked.patterns:
            if any(fnmatchcase(each, pattern) for each in names):
                return Choice(asked, "dtype=")
        if default is None or not is_weight(own):
            return OWN
        based = next((base[each] for each in names if each in base), None)
        if based is not None and based != self._known.base_default:
            return Choice(TORCH_DTYPES[based], "files=")
        # A checkpoint in float32 has also that in float32 which is served in fewer bits.
        if based is not None and TORCH_DTYPES[based].itemsize <= default.itemsize:
            return Choice(default)
        if own.itemsize > default.itemsize and (kept := self._kept_by_model(origin)) is not None:
            return Choice(kept, "the model")
        if own.itemsize > self._known.most_bytes <= default.itemsize:
            return Choice(own, SOURCE)
        return Choice(default)

    def _kept_by_model(self, origin: str) -> torch.dtype | None:
        if self._kept is None:
            self._kept = Kept(self._source, self._asked.default)
        return self._kept.of(origin)


class Kept:
    """Which tensors models of transformers have in another dtype than one of 16 bits that they are loaded in.

    A model is made anew without memory, as `from_pretrained(dtype=...)` makes it: some parameters have a
    dtype of their own. Others are named by `_keep_in_fp32_modules_strict`, and for float16 by
    `_keep_in_fp32_modules`.
    """

    def __init__(self, source: object, dtype: torch.dtype | None) -> None:
        self._made: dict[str, torch.dtype] = {}
        """By the names of the source's tensors."""
        self._named: list[tuple[str, re.Pattern[str]]] = []
        """Beginnings of names, and what models say of the rest."""
        if not isinstance(source, torch.nn.Module) or dtype not in {torch.bfloat16, torch.float16}:
            return
        made: list[str] = []
        for path, start, model in models_of_transformers(without_engine(source)):
            if said := _patterns(model, dtype):
                self._named.append((start, re.compile("|".join(said))))
            if not path.startswith(tuple(made)):
                found = _dtypes_when_loaded(model, dtype)
                if found is not None:
                    made.append(f"{path}." if path else "")
                    self._made |= {start + n: each for n, each in found.items() if each != dtype}

    def of(self, name: str) -> torch.dtype | None:
        """Return the dtype that a model keeps a tensor in; None if that is the one of the others."""
        for start, said in self._named:
            if name.startswith(start) and said.search(name.removeprefix(start)):
                return torch.float32
        return self._made.get(name)


def _patterns(model: Any, dtype: torch.dtype) -> list[str]:
    """Return what a model says of the names that it keeps in float32, as regular expressions."""
    said = list(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        said += getattr(model, "_keep_in_fp32_modules", None) or ()
    return [f"(?:{each.replace('*', '.*')})" for each in said]


def _dtypes_when_loaded(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype] | None:
    """Return the dtypes of a model's weights before they are loaded; None if it cannot be made anew."""
    # FSDP2 makes a class of its own of a model's.
    kind = next(each for each in type(model).__mro__ if not each.__name__.startswith("FSDP"))
    try:
        with _default_dtype(dtype), torch.random.fork_rng(devices=[]), torch.device("meta"):
            state = kind(copy.deepcopy(model.config)).state_dict()
        return {n: each.dtype for n, each in state.items() if is_weight(getattr(each, "dtype", torch.bool))}
    except Exception as exc:  # noqa: BLE001 -- code of any model; the names that it keeps are known without
        logger.warning(
            "%s cannot be made anew (%s), so it is not known which parameters it makes in float32; files= "
            "with a checkpoint, or dtype= by name, says so",
            *(kind.__name__, exc),
        )
        return None


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def check_scales(tensors: Mapping[str, torch.Tensor], served: Mapping[str, torch.dtype]) -> None:
    """Refuse to convert what belongs to quantized weights: scales, offsets and tables of any name.

    They lie beside the codes of a module and have fewer elements, as `layer.SCB`. So a counter beside a gain
    makes no codes of it. Or they lie below them, as `layer.weight.absmax`, where plain weights have nothing;
    then the codes may have any dtype.
    """
    names = {name_of(key) for key in tensors}
    scaled = {_module(name) for name in names if is_scale(name.rpartition(".")[2])}
    codes = {module: (module, math.inf) for module in map(_module, names) if module and module in names}
    for key, tensor in tensors.items():
        name = name_of(key)
        module = _module(name)
        # Positions and counts are integers of 32 bits too; codes have scales beside them.
        is_coded = holds_codes(tensor) and (tensor.dtype.itemsize == 1 or module in scaled)
        if module and is_coded and codes.get(module, ("", 0))[1] < tensor.numel():
            codes[module] = name, tensor.numel()
    for key, tensor in tensors.items() if codes else ():
        name = name_of(key)
        found, size = codes.get(name) or codes.get(_module(name)) or ("", 0)
        is_converted = tensor.dtype != served[key]
        if is_converted and tensor.numel() < size:
            role = "is a scale of" if is_scale(name.rpartition(".")[2]) else "belongs to"
            raise UsageError(
                f"{name!r} {role} the quantized weights {found!r}, and would be rounded from {tensor.dtype} "
                f"to {served[key]}; give dtype=None, so that each tensor is published in its own dtype, or "
                "publish dequantized tensors by name"
            )


def _module(name: str) -> str:
    return name.rpartition(".")[0]
