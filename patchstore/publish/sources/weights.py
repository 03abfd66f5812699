"""What a trainer hands over, as it is served: plain tensors by the names that servers know, each once."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from patchstore.bucket.records import Part, TensorSpec
from patchstore.errors import SchemaMismatch, UsageError
from patchstore.publish import ownership
from patchstore.publish.snapshot import InPlace, Roundable, Stream, Tensors
from patchstore.publish.sources.adapter import AdapterSource
from patchstore.publish.sources.computed import Merged, check_decodable, is_computed
from patchstore.publish.sources.dtypes import OWN, SOURCE, Choice, Held, Served, check_scales, is_weight
from patchstore.publish.sources.layouts import Applied, Mapped, of_transformers, rule_as_saved
from patchstore.publish.sources.names import (
    EXTRA_STATE,
    Names,
    Saved,
    check_adapter,
    check_all,
    each_once,
    without_engine,
)
from patchstore.publish.sources.pieces import (
    ZERO3_ADVICE,
    Given,
    Layout,
    LocalPart,
    Piece,
    PieceOf,
    class_of,
    is_partitioned,
    is_placeholder,
    is_sharded,
    is_weight_source,
    layout_key,
    local_of,
    of_weight_source,
    owns_nothing,
    partition_of,
    plain,
    ranks_of,
    ranks_of_owners,
    whole,
)
from patchstore.publish.sources.quantized import Exchange, Rounding
from patchstore.quantization import Quantization
from patchstore.support import collector
from patchstore.tensors.bits import TORCH_DTYPES, spec_of
from patchstore.tensors.parts import name_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Value = torch.Tensor | LocalPart | Sequence[LocalPart]
Items = Iterable[tuple[str, Value]]
Source = torch.nn.Module | Mapping[str, Value] | Callable[[], Mapping[str, Value] | Items] | Mapped
"""A model, whose `state_dict` is published; its tensors by checkpoint name; or a function that returns these,
or an iterator of names and tensors, anew at each call."""


class Weights:
    """The tensors of a source, as they are at each call of `read`, or each pass of `stream`."""

    def __init__(
        self, source: Source, stored: Collection[str] = (), dtype: torch.dtype | None = None
    ) -> None:
        """Look at a source; nothing is copied.

        Names in `stored`, under which a run has tensors, are preferred among tied ones. What is computed has
        at least the bits of `dtype`, in which most tensors are served.
        """
        self._stored = stored
        self._rules: list[Applied] = []
        inner: Any = source
        while isinstance(inner, Mapped):
            # The innermost rule is the first that names pass.
            self._rules.insert(0, Applied(inner.rule))
            inner = inner.source
        self.given = inner
        """The source without what says how it is published."""
        if isinstance(inner, torch.nn.Module):
            inner = _model(inner, stored, dtype)
        self._source = inner
        self._is_adapter = isinstance(inner, AdapterSource)
        self._names = Names(inner, of_adapter=self._is_adapter)
        self._saved = Saved(inner, self._names.of)
        self._layouts: dict[str, Layout] = {}
        """Of sharded tensors, by name, as they were at the first call."""
        self._places: dict[str, Any] = {}
        """Of pieces, by key, as they were at the first call."""
        self.origins: dict[str, str] = {}
        """What a source calls a tensor that a rule publishes under another name; by that."""
        self.ranks: set[int] = set()
        """Global ranks among which tensors are sharded, as far as reading them has shown."""
        self._same = SameTensors()
        self._last: Given | None = None
        """What the last `read` returned, without the tensors."""
        self._begun: Any = self._items()
        """What the first `read` reads: a function is not called a second time for it."""
        self.is_stream = not isinstance(self._begun, Mapping)
        """Whether tensors exist one after the other, and `stream` has their elements."""

    def read(self) -> Given:
        items, self._begun = self._items() if self._begun is None else self._begun, None
        if not isinstance(items, Mapping):
            return self._measured(items)
        if self._last is not None and (again := self._same.again(items)) is not None:
            return self._last._replace(tensors=again)
        given = self._worked_out(items)
        # Worked out again by the next call, unless they are accepted.
        self._last = None
        if not self._rules:
            keys: dict[str, str | None] = {}
            for name in items:
                own = self._names.of(name)
                if own in given.tensors:
                    keys[name] = own
                elif own in given.tied:
                    keys[name] = None
                elif f"{own}\t0" in given.tensors and f"{own}\t1" not in given.tensors:
                    keys[name] = f"{own}\t0"
            self._same.remember(items, keys)
        return given

    def is_tied_head(self, name: str) -> bool:
        """Whether this is an output layer that the model declares to be tied."""
        origin = self.origins.get(name, name)
        return origin in self._saved.heads and self._saved.leaves_out(origin)

    def compute_in(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Say in which dtypes tensors are served, by the source's names: what is computed has their bits."""
        if isinstance(self._source, Merged):
            self._source.served = dtypes

    def accept(self, given: Given) -> None:
        """Have the next `read` not work out again what tensors are, if they are those of the last one."""
        self._last = given._replace(tensors={}, where=object())

    @collector.paused()
    def _worked_out(self, items: Mapping[str, Any]) -> Given:
        found: dict[str, list[Piece]] = {}
        for name, pieces in self._pieces(items.items()):
            if name in found and (not pieces or any(each.start is None for each in (*pieces, *found[name]))):
                raise SchemaMismatch(
                    f"two tensors would be published as {name!r}; prefixes such as '_orig_mod.' are taken off"
                    " names"
                )
            found.setdefault(name, []).extend(pieces)
        self._check_names(found.keys())
        self._check_not_empty(found, items)

        def leaves_out(name: str) -> bool:
            return self._saved.leaves_out(self.origins.get(name, name))

        once, tied = each_once(found, self._stored, leaves_out)
        tensors, places = dict[str, torch.Tensor](), dict[str, PieceOf]()
        for name, parts in once.items():
            if len(parts) == 1 and parts[0].start is None:
                tensors[name] = parts[0].local
                continue
            for key, each in self._keyed(name, parts, 0):
                tensors[key] = each.local
                if each.start is not None:
                    places[key] = PieceOf(name, each.shape, each.start)
        return Given(tensors, places, tied, {})

    def look_for_ranks(self) -> None:
        """Find the ranks among which tensors are sharded, without reading them: after a read that failed."""
        source = self._source
        if isinstance(source, Merged):
            self.ranks |= source.ranks()
            return
        given = source.state_dict(keep_vars=True) if isinstance(source, torch.nn.Module) else source
        for value in given.values() if isinstance(given, Mapping) else ():
            self.ranks |= ranks_of(value)

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield keys and tensors, as the source yields tensors; a tensor is not kept."""
        for key, each in self._streamed(self._items()):
            yield key, each.local

    def _streamed(self, items: Any) -> Iterator[tuple[str, Piece]]:
        counts: dict[str, int] = {}
        for name, pieces in self._pieces(items):
            number = counts.get(name, 0)
            counts[name] = number + len(pieces)
            if number and any(each.start is None for each in pieces):
                raise SchemaMismatch(f"the source yields {name!r} twice in a pass")
            yield from self._keyed(name, pieces, number)

    def _measured(self, items: Items) -> Given:
        """Pass through a stream once, and keep what tensors are, but not their elements."""
        tensors, places = dict[str, torch.Tensor](), dict[str, PieceOf]()
        devices: dict[str, torch.device] = {}
        for key, (shape, start, local) in self._streamed(items):
            tensors[key] = torch.empty(local.shape, dtype=local.dtype, device="meta")
            devices[key] = local.device
            if start is not None:
                places[key] = PieceOf(name_of(key), shape, start)
        if tensors or not (is_weight_source(self._source) and owns_nothing(self._source)):
            self._check_names({name_of(key) for key in tensors})
        tied = {}
        if isinstance(self._source, Merged):
            tied = dict(self._source.tied)
            self.ranks |= self._source.ranks()
        return Given(tensors, places, tied, devices)

    def _items(self) -> Mapping[str, Any] | Items:
        source: Any = self._source
        if isinstance(source, torch.nn.Module):
            # Parameters themselves: DeepSpeed has attributes on them, and detaching 400 DTensors takes 6 ms.
            state: Mapping[str, Any] = source.state_dict(keep_vars=True)
            return {name: each for name, each in state.items() if name.rpartition(".")[2] != EXTRA_STATE}
        if isinstance(source, Mapping):
            return source
        if isinstance(source, Merged):
            return iter(source)
        if is_weight_source(source):
            self.ranks |= ranks_of_owners(source)
            return of_weight_source(source)
        if callable(source) and not isinstance(source, type):
            found: Any = source()
            if isinstance(found, Mapping):
                return found
            if isinstance(found, Iterable) and not isinstance(found, torch.Tensor | str):
                return iter(found)
            raise UsageError(
                "the source is a function, which must return names and tensors, but returned "
                f"{class_of(found)}"
            )
        raise UsageError(
            f"the source must be a model or a mapping of names to tensors, not {class_of(source)}; "
            "pass the model itself, dict(model.named_parameters()), or a function that returns an iterator "
            "of names and tensors anew at each call"
        )

    def _pieces(self, items: Items) -> Iterator[tuple[str, list[Piece]]]:
        rules = self._rules
        item: Any
        for item in items:
            if not (isinstance(item, tuple | list) and len(item) == 2):
                raise SchemaMismatch(f"the source yields {item!r}, and no pair of a name and a tensor")
            given, value = item
            name = self._names.of(given)
            pieces = self._of_value(name, value)
            if not rules:
                yield name, pieces
                continue
            found: list[tuple[str, list[Piece]]] = [(name, pieces)]
            for rule in rules:
                found = [each for name, pieces in found for each in rule.to(name, pieces)]
            for new, _ in found:
                self.origins.setdefault(new, name)
            yield from found

    def _of_value(self, name: str, value: Any) -> list[Piece]:
        if type(value) is torch.Tensor or (type(value) is torch.nn.Parameter and not vars(value)):
            return [whole(plain(name, value))]
        if isinstance(value, LocalPart):
            return value.pieces(name, plain(name, value.tensor))
        if isinstance(value, list | tuple) and value and all(isinstance(each, LocalPart) for each in value):
            return _of_parts(name, value)
        if is_partitioned(value):
            self.ranks |= ranks_of(value)
            part = partition_of(name, value)
            return part.pieces(name, plain(name, part.tensor))
        if is_sharded(value):
            return self._of_sharded(name, value)
        return [whole(plain(name, value))]

    def _of_sharded(self, name: str, tensor: "DTensor") -> list[Piece]:
        local = plain(name, local_of(tensor))
        layout = self._layouts.get(name)
        if layout is None:
            self.ranks |= ranks_of(tensor)
            layout = self._layouts[name] = Layout.of(name, tensor, local.shape)
        elif layout.key != (key := layout_key(tensor, local.shape)):
            raise SchemaMismatch(
                f"{name!r} is sharded otherwise than when this publisher was opened: {_layout(*layout.key)}, "
                f"but {_layout(*key)} now; open a publisher anew, with resume"
            )
        return layout.pieces(local)

    def _keyed(self, name: str, pieces: Sequence[Piece], first: int) -> Iterator[tuple[str, Piece]]:
        for number, each in enumerate(pieces, first):
            key = name if each.start is None else f"{name}\t{number}"
            if self._places.setdefault(key, each.place) != each.place:
                shape, start, size = self._places[key]
                if start is None and each.start is None:
                    raise SchemaMismatch(
                        f"tensor {name!r} had the shape {list(shape)} when this publisher was opened, but "
                        f"is {list(each.shape)} now"
                    )
                raise SchemaMismatch(
                    f"the part of {name!r} was {size} from {start} on when this publisher was opened, but is "
                    f"{each.place[2]} from {each.start} on now; open a publisher anew, with resume"
                )
            yield key, each

    def _check_names(self, names: Collection[str]) -> None:
        if self._is_adapter:
            check_adapter(names)
        else:
            check_all(names)

    def _check_not_empty(self, found: Mapping[str, Sequence[Piece]], items: Mapping[str, Any]) -> None:
        """Raises SchemaMismatch where tensors have no elements because these are elsewhere."""
        empty = [name for name, pieces in found.items() if any(0 in each.shape for each in pieces)]
        if empty:
            source = self._source
            given = dict(source.named_parameters()) if isinstance(source, torch.nn.Module) else items
            for name, tensor in given.items():
                if isinstance(tensor, torch.Tensor) and is_placeholder(tensor):
                    raise SchemaMismatch(f"{name!r} is a placeholder without elements; {ZERO3_ADVICE}")
        if len(empty) == len(found):
            raise SchemaMismatch(
                f"none of the {len(found)} tensors has an element, such as {empty[0]!r}; is this a model "
                f"whose weights are elsewhere? {ZERO3_ADVICE}"
            )


def _layout(shape: Any, placements: Any, mesh: Any, local_shape: Any) -> str:
    return f"{shape} as {placements} over {mesh}, {local_shape} here"


def _of_parts(name: str, parts: Sequence[LocalPart]) -> list[Piece]:
    found = [each for part in parts for each in part.pieces(name, plain(name, part.tensor))]
    if len(found) > 1 and any(each.start is None for each in found):
        raise SchemaMismatch(f"one of the {len(parts)} parts of {name!r} is all of it")
    if len({each.shape for each in found}) > 1:
        raise SchemaMismatch(f"the parts of {name!r} are of tensors of different shapes")
    return found


def _model(model: torch.nn.Module, stored: Collection[str], dtype: torch.dtype | None) -> Any:
    """Return what of a model is published: without DeepSpeed's engine, as what it computes with."""
    inner = without_engine(model)
    for path, module in inner.named_modules() if dtype is not None else ():
        check_decodable(f"{path}." if path else "", module)
    return Merged(inner, stored, dtype) if is_computed(inner) else inner


