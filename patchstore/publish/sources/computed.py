"""Weights that are computed when they are read: adapters merged, codes of quantized layers decoded.

PEFT itself merges, into a copy of one layer at a time, and the trainer's weights stay as they are. So any
adapter that PEFT can merge is merged exactly as `merge_and_unload` would: in the same dtypes, and in the same
order where several are active. Where the layer below is quantized, the copy has its decoded weights instead:
PEFT would round the sum to codes again, and the model does not compute with these.

Of a sharded model the ranks gather one adapted layer at a time, and each publishes its part of what PEFT
leaves. A product of matrices may have other bits where it is computed of fewer rows, and so may a norm. So a
rank cannot merge its own rows alone.

bitsandbytes, torchao, HQQ and quanto keep codes and scales in the place of weights, and train what lies
around them. Servers of the model know its weights alone. So the library that made the codes decodes them
here, one layer at a time, in the dtype in which the layer computes.
"""

import copy
import logging
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from patchstore.errors import SchemaMismatch
from patchstore.publish.sources.names import Names, Saved, child_of_peft, each_once, is_of_peft, storage_of
from patchstore.publish.sources.pieces import (
    DEQUANTIZED,
    Layout,
    LocalPart,
    Piece,
    class_of,
    holds_codes,
    is_scale,
    is_sharded,
    local_of,
    plain,
    ranks_of,
    whole,
)

logger = logging.getLogger(__name__)

_INSTEAD = (
    "publish a mapping of merged tensors under the base model's names, such as "
    "copy.deepcopy(model).merge_and_unload().state_dict(), which is updated before each call"
)
_UNTIE = (
    "a checkpoint has one tensor there, and the model computes with two. Give each module a copy of the "
    "weights before adapters are added, with tie_word_embeddings=False for a head; or adapt embeddings and "
    "head both, with ensure_weight_tying=True in the adapter's config"
)
_NUM_MEASURED = 8
"""Passes in which it is measured what rounding leaves of the adapters."""
_NUM_LOGGED = 3
_MUCH = 0.1
"""A relative error of what adapters add that is worth a warning."""


class _Adapted(NamedTuple):
    """A module that PEFT put in place of one of the model's, and that merges something into it."""

    path: str
    """With what wrappers add to it, and a dot."""
    wrapper: Any
    tensors: dict[str, torch.Tensor]
    """What it adapts, by the names that are published, before it is merged; without quantized layers."""

    def adapter(self) -> frozenset[object]:
        found = dict(self.wrapper.named_parameters()) | dict(self.wrapper.named_buffers())
        return frozenset(
            _place(name, each)
            for name, each in found.items()
            if each.numel() and {"base_layer", "original_module"}.isdisjoint(name.split("."))
        )


class _Apart(NamedTuple):
    """What a model is made of."""

    plain: dict[str, torch.Tensor]
    """What is published as it is, by the names that are published."""
    adapted: list[_Adapted]
    coded: list[tuple[str, torch.nn.Module]]
    """Quantized layers, by path with a dot."""


def is_computed(model: torch.nn.Module) -> bool:
    """Whether something of a model's weights is computed when they are read."""
    return any(is_of_peft(each) or _is_adapter(each) or is_coded(each) for each in model.modules())


