"""Tensors that modules make from weights are made again, and stay where they were."""

import functools
import warnings
from collections.abc import Callable

import pytest
import torch

from patchstore.errors import LoadFailed, UsageError
from patchstore.tensors.bits import bits
from vllm_plugin.live import derived as derived_module
from vllm_plugin.live.derived import Derived, constructed, loaded, slots, watch_loading


class Attention(torch.nn.Module):
    """Makes two matrices from the weight below it: one a parameter, one a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = torch.nn.Linear(4, 6, bias=False)
        self.num_calls = 0
        self.transposes = False
        self.fails = False

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        self.num_calls += 1
        weight = self.projection.weight.detach()
        self.plain = (weight[:3].T if self.transposes else weight[:3]).to(dtype, copy=True)
        if self.fails:
            raise RuntimeError("made to fail")
        self.made = torch.nn.Parameter((weight[3:] * 2).to(dtype), requires_grad=False)
        self.scale = torch.ones(2)


class Uncounted(Attention):
    """Writes as vLLM 0.33 does, through `data`: into the same memory, or over to other memory."""

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        if self.num_calls == 0:
            super().process_weights_after_loading(dtype)
            return
        self.num_calls += 1
        weight = self.projection.weight.detach()
        self.plain.data.copy_(weight[:3])
        self.made.data = (weight[3:] * 2).to(dtype)
        self.scale = torch.ones(2)


class Views(Attention):
    """Needs no memory of its own: what it makes are views of the weight."""

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        self.num_calls += 1
        self.plain = self.projection.weight.data[:3]
        self.made = torch.nn.Parameter(self.projection.weight.data[3:].T, requires_grad=False)


class Inverting(Attention):
    """Is right when it is called once: then it inverts a scale again, and lays a matrix out otherwise."""

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        self.transposes = self.num_calls > 0
        scale = getattr(self, "scale", torch.full((2,), 3.0))
        super().process_weights_after_loading(dtype)
        self.scale = 1 / scale


class Failing(Uncounted):
    """Fails when it is called for the third time: once bits were turned, to see what it writes."""

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        if self.num_calls == 2:
            raise torch.OutOfMemoryError("made to fail")
        super().process_weights_after_loading(dtype)


class Model(torch.nn.Module):
    def __init__(self, kind: type[Attention] = Attention) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([kind(), torch.nn.Linear(4, 4), kind()])
        constructed(self)
        for each in self.attentions:
            refresh(each)
        loaded(self)

    @property
    def attentions(self) -> list[Attention]:
        return [self.layers[0], self.layers[2]]


def refresh(module: torch.nn.Module) -> None:
    module.process_weights_after_loading(torch.bfloat16)


def tensors(model: Model) -> list[torch.Tensor]:
    return [tensor for each in model.attentions for tensor in (each.plain, each.made)]


def follow(model: torch.nn.Module) -> Derived:
    """What is made of a model's weights, proved once."""
    derived = Derived([model], refresh)
    derived.verify(set())
    return derived


@pytest.fixture
def model() -> Model:
    return Model()


def change(model: Model) -> None:
    with torch.no_grad():
        for each in model.attentions:
            each.projection.weight.mul_(3)


def test_they_are_known_by_name(model):
    names = {f"layers.{layer}.{name}" for layer in (0, 2) for name in ("plain", "made", "scale")}
    assert Derived([model], refresh).names == names
    # Of several models, and of a module that is a model itself.
    other = Model()
    assert Derived([model, other], refresh).names == names


@pytest.mark.parametrize("kind", [Attention, Uncounted, Views])
def test_they_follow_their_weights_without_moving(kind):
    model = Model(kind)
    derived = follow(model)
    objects, places = tensors(model), [each.data_ptr() for each in tensors(model)]
    change(model)
    expected = Model(kind)
    expected.load_state_dict(model.state_dict(), strict=False)
    for each in expected.attentions:
        refresh(each)

    derived.refresh()

    for now, before, place, goal in zip(tensors(model), objects, places, tensors(expected), strict=True):
        assert now.data_ptr() == place
        assert torch.equal(bits(before), bits(goal))
        assert torch.equal(bits(now), bits(goal))


