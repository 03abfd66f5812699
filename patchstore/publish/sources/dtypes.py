"""In which dtype each tensor is served: the one place that decides it.

A trainer may keep all weights in float32, of which servers hold most in bfloat16, but not all: biases of
routers and decays of recurrent layers stay in float32, in checkpoints and in vLLM. Rounded to bfloat16,
biases of 34.5 with a spread of 0.14 have three values left, and steps of 0.001 never change them.
"""

import copy
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Self

import torch

from patchstore.errors import UsageError
from patchstore.format.records import Schema, TensorSpec
from patchstore.publish.sources.names import Names
from patchstore.tensors.bits import TORCH_DTYPES

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
    def of(cls, value: Any) -> Self:
        """Read the argument.

        Raises:
            UsageError: it is no dtype in which weights can be served, and no mapping to such dtypes.
        """
        if not isinstance(value, Mapping):
            return cls(_dtype_of(value))
        if not all(isinstance(pattern, str) for pattern in value):
            raise UsageError(f"dtype must map patterns of tensors' names to dtypes, not {value!r:.200}")
        return cls(torch.bfloat16, tuple((pattern, _dtype_of(each)) for pattern, each in value.items()))

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


Counts = Mapping[str, int]
"""How many elements of weights there are of each dtype, by what `str` says of it."""


@dataclass(frozen=True, slots=True)
class Base:
    """The dtypes of the weights in the base checkpoint."""

    dtypes: Mapping[str, str]
    """By name, as safetensors names them."""
    default: str = ""
    """The one that most elements have."""

    @classmethod
    def of(cls, specs: Iterable[TensorSpec]) -> Self:
        dtypes: dict[str, str] = {}
        counts = Counter[str]()
        for spec in specs:
            if is_weight(TORCH_DTYPES[spec.dtype]):
                dtypes[spec.name] = spec.dtype
                counts[spec.dtype] += spec.num_elements
        return cls(dtypes, max(counts, key=lambda dtype: counts[dtype], default=""))


class Choice(NamedTuple):
    """In which dtype a tensor is served."""

    dtype: torch.dtype | None
    """None: in its own, whatever that is."""
    why: str = ""
    """Who says so; nobody, if that is the default or its own."""

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

    def __init__(
        self,
        asked: Asked,
        base: Base,
        counts: Counts,
        source: object,
    ) -> None:
        """Look at nothing yet.

        Args:
            counts: of the source, on all ranks.
            source: a model may say what it keeps in float32; that is asked once a tensor needs it.
        """
        self._asked, self._base, self._source = asked, base, source
        # Where two have as many elements, nothing is wider on purpose.
        sizes = {getattr(torch, name.removeprefix("torch.")).itemsize: num for name, num in counts.items()}
        self._most_bytes = max(sizes, key=lambda size: (sizes[size], size), default=8)
        self._kept: Mapping[str, torch.dtype] | None = None

    def of(self, names: Sequence[str], origin: str, own: torch.dtype) -> Choice:
        """Return in which dtype a tensor is served.

        Args:
            names: under which it is published, that it is stored under first.
            origin: what the model calls it.
            own: its dtype in the source.
        """
        default = self._asked.default
        for pattern, asked in self._asked.patterns:
            if any(fnmatchcase(name, pattern) for name in names):
                return Choice(asked, "dtype=")
        if default is None or not is_weight(own):
            return OWN
        based = next((self._base.dtypes[name] for name in names if name in self._base.dtypes), None)
        if based is not None and based != self._base.default:
            return Choice(TORCH_DTYPES[based], "files=")
        # A checkpoint in float32 has also that in float32 which is served in fewer bits.
        if based is not None and TORCH_DTYPES[based].itemsize <= default.itemsize:
            return Choice(default)
        if own.itemsize > default.itemsize and (kept := self._kept_by_model(origin)) is not None:
            return Choice(kept, "the model")
        if own.itemsize > self._most_bytes <= default.itemsize:
            return Choice(own, SOURCE)
        return Choice(default)

    def _kept_by_model(self, origin: str) -> torch.dtype | None:
        if self._kept is None:
            self._kept = kept_by_models(self._source, self._asked.default)
        if not self._kept:
            return None
        # The model may be inside of another one, under some name.
        while origin not in self._kept and "." in origin:
            origin = origin.partition(".")[2]
        return self._kept.get(origin)


def kept_by_models(source: object, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Return which tensors models of transformers have in another dtype than one in which they are loaded.

    A model is made anew without memory, as `from_pretrained(dtype=...)` makes it: some parameters have a
    dtype of their own. Others are named by `_keep_in_fp32_modules_strict`, and for float16 by
    `_keep_in_fp32_modules`.

    Returns:
        By the names of the innermost model's tensors.
    """
    found: dict[str, torch.dtype] = {}
    if not isinstance(source, torch.nn.Module) or dtype not in {torch.bfloat16, torch.float16}:
        return found
    outermost = ""
    for path, module in source.named_modules():
        is_inside = outermost and path.startswith(outermost)
        if is_inside or not any(each.__name__ == "PreTrainedModel" for each in type(module).__mro__):
            continue
        outermost = f"{path}." if path else "."
        kept, names = re.compile("|".join(_patterns(module, dtype)) or r"(?!)"), Names(module)
        for given, own in _dtypes_when_loaded(module, dtype):
            name = names.of(given)
            if is_weight(each := torch.float32 if kept.search(name) else own) and each != dtype:
                found[name] = each
        if not path:
            break
    return found


def _patterns(model: Any, dtype: torch.dtype) -> list[str]:
    """Return what a model says of the names that it keeps in float32, as regular expressions."""
    said = list(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        said += getattr(model, "_keep_in_fp32_modules", None) or ()
    return [f"(?:{each.replace('*', '.*')})" for each in said]


def _dtypes_when_loaded(model: Any, dtype: torch.dtype) -> list[tuple[str, torch.dtype]]:
    """Return the names of a model's tensors, and which dtypes they have before weights are loaded in one."""
    # FSDP2 makes a class of its own of a model's.
    kind = next(each for each in type(model).__mro__ if not each.__name__.startswith("FSDP"))
    try:
        with _default_dtype(dtype), torch.random.fork_rng(devices=[]), torch.device("meta"):
            state = kind(copy.deepcopy(model.config)).state_dict()
        return [(name, tensor.dtype) for name, tensor in state.items() if isinstance(tensor, torch.Tensor)]
    except Exception as exc:  # noqa: BLE001 -- code of any model; the names that it keeps are known without
        logger.debug("%s cannot be made anew: %s", kind.__name__, exc)
        return [(name, dtype) for name in model.state_dict()]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
