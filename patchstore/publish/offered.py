"""What a source offers to a publisher, and what of it this publisher publishes, as it is served."""

from collections.abc import Callable, Collection, Iterator, Sequence
from math import prod

import torch

from patchstore.errors import SchemaMismatch
from patchstore.format.records import Part, TensorSpec
from patchstore.publish.snapshot.memory import Stream, Tensors
from patchstore.publish.snapshot.rounded import Given as Unrounded
from patchstore.publish.snapshot.rounded import Measure, Rounded
from patchstore.publish.sources import Given, Quantized, Source, Weights, changed
from patchstore.publish.sources.cuts import Exchange
from patchstore.publish.sources.dtypes import OWN, SOURCE, Choice, Held, Served, is_weight
from patchstore.publish.sources.mapped import Mapped
from patchstore.publish.sources.saved import rule_as_saved
from patchstore.publish.sources.scales import check_scales
from patchstore.quantization import Form, Quantization
from patchstore.tensors.bits import spec_of


class Offered:
    """The tensors of a source, which must stay those that they were at first."""

    def __init__(
        self,
        source: Source,
        dtype: torch.dtype | None,
        stored: Collection[str],
        quantization: Quantization | None = None,
    ) -> None:
        """Look at a source; `read` comes next, and then `serve`.

        Args:
            dtype, stored: see `Weights`.

        Raises:
            SchemaMismatch, UsageError: see `Weights`.
        """
        self._weights: Weights | Quantized = Weights(source, stored, dtype)
        self._stored, self._dtype, self._quantization = stored, dtype, quantization
        self._source = source
        self.given = self._weights.given
        self.choices: dict[str, Choice] = {}
        """By name, in which dtype a tensor is served, and who says so."""
        self._given: Given | None = None
        self._whole: dict[str, Part] = {}
        """Tensors that this process has in several pieces, by name."""
        self._keys: dict[str, str] = {}
        """The key of what is published, by that of the source."""

    @property
    def ranks(self) -> set[int]:
        """Global ranks among which tensors are sharded, as far as they were read."""
        return self._weights.ranks

    def read(self) -> None:
        """Read the source for the first time. A model of transformers gets the names that it is saved under.

        Raises:
            SchemaMismatch, UsageError: see `Weights` and `as_saved`.
        """
        try:
            self._given = self._weights.read()
            if isinstance(self._source, torch.nn.Module):
                rule = rule_as_saved(self._source, self._given)
                if rule is not None:
                    self._weights = Weights(Mapped(self._source, rule), self._stored, self._dtype)
                    self._given = self._weights.read()
        except Exception:
            self._weights.look_for_ranks()
            raise

    def held(self) -> Held:
        """Return what was read, as far as it decides dtypes."""
        assert self._given is not None
        weights = {}
        for key, tensor in self._given.tensors.items():
            if is_weight(tensor.dtype):
                place = self._given.places.get(key)
                name, shape = (key, tensor.shape) if place is None else (place.name, place.shape)
                weights[name] = str(tensor.dtype), prod(shape)
        return Held(weights, dict(self._given.tied))

    def serve(self, served: Served) -> None:
        """Choose in which dtypes tensors are served, and so what this process has to publish.

        Raises:
            SchemaMismatch, UsageError: see `check_scales`, and `Quantized.round`.
        """
        given, weights = self._given, self._weights
        assert given is not None and isinstance(weights, Weights)
        choices: dict[str, Choice] = {}
        computed: dict[str, torch.dtype] = {}
        for key, tensor in given.tensors.items():
            name = key if key not in given.places else given.places[key].name
            origin = weights.origins.get(name, name)
            self.choices[name] = choices[key] = choice = served.of(name, origin, tensor.dtype)
            # Of a tensor that is cut into several, what is computed is computed once.
            dtype = choice.of(tensor.dtype)
            computed[origin] = max(computed.get(origin, dtype), dtype, key=lambda each: each.itemsize)
        weights.compute_in(computed)
        self.untied = sorted(filter(weights.is_tied_head, self.choices.keys() - set(given.tied.values())))
        """Output layers that checkpoints of such a model lack if they are tied, which these are not."""
        # Scales of weights that are quantised already always have more bits, so that says nothing.
        asked = {k: Choice(self._dtype) if each.why == SOURCE else each for k, each in choices.items()}
        check_scales(given.tensors, {k: each.of(given.tensors[k].dtype) for k, each in asked.items()})
        if self._quantization is not None:
            self._weights = weights = Quantized(weights, self._quantization, choices)
            given = self._given = weights.round(given)
            # It converts what stays as it is, and its scales stay in float32.
            choices = {}
        self._choices = choices
        """By key of the source."""
        self.tied = given.tied
        self._places = given.places
        self._devices = given.devices or {key: tensor.device for key, tensor in given.tensors.items()}
        self._served = {
            key: (self._served_dtype(key, tensor), tensor.shape) for key, tensor in given.tensors.items()
        }
        parts = {key: self._part(key, *served) for key, served in self._served.items()}
        self._parts = parts
        """By key of the source."""
        seen = set[Part]()
        for part in parts.values():
            if part in seen and part.num_elements:
                raise SchemaMismatch(f"the source has {part.size} from {part.start} on of {part.spec} twice")
            seen.add(part)

    @property
    def parts(self) -> tuple[Part, ...]:
        """What this process has, ascending by key."""
        found = {key: part for key, part in self._parts.items() if part.spec.name not in self._whole}
        found |= self._whole
        return tuple(found[key] for key in sorted(found))

    def join(self) -> None:
        """Make whole tensors of pieces, which is how one process publishes alone.

        Raises:
            SchemaMismatch: this process does not have all pieces, or has an element twice.
        """
        pieces = [part for part in self._parts.values() if not part.is_whole]
        if pieces:
            from patchstore.publish.group import ownership

            ownership.own([pieces])
            self._whole = {part.spec.name: Part.whole(part.spec) for part in pieces}

    def share(self, exchange: Exchange) -> None:
        """Have ranks compare what they must to round parts of blocks; see `Quantized.share`."""
        if isinstance(self._weights, Quantized):
            self._weights.share(exchange)

    def choose(self, owned: Sequence[Part]) -> None:
        """Say what of the parts this publisher publishes; the other ones are left out from now on."""
        chosen = set(owned)
        for key, part in self._parts.items():
            joined = self._whole.get(part.spec.name)
            if (part if joined is None else joined) in chosen:
                self._keys[key] = part.key if joined is None else joined.key
        if isinstance(self._weights, Quantized):
            self._weights.only(self._keys)

    def first(self) -> Tensors:
        """Return the tensors as they were read first, by the keys of what is published."""
        given, self._given = self._given, None
        assert given is not None
        return self._tensors(given)

    def current(self) -> Tensors:
        """Return the tensors as they are now, by the keys of what is published.

        Raises:
            SchemaMismatch: they are not those of the first time; of a stream, when it is read.
        """
        if self._weights.is_stream:
            return self._tensors(None)
        given = self._weights.read()
        current = given.tensors
        if given.is_unmoved:
            return self._tensors(given)
        try:
            if given.tied != self.tied:
                raise SchemaMismatch(f"tensors were tied as {self.tied}, but are tied as {given.tied} now")
            if len(current) != len(self._served) or not all(map(self._is_served, current, current.values())):
                for key in sorted(current.keys() | self._served.keys()):
                    self._check(key, current.get(key))
        except SchemaMismatch:
            self._weights.forget()
            raise
        return self._tensors(given)

    def _tensors(self, given: Given | None) -> Tensors:
        """Return what is published of tensors that were read, or of the next pass of a stream."""
        if given is not None and not self._weights.is_stream and not self._whole:
            return {own: given.tensors[key] for key, own in self._keys.items()}
        devices = {own: self._devices[key] for key, own in self._keys.items()}

        def read() -> Iterator[tuple[str, torch.Tensor]]:
            if self._weights.is_stream:
                return self._joined(self._checked(self._weights.stream()))
            assert given is not None
            return self._joined(iter(given.tensors.items()))

        weights = self._weights
        if not isinstance(weights, Quantized) or not weights.has_matrices or self._whole:
            return Stream(devices, read)
        return Stream(devices, read, _Roundable(self, weights))

    def matrices(self, weights: Quantized, measure: Measure) -> Unrounded:
        """Begin a pass of a source in FP8, in which weights are not rounded; see `Roundable.read`."""
        missing = dict.fromkeys(self._keys)

        def own(key: str | None) -> str | None:
            if key is None:
                return None
            del missing[key]
            return self._keys[key]

        rounded: list[Rounded] = []

        def measured(found: Sequence[Rounded]) -> tuple[torch.Tensor, Callable[[int], torch.Tensor]]:
            for matrix, codes, scales, owned in found:
                rounded.append(Rounded(matrix, own(codes), own(scales), owned))
            return measure(rounded)

        given = weights.matrices(measured)
        for key, tensor in given.plain.items():
            if not self._is_served(key, tensor):
                self._check(key, tensor)
        plain = {name: tensor for key, tensor in given.plain.items() if (name := own(key)) is not None}
        for key in missing:
            self._check(key, None)
        return Unrounded(plain, rounded)

    def _checked(self, stream: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what a stream yields, if this is what it yielded at first."""
        # Of codes, those of other owners are not even computed.
        missing = dict.fromkeys(self._keys if isinstance(self._weights, Quantized) else self._served)
        for key, tensor in stream:
            if not self._is_served(key, tensor):
                self._check(key, tensor)
            del missing[key]
            yield key, tensor
        for key in missing:
            self._check(key, None)

    def _joined(self, items: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is published, with pieces joined where that was asked for."""
        open_: dict[str, tuple[torch.Tensor, int]] = {}
        for key, tensor in items:
            own = self._keys.get(key)
            if own is None:
                continue
            if own not in self._whole:
                yield own, tensor
                continue
            part = self._parts[key]
            joined, missing = open_.get(own) or (
                torch.empty(part.spec.shape, dtype=tensor.dtype, device=tensor.device),
                part.spec.num_elements,
            )
            place = tuple(
                slice(start, start + size) for start, size in zip(part.start, part.size, strict=True)
            )
            joined[place] = tensor.detach()
            open_[own] = joined, missing - part.num_elements
            if open_[own][1] == 0:
                del open_[own]
                yield own, joined

    def _served_dtype(self, key: str, tensor: torch.Tensor) -> torch.dtype:
        return self._choices.get(key, OWN).of(tensor.dtype)

    def _part(self, key: str, dtype: torch.dtype, shape: torch.Size) -> Part:
        """Describe what this process has under a key, as it is served."""
        place = self._places.get(key)
        spec = spec_of(key if place is None else place.name, torch.empty(shape, dtype=dtype, device="meta"))
        if place is None:
            return Part.whole(spec)
        return Part(TensorSpec(name=place.name, dtype=spec.dtype, shape=place.shape), place.start, spec.shape)

    def _is_served(self, key: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor of this key, dtype and shape is one of the run's."""
        dtype, shape = self._served.get(key, (None, None))
        # `Quantized` has checked the dtype of what it does not round, which the snapshot converts.
        is_checked = isinstance(self._weights, Quantized) and key in self._served
        return tensor.shape == shape and (is_checked or self._served_dtype(key, tensor) == dtype)

    def _check(self, key: str, tensor: torch.Tensor | None) -> None:
        """Raises SchemaMismatch unless a tensor, or that there is none, is as it was at first."""
        if tensor is not None and self._is_served(key, tensor):
            return
        name = key.partition("\t")[0]
        was = self._parts[key].spec if key in self._parts else None
        now = None
        if tensor is not None:
            dtype = self._served_dtype(key, tensor)
            now = spec_of(name, torch.empty(tensor.shape, dtype=dtype, device="meta"))
        raise changed(name, was, now)


class _Roundable:
    """See `snapshot.rounded.Roundable`."""

    def __init__(self, offered: Offered, weights: Quantized) -> None:
        self._offered, self._weights = offered, weights

    @property
    def form(self) -> Form:
        return self._weights.form

    @property
    def dtypes(self) -> Collection[tuple[torch.dtype, torch.dtype]]:
        return self._weights.dtypes

    def read(self, measure: Measure) -> Unrounded:
        return self._offered.matrices(self._weights, measure)
