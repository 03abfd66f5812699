"""A source whose linear layers are published in FP8: each tensor is rounded when it is read."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from patchstore.errors import SchemaMismatch, UsageError
from patchstore.format.records import TensorSpec
from patchstore.kernels import are_usable
from patchstore.publish.snapshot.rounded import Given as Unrounded
from patchstore.publish.snapshot.rounded import Measure, Rounded
from patchstore.publish.sources.cuts import Cuts, Exchange, Region, Values, alone
from patchstore.publish.sources.dtypes import OWN, Choice
from patchstore.publish.sources.roundable import check_layers, check_roundable
from patchstore.publish.sources.weights import Given, Place, Weights, changed
from patchstore.quantization import Form, Quantization
from patchstore.quantization.forms import E4M3
from patchstore.quantization.matrix import Matrix
from patchstore.tensors.bits import TORCH_DTYPES, spec_of


class _Rounded(NamedTuple):
    """A tensor of the source that is published as codes and scales."""

    codes: str
    """Its key, and that of the codes."""
    scales: str
    """Without meaning where the part has no scale of its own."""
    shape: tuple[int, ...]
    """Of the weights that this process has."""
    start: tuple[int, ...] = (0, 0)
    region: Region | None = None
    """The blocks of a part; None for a whole tensor."""


class _Wanted(NamedTuple):
    """What is to be made of a tensor of the source in each pass; the same for all of them."""

    served: torch.dtype
    """In which it is published, or rounded from."""
    rounded: Rounded | None
    """How it is published, but for its weights; None for a tensor that is published as it is."""
    region: Region | None = None


class Quantized:
    """The tensors of a source as codes and scales; otherwise as `Weights`, whose place it takes.

    What is rounded are the weights in the dtype in which they would be served. So a version in FP8 is a
    function of the version that a publisher without quantization makes of the same weights.
    """

    is_stream = True
    """Codes exist one tensor after the other."""

    def __init__(self, weights: Weights, quantization: Quantization, choices: Mapping[str, Choice]) -> None:
        """Look at a source; nothing is read.

        Args:
            choices: by key of the source, in which dtype a tensor would be served without quantization.
        """
        self._weights, self._quantization, self._choices = weights, quantization, choices
        self.given = weights.given
        self.dtypes: set[tuple[torch.dtype, torch.dtype]] = set()
        """Of what is rounded: as it is given, and as it would be served."""
        self._rounded: dict[str, _Rounded | None] = {}
        """By key of the source, as they were at first; None of a tensor that is published as it is."""
        self._served: dict[str, TensorSpec] = {}
        """By key of the source, what would be served without quantization, as it was at first."""
        self._tied: dict[str, str] = {}
        self._published: frozenset[str] = frozenset()
        """Keys of codes, scales and other tensors."""
        self._wanted: frozenset[str] | None = None
        self._plan: dict[str, _Wanted] | None = None
        """By key of the source, all that is to be published; None until that is asked for."""
        self._cuts = Cuts(())
        self._exchange: Exchange = alone

    @property
    def form(self) -> Form:
        return self._quantization.form

    @property
    def has_matrices(self) -> bool:
        """Whether `matrices` can take the place of `stream`."""
        return not self._weights.is_stream

    @property
    def ranks(self) -> set[int]:
        return self._weights.ranks

    def look_for_ranks(self) -> None:
        """See `Weights.look_for_ranks`."""
        self._weights.look_for_ranks()

    def forget(self) -> None:
        """See `Weights.forget`."""
        self._weights.forget()

    def share(self, exchange: Exchange) -> None:
        """Have maxima compared with those of other ranks, in each pass from now on."""
        self._exchange = exchange

    def only(self, keys: Collection[str]) -> None:
        """Leave out all but these keys of codes, scales and other tensors from now on."""
        self._wanted, self._plan = frozenset(keys), None

    def read(self) -> Given:
        """Return what codes, scales and other tensors are now; see `round`."""
        return self.round(self._weights.read())

    def round(self, inner: Given) -> Given:
        """Return what codes, scales and other tensors are made of a source's, without their elements.

        Raises:
            SchemaMismatch: as `Weights.read`, `check_layers` and `check_roundable`; or a tensor is cut within
                blocks.
        """
        check_layers(self._weights.given)
        form, of_name = self.form, self._of_name(inner)
        tensors, places, devices = dict[str, torch.Tensor](), dict[str, Place](), dict[str, torch.device]()
        for key, tensor in inner.tensors.items():
            place = inner.places.get(key)
            dtype = self._served_dtype(key, tensor)
            name, shape = (key, tuple(tensor.shape)) if place is None else (place.name, place.shape)
            device = inner.devices.get(key, tensor.device)
            self._rounded[key] = None
            if place is not None:
                places[key] = place
            if not of_name[name]:
                tensors[key] = torch.empty(tensor.shape, dtype=dtype, device="meta")
                devices[key] = device
                continue
            scales = form.scale_name(name)
            size: tuple[int, ...] = form.scale_shape(tuple(tensor.shape))
            rounded = _Rounded(key, scales, tuple(tensor.shape))
            self.dtypes.add((tensor.dtype, dtype))
            if place is not None:
                region = Region.of(shape, place.start, tuple(tensor.shape), form.block_of(shape))
                scales = f"{scales}\t{key.partition(chr(9))[2]}"
                rounded = rounded._replace(scales=scales, start=place.start, region=region)
                size = region.owned.rows, region.owned.columns
                if min(size) > 0:
                    first = region.owned.row, region.owned.column
                    places[scales] = Place(form.scale_name(name), form.scale_shape(shape), first)
                if region.cut and self._weights.is_stream:
                    raise SchemaMismatch(
                        f"a part of {name!r} begins or ends within a block that shares a scale: "
                        f"{tuple(tensor.shape)} from {place.start} on, of {shape}; a source that is a "
                        "function is read once, so it must yield whole blocks; pass a mapping of its tensors"
                    )
            self._rounded[key] = rounded
            tensors[key] = torch.empty(tensor.shape, dtype=E4M3, device="meta")
            devices[key] = device
            if min(size) > 0:
                tensors[scales] = torch.empty(size, dtype=torch.float32, device="meta")
                devices[scales] = device
        self._tied = dict(inner.tied)
        self._cuts = Cuts(
            tuple(
                (key.partition("\t")[0], box)
                for key, rounded in sorted(self._rounded.items())
                if rounded is not None and rounded.region is not None
                for box in rounded.region.cut
            )
        )
        self._published, self._plan = frozenset(tensors), None
        return Given(tensors, places, self._all_tied(inner.tied, of_name), devices)

    def _of_name(self, inner: Given) -> dict[str, bool]:
        """Return which tensors are stored in FP8, by name. Raises as `read`."""
        specs = dict[str, TensorSpec]()
        for key, tensor in inner.tensors.items():
            self._served[key] = local = self._spec(key, tensor)
            place = inner.places.get(key)
            specs[local.name] = local if place is None else replace(local, shape=place.shape)
        found = {name: self._quantization.quantizes(spec) for name, spec in specs.items()}
        check_roundable(self._quantization, specs, found, inner.tied, has_parts=bool(inner.places))
        return found

    def _all_tied(self, tied: dict[str, str], is_rounded: dict[str, bool]) -> dict[str, str]:
        """Return further names of codes and scales."""
        found = dict(tied)
        form = self.form
        for alias, name in tied.items():
            if is_rounded.get(name):
                if not alias.endswith("weight"):
                    raise SchemaMismatch(
                        f"{alias!r} and {name!r} are one tensor, and only one of the names can be of weights "
                        "in FP8; publish without quantization="
                    )
                found[form.scale_name(alias)] = form.scale_name(name)
        return found

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield keys and tensors; a tensor is not kept.

        Raises:
            SchemaMismatch: as `Weights.stream`.
            UsageError: at the end, where a weight is not finite.
        """
        finite: dict[torch.device, list[torch.Tensor]] = {}
        names: dict[torch.device, list[str]] = {}
        shared, items = self._shared()
        missing = dict.fromkeys(self._served)
        for key, tensor in items:
            self._check(key, tensor)
            del missing[key]
            rounded = self._rounded[key]
            if rounded is None:
                # The snapshot converts it, and checks its range.
                if self._wanted is None or key in self._wanted:
                    yield key, tensor.detach()
                continue
            if self._wanted is not None and self._wanted.isdisjoint(rounded):
                continue
            given = tensor.detach().to(self._served_dtype(key, tensor))
            codes, scales = self._quantized(given, rounded, shared.get(key))
            finite.setdefault(given.device, []).append(scales.isfinite().all())
            names.setdefault(given.device, []).append(key.partition("\t")[0])
            for each, made in ((rounded.codes, codes), (rounded.scales, scales)):
                if made.numel() and (self._wanted is None or each in self._wanted):
                    yield each, made
        for key in missing:
            self._check(key, None)
        for device, flags in finite.items():
            # One wait for the device, and not one for each tensor.
            found = torch.stack(flags)
            if not bool(found.all()):
                raise self._not_finite(names[device][int((~found).nonzero()[0])])

    def _not_finite(self, name: str) -> UsageError:
        return UsageError(
            f"{name!r} has numbers that are infinite or NaN, or are beyond the range of the dtype in which "
            f"it would be served: these have no scale in {self._quantization.form.name}; nothing was "
            "published, and once they are finite the next call goes on"
        )

    def matrices(self, measure: Measure) -> Unrounded:
        """Begin a pass in which weights are not rounded here, in the place of `stream`.

        Args:
            measure: see `snapshot.rounded.Roundable`.

        Raises:
            SchemaMismatch: as `Weights.read`, or a weight has another shape than at first.
            UsageError: a weight is not finite.
        """
        plain: dict[str, torch.Tensor] = {}
        found: list[Rounded] = []
        regions: list[Region | None] = []
        names: list[str] = []
        maxima = torch.zeros(0, device="cpu")
        view: Callable[[int], torch.Tensor]

        def local() -> Values:
            nonlocal maxima, view
            plan = self._planned()
            for key, tensor in self._read_again():
                if (wanted := plan.get(key)) is None:
                    continue
                served, rounded, region = wanted
                if rounded is None:
                    plain[key] = tensor.detach()
                    continue
                matrix, codes, scales, owned = rounded
                matrix = Matrix(tensor.detach(), served, matrix.above, matrix.left)
                found.append(Rounded(matrix, codes, scales, owned))
                regions.append(region)
                names.append(key)
            maxima, view = measure(found)
            values = [place.reshape(-1) for place in _cut_places(view, regions)]
            return torch.cat(values).cpu().numpy() if values else np.zeros(0, dtype=np.float32)

        shared = torch.from_numpy(self._exchange(self._cuts, local).copy())
        first = 0
        for place in _cut_places(view, regions):
            place.copy_(shared[first : first + place.numel()].view(place.shape))
            first += place.numel()
        if not bool(maxima.isfinite().all()):
            strange = next(i for i in range(len(found)) if not bool(view(i).isfinite().all()))
            raise self._not_finite(names[strange].partition("\t")[0])
        return Unrounded(plain, found)

    def _planned(self) -> dict[str, _Wanted]:
        """Return what is to be published of the source's tensors."""
        if self._plan is None:
            wanted = self._published if self._wanted is None else self._wanted
            self._plan = {}
            for key, rounded in self._rounded.items():
                served = TORCH_DTYPES[self._served[key].dtype]
                if rounded is None:
                    if key in wanted:
                        self._plan[key] = _Wanted(served, None)
                    continue
                codes, scales = (each if each in wanted else None for each in rounded[:2])
                if codes or scales or (rounded.region is not None and rounded.region.cut):
                    its = self._unrounded(rounded, served)._replace(codes=codes, scales=scales)
                    self._plan[key] = _Wanted(served, its, rounded.region)
        return self._plan

    def _unrounded(self, rounded: _Rounded, served: torch.dtype) -> Rounded:
        """Describe weights that are to be rounded, without their elements."""
        block, region = self.form.block, rounded.region
        above, left = (0, 0) if block is None else (rounded.start[dim] % block[dim] for dim in range(2))
        matrix = Matrix(torch.empty(rounded.shape, dtype=served, device="meta"), served, above, left)
        owned = None if region is None else region.owned.within(region.touched)
        return Rounded(matrix, rounded.codes, rounded.scales, owned)

    def _read_again(self) -> list[tuple[str, torch.Tensor]]:
        """Read the tensors, in the order of the snapshot, so that neighbours are compared together.

        Raises:
            SchemaMismatch: they are not those of the first time.
        """
        given = self._weights.read()
        try:
            if given.tied != self._tied:
                raise SchemaMismatch(f"tensors were tied as {self._tied}, but are tied as {given.tied} now")
            if not given.is_unmoved:
                for key in sorted(given.tensors.keys() | self._served.keys()):
                    self._check(key, given.tensors.get(key))
        except SchemaMismatch:
            self._weights.forget()
            raise
        return sorted(given.tensors.items())

    def _check(self, key: str, tensor: torch.Tensor | None) -> None:
        """Raises SchemaMismatch unless a tensor, or that there is none, is as it was at first."""
        was = self._served.get(key)
        if tensor is not None and was is not None:
            dtype = TORCH_DTYPES[was.dtype]
            if self._served_dtype(key, tensor) == dtype and tuple(tensor.shape) == was.shape:
                return
        now = None if tensor is None else self._spec(key, tensor)
        raise changed(key.partition("\t")[0], was, now)

    def _spec(self, key: str, tensor: torch.Tensor) -> TensorSpec:
        """Describe what this process has under a key, as it would be served without quantization."""
        dtype = self._served_dtype(key, tensor)
        return spec_of(key.partition("\t")[0], torch.empty(tensor.shape, dtype=dtype, device="meta"))

    def _shared(self) -> tuple[dict[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]]:
        """Return the maxima of parts with cut blocks, by key, and the tensors of the source."""
        items: Iterable[tuple[str, torch.Tensor]] = ()
        tensors: dict[str, torch.Tensor] = {}
        own: dict[str, torch.Tensor] = {}

        def local() -> Values:
            nonlocal items
            if self._weights.is_stream:
                items = self._weights.stream()
                return np.zeros(0, dtype=np.float32)
            items = self._read_again()
            tensors.update(items)
            values = []
            for key, region in self._cut_regions():
                tensor = tensors[key].detach()
                own[key] = self._maxima(tensor.to(self._served_dtype(key, tensor)), key)
                values += [own[key][box.within(region.touched)].reshape(-1) for box in region.cut]
            return torch.cat(values).cpu().numpy() if values else np.zeros(0, dtype=np.float32)

        found = torch.from_numpy(self._exchange(self._cuts, local).copy())
        first = 0
        for key, region in self._cut_regions():
            for box in region.cut:
                place = own[key][box.within(region.touched)]
                place.copy_(found[first : first + box.num].view(place.shape))
                first += box.num
        return own, items

    def _cut_regions(self) -> Iterator[tuple[str, Region]]:
        for key, rounded in sorted(self._rounded.items()):
            if rounded is not None and rounded.region is not None and rounded.region.cut:
                yield key, rounded.region

    def _maxima(self, given: torch.Tensor, key: str) -> torch.Tensor:
        """Return the maxima of all blocks of a part, as far as this process has them."""
        rounded = self._rounded[key]
        assert rounded is not None
        form = self.form
        return form.maxima(form.part(given, rounded.start))

    def _quantized(
        self, given: torch.Tensor, rounded: _Rounded, maxima: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes of a tensor, or of a part, and the scales that are published with it."""
        form, region = self._quantization.form, rounded.region
        if maxima is None or region is None:
            return quantize(form, given)
        padded = form.part(given, rounded.start)
        codes, scales = form.quantize(padded, maxima)
        above, left = (padded.shape[dim] - given.shape[dim] for dim in range(2))
        owned = scales[region.owned.within(region.touched)]
        return codes[above:, left:].contiguous(), owned.contiguous()

    def _served_dtype(self, key: str, tensor: torch.Tensor) -> torch.dtype:
        return self._choices.get(key, OWN).of(tensor.dtype)


def _cut_places(
    view: Callable[[int], torch.Tensor], regions: Sequence[Region | None]
) -> Iterator[torch.Tensor]:
    """Yield the boxes of cut blocks in the maxima of parts: views."""
    for number, region in enumerate(regions):
        if region is not None and region.cut:
            maxima = view(number)
            yield from (maxima[box.within(region.touched)] for box in region.cut)


def quantize(form: Form, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a matrix where it is, as `Form.quantize` does."""
    if form.block is not None and are_usable(weights.device):
        from patchstore.kernels import quantize as kernel

        return kernel.quantize(weights, form.block)
    return form.quantize(weights)