class ServedSource:
    """The tensors of a source, which must stay those that they were at first.

    This is the one place that checks it. What is rounded to FP8 is made of tensors that were checked.
    """

    def __init__(
        self,
        source: Source,
        dtype: torch.dtype | None,
        stored: Collection[str],
        quantization: Quantization | None = None,
    ) -> None:
        self._weights = Weights(source, stored, dtype)
        self._stored, self._dtype, self._quantization = stored, dtype, quantization
        self._source = source
        self.given = self._weights.given
        self.choices: dict[str, Choice] = {}
        """By name, in which dtype a tensor is served, and who says so."""
        self._given: Given | None = None
        """What was read first, until `first` returns it."""
        self._choices: dict[str, Choice] = {}
        """The same as `choices` by key of the source."""
        self._at_first: dict[str, TensorSpec] = {}
        """By key of the source, what is served without quantization."""
        self._rounding: Rounding | None = None
        self._whole: dict[str, Part] = {}
        """Tensors that this process has in several pieces, by name."""
        self._keys: dict[str, str] = {}
        """The key of what is published, by that of what the source has, or of what is rounded."""
        self._devices_of_keys: dict[str, torch.device] = {}
        """Where that was first, by its key."""

    @property
    def ranks(self) -> set[int]:
        return self._weights.ranks

    def read(self) -> None:
        """Read the source for the first time. A model of transformers gets the names that it saves."""
        try:
            self._given = self._weights.read()
            if isinstance(self._source, torch.nn.Module):
                rule = rule_as_saved(self._source, self._given.without_elements())
                if rule is not None:
                    self._weights = Weights(Mapped(self._source, rule), self._stored, self._dtype)
                    self._given = self._weights.read()
            self._weights.accept(self._given)
        except Exception:
            self._weights.look_for_ranks()
            raise

    def held(self) -> Held:
        assert self._given is not None
        weights = {}
        for key, tensor in self._given.tensors.items():
            if is_weight(tensor.dtype):
                name, shape = self._given.whole(key)
                weights[name] = str(tensor.dtype), prod(shape)
        return Held(weights, dict(self._given.tied))

    @collector.paused()
    def serve(self, served: Served, *, joined: bool) -> None:
        """Choose in which dtypes tensors are served, and so what this process has to publish.

        `joined`: whole tensors are made of pieces, which is how one process publishes alone.
        """
        given, weights = self._given, self._weights
        assert given is not None
        computed: dict[str, torch.dtype] = {}
        for key, tensor in given.tensors.items():
            name = given.name(key)
            origin = weights.origins.get(name, name)
            self.choices[name] = self._choices[key] = choice = served.of(name, origin, tensor.dtype)
            # Of a tensor that is cut into several, what is computed is computed once.
            dtype = choice.of(tensor.dtype)
            if origin not in computed or computed[origin].itemsize < dtype.itemsize:
                computed[origin] = dtype
        weights.compute_in(computed)
        self.untied = sorted(filter(weights.is_tied_head, self.choices.keys() - set(given.tied.values())))
        """Output layers that checkpoints of such a model lack if they are tied, which these are not."""
        # Scales of weights that are quantized already always have more bits, so that says nothing.
        asked = {k: Choice(self._dtype) if c.why == SOURCE else c for k, c in self._choices.items()}
        check_scales(given.tensors, {k: each.of(given.tensors[k].dtype) for k, each in asked.items()})
        self._at_first = {k: self._spec(given.name(k), k, each) for k, each in given.tensors.items()}
        self._tied_at_first = dict(given.tied)
        published, specs = given, self._at_first
        if self._quantization is not None:
            self._rounding = Rounding(
                self._quantization, given, specs, self.given, is_stream=weights.is_stream
            )
            published = self._rounding.given
            specs = {key: spec_of(published.name(key), each) for key, each in published.tensors.items()}
        self.tied = published.tied
        self._devices = published.devices or {key: each.device for key, each in given.tensors.items()}
        self._parts = {key: _part(published, key, spec) for key, spec in specs.items()}
        """By key of the source, or of what is rounded."""
        seen = set[str]()
        for part in self._parts.values():
            if part.key in seen and part.num_elements:
                raise SchemaMismatch(f"the source has {part.size} from {part.start} on of {part.spec} twice")
            seen.add(part.key)
        pieces = [part for part in self._parts.values() if not part.is_whole]
        if joined and pieces:
            ownership.own([pieces])
            self._whole = {part.spec.name: Part.whole(part.spec) for part in pieces}
        found = {key: part for key, part in self._parts.items() if part.spec.name not in self._whole}
        found |= self._whole
        self.parts = tuple(found[key] for key in sorted(found))
        """What this process has to publish."""

    def share(self, exchange: Exchange) -> None:
        """Have ranks compare, in each pass from now on, what they must to round parts of blocks."""
        if self._rounding is not None:
            self._rounding.exchange = exchange

    def choose(self, owned: Sequence[Part]) -> None:
        """Say what of the parts this publisher publishes; the other ones are left out from now on."""
        chosen = {part.key for part in owned}
        for key, part in self._parts.items():
            own = self._whole.get(part.spec.name, part).key
            if own in chosen:
                self._keys[key] = own
        self._devices_of_keys = {own: self._devices[key] for key, own in self._keys.items()}
        if self._rounding is not None:
            self._rounding.only(self._keys)

    def first(self) -> Tensors:
        """Return the tensors as they were read first, by the keys of what is published."""
        given, self._given = self._given, None
        assert given is not None
        return self._stream() or self._tensors(given)

    def current(self) -> Tensors:
        """Return the tensors as they are now, by the keys of what is published."""
        return self._stream() or self._tensors(self._read())

    def _tensors(self, given: Given) -> Tensors:
        if not self._whole:
            return InPlace({own: given.tensors[key] for key, own in self._keys.items()}, given.where)
        return Stream(self._devices_of_keys, lambda: self._joined(given.tensors.items()))

    def _stream(self) -> Stream | None:
        """Return what exists only in a pass, as all of a stream and all codes do; None if nothing does."""
        rounding, rounded = self._rounding, None
        if rounding is not None and not self._weights.is_stream and not self._whole:
            rounded = Roundable(rounding.form, rounding.dtypes, partial(rounding.matrices, self._read))
        if rounding is None and not self._weights.is_stream:
            return None

        def begin() -> Iterator[tuple[str, torch.Tensor]]:
            return self._joined(self._items() if rounding is None else rounding.codes(self._items))

        return Stream(self._devices_of_keys, begin, rounded)

    def _items(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return keys and tensors of the source as they are now; checked, of a stream while it is read."""
        if self._weights.is_stream:
            return self._checked(self._weights.stream())
        # In the order of the snapshot, so that neighbours are compared together.
        return sorted(self._read().tensors.items())

    def _read(self) -> Given:
        """Read tensors that exist at the same time, and check them."""
        given = self._weights.read()
        if given.where is not None:
            return given
        if given.tied != self._tied_at_first:
            raise SchemaMismatch(
                f"tensors were tied as {self._tied_at_first}, but are tied as {given.tied} now"
            )
        for key in sorted(given.tensors.keys() | self._at_first.keys()):
            self._check(key, given.tensors.get(key))
        self._weights.accept(given)
        return given

    def _checked(self, stream: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        missing = dict.fromkeys(self._at_first)
        for key, tensor in stream:
            self._check(key, tensor)
            del missing[key]
            yield key, tensor
        if missing and len(missing) == len(self._at_first):
            raise SchemaMismatch(
                "the source yields no tensors any more; if it is a function, it must make a new iterator in "
                "each call, such as lambda: model.named_parameters()"
            )
        for key in missing:
            self._check(key, None)

    def _check(self, key: str, tensor: torch.Tensor | None) -> None:
        """Raises SchemaMismatch unless a tensor, or that there is none, is as it was at first."""
        was, name = self._at_first.get(key), name_of(key)
        if tensor is None:
            assert was is not None
            raise SchemaMismatch(f"tensor {name!r} is gone: it was {was.kind} when this publisher was opened")
        if was is None:
            raise SchemaMismatch(f"tensor {name!r} was not there when this publisher was opened")
        if tensor.shape != was.shape or self._served_dtype(key, tensor) != TORCH_DTYPES[was.dtype]:
            raise SchemaMismatch(
                f"tensor {name!r} was {was.kind}, but is {self._spec(name, key, tensor).kind} now"
            )

    def _spec(self, name: str, key: str, tensor: torch.Tensor) -> TensorSpec:
        """Describe what this process has under a key of the source, as it is served without quantization."""
        return spec_of(name, tensor, self._served_dtype(key, tensor))

    def _served_dtype(self, key: str, tensor: torch.Tensor) -> torch.dtype:
        return self._choices.get(key, OWN).of(tensor.dtype)

    def _joined(self, items: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
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
            if tensor.dtype != joined.dtype:
                # Rounded once, where all is converted to the served dtype.
                joined = joined.to(torch.promote_types(joined.dtype, tensor.dtype))
            joined[place] = tensor.detach()
            open_[own] = joined, missing - part.num_elements
            if open_[own][1] == 0:
                del open_[own]
                yield own, joined


def _part(given: Given, key: str, spec: TensorSpec) -> Part:
    """Describe what this process has under a key, given what is there as a tensor of its own."""
    place = given.places.get(key)
    if place is None:
        return Part.whole(spec)
    return Part(replace(spec, name=place.name, shape=place.shape), place.start, spec.shape)


class SameTensors:
    """What the tensors of a mapping were at the last call. It keeps none of them alive.

    A trainer changes weights in place, so nearly every call finds the same tensors in the same memory. To see
    that takes a tenth of the time of working out again what each of them is, and who shares memory with whom.
    """

    def __init__(self) -> None:
        self._known: tuple[list[str], list[list[Any]], list[str | None]] | None = None
        """Names, what `_seen` told of all, and their keys."""

    @collector.paused()
    def remember(self, items: Mapping[str, Any], keys: Mapping[str, str | None]) -> None:
        """Take note of tensors that were just read, and under which key each is published as one piece.

        The key is None for a further name of a tied tensor.
        """
        seen = [*_seen(items.values())]
        self._known = None
        # Others are of another kind, or in several pieces.
        if items.keys() <= keys.keys() and None not in seen:
            self._known = [*items], [each[1] for each in seen if each], [keys[name] for name in items]

    def again(self, items: Mapping[str, Any]) -> dict[str, torch.Tensor] | None:
        """Return the tensors of this process by key, if all is as it was; otherwise None.

        Equal addresses, shapes and strides are equal elements, so ties are what they were too.
        """
        if self._known is None or len(items) != len(self._known[0]):
            return None
        names, memory, keys = self._known
        if [*items] != names:
            return None
        tensors: list[torch.Tensor] = []
        for seen, before in zip(_seen(items.values()), memory, strict=True):
            if seen is None or seen[1] != before:
                return None
            tensors += seen[0]
        return {key: tensor for key, tensor in zip(keys, tensors, strict=True) if key is not None}


_SEEN_TOGETHER = 256
"""Tensors: what is looked at of them stays in the cache."""
_TOLD: tuple[Callable[[Any], Any], ...] = (
    *(torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride),
    *map(attrgetter, ("dtype", "device")),
)


def _seen(values: Iterable[Any]) -> Iterator[tuple[list[torch.Tensor], list[Any]] | None]:
    """Yield, of some tensors at a time, the elements that this process has, and all that tells whether they
    are the same tomorrow; None where one is of another kind.

    Columns: a call of Python for each tensor took twice as long.
    """
    rest = iter(values)
    while some := [*islice(rest, _SEEN_TOGETHER)]:
        yield _seen_together(some)


def _seen_together(some: list[Any]) -> tuple[list[torch.Tensor], list[Any]] | None:
    kinds, placed = [*map(type, some)], list[Any]()
    for place, value in enumerate(some) if {*kinds} != {torch.Tensor} else ():
        kind = kinds[place]
        if kind is torch.Tensor or (kind is torch.nn.Parameter and not vars(value)):
            continue
        if not is_sharded(value) or type(value._local_tensor) is not torch.Tensor:
            return None
        some[place] = value._local_tensor
        placed.append((place, value.placements, value.device_mesh, value.shape))
    try:
        memory = [kinds, placed, *([*map(tell, some)] for tell in _TOLD)]
    except RuntimeError:
        # One has no memory, or not one of its own.
        return None
    if any(map(torch.Tensor.is_neg, some)):
        # It has not the signs that its memory has.
        return None
    return [each.detach() if each.requires_grad else each for each in some], memory


def as_saved(model: torch.nn.Module) -> Mapped | torch.nn.Module:
    """Return a source that publishes a model of transformers under the names that `save_pretrained` writes.

    Args:
        model: a PreTrainedModel, perhaps wrapped, sharded, or with adapters of PEFT.

    Returns:
        The model itself where it has these names already: it is read faster than through a rule.

    Raises:
        UsageError: this is no model of transformers.
        SchemaMismatch: transformers computes a tensor, and does not only take others apart or join them.
    """
    inner = of_transformers(model)
    if inner is None:
        raise UsageError(f"as_saved takes a model of transformers, not {class_of(model)}")
    rule = rule_as_saved(model, Weights(model).read().without_elements())
    return model if rule is None else Mapped(model, rule)
