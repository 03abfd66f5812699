"""A source whose linear layers are published in FP8: weights are rounded in each pass.

Ranks may have parts of one block, which shares a scale. So they compare the largest magnitudes of these.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from patchstore.bucket.records import TensorSpec
from patchstore.errors import SchemaMismatch, UsageError
from patchstore.kernels import are_usable
from patchstore.publish.snapshot import InPlace, Measure, Rounded, Unrounded
from patchstore.publish.sources.pieces import Given, PieceOf
from patchstore.quantization import Form, Quantization
from patchstore.quantization.forms import E4M3, Matrix
from patchstore.tensors.bits import TORCH_DTYPES
from patchstore.tensors.parts import name_of

logger = logging.getLogger(__name__)

Values = npt.NDArray[np.float32]


class Blocks(NamedTuple):
    """A box of blocks, counted in the whole tensor."""

    row: int
    rows: int
    column: int
    columns: int

    @property
    def num(self) -> int:
        return self.rows * self.columns

    def within(self, outer: "Blocks") -> tuple[slice, slice]:
        row, column = self.row - outer.row, self.column - outer.column
        return slice(row, row + self.rows), slice(column, column + self.columns)


@dataclass(frozen=True, slots=True)
class Region:
    """The blocks of a part of a matrix."""

    touched: Blocks
    """Those of which it has an element."""
    owned: Blocks
    """Those of which it has the first element: their scales are published with it."""
    cut: tuple[Blocks, ...]
    """Those of which it has some elements and not all, or lines of blocks that have such ones."""

    @classmethod
    def of(
        cls, shape: tuple[int, ...], start: Sequence[int], size: Sequence[int], block: tuple[int, int]
    ) -> Self:
        """Return the blocks, of rows and columns each, of a part of a matrix of this shape."""
        ends = [first + num for first, num in zip(start, size, strict=True)]
        touched, owned = list[int](), list[int]()
        is_cut = []
        for first, end, side, step in zip(start, ends, shape, block, strict=True):
            below = -(-end // step)
            touched += [first // step, below - first // step]
            owned += [-(-first // step), below - -(-first // step)]
            is_cut.append((bool(first % step), bool(end % step) and end != side))
        whole = Blocks(*touched)
        if any(is_cut[1]):
            return cls(whole, Blocks(*owned), (whole,))
        ends_of = whole.row, whole.row + whole.rows - 1
        lines = {row for row, is_so in zip(ends_of, is_cut[0], strict=True) if is_so}
        cut = tuple(Blocks(row, 1, whole.column, whole.columns) for row in sorted(lines))
        return cls(whole, Blocks(*owned), cut)


Cuts = Sequence[tuple[str, Blocks]]
"""All blocks of which a process has a part, with the tensors' names, in the order in which it tells their
maxima."""


def joined(every: Sequence[Cuts], values: Sequence[Values]) -> list[Values]:
    """Return the maxima over all processes of each one's blocks, float32 [num_blocks]. A NaN is a maximum."""
    shapes: dict[str, tuple[int, int]] = {}
    for cuts in every:
        for name, box in cuts:
            rows, columns = shapes.get(name, (0, 0))
            shapes[name] = max(rows, box.row + box.rows), max(columns, box.column + box.columns)
    most = {name: np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}

    def places(cuts: Cuts) -> list[tuple[Values, Blocks]]:
        return [
            (most[name][box.row : box.row + box.rows, box.column : box.column + box.columns], box)
            for name, box in cuts
        ]

    for cuts, its in zip(every, values, strict=True):
        first = 0
        for place, box in places(cuts):
            np.maximum(place, its[first : first + box.num].reshape(place.shape), out=place)
            first += box.num
    nothing = np.zeros(0, dtype=np.float32)
    return [np.concatenate([nothing, *(place.reshape(-1) for place, _ in places(cuts))]) for cuts in every]


Exchange = Callable[[Cuts, Callable[[], Values]], Values]
"""Returns the maxima over all processes, given where this one's blocks are, and what returns its own."""


def alone(cuts: Cuts, local: Callable[[], Values]) -> Values:
    """Return the maxima of blocks of which this process has all parts."""
    (found,) = joined([cuts], [local()])
    return found


