"""What a model makes of its weights beside them, and must make again when they change.

Multi-head latent attention splits one projection into two that it multiplies separately; some attention
kernels keep their sinks in float32. Loading makes most of these, in `process_weights_after_loading`, and the
first forward pass makes some. Versions of vLLM answer that hook with new tensors; here their contents move
into the old ones, whose addresses CUDA graphs have captured.

`slots` finds every tensor that a model's modules hold, wherever they keep it: in lists, objects, closures.
What is made of weights is told from constants by when it came to be: a constant is there as soon as the model
is constructed, and loading leaves it alone.
"""

import functools
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from patchstore.errors import LoadFailed, UsageError
from patchstore.tensors.bits import bits
from vllm_plugin.map.provenance import within

Step = tuple[Literal["attribute", "item"], Any]
"""From a value to one that it holds: an attribute's name, or a key or index."""

_FOREIGN = frozenset({*sys.stdlib_module_names, "torch", "numpy", "triton"})
"""Packages whose objects are not looked into: they hold no weights, or those that they were called with."""

_APART = ("vllm.config", "vllm.compilation", "vllm.distributed")
"""Parts of vLLM that modules refer to and that lead to other models, or to nothing."""

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})

KV_CACHE = "kv_cache"
NO_WEIGHTS = frozenset(
    {
        *(KV_CACHE, "_q_scale", "_k_scale", "_v_scale", "_prob_scale", "_k_scale_cpu", "_v_scale_cpu"),
        # Constants that vLLM 0.26 makes anew in the hook of each attention layer.
        *("q_range", "k_range", "v_range"),
    }
)
"""What vLLM gives attention layers beside their weights: a cache, and scales of what is in it. If these were
taken for weights, each update would call the hooks of all attention layers while generation is paused."""


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One place that holds a tensor."""

    path: str
    """From the model, as one would write it in Python."""
    module: torch.nn.Module
    """The registered module that it was found in."""
    way: tuple[Step, ...]
    """From there to the tensor. Followed anew each time, since what lies between may be replaced."""

    @property
    def is_parameter(self) -> bool:
        return self.way[0] == ("attribute", "_parameters")

    def get(self) -> torch.Tensor | None:
        found = self._follow(self.way)
        return found if isinstance(found, torch.Tensor) else None

    def put(self, tensor: torch.Tensor) -> None:
        """Put a tensor there. What is in a tuple stays."""
        holder, (kind, key) = self._follow(self.way[:-1]), self.way[-1]
        if kind == "attribute":
            object.__setattr__(holder, key, tensor)
        elif isinstance(holder, dict | list):
            holder[key] = tensor

    def _follow(self, way: tuple[Step, ...]) -> Any:
        found: Any = self.module
        for kind, key in way:
            try:
                found = object.__getattribute__(found, key) if kind == "attribute" else found[key]
            except (AttributeError, LookupError, TypeError):
                return None
        return found


def slots(model: torch.nn.Module) -> Iterator[Slot]:
    """Yield what the modules of a model hold; each object is looked into once."""
    registered = {id(module) for module in model.modules()}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for kind in ("_parameters", "_buffers"):
            for name, tensor in vars(module)[kind].items():
                if tensor is not None and name not in NO_WEIGHTS:
                    yield Slot(within(path, name), module, (("attribute", kind), ("item", name)))
        # A list of what is ahead, so that a chain of objects is no chain of calls.
        ahead: list[tuple[str, tuple[Step, ...], Any]] = [
            (within(path, name), (("attribute", name),), value)
            for name, value in vars(module).items()
            if name not in {"_parameters", "_buffers", "_modules"}
        ]
        while ahead:
            where, way, value = ahead.pop()
            if way[-1][1] in NO_WEIGHTS:
                continue
            if isinstance(value, torch.Tensor):
                yield Slot(where, module, way)
            elif type(value) not in _PLAIN and id(value) not in seen and id(value) not in registered:
                seen.add(id(value))
                ahead += [(where + text, (*way, *steps), each) for text, steps, each in _inside(value)]


def _inside(value: Any) -> Iterator[tuple[str, tuple[Step, ...], Any]]:
    """Yield what an object holds: how one writes that, how to get there, and the value."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", (("item", key),), each) for key, each in list(value.items()))
    elif isinstance(value, list | tuple):
        yield from ((f"[{number}]", (("item", number),), each) for number, each in enumerate(value))
    elif isinstance(value, functools.partial):
        for name in ("func", "args", "keywords"):
            yield f".{name}", (("attribute", name),), getattr(value, name)
    elif isinstance(value, types.MethodType):
        yield ".__self__", (("attribute", "__self__"),), value.__self__
    elif isinstance(value, types.FunctionType):
        for number, cell in enumerate(value.__closure__ or ()):
            way: tuple[Step, ...] = (
                ("attribute", "__closure__"),
                ("item", number),
                ("attribute", "cell_contents"),
            )
            try:
                yield f".{value.__code__.co_freevars[number]}", way, cell.cell_contents
            except ValueError:
                continue  # not bound yet
    elif isinstance(value, torch.nn.Module) or (not isinstance(value, type) and _is_of_model(type(value))):
        for name in {*getattr(value, "__dict__", ()), *_slot_names(type(value))}:
            try:
                # As it is stored: a config of transformers does not say itself what its layers differ in.
                held = object.__getattribute__(value, name)
            except AttributeError:
                continue
            yield f".{name}", (("attribute", name),), held


