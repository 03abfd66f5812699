"""The weights that a model serves, mapped to a checkpoint's names: traced, read and digested.

Nothing here writes to them; `weights` does.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from patchstore.encodings.context import Chosen, Tiles, Tiling, is_coded
from patchstore.errors import PatchstoreError, SchemaMismatch, UsageError
from patchstore.format import hashing, mismatch, records
from patchstore.format.records import Schema, TensorSpec
from patchstore.read.deltas import Deltas
from patchstore.tensors import state_digest
from patchstore.tensors.bits import TORCH_DTYPES, bits, raw_bytes
from patchstore.tensors.state_digest import Sums
from vllm_plugin.batches import Comparison, Piece
from vllm_plugin.mapping import RankSlices, SliceSums, WeightMap, share
from vllm_plugin.pairing import ADVICE
from vllm_plugin.post_load import Derived
from vllm_plugin.reachable import NO_WEIGHTS
from vllm_plugin.regions import Region, View, locate, pieces, positions
from vllm_plugin.runtime_bits import PIECE, UNMATCHED, flat, is_widened, narrowed
from vllm_plugin.tiles import Box, are_cut, boxes, numbers
from vllm_plugin.trace import Trace, trace, untraced
from vllm_plugin.transfers import BLOCK_BYTES, Transfers

Load = Callable[[torch.nn.Module, Iterator[tuple[str, torch.Tensor]]], object]
"""Calls a model's loader, in the surroundings that loaders expect; may return a set of weights left alone."""

NUM_SAMPLES = 64
"""Elements of each tensor that are compared with the checkpoint when a map is new."""