class Merged:
    """A model of which each pass yields what it computes with, under the names that it has without PEFT.

    Active adapters are merged, and none where they are disabled. Quantized layers are decoded.
    """

    def __init__(self, model: torch.nn.Module, stored: Collection[str], dtype: torch.dtype | None) -> None:
        self._model, self._stored, self._dtype = model, stored, dtype
        self.served: Mapping[str, torch.dtype] = {}
        """In which dtype each tensor is served; `dtype` for others."""
        self._names = Names(model)
        self._saved = Saved(model, self._names.of)
        self.tied: dict[str, str] = {}
        """Further names of tensors -> the ones that they are under, as the last pass found them."""
        self._num_passes = 0
        self._said: list[str] = []

    def ranks(self) -> set[int]:
        return set[int]().union(*map(ranks_of, self._model.parameters()))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | list[LocalPart]]]:
        """Yield tensors; those that are computed one layer at a time.

        Of a sharded model all ranks of its mesh must take the same steps: a layer is gathered between them.
        """
        apart = _Apart({}, [], [])
        self._take_apart("", self._model, apart)
        _check_users(apart)
        found = dict(apart.plain)
        for each in apart.adapted:
            found |= each.tensors
        pieces = {name: _pieces(name, each) for name, each in found.items()}
        once, self.tied = each_once(pieces, self._stored, self._saved.leaves_out)
        for name in once:
            if name in apart.plain:
                yield name, found[name].detach()
        for path, module in apart.coded:
            for name, tensor in decoded(path, module).items():
                yield self._names.of(path + name), tensor
        lost = self._measures()
        shared: dict[str, torch.Tensor] = {}
        for each in apart.adapted:
            for name, tensor in self._merged(each, lost):
                kept = self.tied.get(name, name)
                if kept in shared:
                    _check_equal(name, tensor, kept, shared[kept])
                    continue
                if kept in self.tied.values():
                    shared[kept] = tensor
                yield kept, _part(name, tensor, found[name]) if is_sharded(found.get(name)) else tensor
        if lost is not None and (line := lost.line()) and line not in self._said:
            self._said.append(line)
            logger.log(logging.WARNING if lost.overall > _MUCH else logging.INFO, "%s", line)

    def _take_apart(self, path: str, module: Any, apart: _Apart) -> None:
        child = child_of_peft(module)
        if child is not None:
            _check_wrapper(module)
            self._take_apart(f"{path}{child}.", module._modules[child], apart)
        elif _is_adapter(module):
            inner, merges = _inside(module)
            if not merges:
                self._take_apart(path, inner, apart)
                return
            tensors = {self._names.of(path + name): each for name, each in _state(path, inner).items()}
            apart.adapted.append(_Adapted(path, module, tensors))
        elif is_of_peft(module):
            raise SchemaMismatch(
                f"{path[:-1]!r} is a {class_of(module)}, which cannot be merged into the model's weights; "
                "have servers load the adapter themselves"
            )
        else:
            if is_coded(module):
                apart.coded.append((path, module))
            else:
                self._add_plain(path, module, apart.plain)
            for name, each in module._modules.items():
                if each is not None:
                    self._take_apart(f"{path}{name}.", each, apart)

    def _add_plain(self, path: str, module: torch.nn.Module, plain: dict[str, torch.Tensor]) -> None:
        """Add what a module itself has, or raise SchemaMismatch where a name is another tensor's already."""
        for own, tensor in _own(path, module).items():
            name = self._names.of(path + own)
            if plain.setdefault(name, tensor) is not tensor:
                raise SchemaMismatch(
                    f"two tensors would be published as {name!r}; what wrappers add to names is taken off"
                )

    def _merged(self, adapted: _Adapted, lost: "_Lost | None") -> Iterator[tuple[str, torch.Tensor]]:
        """Merge a copy of a module, and yield the tensors by the names that are published."""
        path = adapted.path
        before: dict[str, torch.Tensor] = {}
        exact: dict[str, torch.Tensor] = {}
        with torch.no_grad(), warnings.catch_warnings():
            # PEFT says so where an adapter is merged already.
            warnings.simplefilter("ignore")
            wrapper = _copied(path, adapted.wrapper)
            try:
                if lost is not None:
                    wide = copy.deepcopy(wrapper)
                    before = {name: each.clone() for name, each in _inside(wide)[0].state_dict().items()}
                    _widen(wide, lambda _: torch.float32)
                    exact = _left_of(wide).state_dict()
                    del wide
                _widen(wrapper, lambda own: self._served(self._names.of(path + own)))
                merged = _left_of(wrapper).state_dict()
            except torch.OutOfMemoryError:
                # It says how much is free, and the next call may succeed.
                raise
            except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as exc:
                where = self._names.of(f"{path}weight").removesuffix(".weight")
                raise SchemaMismatch(f"PEFT cannot merge the adapter of {where!r}: {exc!r}") from exc
        names = {own: self._names.of(path + own) for own in merged}
        if missing := adapted.tensors.keys() - names.values():
            raise SchemaMismatch(
                f"PEFT renames {min(missing)!r} when it merges, which is not known here; {_INSTEAD}"
            )
        for own, tensor in merged.items():
            if lost is not None:
                served = self._served(names[own]) or tensor.dtype
                lost.add(names[own], served, before[own], tensor, exact[own])
            yield names[own], tensor

    def _measures(self) -> "_Lost | None":
        """Return what measures the rounding of this pass, where that is wanted."""
        self._num_passes += 1
        distributed = torch.distributed
        is_other = distributed.is_available() and distributed.is_initialized() and distributed.get_rank() > 0
        # The first pass shows what there is, and the second one is the snapshot.
        if is_other or not 1 < self._num_passes <= _NUM_MEASURED or len(self._said) == _NUM_LOGGED:
            return None
        return _Lost()

    def _served(self, name: str) -> torch.dtype | None:
        return self.served.get(name, self._dtype)