@pytest.mark.parametrize("kind", [Inverting, Failing])
def test_what_cannot_be_proved_is_left_as_it_was_served(kind):
    model = Model(kind)
    served = [each.scale for each in model.attentions] + tensors(model)
    before = [each.detach().clone() for each in served]
    with pytest.raises((LoadFailed, torch.OutOfMemoryError)):
        follow(model)
    now = [each.scale for each in model.attentions] + tensors(model)
    assert all(one is other for one, other in zip(now, served, strict=True))
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(now, before, strict=True))


def test_another_shape_or_a_failure_halfway_is_refused_and_nothing_has_moved(model):
    derived = follow(model)
    objects = tensors(model)
    change(model)
    model.attentions[1].transposes = True
    with pytest.raises(LoadFailed, match=r"layers\.2\.plain was \(3, 4\) .* and is \(4, 3\)"):
        derived.refresh()
    assert all(now is then for now, then in zip(tensors(model), objects, strict=True))

    model.attentions[1].transposes = False
    model.attentions[0].fails = True
    with pytest.raises(RuntimeError, match="made to fail"):
        derived.refresh()
    assert all(now is then for now, then in zip(tensors(model), objects, strict=True))

    model.attentions[0].fails = False
    derived.refresh()
    assert all(now is then for now, then in zip(tensors(model), objects, strict=True))
    assert torch.equal(objects[2], model.attentions[1].projection.weight[:3].bfloat16())


class Kernel:
    """What a layer calls, and where it keeps tensors: no module."""

    def __init__(self, sinks: torch.nn.Parameter) -> None:
        self.sinks: torch.Tensor = sinks
        self.slopes = torch.arange(4.0)
        self.combined: list[torch.Tensor] = []


class Sinks(torch.nn.Module):
    """Has a kernel that keeps copies of its weights in an object, a list, a closure or not at all."""

    def __init__(self, keeps: str = "") -> None:
        super().__init__()
        self.sinks = torch.nn.Parameter(torch.randn(4, dtype=torch.bfloat16), requires_grad=False)
        self.kernel = Kernel(self.sinks)
        self.register_buffer("_k_scale", torch.tensor(1.0))
        self._k_scale_float = 1.0
        self.keeps = keeps

    def calibrate(self, scale: float) -> None:
        """Set the scale of the cache, as vLLM's layers do at the first request."""
        self._k_scale.fill_(scale)
        self._k_scale_float = scale

    @property
    def scales(self) -> tuple[float, float]:
        return self._k_scale.item(), self._k_scale_float

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        self.calibrate(1.0)
        if self.keeps == "in place" and self.kernel.sinks.dtype == torch.float32:
            self.kernel.sinks.copy_(self.sinks)
            self.kernel.combined[0].copy_(self.sinks.float() * 2)
        elif self.keeps:
            self.kernel.sinks = self.sinks.float()
            self.kernel.combined = [self.sinks.float() * 2]

    def forward(self) -> torch.Tensor:
        if self.kernel.sinks.dtype != torch.float32:
            with torch.inference_mode():
                self.kernel.sinks = self.kernel.sinks.float()
        return self.kernel.sinks * 1


def started(model: torch.nn.Module, load: Callable[[], object] = lambda: None) -> torch.nn.Module:
    """Do what vLLM does when it starts."""
    constructed(model)
    load()
    for module in model.modules():
        if hasattr(module, "process_weights_after_loading"):
            refresh(module)
    loaded(model)
    return model