class MappedWeights:
    """The parameters and buffers of one rank: of the model, and of a draft model that comes with it."""

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        load: Load,
        derived: Derived,
        *,
        fits: Callable[[Schema], object] = bool,
        load_traced: Load | None = None,
        is_calculated: bool = False,
    ) -> None:
        """Take over models as they are.

        Args:
            fits: raises if a run's tensors are of another form than the models'.
            load_traced: calls a model's loader for a trace; None for `load`.
            is_calculated: whether vLLM quantises weights while it loads them, so that nothing is copied.
        """
        self._models = tuple(models)
        self._is_calculated = is_calculated
        self._fits = fits
        self._load, self._load_traced = load, load_traced or load
        self._is_quantised = load_traced is not None
        self._derived = derived
        self._map: WeightMap | None = None
        self._boxes: Mapping[str, list[Box] | None] = {}
        self._alike: Mapping[str, int] = {}
        """The same number for names of which this rank holds the same boxes."""
        self.cut: frozenset[str] = frozenset()
        """Names of which a coded delta is not decoded from what is served: regions cut through tiles, or some
        part is served nowhere, so that no digest tells whether the rest is right."""
        self.dropped: Mapping[str, str] = {}
        """Names without a tensor of their own in the model, as it has one for them and another name -> that
        other name. vLLM ties an output layer to the embedding where both were equal when it started."""
        self._watched: set[str] = set()
        self._places: dict[str, tuple[object, ...]] = {}
        # The same as columns, one for each place of a module: see `has_moved`.
        self._owners: Sequence[dict[str, torch.Tensor | None]] = []
        self._keys: Sequence[str] = []
        self._addresses: Sequence[int] = []
        self.device = next(iter(models[0].parameters())).device
        self._transfers = Transfers(self.device)
        self.staging_bytes = 0
        """Of the device's memory, that staging took last at its peak, with what is staged; 0 on the CPU."""

    # The map.

    def trace(self, schema: Schema) -> Trace:
        """Trace the models' loaders for a schema, and prove what is made of weights. All stays as it is.

        Raises:
            SchemaMismatch: a loader does not take these names, or leaves a parameter as it is.
            UsageError: the loader cannot be traced, or the model keeps tensors that are made of weights and
                that it cannot make again.
        """
        self._fits(schema)
        if self._is_calculated:
            self._derived.notice()
            return untraced(self._models, schema)
        traced = trace(self._target_last(), schema, self._load_traced)
        if self._is_quantised and traced.computed:
            raise self._calculated(schema, traced)
        bare = {
            n: count
            for n, count in traced.uncovered.items()
            if n not in self._derived.names and n.rpartition(".")[2] not in NO_WEIGHTS
        }
        if bare:
            listed = ", ".join(f"{name!r} ({count:,} elements)" for name, count in sorted(bare.items())[:5])
            if any(".base_layer." in name for name in bare):
                raise UsageError(
                    f"vLLM's loader does not reach {len(bare):,} weights that LoRA wraps, such as {listed}: "
                    "start vllm without --enable-lora, or with --lora-target-modules and only modules of "
                    "linear layers, such as qkv_proj o_proj, so that experts stay as they are"
                )
            raise SchemaMismatch(
                mismatch.explain(
                    schema,
                    f"{len(bare):,} parameters of the model get nothing from this run's "
                    f"{len(schema.tensors):,} tensors, such as {listed}: publish them too, or serve a model "
                    "without them",
                )
            )
        reached = {index for found in traced.regions.values() for index, _ in found}
        reached = reached.union(*(indices for _, indices in traced.computed))
        self._derived.verify({traced.runtimes[index].storage.data_ptr() for index in reached})
        return traced

    def _calculated(self, schema: Schema, traced: Trace) -> PatchstoreError:
        """Say what keeps tensors of a quantised checkpoint from being written where they are served."""
        specs = schema.by_name()
        for group, indices in traced.computed:
            served = {traced.runtimes[index].dtype for index in indices}
            for name in sorted(group):
                if TORCH_DTYPES[specs[name].dtype] not in served:
                    has = ", ".join(sorted(map(str, served)))
                    return SchemaMismatch(
                        f"the run has {name!r} as {specs[name].dtype}, and this server as {has}: the lists "
                        "of what is not quantised (modules_to_not_convert, or ignore, in "
                        "quantization_config) differ; start vllm from the run's own checkpoint"
                    )
        names = sorted(name for group, _ in traced.computed for name in group)
        return UsageError(
            f"vLLM calculates something else from {len(names):,} tensors of this quantised checkpoint, such "
            f"as {names[0]!r}, so versions cannot be written where they are served: {ADVICE}"
        )

    def share(self, traced: Trace) -> RankSlices:
        return share(traced)

    def follow(self, mapped: WeightMap) -> None:
        """Use a map that all ranks agreed on, from here on."""
        self._map = mapped
        specs = mapped.schema.by_name()
        places = {
            name: _place(each) for name, each in self._models[0].named_parameters(remove_duplicate=False)
        }
        several = {place for place, count in Counter(places.values()).items() if count > 1}
        # Not what a draft model shares with its target: vLLM always takes the target's.
        self.dropped = {
            name: other for name, (alias, other) in mapped.aliases.items() if places.get(alias) in several
        }
        self._boxes = {
            name: boxes(specs[name], found)
            for name, found in mapped.regions.items()
            if found and is_coded(specs[name].dtype)
        }
        kinds: dict[tuple[records.Box, ...], int] = {}
        self._alike = {
            name: kinds.setdefault(tuple(box.elements for box in found), len(kinds))
            for name, found in self._boxes.items()
            if found
        }
        # What cannot be proved must not say what a delta means either.
        self.cut = frozenset(n for n, found in self._boxes.items() if found is None or n in mapped.partial)
        # Other buffers may move: vLLM makes some anew, such as a cache of rotations in another dtype.
        self._watched = {name for index in self.written() for name in mapped.runtimes[index].names}
        self._places = self._places_now()
        slots = [
            (owner, key, tensor.data_ptr())
            for model in self._models
            for module_name, module in model.named_modules()
            for owner in (module._parameters, module._buffers)
            for key, tensor in owner.items()
            if tensor is not None and f"{module_name}.{key}".lstrip(".") in self._watched
        ]
        self._owners = [owner for owner, _, _ in slots]
        self._keys = [key for _, key, _ in slots]
        self._addresses = [address for _, _, address in slots]

    @property
    def map(self) -> WeightMap:
        assert self._map is not None
        return self._map

    def moved(self) -> list[str]:
        """Names of parameters and buffers whose memory is not what was traced."""
        now = self._places_now()
        return sorted(n for n in now.keys() | self._places.keys() if now.get(n) != self._places.get(n))

    def has_moved(self) -> bool:
        """Whether `moved` would name any, as far as can be told quickly: generation waits for the answer."""
        # `map` calls both without Python in between, and vLLM's classes of parameters would have every call
        # pass through Python: each takes several times as long.
        held: Iterator[Any] = map(dict.get, self._owners, self._keys)
        with torch._C.DisableTorchFunctionSubclass():
            try:
                return [*map(torch.Tensor.data_ptr, held)] != self._addresses
            except TypeError:  # None: it is gone.
                return True

    def _places_now(self) -> dict[str, tuple[object, ...]]:
        # See `has_moved`.
        with torch._C.DisableTorchFunctionSubclass():
            return {
                f"{i}.{name}": _place(tensor)
                for i, model in enumerate(self._models)
                for name, tensor in _tensors(model)
                if name in self._watched
            }

    # Reading.

    def slice_sums(self, names: Iterable[str]) -> SliceSums:
        """Digest what this rank holds of these names; those that are calculated are left out."""
        specs = self.map.schema.by_name()
        found: dict[str, list[tuple[View, Sums]]] = {}
        for name in names:
            for index, region in self.map.regions.get(name, ()):
                sums = self._sums(specs[name], index, region)
                found.setdefault(name, []).append((region.source, sums))
        return found

    def _sums(self, spec: TensorSpec, index: int, region: Region) -> Sums:
        flat, total = self._flat(index), Sums()
        for part in pieces(region, PIECE):
            held = flat.as_strided(part.target.shape, part.target.strides, part.target.offset).reshape(-1)
            elements = narrowed(held, spec)
            if not is_widened(held, spec):
                total = total.plus(UNMATCHED)
            if part.source.strides in {(), (1,)}:
                found = state_digest.of_run(part.source.offset, elements)
            else:
                found = state_digest.of_elements(positions(part.source, held.device), elements)
            total = total.plus(found)
        return total

    def serves(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether what this rank holds of copied names is what checkpoint tensors have there."""
        comparison = Comparison(self.pieces(tensors))
        self._transfers.run(comparison.jobs)
        if comparison.shortage is not None:
            raise comparison.shortage
        return not comparison.differs

    def comparison_of_all(self, loaded: Mapping[str, torch.Tensor]) -> Comparison | None:
        """Prepare to compare all copied names with these tensors; None where some are not among them."""
        names = {name for name, found in self.map.regions.items() if found}
        if not loaded.keys() >= names:
            return None
        return Comparison(self.pieces({name: loaded[name] for name in names}))

    def pieces(self, tensors: Mapping[str, torch.Tensor]) -> list[Piece]:
        """Cut what this rank holds of copied names, so that each piece can be copied at once.

        Args:
            tensors: a checkpoint's, by name, contiguous, on the CPU.
        """
        specs, found = self.map.schema.by_name(), list[Piece]()
        for name in sorted(tensors):
            source = bits(tensors[name])
            for index, region in self.map.regions.get(name, ()):
                flat = self._flat(index)
                for part in pieces(region, BLOCK_BYTES // source.element_size()):
                    first = source.storage_offset() + part.source.offset
                    given = source.as_strided(part.source.shape, part.source.strides, first)
                    held = flat.as_strided(part.target.shape, part.target.strides, part.target.offset)
                    found.append(Piece(specs[name], given, held))
        return found

    def misplaced(self, loaded: Mapping[str, torch.Tensor]) -> list[str]:
        """Names of which sampled elements are not where the map says.

        Args:
            loaded: checkpoint tensors that the model was loaded from, contiguous, on the CPU.
        """
        random = torch.Generator().manual_seed(0)
        specs, wrong = self.map.schema.by_name(), []
        for name in sorted(loaded.keys() & self.map.regions.keys()):
            spec, elements = specs[name], bits(loaded[name])
            chosen = torch.randint(max(1, spec.num_elements), (NUM_SAMPLES,), generator=random)
            chosen = torch.unique(chosen)[: spec.num_elements]
            for index, region in self.map.regions[name]:
                inside, mask, target = locate(region, chosen.to(self.device))
                at = chosen[inside] if mask is None else chosen[inside][mask.cpu()]
                if not torch.equal(narrowed(self._flat(index)[target], spec).cpu(), elements[at]):
                    wrong.append(name)
                    break
        return wrong

    def fingerprint(self) -> dict[str, str]:
        """Digest the bits of each parameter and buffer; equal fingerprints mean equal weights."""
        several = len(self._models) > 1
        return {
            (f"draft.{name}" if several and i else name): hashing.digest(raw_bytes(tensor.detach()))
            for i, model in enumerate(self._models)
            for name, tensor in _tensors(model)
        }

    def _tiles(self, name: str) -> Chosen | None:
        """Say which tiles of a part this rank needs; None for all."""
        found = self._boxes[name]
        return None if found is None else lambda tiles: numbers(tiles, found)

    def needs(self, spec: TensorSpec, tiles: Tiling) -> Tiles:
        """Which tiles of a coded part an update of what is served takes, ascending; None for all."""
        if spec.name in self.map.computed or spec.name in self.cut:
            return None
        return numbers(tiles, self._boxes.get(spec.name) or ())

    def cut_by(self, deltas: Deltas) -> set[str]:
        """Names, not in `cut`, of which these deltas have tiles that this rank holds in part.

        A trainer of many processes has small parts, whose tiles are fewer than those of a whole tensor.
        """
        others = self.map.computed | self.cut
        # Tensors of one shape have one tiling, and in most models boxes alike.
        known: dict[tuple[int, int | None], bool] = {}
        found = set()
        for name, tiles in deltas.tilings():
            key = id(tiles), self._alike.get(name)
            if key not in known:
                known[key] = are_cut(tiles, self._boxes.get(name) or ())
            if known[key] and name not in others:
                found.add(name)
        return found

    def gathered(self, name: str) -> torch.Tensor:
        """Return a copied name's tensor, flat, with zeros where this rank has nothing."""
        spec = self.map.schema.by_name()[name]
        found = torch.zeros(spec.num_elements, dtype=TORCH_DTYPES[spec.dtype], device=self.device)
        for index, region in self.map.regions[name]:
            flat = self._flat(index)
            for part in pieces(region, PIECE):
                held = flat.as_strided(part.target.shape, part.target.strides, part.target.offset)
                goal = bits(found).as_strided(part.source.shape, part.source.strides, part.source.offset)
                goal.copy_(narrowed(held, spec))
        return found

    def registered(self) -> set[int]:
        """Runtimes of parameters and buffers: all that a loader may write to, but not the KV cache."""
        names = {name for model in self._models for name, _ in _tensors(model)}
        return {i for i, each in enumerate(self.map.runtimes) if not names.isdisjoint(each.names)}

    def written(self) -> set[int]:
        """Runtimes that any name of the checkpoint reaches."""
        copied = {index for found in self.map.regions.values() for index, _ in found}
        return copied.union(*(indices for _, indices in self.map.groups))

    def _flat(self, index: int) -> torch.Tensor:
        return flat(self.map.runtimes[index])

    def _target_last(self) -> Sequence[torch.nn.Module]:
        # A draft model shares the target's embedding and head, and checkpoints may have other values for
        # those under the draft's names. vLLM loads both before it lets them share, and so keeps the target's.
        return self._models[::-1]


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter and buffer once, under its first name in the model."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