class _Lost:
    """How much of what adapters add is lost where the sums are rounded."""

    def __init__(self) -> None:
        self._served: set[str] = set()
        self._added = self._lost = self._worst = 0.0
        self._name = ""

    def add(
        self,
        name: str,
        served: torch.dtype,
        before: torch.Tensor,
        merged: torch.Tensor,
        exact: torch.Tensor,
    ) -> None:
        """Compare a tensor before and after the merge, as it is served, with the sum in float32."""
        if not merged.is_floating_point():
            return
        self._served.add(str(served))
        added = exact.float() - before.float()
        lost = merged.to(served).float() - before.to(served).float() - added
        size, error = float(added.norm()), float(lost.norm())
        if size:
            self._added, self._lost = self._added + size**2, self._lost + error**2
            if error / size > self._worst:
                self._worst, self._name = error / size, name

    @property
    def overall(self) -> float:
        return float((self._lost / self._added) ** 0.5) if self._added else 0.0

    def line(self) -> str:
        """Return what to say; nothing where adapters add nothing, or nothing is lost."""
        if not self._worst:
            return ""
        return (
            f"what adapters add to the weights is published in {', '.join(sorted(self._served))} with a "
            "relative error of "
            f"{self.overall:.2g} over all layers, at worst {self._worst:.2g} in {self._name!r}: it is "
            "rounded together with the weights, which are larger. The error falls as adapters learn; "
            "dtype=torch.float32 avoids it, in twice the bytes"
        )


def _is_adapter(module: torch.nn.Module) -> bool:
    """Whether this is what PEFT puts in place of one of the model's modules."""
    kind = type(module)
    is_layer = "base_layer" in module._modules and callable(getattr(kind, "merge", None))
    return is_layer or hasattr(kind, "unload_and_optionally_merge_module")


def _check_wrapper(wrapper: Any) -> None:
    """Raises SchemaMismatch where what PEFT put around a model says that nothing can be merged."""
    configs = getattr(wrapper, "peft_config", {}).values()
    if any(getattr(config, "is_prompt_learning", False) for config in configs):
        raise SchemaMismatch(
            "the model learns a prompt, which is no part of its weights and cannot be merged; servers "
            "load such an adapter themselves"
        )
    check = getattr(type(wrapper), "_check_merge_allowed", None)
    try:
        if check is not None:
            check(wrapper)
    except ValueError as exc:
        raise SchemaMismatch(f"PEFT cannot merge these adapters: {exc}") from exc


