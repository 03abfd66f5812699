"""What a trainer hands over, as plain tensors by the names that servers know, each once, and their ties."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from patchstore.errors import SchemaMismatch, UsageError
from patchstore.format.records import TensorSpec
from patchstore.publish.sources import zero3
from patchstore.publish.sources.dequantised import check_decodable
from patchstore.publish.sources.dtensors import Layout, is_sharded, local_of, ranks_of
from patchstore.publish.sources.mapped import Applied, Mapped
from patchstore.publish.sources.merged import Merged, is_computed
from patchstore.publish.sources.names import EXTRA_STATE, Names, check_all, without_engine
from patchstore.publish.sources.pieces import LocalPart, Piece, whole
from patchstore.publish.sources.plain import class_of, plain
from patchstore.publish.sources.ties import Saved, each_once
from patchstore.publish.sources.unmoved import Unmoved
from patchstore.publish.sources.weight_source import (
    is_weight_source,
    of_weight_source,
    owns_nothing,
    ranks_of_owners,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Value = torch.Tensor | LocalPart | Sequence[LocalPart]
Items = Iterable[tuple[str, Value]]
Source = torch.nn.Module | Mapping[str, Value] | Callable[[], Mapping[str, Value] | Items] | Mapped
"""A model, whose `state_dict` is published; its tensors by checkpoint name; or a function that returns these,
or an iterator of names and tensors, anew at each call."""


class Place(NamedTuple):
    """Where a piece of a tensor belongs."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: tuple[int, ...]


class Given(NamedTuple):
    """What a source has in this process."""

    tensors: dict[str, torch.Tensor]
    """Plain, each once. By name; a piece of a tensor by the name, a tab and a number. Of a stream they are on
    the meta device, without elements."""
    places: Mapping[str, Place]
    """Where pieces belong, by the same keys."""
    tied: dict[str, str]
    """A further name of a tensor -> the one that it is under."""
    devices: dict[str, torch.device]
    """Where the elements of a stream are."""
    is_unmoved: bool = False
    """Whether names, shapes, dtypes, places and ties are those of the call before."""