@pytest.mark.parametrize("keeps", ["anew", "in place"])
def test_vectors_in_objects_and_lists_follow_their_weights(keeps):
    layer = Sinks(keeps)
    derived = follow(started(torch.nn.Sequential(layer)))
    assert derived.names == {"0.kernel.sinks", "0.kernel.combined[0]"}
    copies = [layer.kernel.sinks, *layer.kernel.combined]
    layer.sinks.copy_(torch.randn(4))
    derived.refresh()
    assert [layer.kernel.sinks, *layer.kernel.combined] == copies
    assert torch.equal(copies[0], layer.sinks.float())
    assert torch.equal(copies[1], layer.sinks.float() * 2)


class Guarded:
    """Refuses to name what it holds, as configs of transformers do of what differs between layers."""

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def __getattribute__(self, name: str) -> object:
        if name == "held":
            raise ValueError("ambiguous")
        return super().__getattribute__(name)


def test_what_an_object_does_not_name_itself_is_found_too():
    layer = Sinks("anew")
    layer.config = Guarded(torch.ones(2))
    model = torch.nn.Sequential(layer)
    assert "0.config.held" in {slot.path for slot in slots(model)}
    assert follow(started(model)).names == {"0.kernel.sinks", "0.kernel.combined[0]"}


@pytest.mark.parametrize("when", ["before it is followed", "after it is followed"])
def test_a_copy_that_the_first_forward_pass_makes_follows_its_weight(when):
    layer = Sinks()
    model = started(torch.nn.Sequential(layer))
    if when == "before it is followed":
        layer()
    derived = follow(model)
    layer()
    derived.notice()
    layer.sinks.copy_(torch.randn(4))
    derived.refresh()
    assert torch.equal(layer(), layer.sinks.float())


def test_what_a_forward_pass_made_of_a_weight_otherwise_is_refused():
    layer = Sinks()
    derived = follow(started(torch.nn.Sequential(layer)))
    layer.kernel.sinks = layer.sinks.float() * 2
    with pytest.raises(
        UsageError, match=r"'0\.kernel\.sinks' \(\(4,\) torch\.float32\), which it made of a weight"
    ):
        derived.notice()


def test_what_loading_made_where_nothing_makes_it_again_is_refused():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3))
    model[0].packed = None

    def load() -> None:
        packed = model[0].weight.detach().T.contiguous()
        model[0].packed = lambda x: x @ packed

    with pytest.raises(
        UsageError, match=r"keeps 1 tensors that loading made .* '0\.packed\.packed' \(\(3, 3\)"
    ):
        follow(started(model, load))


def test_what_comes_out_otherwise_from_the_same_weights_is_refused_and_stays(model):
    before = [each.clone() for each in tensors(model)]
    model.attentions[1].made.mul_(2)
    expected = [*before[:3], before[3] * 2]
    with pytest.raises(UsageError, match=r"'layers\.2\.made'"):
        follow(model)
    assert all(torch.equal(bits(now), bits(then)) for now, then in zip(tensors(model), expected, strict=True))


@pytest.mark.parametrize("is_seen", [True, False])
def test_what_no_hook_writes_is_no_weight_and_stays(is_seen):
    model = Model(Uncounted)
    for each in model.attentions:
        each.constant = torch.tensor([0.5, -0.0, float("nan")])
    kept = [bits(each.constant).clone() for each in model.attentions]
    vars(derived_module)["_loadings"].pop(model)
    if is_seen:
        constructed(model)
        for each in model.attentions:
            each.constant = each.constant.clone()
        loaded(model)
        with pytest.raises(UsageError, match=r"keeps 2 tensors .* 'layers\.0\.constant'"):
            follow(model)
    else:
        assert not {"layers.0.constant"} & {name for name, _ in follow(model).storages()}
    assert all(
        torch.equal(bits(each.constant), was) for each, was in zip(model.attentions, kept, strict=True)
    )


def test_constants_and_buffers_that_are_loaded_are_not_made_of_weights():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4))
    derived = Derived([started(model, lambda: model[0].running_mean.fill_(3))], refresh)
    derived.verify({model[0].running_mean.untyped_storage().data_ptr()})
    derived = Derived([model], refresh)
    with pytest.raises(UsageError, match=r"'0\.running_mean'"):
        derived.verify(set())


