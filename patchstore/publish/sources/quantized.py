"""A source whose linear layers are published in FP8: each tensor is rounded when it is read."""

from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch

from patchstore.errors import SchemaMismatch, UsageError
from patchstore.format.records import TensorSpec
from patchstore.kernels import are_usable
from patchstore.publish.sources.weights import Given, Place, Weights
from patchstore.quantization import Form, Quantization
from patchstore.quantization.forms import E4M3
from patchstore.tensors.bits import spec_of


class _Rounded(NamedTuple):
    """A tensor of the source that is published as codes and scales."""

    codes: str
    """Its key, and that of the codes."""
    scales: str


class Quantized:
    """The tensors of a source as codes and scales; otherwise as `Weights`, whose place it takes.

    What is rounded are the weights in the dtype in which they would be served. So a version in FP8 is a
    function of the version that a publisher without quantization makes of the same weights.
    """

    is_stream = True
    """Codes exist one tensor after the other."""

    def __init__(self, weights: Weights, quantization: Quantization, dtype: torch.dtype | None) -> None:
        """Look at a source; nothing is read.

        Args:
            dtype: as `Publisher` takes it.
        """
        self._weights, self._quantization, self._dtype = weights, quantization, dtype
        self.given = weights.given
        self._rounded: dict[str, _Rounded | None] = {}
        """By key of the source, as they were at first; None of a tensor that is published as it is."""
        self._tied: dict[str, str] = {}
        self._wanted: frozenset[str] | None = None

    @property
    def ranks(self) -> set[int]:
        return self._weights.ranks

    def look_for_ranks(self) -> None:
        """See `Weights.look_for_ranks`."""
        self._weights.look_for_ranks()

    def forget(self) -> None:
        """See `Weights.forget`."""
        self._weights.forget()

    def only(self, keys: Collection[str]) -> None:
        """Leave out all but these keys of codes, scales and other tensors from now on."""
        self._wanted = frozenset(keys)

    def read(self) -> Given:
        """Return what codes, scales and other tensors are, without their elements.

        Raises:
            SchemaMismatch: as `Weights.read`; or no tensor can be stored in FP8, or one is cut within blocks.
        """
        inner = self._weights.read()
        form = self._quantization.form
        tensors, places, devices = dict[str, torch.Tensor](), dict[str, Place](), dict[str, torch.device]()
        of_name: dict[str, bool] = {}
        for key, tensor in inner.tensors.items():
            place = inner.places.get(key)
            dtype = self._served_dtype(tensor)
            name, shape = (key, tuple(tensor.shape)) if place is None else (place.name, place.shape)
            device = inner.devices.get(key, tensor.device)
            spec = spec_of(name, torch.empty(shape, dtype=dtype, device="meta"))
            of_name[name] = self._quantization.quantizes(spec)
            self._rounded[key] = None
            if place is not None:
                places[key] = place
            if not of_name[name]:
                tensors[key] = torch.empty(tensor.shape, dtype=dtype, device="meta")
                devices[key] = device
                continue
            scales = form.scale_name(name)
            if place is not None:
                start = _first_scale(form, spec, place.start, tuple(tensor.shape))
                scales = f"{scales}\t{key.partition(chr(9))[2]}"
                places[scales] = Place(form.scale_name(name), form.scale_shape(shape), start)
            self._rounded[key] = _Rounded(key, scales)
            tensors[key] = torch.empty(tensor.shape, dtype=E4M3, device="meta")
            tensors[scales] = torch.empty(form.scale_shape(tuple(tensor.shape)), device="meta")
            devices |= {key: device, scales: device}
        if inner.tensors and not any(of_name.values()) and not inner.places:
            raise SchemaMismatch(
                f"quantization={form.name!r} finds no weight of a linear layer among {len(of_name)} tensors, "
                f"such as {next(iter(of_name))!r}; their names must be those of the checkpoint, and end in "
                "'.weight'; see patchstore.mapped"
            )
        self._tied = dict(inner.tied)
        return Given(tensors, places, self._all_tied(inner.tied, of_name), devices)

    def _all_tied(self, tied: dict[str, str], is_rounded: dict[str, bool]) -> dict[str, str]:
        """Return further names of codes and scales."""
        found = dict(tied)
        form = self._quantization.form
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
        for key, tensor in self._inner():
            rounded = self._rounded.get(key)
            given = tensor.detach().to(self._served_dtype(tensor))
            if rounded is None:
                if self._wanted is None or key in self._wanted:
                    yield key, given
                continue
            if self._wanted is not None and self._wanted.isdisjoint(rounded):
                continue
            codes, scales = quantize(self._quantization.form, given)
            finite.setdefault(given.device, []).append(scales.isfinite().all())
            names.setdefault(given.device, []).append(key.partition("\t")[0])
            for each, made in ((rounded.codes, codes), (rounded.scales, scales)):
                if self._wanted is None or each in self._wanted:
                    yield each, made
        for device, flags in finite.items():
            # One wait for the device, and not one for each tensor.
            found = torch.stack(flags)
            if not bool(found.all()):
                name = names[device][int((~found).nonzero()[0])]
                raise UsageError(
                    f"{name!r} has numbers that are infinite or NaN, which have no scale in "
                    f"{self._quantization.form.name}; nothing was published, and once they are finite the "
                    "next call goes on"
                )

    def _inner(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._weights.is_stream:
            yield from self._weights.stream()
            return
        given = self._weights.read()
        if given.tied != self._tied:
            raise SchemaMismatch(f"tensors were tied as {self._tied}, but are tied as {given.tied} now")
        # In the order of the snapshot, so that neighbours are compared together.
        yield from sorted(given.tensors.items())

    def _served_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        if self._dtype is not None and tensor.is_floating_point() and tensor.element_size() >= 2:
            return self._dtype
        return tensor.dtype


def quantize(form: Form, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a matrix where it is, as `Form.quantize` does."""
    if form.block is not None and are_usable(weights.device):
        from patchstore.kernels import quantize as kernel

        return kernel.quantize(weights, form.block)
    return form.quantize(weights)


def _first_scale(
    form: Form, spec: TensorSpec, start: tuple[int, ...], size: tuple[int, ...]
) -> tuple[int, int]:
    """Return where the scales of a piece begin among those of the tensor.

    Raises:
        SchemaMismatch: the piece has a part of a block.
    """
    block = (1, spec.shape[1]) if form.block is None else form.block
    for dim, step in enumerate(block):
        end = start[dim] + size[dim]
        if start[dim] % step or (end % step and end != spec.shape[dim]):
            raise SchemaMismatch(
                f"a part of {spec.name!r} begins or ends within a block of {block[0]} x {block[1]} that "
                f"shares a scale: {size} from {start} on, of {spec.shape}; shard it in whole blocks"
            )
    return start[0] // block[0], start[1] // block[1]