Items = Iterable[tuple[str, torch.Tensor]]
"""Keys and tensors of a source; or of what is published."""


class _Entry(NamedTuple):
    """How a tensor of the source is published."""

    served: torch.dtype
    """In which it is published, or rounded from."""
    is_rounded: bool = False
    scales: str | None = None
    """The key of its scales; None where it has none, as a part whose blocks all begin in another one."""
    above: int = 0
    """Rows of its first blocks that are not part of it."""
    left: int = 0
    """The same of columns."""
    owned: tuple[slice, slice] | None = None
    """Which scales, of all blocks that a part touches, are published with it; None for a whole tensor."""
    cut: tuple[tuple[slice, slice], ...] = ()
    """Which of these blocks have elements in other parts."""


class Rounding:
    """What of a source's tensors is published as codes and scales, and how these are made in each pass.

    What is rounded are the weights in the dtype in which they would be served. So a version in FP8 is a
    function of the version that a publisher without quantization makes of the same weights.
    """

    def __init__(
        self,
        quantization: Quantization,
        source: Given,
        specs: Mapping[str, TensorSpec],
        model: object,
        *,
        is_stream: bool,
    ) -> None:
        """Say what is made of each tensor; nothing is read.

        `specs`: by key, what would be served without quantization. A pass of a stream has one tensor after
        the other.
        """
        _check_layers(model)
        self.form = form = quantization.form
        self.exchange: Exchange = alone
        """Compares maxima with those of other ranks, once in each pass."""
        wholes = {name: replace(specs[key], name=name, shape=shape) for key, (name, shape) in source.wholes()}
        is_rounded = {name: quantization.quantizes(spec) for name, spec in wholes.items()}
        _check_roundable(quantization, wholes, is_rounded, source.tied, has_parts=bool(source.places))
        self.dtypes: set[tuple[torch.dtype, torch.dtype]] = set()
        """Of what is rounded: as it is given, and as it would be served."""
        self._entries: dict[str, _Entry] = {}
        """By key of the source."""
        self.given = Given({}, dict(source.places), _tied(form, source.tied, is_rounded), {})
        """Codes, scales and other tensors, without their elements. Codes have the key of their weights."""
        cuts = list[tuple[str, Blocks]]()
        for key, (name, shape) in sorted(source.wholes()):
            tensor, served = source.tensors[key], TORCH_DTYPES[specs[key].dtype]
            self._add(source, key, tensor.shape, E4M3 if is_rounded[name] else served)
            if not is_rounded[name]:
                self._entries[key] = _Entry(served)
                continue
            self.dtypes.add((tensor.dtype, served))
            if key in source.places:
                region = self._add_part(source, key, served)
                if region.cut and is_stream:
                    raise SchemaMismatch(
                        f"a part of {name!r} begins or ends within a block that shares a scale: "
                        f"{tuple(tensor.shape)} from {source.places[key].start} on, of {shape}; a source "
                        "that is a function is read once, so it must yield whole blocks; pass a mapping of "
                        "its tensors"
                    )
                cuts += [(name, box) for box in region.cut]
            else:
                self._entries[key] = _Entry(served, True, form.scale_name(name))
                self._add(source, key, form.scale_shape(shape), torch.float32, form.scale_name(name))
        self._cuts = cuts
        self.only({key: key for key in self.given.tensors})

    def _add_part(self, source: Given, key: str, served: torch.dtype) -> Region:
        """Add codes and scales of a part of a matrix, and return its blocks."""
        form, (name, shape, start) = self.form, source.places[key]
        region = Region.of(shape, start, tuple(source.tensors[key].shape), form.block_of(shape))
        own, scales = region.owned, None
        if min(own.rows, own.columns) > 0:
            scales = f"{form.scale_name(name)}\t{key.partition(chr(9))[2]}"
            self._add(source, key, (own.rows, own.columns), torch.float32, scales)
            first = own.row, own.column
            self.given.places[scales] = PieceOf(form.scale_name(name), form.scale_shape(shape), first)
        above, left = (0, 0) if form.block is None else (start[dim] % form.block[dim] for dim in range(2))
        self._entries[key] = _Entry(
            *(served, True, scales, above, left),
            owned=own.within(region.touched),
            cut=tuple(box.within(region.touched) for box in region.cut),
        )
        return region

    def _add(
        self, source: Given, key: str, shape: Sequence[int], dtype: torch.dtype, own: str | None = None
    ) -> None:
        """Add what is published, under a key of its own or that of a source's tensor."""
        self.given.tensors[own or key] = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self.given.devices[own or key] = source.devices.get(key, source.tensors[key].device)

    def only(self, names: Mapping[str, str]) -> None:
        """Leave out from now on all but these, by key; `names` are what they are published as."""
        self._names = names
        # In the order of a snapshot, so that neighbours are compared together.
        self._wanted = {
            key: each
            for key, each in sorted(self._entries.items())
            if key in names or each.scales in names or each.cut
        }
        self._plain = [(key, names[key]) for key, each in self._wanted.items() if not each.is_rounded]
        """What is published as it is: its key in the source, and its own."""
        self._weights = {key: each for key, each in self._wanted.items() if each.is_rounded}
        self._cut_boxes = [(i, box) for i, each in enumerate(self._weights.values()) for box in each.cut]
        """Of which matrices blocks are cut, and which, in the order of `_cuts`."""

    def codes(self, read: Callable[[], Items]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield codes, scales and other tensors by their keys, in a pass; a tensor is not kept."""
        items: Items = ()
        maxima: dict[str, torch.Tensor] = {}

        def local() -> list[torch.Tensor]:
            nonlocal items
            items = read()
            if not self._cuts:
                return []
            items = list(items)
            maxima.update((key, self._maxima(key, each)) for key, each in items if self._entries[key].cut)
            return [maxima[key][box] for key in maxima for box in self._entries[key].cut]

        self._share(local)
        finite: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
        for key, tensor in items:
            entry = self._wanted.get(key)
            if entry is None or (key not in self._names and entry.scales not in self._names):
                continue
            if not entry.is_rounded:
                yield key, tensor.detach()
                continue
            weights = tensor.detach().to(entry.served)
            codes, scales = self._rounded(weights, entry, maxima.get(key))
            finite.setdefault(weights.device, []).append((key, scales.isfinite().all()))
            if key in self._names and codes.numel():
                yield key, codes
            if entry.scales is not None and entry.scales in self._names:
                yield entry.scales, scales
        for flags in finite.values():
            # One wait for the device, and not one for each tensor.
            found = torch.stack([flag for _, flag in flags])
            if not bool(found.all()):
                raise self._not_finite(flags[int((~found).nonzero()[0])][0])

    def matrices(self, read: Callable[[], Given], measure: Measure) -> None:
        """Begin a pass in which weights are not rounded here, instead of `codes`; see `Roundable.read`."""
        maxima = torch.zeros(0, device="cpu")
        view: Callable[[int], torch.Tensor]

        def local() -> list[torch.Tensor]:
            nonlocal maxima, view
            given = read()
            plain = InPlace({own: given.tensors[key].detach() for key, own in self._plain}, given.where)
            maxima, view = measure(Unrounded(plain, partial(self._listed, given), given))
            return [view(number)[box] for number, box in self._cut_boxes]

        self._share(local)
        if not bool(maxima.isfinite().all()):
            keys = enumerate(self._weights)
            raise self._not_finite(next(key for i, key in keys if not bool(view(i).isfinite().all())))

    def _listed(self, given: Given) -> list[Rounded]:
        return [
            Rounded(
                Matrix(given.tensors[key].detach(), entry.served, entry.above, entry.left),
                self._names.get(key),
                None if entry.scales is None else self._names.get(entry.scales),
                entry.owned,
            )
            for key, entry in self._weights.items()
        ]

    def _maxima(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the maxima of all blocks of a part, as far as this process has them."""
        entry = self._entries[key]
        weights = tensor.detach().to(entry.served)
        return self.form.maxima(self.form.part(weights, (entry.above, entry.left)))

    def _share(self, local: Callable[[], list[torch.Tensor]]) -> None:
        """Raise maxima of cut blocks, of which `local` returns views in the order of `Cuts`, to those of all
        parts.

        The exchange calls it, so that other ranks hear of what it raises.
        """
        places: list[torch.Tensor] = []

        def values() -> Values:
            places.extend(local())
            flat = [place.reshape(-1) for place in places]
            return torch.cat(flat).cpu().numpy() if flat else np.zeros(0, dtype=np.float32)

        shared = torch.from_numpy(self.exchange(self._cuts, values).copy())
        first = 0
        for place in places:
            place.copy_(shared[first : first + place.numel()].view(place.shape))
            first += place.numel()

    def _rounded(
        self, weights: torch.Tensor, entry: _Entry, maxima: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes of a tensor, or of a part, and the scales that are published with it."""
        if maxima is None:
            return quantize(self.form, weights)
        codes, scales = self.form.quantize(self.form.part(weights, (entry.above, entry.left)), maxima)
        assert entry.owned is not None
        return codes[entry.above :, entry.left :].contiguous(), scales[entry.owned].contiguous()

    def _not_finite(self, key: str) -> UsageError:
        return UsageError(
            f"{name_of(key)!r} has numbers that are infinite or NaN, or are beyond the range of "
            f"the dtype in which it would be served: these have no scale in {self.form.name}; nothing was "
            "published, and once they are finite the next call goes on"
        )


def quantize(form: Form, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a matrix where it is, as `Form.quantize` does."""
    if form.block is not None and are_usable(weights.device):
        from patchstore.kernels import quantize as kernel

        return kernel.quantize(weights, form.block)
    return form.quantize(weights)


def _tied(form: Form, tied: Mapping[str, str], is_rounded: Mapping[str, bool]) -> dict[str, str]:
    found = dict(tied)
    for alias, name in tied.items():
        if is_rounded.get(name):
            if not alias.endswith("weight"):
                raise SchemaMismatch(
                    f"{alias!r} and {name!r} are one tensor, and only one of the names can be of weights "
                    "in FP8; publish without quantization="
                )
            found[form.scale_name(alias)] = form.scale_name(name)
    return found


def _check_layers(source: object) -> None:
    for name, module in source.named_modules() if isinstance(source, torch.nn.Module) else ():
        if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
            raise SchemaMismatch(
                f"{name!r} is a Conv1D, which has its weights as [inputs, outputs], and checkpoints in "
                "FP8 have them as [outputs, inputs]; publish without quantization="
            )


def _check_roundable(
    quantization: Quantization,
    specs: Mapping[str, TensorSpec],
    is_rounded: Mapping[str, bool],
    tied: Collection[str],
    *,
    has_parts: bool,
) -> None:
    """Refuse tensors of which no codes can be made; warn of matrices that few programs would read."""
    form = quantization.form
    for name, spec in specs.items():
        if spec.dtype.startswith("F8_") and name.endswith("weight"):
            raise SchemaMismatch(
                f"{name!r} is in FP8 already, so quantization={form.name!r} cannot round it; publish such "
                "weights as they are, with dtype=None and without quantization="
            )
    rounded = sorted(name for name, each in is_rounded.items() if each)
    if specs and not rounded and not has_parts:
        raise SchemaMismatch(
            f"quantization={form.name!r} finds no weight of a linear layer among {len(specs)} tensors, such "
            f"as {next(iter(specs))!r}; their names must be those of the checkpoint, and end in '.weight'; "
            "see patchstore.mapped"
        )
    for name in rounded:
        if (scales := form.scale_name(name)) in specs or scales in tied:
            raise SchemaMismatch(
                f"the source has a tensor {scales!r}, the name that quantization={form.name!r} gives the "
                f"scales of {name!r}; leave that tensor out, or publish without quantization="
            )
    if form.block is None or quantization.names is not None:
        # A base checkpoint that has smaller blocks at edges is one that is served.
        return
    rows, columns = form.block
    uneven = [name for name in rounded if specs[name].shape[0] % rows or specs[name].shape[1] % columns]
    if uneven:
        logger.warning(
            "blocks of %d x %d do not divide %r, %s (in all, matrices of such a size: %d). transformers "
            "cannot read such a checkpoint. vLLM can, but not where another matrix follows in the same fused "
            "layer. quantization='fp8-channel' has no blocks.",
            *(rows, columns, uneven[0], specs[uneven[0]].kind, len(uneven)),
        )