def _own(path: str, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    kept = module._buffers.keys() - module._non_persistent_buffers_set
    found = module._parameters | {name: each for name, each in module._buffers.items() if name in kept}
    for name, each in found.items():
        if hasattr(each, "ds_id"):
            raise SchemaMismatch(
                f"{path + name!r} is sharded by DeepSpeed, and adapters are merged of whole tensors; "
                f"{_INSTEAD}"
            )
    return {name: each for name, each in found.items() if each is not None}


def _state(path: str, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what a module that is adapted would save, without the quantized layers in it."""
    found: dict[str, torch.Tensor] = {}
    for inner, each in module.named_modules():
        if not is_coded(each):
            start = f"{inner}." if inner else ""
            found |= {start + name: tensor for name, tensor in _own(path + start, each).items()}
    for name, tensor in found.items():
        if holds_codes(tensor):
            raise SchemaMismatch(
                f"{path + name!r} has codes of {tensor.dtype} in a {class_of(module)}, into which no adapter "
                "can be merged; publish a mapping of merged tensors that were dequantized"
            )
    return found


def _inside(wrapper: Any) -> tuple[Any, bool]:
    """Return the module that is left when PEFT is gone, and whether something is merged into it."""
    disabled = bool(getattr(wrapper, "disable_adapters", False))
    if hasattr(wrapper, "modules_to_save"):
        if disabled or not wrapper.active_adapters:
            return wrapper.original_module, False
        saved = wrapper.modules_to_save[wrapper.active_adapters[0]]
        return (saved.get_base_layer(), True) if hasattr(saved, "base_layer") else (saved, False)
    if hasattr(wrapper, "token_adapter"):
        return wrapper.token_adapter.get_base_layer(), not disabled or wrapper.token_adapter.merged
    # Merged already and disabled: it is unmerged in the next forward pass.
    return wrapper.get_base_layer(), not disabled or wrapper.merged


def _check_users(apart: _Apart) -> None:
    """Refuse adapters that change a tensor which another module uses without the same adapter."""
    users: dict[object, tuple[str, frozenset[object]]] = {}
    for each in apart.adapted:
        adapter = each.adapter()
        for name, tensor in each.tensors.items():
            first, known = users.setdefault(_place(name, tensor), (name, adapter))
            if known != adapter:
                raise SchemaMismatch(f"{first!r} and {name!r} are one tensor with two adapters: {_UNTIE}")
    for name, tensor in apart.plain.items() if users else ():
        if (user := users.get(_place(name, tensor))) is not None:
            raise SchemaMismatch(
                f"{user[0]!r} and {name!r} are one tensor, and only the first has an adapter: {_UNTIE}"
            )


def _check_equal(name: str, merged: torch.Tensor, kept: str, other: torch.Tensor) -> None:
    """Raises SchemaMismatch where one tensor becomes two; products of transposes may differ in a last bit."""
    few = 4 * torch.finfo(other.dtype).eps if other.is_floating_point() else 0.0
    merged, other = merged.float(), other.float()
    if not torch.allclose(merged, other, rtol=few, atol=few * float(other.abs().max()), equal_nan=True):
        raise SchemaMismatch(f"{kept!r} and {name!r} are one tensor with two adapters: {_UNTIE}")


def _copied(path: str, wrapper: Any) -> Any:
    """Copy a module with whole tensors in place of sharded ones; all ranks of their mesh take part.

    In place of a quantized layer the copy has a plain one, and the class that PEFT has for these.
    """
    if any(each.__name__ == "FSDPModule" for each in type(wrapper).__mro__):
        raise SchemaMismatch(
            f"fully_shard was called for the {type(wrapper).__name__} that PEFT put in, of which FSDP allows "
            "no copy; call it for the layer around it"
        )
    # It knows originals by their ids, and they outlive it.
    memo: dict[int, Any] = {}
    were_coded = False
    for name, module in wrapper.named_modules():
        if is_coded(module):
            memo[id(module)] = without_codes(f"{path}{name}.", module)
            were_coded = True
            continue
        for each in tree_leaves(vars(module)):
            if isinstance(each, torch.Tensor) and not each.is_leaf:
                # PEFT keeps some, and torch forbids copies of them.
                memo[id(each)] = each.detach()
    for each in (*wrapper.parameters(), *wrapper.buffers()):
        if is_sharded(each):
            full: torch.Tensor = each.full_tensor().detach()
            is_parameter = isinstance(each, torch.nn.Parameter)
            memo[id(each)] = torch.nn.Parameter(full, each.requires_grad) if is_parameter else full
    copied = copy.deepcopy(wrapper, memo)
    for module in copied.modules() if were_coded else ():
        if _is_adapter(module) and "base_layer" in module._modules:
            module.__class__ = _of_plain_layers(path, module)
            # Not all classes for quantized layers have it, and none of these is transposed.
            vars(module).setdefault("fan_in_fan_out", False)
            if "quantization_backend" in vars(module):
                # Other kinds of adapters have one class for all layers, and this decodes for them.
                module.quantization_backend = None
    return copied


def _of_plain_layers(path: str, wrapper: torch.nn.Module) -> type[torch.nn.Module]:
    """Return the class of adapters of plain layers, for one that PEFT has for quantized layers."""
    kind = type(wrapper)
    home = f"{kind.__module__.rpartition('.')[0]}.layer"
    if kind.__module__ == home:
        return kind
    known = vars(sys.modules[home]).values() if home in sys.modules else ()
    found = [
        each
        for each in known
        if isinstance(each, type) and issubclass(each, torch.nn.Module) and each.__module__ == home
        if each.__name__.endswith("Linear") and hasattr(each, "merge")
    ]
    if len(found) != 1:
        raise SchemaMismatch(
            f"{path[:-1]!r} is a {class_of(wrapper)} of a quantized layer, and PEFT can merge it only into "
            "codes; publish a mapping of merged tensors that were dequantized"
        )
    return found[0]


def _widen(wrapper: Any, dtype_of: Callable[[str], torch.dtype | None]) -> None:
    """Have adapters merged in dtypes with more bits than the weights have."""
    inner: torch.nn.Module = _inside(wrapper)[0]
    for own, each in (*inner.named_parameters(), *inner.named_buffers()):
        dtype = dtype_of(own)
        if dtype is not None and each.is_floating_point() and each.element_size() < dtype.itemsize:
            each.data = each.data.to(dtype)


def _left_of(wrapper: Any) -> Any:
    """Merge a module of PEFT, or undo that where adapters are disabled, and return what is left of it."""
    if getattr(wrapper, "disable_adapters", False):
        inner = getattr(wrapper, "token_adapter", wrapper)
        inner.unmerge()
        return inner.get_base_layer()
    if hasattr(wrapper, "unload_and_optionally_merge_module"):
        return wrapper.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    if hasattr(wrapper.base_layer, "base_layer"):
        # An adapter of another kind, which PEFT would leave out. What is merged is not merged again.
        _left_of(wrapper.base_layer)
    wrapper.merge(safe_merge=False, adapter_names=None)
    return wrapper.get_base_layer()


def _pieces(name: str, tensor: Any) -> list[Piece]:
    if not is_sharded(tensor):
        return [whole(plain(name, tensor))]
    local = plain(name, local_of(tensor))
    return Layout.of(name, tensor, local.shape).pieces(local)


def _part(name: str, merged: torch.Tensor, tensor: Any) -> list[LocalPart]:
    """Return what this rank has of a merged tensor: what it has of the one that was merged into."""
    found = []
    for box in _pieces(name, tensor):
        start = box.start or (0,) * merged.dim()
        side = tuple(slice(at, at + size) for at, size in zip(start, box.local.shape, strict=True))
        found.append(LocalPart(merged[side], box.shape, start=start))
    return found


def _place(name: str, tensor: Any) -> object:
    """Return what tied tensors share: the same on all ranks, also on those that have no element of it."""
    if is_sharded(tensor):
        return id(tensor)
    local = plain(name, tensor)
    return (storage_of(name, local), local.storage_offset()) if local.numel() else name


def is_coded(module: torch.nn.Module) -> bool:
    """Whether the module itself keeps codes that its library can decode."""
    if callable(getattr(type(module), "dequantize", None)) and not module._modules and module._parameters:
        # A whole model of transformers has such a method too, which changes it.
        return True
    # A module of TorchScript has them in a class with `keys`, which cannot be iterated over.
    names = module._parameters.keys()
    return any(_decoder(module, name) is not None for name in names)


def decoded(path: str, module: Any) -> dict[str, torch.Tensor]:
    """Return what a module that keeps codes would keep if it did not, by its own names.

    Of sharded codes all ranks of their mesh must take part: they are gathered.
    """
    if getattr(getattr(module, "source_cls", None), "__name__", "") == "Conv1D":
        raise SchemaMismatch(
            f"{path[:-1]!r} is a quantized Conv1D, and its checkpoint has the weights transposed; publish a "
            "mapping of dequantized tensors under the checkpoint's names, in its layout"
        )
    if any(hasattr(each, "ds_id") for each in module.parameters(recurse=False)):
        raise SchemaMismatch(
            f"DeepSpeed shards the codes of {path[:-1]!r}, a {class_of(module)}, and whole ones alone are "
            "decoded; publish a mapping of dequantized tensors"
        )
    found: dict[str, Any] = {}
    try:
        with torch.no_grad():
            if callable(getattr(type(module), "dequantize", None)):
                found = {"weight": module.dequantize(), "bias": getattr(module, "bias", None)}
            else:
                kept = module._buffers.keys() - module._non_persistent_buffers_set
                found = {name: module._buffers[name] for name in kept if not is_scale(name)}
                for name, parameter in module._parameters.items():
                    decode = _decoder(module, name)
                    found[name] = _whole(parameter) if decode is None else decode()
    except (ImportError, NotImplementedError) as exc:
        raise SchemaMismatch(
            f"the codes of {path[:-1]!r}, a {class_of(module)}, cannot be decoded here ({exc}); {DEQUANTIZED}"
        ) from exc
    return {name: plain(path + name, each.detach()) for name, each in found.items() if each is not None}


def without_codes(path: str, module: Any) -> torch.nn.Module:
    tensors = decoded(path, module)
    is_leaf = tensors.keys() <= {"weight", "bias"} and tensors["weight"].dim() == 2 and not module._modules
    rows, columns = tensors["weight"].shape if is_leaf else (0, 0)
    layer: torch.nn.Module
    if isinstance(module, torch.nn.Embedding) and is_leaf:
        layer = torch.nn.Embedding(rows, columns, module.padding_idx, device="meta")
    elif hasattr(module, "in_features") and is_leaf:
        layer = torch.nn.Linear(columns, rows, "bias" in tensors, device="meta")
    else:
        raise SchemaMismatch(
            f"{path[:-1]!r} is a quantized {class_of(module)}, and adapters are merged into no other "
            "quantized layers than linear ones and embeddings; publish a mapping of merged tensors"
        )
    for name, each in tensors.items():
        layer.register_parameter(name, torch.nn.Parameter(each.clone(), requires_grad=False))
    return layer


def check_decodable(path: str, module: torch.nn.Module) -> None:
    """Raises SchemaMismatch where a module keeps codes that nothing here can decode."""
    for name, each in module._parameters.items():
        if each is not None and holds_codes(each) and each.dtype.itemsize == 1 and not is_coded(module):
            raise SchemaMismatch(
                f"{path + name!r} has codes of {each.dtype} in a {class_of(module)}, which nothing here can "
                f"decode; {DEQUANTIZED}; or give dtype=None to publish codes and scales as they are, for "
                "servers of this form"
            )


def _decoder(module: Any, name: str) -> Callable[[], torch.Tensor] | None:
    parameter = module._parameters[name]
    if parameter is None:
        return None
    state = getattr(parameter, "quant_state", None)
    if state is None and name == "weight":
        # FSDP makes another parameter of it, and the module remembers.
        state = getattr(module, "quant_state", None)
    if state is not None:
        return lambda: _of_four_bits(module, parameter, state)
    # The first forward pass moves them.
    scales = getattr(parameter, "SCB", None)
    scales = getattr(getattr(module, "state", None), "SCB", None) if scales is None else scales
    if scales is not None and parameter.dtype == torch.int8:
        return lambda: _of_eight_bits(parameter, scales)
    if type(parameter).dequantize is torch.Tensor.dequantize:
        return None
    try:
        if not holds_codes(plain(name, parameter)):
            return None
    except SchemaMismatch:
        # No plain tensor lies in it, and its class says how to decode it.
        pass
    decode: Callable[[], torch.Tensor] = parameter.dequantize
    return decode


def _of_four_bits(module: Any, codes: torch.Tensor, state: Any) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit

    if getattr(state, "packing_format_for_cpu", False):
        if is_sharded(codes):
            raise NotImplementedError("inference on a CPU has packed codes that are sharded")
        # Inference on a CPU has packed them otherwise, with scales in bf16, [blocks of a row, rows]. Saving
        # undoes that, here in a copy; but 0.50.2 leaves the scales so, or rounds them again.
        scales = state.absmax.T.reshape(-1).float()
        module = copy.deepcopy(module)
        module.state_dict()
        codes, state = module.weight, module.weight.quant_state
        state.absmax, state.nested = scales, False
    found: torch.Tensor = dequantize_4bit(_whole(codes).data, state)
    computed = getattr(module, "compute_dtype", None)
    # The layer casts them so before it multiplies.
    return found if computed is None else found.to(computed)


def _of_eight_bits(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    from bitsandbytes.functional import int8_vectorwise_dequant

    found: torch.Tensor = int8_vectorwise_dequant(_whole(codes).data, scales.to(codes.device))
    return found


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if is_sharded(tensor) else tensor