def test_scales_of_the_cache_stay_as_requests_calibrated_them():
    layer = Sinks("anew")
    derived = follow(started(torch.nn.Sequential(layer)))
    layer.calibrate(0.25)
    derived.refresh()
    assert layer.scales == (0.25, 0.25)


class QuantizedCache(torch.nn.Module):
    """Has what vLLM 0.26 gives an attention layer: scales, and constants that its hook makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.weight = torch.nn.Parameter(torch.randn(4), requires_grad=False)
        self.kv_cache = torch.tensor([])
        for name in ("_q_scale", "_k_scale", "_v_scale", "_prob_scale"):
            self.register_buffer(name, torch.tensor(1.0))
        self.process_weights_after_loading(torch.bfloat16)
        self.num_calls = 0

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        self.num_calls += 1
        for name in ("_q_scale", "_k_scale", "_v_scale", "_prob_scale"):
            getattr(self, name).fill_(1.0)
        self._k_scale_cpu = self._v_scale_cpu = torch.tensor(1.0)
        self.q_range, self.k_range, self.v_range = (torch.tensor(each) for each in (200.0, 200.0, 100.0))


class Cached(torch.nn.Module):
    """Makes nothing from weights, but has what vLLM gives it once it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.kv_cache = torch.zeros(2, 3, 4)

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        self.num_calls += 1


@pytest.mark.parametrize(
    ("kind", "runs_hooks"), [(Attention, False), (Cached, False), (QuantizedCache, True)]
)
def test_the_hooks_of_layers_that_make_nothing_of_weights_are_not_called_for_an_update(kind, runs_hooks):
    layer = kind()
    if runs_hooks:
        started(torch.nn.Sequential(layer))
    else:
        constructed(layer)
        loaded(layer)
    derived = follow(torch.nn.Sequential(layer))
    before = layer.num_calls
    derived.notice()
    derived.refresh()
    assert (derived.names, layer.num_calls) == (frozenset(), before)


def test_a_model_whose_loading_was_not_seen_is_not_refused_for_its_constants():
    layer = Sinks("anew")
    model = torch.nn.Sequential(layer)
    layer.constant = torch.ones(3)
    refresh(layer)
    derived = follow(model)
    layer.sinks.copy_(torch.randn(4))
    derived.refresh()
    assert torch.equal(layer.kernel.sinks, layer.sinks.float())
    assert "0.constant" not in dict(derived.storages())


def test_reloading_leaves_hooks_to_vllm():
    layer = Sinks("anew")
    derived = Derived([started(torch.nn.Sequential(layer))], refresh, hooks=False)
    derived.verify(set())
    assert derived.names == frozenset()


def test_loading_is_watched_where_vllm_wraps_its_own_functions(monkeypatch) -> None:
    with warnings.catch_warnings():
        # It imports all of torch's compiler, and that some functions of other days.
        warnings.simplefilter("ignore", DeprecationWarning)
        from vllm.model_executor.model_loader import base_loader

    def construct() -> torch.nn.Module:
        layer = Sinks("anew")
        layer.constant = torch.ones(3)
        return torch.nn.Sequential(layer)

    @functools.wraps(construct)
    def traced() -> torch.nn.Module:
        return construct()

    monkeypatch.setattr(base_loader, "initialize_model", traced)
    monkeypatch.setattr(base_loader, "process_weights_after_loading", lambda model: refresh(model[0]))
    watch_loading()
    watched = base_loader.initialize_model
    watch_loading()

    assert base_loader.initialize_model is watched
    model = base_loader.initialize_model()
    base_loader.process_weights_after_loading(model)
    # Of a model whose construction was not seen, the constant would be taken for what loading made.
    assert Derived([model], refresh).names == {"0.kernel.sinks", "0.kernel.combined[0]"}