def _is_of_model(kind: type) -> bool:
    name = kind.__module__
    return name.partition(".")[0] not in _FOREIGN and not name.startswith(_APART)


def _slot_names(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        yield from (names,) if isinstance(names, str) else names


_HOOK = "process_weights_after_loading"
_WATCHED = "watched_by_patchstore"
"""Marks a function that `watch_loading` put there. With OpenTelemetry vLLM wraps its own too."""

_Seen = dict[int, tuple["weakref.ref[torch.Tensor]", int | None]]
"""Tensors by id, with the number of writes to each."""


@dataclass
class _Loading:
    """What a model held beside its parameters when it had just been loaded."""

    parameters: set[str]
    """Names of those that it was constructed with."""
    constants: _Seen
    aliases: list[tuple[Slot, torch.Tensor]] = field(default_factory=list)
    """Places that held a parameter or a view of one, and that."""
    made: list[Slot] = field(default_factory=list)
    """Places of tensors that loading made, or wrote to."""
    is_known: bool = True
    """Whether the model was seen when it was constructed, so that constants are none of `made`."""


_loadings: "weakref.WeakKeyDictionary[torch.nn.Module, _Loading]" = weakref.WeakKeyDictionary()


def watch_loading() -> None:
    """Have vLLM's loaders say when a model was constructed and when it is loaded. Again changes nothing."""
    from vllm.model_executor.model_loader import base_loader

    construct, process = base_loader.initialize_model, base_loader.process_weights_after_loading
    if _WATCHED in vars(construct):
        return

    @functools.wraps(construct)
    def constructing(*args: Any, **kwargs: Any) -> torch.nn.Module:
        model: torch.nn.Module = construct(*args, **kwargs)
        constructed(model)
        return model

    @functools.wraps(process)
    def processing(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        answer = process(model, *args, **kwargs)
        loaded(model)
        return answer

    setattr(constructing, _WATCHED, True)
    base_loader.initialize_model, base_loader.process_weights_after_loading = constructing, processing


def constructed(model: torch.nn.Module) -> None:
    """Remember what a model has before it is loaded."""
    held = [tensor for slot in slots(model) if (tensor := slot.get()) is not None]
    constants = {id(tensor): (weakref.ref(tensor), _num_writes(tensor)) for tensor in held}
    _loadings[model] = _Loading({*_parameters(model)}, constants)


def loaded(model: torch.nn.Module) -> None:
    """Find what loading made of its weights; called before the first forward pass."""
    known = _loadings.get(model)
    if known is None:
        known = _loadings[model] = _Loading({*_parameters(model)}, {}, is_known=False)
    known.aliases, known.made = [], []
    own = {name: each for name, each in _parameters(model).items() if name in known.parameters}
    memory = {each.untyped_storage()._cdata for each in own.values() if each.numel()}
    for slot in slots(model):
        tensor = slot.get()
        if tensor is None or not tensor.numel() or slot.path in own:
            continue
        if tensor.untyped_storage()._cdata in memory:
            if not slot.is_parameter:
                known.aliases.append((slot, tensor))
            continue
        there, num_writes = known.constants.get(id(tensor), (None, None))
        if there is None or there() is not tensor or num_writes is None or num_writes != _num_writes(tensor):
            known.made.append(slot)
    # Nothing asks for them again.
    known.constants = {}


def _parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def _num_writes(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


class Derived:
    """The tensors of some models that are made of their weights, and what makes them."""

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        refresh: Callable[[torch.nn.Module], object],
        *,
        hooks: bool = True,
    ) -> None:
        """Take over loaded models. Without `hooks` each update loads the model as vLLM does."""
        self._refresh = refresh
        self._aliases: list[tuple[Slot, torch.Tensor]] = []
        self._casts: list[tuple[Slot, torch.Tensor, torch.Tensor]] = []
        """Places that hold a copy in another dtype of what they first held: the place, that, and the copy."""
        self._made: dict[torch.nn.Module, list[Slot]] = {}
        self._orphans: list[Slot] = []
        """What loading made in modules without a hook."""
        self._unknown: set[torch.nn.Module] = set()
        """Modules of models of which it is not known what is constant."""
        for model in models:
            if model not in _loadings:
                loaded(model)
            found = _loadings[model]
            self._aliases += found.aliases
            owners = _owners(model)
            for slot in found.made if hooks else ():
                owner = owners[slot.module]
                if owner is not None:
                    self._made.setdefault(owner, []).append(slot)
                    if not found.is_known:
                        self._unknown.add(owner)
                elif found.is_known:
                    self._orphans.append(slot)
        self.names = frozenset(slot.path for made in self._made.values() for slot in made)
        """Of the tensors, as `named_parameters` would call them."""

    def storages(self) -> Iterator[tuple[str, torch.UntypedStorage]]:
        """Yield where hooks make tensors again: path of a tensor, and its memory now."""
        for slot in (slot for made in self._made.values() for slot in made):
            if (tensor := slot.get()) is not None:
                yield slot.path, tensor.untyped_storage()

    @torch.no_grad()
    def verify(self, covered: Collection[int]) -> None:
        """Make all of them once more from the same weights, and refuse what does not come out the same.

        Leaves out storages that the checkpoint's tensors are copied to: `covered`.
        """
        found = [slot for slot in self._orphans if _storage(slot) not in covered]
        for module, made in list(self._made.items()):
            left = [slot for slot in made if _storage(slot) not in covered]
            if not left:
                del self._made[module]
                continue
            old = {slot: tensor.clone() for slot in left if (tensor := slot.get()) is not None}
            before = {slot: _state(slot) for slot in left}
            try:
                with self._anew(module, left):
                    touched = [slot for slot in old if _state(slot) != before[slot]]
                    wrong = [slot for slot in touched if not _equal(slot.get(), old[slot])]
                for slot, is_equal in self._uncounted(module, old, left, {*touched}):
                    touched.append(slot)
                    wrong += [] if is_equal else [slot]
            except BaseException:
                # Some may be what the hook made of them, or have a bit turned.
                for slot, tensor in old.items():
                    _write(slot.get(), tensor)
                raise
            for slot in wrong:
                _write(slot.get(), old[slot])
            found += wrong
            if module not in self._unknown:
                found += [slot for slot in old if slot not in touched]
            self._made[module] = touched
        if found:
            tensor = found[0].get()
            raise UsageError(
                f"the model keeps {len(found)} tensors that loading made and that cannot be made again when "
                f"weights change, such as {found[0].path!r} ({_shape(tensor)}); choose another backend for "
                "the layer (--attention-backend, --moe-backend)"
            )
        self.notice()

    def _uncounted(
        self,
        module: torch.nn.Module,
        old: dict[Slot, torch.Tensor],
        made: Sequence[Slot],
        counted: Collection[Slot],
    ) -> list[tuple[Slot, bool]]:
        """Return what else a module's hook makes, and whether that is `old` again.

        torch counts no write through `data`, and none in inference mode. So a bit of each element is turned
        before the hook is called: what has other bits afterwards was written. All else is as before.
        """
        turned = {
            slot: _turned(tensor)
            for slot, tensor in old.items()
            if slot not in counted and 0 not in tensor.stride()
        }
        if not turned:
            return []
        for slot, tensor in turned.items():
            _write(slot.get(), tensor)
        with self._anew(module, made):
            found = [
                (slot, _equal(slot.get(), old[slot]))
                for slot, tensor in turned.items()
                if not _equal(slot.get(), tensor)
            ]
        for slot in turned:
            _write(slot.get(), old[slot])
        # Once more, for what the hook made of what was turned.
        with self._anew(module, made):
            return found

    def notice(self) -> None:
        """Find copies that forward passes put in the place of weights; called before weights change."""
        for number, (slot, first) in enumerate(self._aliases):
            now = slot.get()
            if now is first or now is None or not now.numel():
                continue
            if now.untyped_storage()._cdata == first.untyped_storage()._cdata:
                self._aliases[number] = slot, now
                continue
            if any(now is copy for _, _, copy in self._casts):
                continue
            if now.shape != first.shape or not torch.equal(bits(now), bits(first.to(now.dtype))):
                raise UsageError(
                    f"the model keeps {slot.path!r} ({_shape(now)}), which it made of a weight and which "
                    "cannot be made again when that changes; choose another --attention-backend"
                )
            self._casts.append((slot, first, now))

    @torch.no_grad()
    def refresh(self) -> None:
        """Make all of them again, in the same memory."""
        for module, made in self._made.items():
            with self._anew(module, made):
                pass
        for _, first, copy in self._casts:
            _write(copy, first)

    @contextmanager
    def _anew(self, module: torch.nn.Module, made: Sequence[Slot]) -> Iterator[None]:
        """Call a module's hook. Inside of the block what it made is in its places, after it in old memory."""
        # The hook may give a tensor other memory, by its `data`.
        before = {slot: (tensor, tensor.detach()) for slot in made if (tensor := slot.get()) is not None}
        try:
            with _scales_kept(module):
                self._refresh(module)
            after = {slot: None if (now := slot.get()) is None else now.detach() for slot in before}
            yield
        finally:
            # Also after a failure, so that it is the old memory that is put right when that is undone.
            for slot, (old, memory) in before.items():
                if old.data_ptr() != memory.data_ptr() or old.shape != memory.shape:
                    old.data = memory
                slot.put(old)
        for slot, (old, _) in before.items():
            new = after[slot]
            if new is None or (new.shape, new.dtype) != (old.shape, old.dtype):
                raise LoadFailed(f"{slot.path} was {_shape(old)} and is {_shape(new)}")
            if new.data_ptr() != old.data_ptr():
                _write(old, new)


def _owners(model: torch.nn.Module) -> dict[torch.nn.Module, torch.nn.Module | None]:
    """Return for each module the nearest one, itself or above, that has the hook."""
    found: dict[str, torch.nn.Module | None] = {}
    owners: dict[torch.nn.Module, torch.nn.Module | None] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        above = found.get(path.rpartition(".")[0]) if path else None
        found[path] = module if hasattr(module, _HOOK) else above
        owners.setdefault(module, found[path])
    return owners


@contextmanager
def _scales_kept(module: torch.nn.Module) -> Iterator[None]:
    """Keep the scales of keys and values, which the hook sets to 1, as requests may have calibrated them."""
    values = {
        name: value for name, value in vars(module).items() if name.endswith(("_scale_float", "_scale_cpu"))
    }
    tensors = {
        name: each.clone() for name, each in module._buffers.items() if each is not None and "_scale" in name
    }
    try:
        yield
    finally:
        vars(module).update(values)
        for name, then in tensors.items():
            now = module._buffers[name]
            if now is not None:
                now.copy_(then)


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the lowest bit of each element turned: other numbers, and none far off."""
    return (bits(tensor) ^ 1).view(tensor.dtype).view(tensor.shape)


def _write(tensor: torch.Tensor | None, value: torch.Tensor) -> None:
    """Copy to a tensor that a forward pass may have made, and that only such may write to otherwise."""
    assert tensor is not None
    with torch.inference_mode(tensor.is_inference()):
        tensor.copy_(value)


def _storage(slot: Slot) -> int | None:
    tensor = slot.get()
    return None if tensor is None else tensor.untyped_storage().data_ptr()


def _state(slot: Slot) -> tuple[int, int | None] | None:
    tensor = slot.get()
    return None if tensor is None else (id(tensor), _num_writes(tensor))


def _equal(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    if one is None or (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(bits(one.contiguous()), bits(other.contiguous()))


def _shape(tensor: torch.Tensor | None) -> str:
    return "gone" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