class Weights:
    """The tensors of a source, as they are at each call of `read`, or each pass of `stream`."""

    def __init__(
        self, source: Source, stored: Collection[str] = (), dtype: torch.dtype | None = None
    ) -> None:
        """Look at a source; nothing is copied.

        Args:
            stored: names under which an existing run stores tensors; preferred among tied ones.
            dtype: in which most tensors are served; None for their own. Weights that are computed have at
                least its bits.

        Raises:
            UsageError: this is no source.
            SchemaMismatch: a wrapper around the model, of which no weights can be taken.
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
        self._names = Names(inner)
        self._saved = Saved(inner, self._names.of)
        self._layouts: dict[str, Layout] = {}
        """Of sharded tensors, by name, as they were at the first call."""
        self._places: dict[str, Any] = {}
        """Of pieces, by key, as they were at the first call."""
        self.origins: dict[str, str] = {}
        """What a source calls a tensor that a rule publishes under another name; by that."""
        self.ranks: set[int] = set()
        """Global ranks among which tensors are sharded, as far as reading them has shown."""
        self._unmoved = Unmoved()
        self._last: Given | None = None
        """What the last `read` returned, without the tensors."""
        self._begun: Any = self._items()
        """What the first `read` reads: a function is not called a second time for it."""
        self.is_stream = not isinstance(self._begun, Mapping)
        """Whether tensors exist one after the other, and `stream` has their elements."""

    def read(self) -> Given:
        """Return the tensors, plain and each once.

        Raises:
            SchemaMismatch: one is not a tensor in memory, a name is none that servers know, or a tensor is
                sharded otherwise than at the first call.
        """
        items, self._begun = self._items() if self._begun is None else self._begun, None
        if not isinstance(items, Mapping):
            return self._measured(items)
        if self._last is not None and (again := self._unmoved.again(items)) is not None:
            return self._last._replace(tensors=again)
        given = self._worked_out(items)
        self._last = given._replace(tensors={}, is_unmoved=True)
        if not self._rules:
            keys: dict[str, str | None] = {}
            for name in items:
                own = self._names.of(name)
                key = next((key for key in (own, f"{own}\t0") if key in given.tensors), None)
                if (key is not None and f"{own}\t1" not in given.tensors) or own in given.tied:
                    keys[name] = key
            self._unmoved.remember(items, keys)
        return given

    def is_tied_head(self, name: str) -> bool:
        """Whether this is an output layer that the model declares to be tied."""
        origin = self.origins.get(name, name)
        return origin in self._saved.heads and self._saved.leaves_out(origin)

    def compute_in(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Say in which dtypes tensors are served, by the source's names: what is computed has their bits."""
        if isinstance(self._source, Merged):
            self._source.served = dtypes

    def forget(self) -> None:
        """Have the next `read` work out again what tensors are: those of the last one were refused."""
        self._last = None

    def _worked_out(self, items: Mapping[str, Any]) -> Given:
        """Return what the tensors of a mapping are."""
        found: dict[str, list[Piece]] = {}
        for name, pieces in self._pieces(items.items()):
            if name in found and (not pieces or any(each.start is None for each in (*pieces, *found[name]))):
                raise SchemaMismatch(
                    f"two tensors would be published as {name!r}; prefixes such as '_orig_mod.' are taken off"
                    " names"
                )
            found.setdefault(name, []).extend(pieces)
        check_all(found.keys())
        self._check_not_empty(found, items)

        def leaves_out(name: str) -> bool:
            return self._saved.leaves_out(self.origins.get(name, name))

        once, tied = each_once(found, self._stored, leaves_out)
        tensors, places = dict[str, torch.Tensor](), dict[str, Place]()
        for name, parts in once.items():
            if len(parts) == 1 and parts[0].start is None:
                tensors[name] = parts[0].local
                continue
            for key, each in self._keyed(name, parts, 0):
                tensors[key] = each.local
                if each.start is not None:
                    places[key] = Place(name, each.shape, each.start)
        return Given(tensors, places, tied, {})

    def look_for_ranks(self) -> None:
        """Find the ranks among which tensors are sharded, without reading them: after a read that failed."""
        source = self._source
        if isinstance(source, Merged):
            self.ranks |= source.ranks()
            return
        given = source.state_dict(keep_vars=True) if isinstance(source, torch.nn.Module) else source
        for value in given.values() if isinstance(given, Mapping) else ():
            if zero3.is_partitioned(value):
                self.ranks |= zero3.world()
            elif is_sharded(value):
                self.ranks |= ranks_of(value)

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield keys and tensors, as the source yields tensors; a tensor is not kept.

        Raises:
            SchemaMismatch: as `read`.
        """
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
        tensors, places = dict[str, torch.Tensor](), dict[str, Place]()
        devices: dict[str, torch.device] = {}
        for key, (shape, start, local) in self._streamed(items):
            tensors[key] = torch.empty(local.shape, dtype=local.dtype, device="meta")
            devices[key] = local.device
            if start is not None:
                places[key] = Place(key.partition("\t")[0], shape, start)
        if tensors or not (is_weight_source(self._source) and owns_nothing(self._source)):
            check_all({key.partition("\t")[0] for key in tensors})
        tied = {}
        if isinstance(self._source, Merged):
            tied = dict(self._source.tied)
            self.ranks |= self._source.ranks()
        return Given(tensors, places, tied, devices)

    def _items(self) -> Mapping[str, Any] | Items:
        """Return the source's tensors: all of them, or an iterator."""
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
        """Yield what this process has of each tensor, under the names that are published."""
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
        if zero3.is_partitioned(value):
            self.ranks |= zero3.world()
            part = zero3.part_of(name, value)
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
        elif not layout.fits(tensor, local.shape):
            raise SchemaMismatch(
                f"{name!r} is sharded otherwise than when this publisher was opened: {layout}, but "
                f"{Layout.described(tensor, local.shape)} now; open a publisher anew, with resume"
            )
        return layout.pieces(local)

    def _keyed(self, name: str, pieces: Sequence[Piece], first: int) -> Iterator[tuple[str, Piece]]:
        """Yield pieces with their keys.

        Raises:
            SchemaMismatch: a piece is another one than at the first call.
        """
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

    def _check_not_empty(self, found: Mapping[str, Sequence[Piece]], items: Mapping[str, Any]) -> None:
        """Raises SchemaMismatch where tensors have no elements because these are elsewhere."""
        empty = [name for name, pieces in found.items() if any(0 in each.shape for each in pieces)]
        if empty:
            source = self._source
            given = dict(source.named_parameters()) if isinstance(source, torch.nn.Module) else items
            for name, tensor in given.items():
                if isinstance(tensor, torch.Tensor) and zero3.is_placeholder(tensor):
                    raise SchemaMismatch(f"{name!r} is a placeholder without elements; {zero3.ADVICE}")
        if len(empty) == len(found):
            raise SchemaMismatch(
                f"none of the {len(found)} tensors has an element, such as {empty[0]!r}; is this a model "
                f"whose weights are elsewhere? {zero3.ADVICE}"
            )


def _of_parts(name: str, parts: Sequence[LocalPart]) -> list[Piece]:
    """Return the pieces of several parts of a tensor.

    Raises:
        SchemaMismatch: one is no part of it, or is all of it beside others.
    """
    found = [each for part in parts for each in part.pieces(name, plain(name, part.tensor))]
    if len(found) > 1 and any(each.start is None for each in found):
        raise SchemaMismatch(f"one of the {len(parts)} parts of {name!r} is all of it")
    if len({each.shape for each in found}) > 1:
        raise SchemaMismatch(f"the parts of {name!r} are of tensors of different shapes")
    return found


def _model(model: torch.nn.Module, stored: Collection[str], dtype: torch.dtype | None) -> Any:
    """Return what of a model is published: without DeepSpeed's engine, and as what the model computes with.

    Raises:
        SchemaMismatch: it has codes that nothing can decode, and they are not published as they are.
    """
    inner = without_engine(model)
    for path, module in inner.named_modules() if dtype is not None else ():
        check_decodable(f"{path}." if path else "", module)
    return Merged(inner, stored, dtype) if is_computed(inner) else inner


def changed(name: str, was: TensorSpec | None, now: TensorSpec | None) -> SchemaMismatch:
    """Say that a tensor is no longer what it was when the publisher was opened; None where there is none."""
    if was is None:
        return SchemaMismatch(f"tensor {name!r} was not there when this publisher was opened")
    if now is None:
        return SchemaMismatch(f"tensor {name!r} is gone: it was {was.kind} when this publisher was opened")
    return SchemaMismatch(f"tensor {name!r} was {was.kind}, but is {now.kind} now")
