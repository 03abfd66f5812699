"""A run of adapters: what PEFT saves, bit for bit, as versions like any others."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from patchstore import PeftAdapter, Publisher, replay, verify
from patchstore.bucket import history, manifest_json
from patchstore.errors import PatchstoreError, SchemaMismatch, UsageError, WrongSignature
from patchstore.signing import KeySigner
from patchstore.stores import layout, open_store
from patchstore.stores.memory import MemoryStore
from tests.support.adapted_models import adapted
from tests.support.keys import key_pair
from tests.support.small_models import causal, compiled
from tests.support.weights import State, assert_same_bits

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def saved(model: Any, folder: Path, name: str = "default") -> tuple[State, dict[str, Any]]:
    """Return what PEFT saves of an adapter: tensors and config."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, selected_adapters=[name], save_embedding_layers=False)
    place = folder if name == "default" else folder / name
    return load_file(place / "adapter_model.safetensors"), json.loads(
        (place / "adapter_config.json").read_bytes()
    )


def replayed(store: Any, out: Path) -> tuple[State, dict[str, Any]]:
    replay(store, out=out)
    assert sorted(each.name for each in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    return load_file(out / "adapter_model.safetensors"), json.loads(
        (out / "adapter_config.json").read_bytes()
    )


def as_json(config: dict[str, Any]) -> dict[str, Any]:
    """PEFT has sets in its config, and writes them in any order."""
    return {name: sorted(each) if isinstance(each, list) else each for name, each in config.items()}


def train(model: Any) -> None:
    with torch.no_grad():
        for each in model.parameters():
            if each.requires_grad:
                each.add_(torch.randn_like(each) * 1e-3)


def wrapped(model: Any) -> Any:
    return torch.nn.DataParallel(model)


SAME: Callable[[Any], Any] = lambda model: model  # noqa: E731


@pytest.mark.parametrize(
    ("kind", "name", "wrap"),
    [
        ("linear", "default", SAME),
        ("linear", "default", wrapped),
        ("linear", "default", compiled),
        ("linear", "default", lambda model: wrapped(compiled(model))),
        ("several", "other0", SAME),
        ("embedding", "default", SAME),
        ("convolution", "default", SAME),
        ("modules to save", "default", SAME),
        ("parameters", "default", SAME),
        ("nothing else", "default", SAME),
    ],
)
def test_each_version_is_what_peft_saves(
    tmp_path: Path, kind: str, name: str, wrap: Callable[[Any], Any]
) -> None:
    model = adapted(kind, torch.float32)
    store = MemoryStore()
    with Publisher(store, wrap(model), adapter=name) as publisher:
        for step in range(3):
            publisher.publish_patch(step).result()
            tensors, config = replayed(store, tmp_path / f"out{step}")
            expected, said = saved(model, tmp_path / f"saved{step}", name)
            assert_same_bits(tensors, expected)
            assert as_json(config) == as_json(said)
            train(model)


def qwen(tmp_path: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model as it is trained: a base in bf16 that was loaded from a folder, and adapters in fp32."""
    causal("Qwen2", dtype).save_pretrained(tmp_path / "base")
    transformers = pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(base, config)


def test_a_replay_is_a_folder_of_peft_and_what_was_trained(tmp_path: Path) -> None:
    model, store = qwen(tmp_path), MemoryStore()
    with Publisher(store, model, adapter="default") as publisher:
        publisher.publish_patch(0)
        train(model)
        publisher.publish_patch(1).result()
        replay(store, out=tmp_path / "out")
        header = history.run_header(store)
    assert {spec.dtype for spec in header.schema.tensors} == {"F32"}
    assert header.adapter is not None and header.adapter.base.name == str(tmp_path / "base")
    transformers = pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    found = peft.PeftModel.from_pretrained(base, tmp_path / "out")
    assert_same_bits(dict(found.named_parameters()), dict(model.named_parameters()))


def test_adapters_in_a_model_of_transformers_have_the_names_that_it_saves(tmp_path: Path) -> None:
    model = causal("Qwen2", torch.float32)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False), "policy")
    model.save_pretrained(tmp_path / "saved")
    store = MemoryStore()
    with Publisher(store, model, adapter="policy") as publisher:
        publisher.publish_patch(0).result()
    assert_same_bits(
        replayed(store, tmp_path / "out")[0], load_file(tmp_path / "saved" / "adapter_model.safetensors")
    )


def test_a_mapping_is_published_with_the_config_of_a_folder(tmp_path: Path) -> None:
    model = qwen(tmp_path)
    expected, _ = saved(model, tmp_path / "saved")
    store = MemoryStore()
    files = tmp_path / "saved"
    with Publisher(
        store, lambda: peft.get_peft_model_state_dict(model), adapter="default", files=files
    ) as publisher:
        publisher.publish_patch(0).result()
    replay(store, out=tmp_path / "out")
    assert_same_bits(load_file(tmp_path / "out" / "adapter_model.safetensors"), expected)


@pytest.mark.parametrize(("dtype", "kind"), [("auto", "anchor"), (torch.bfloat16, "delta")])
def test_a_version_is_a_delta_where_that_is_smaller(tmp_path: Path, dtype: Any, kind: str) -> None:
    model, store = qwen(tmp_path), MemoryStore()
    with Publisher(store, model, adapter="default", dtype=dtype) as publisher:
        publisher.publish_patch(0)
        with torch.no_grad():
            for each in model.parameters():
                if each.requires_grad:
                    # All of it in fp32; in bf16 hardly any.
                    each.mul_(1 + 1e-4)
        manifest = publisher.publish_patch(1).result()
        assert manifest.kind == kind
        verify(store)
        with torch.no_grad():
            for each in model.parameters():
                if each.requires_grad:
                    # A third of it, which `context` would state in fewest bytes.
                    each.mul_(1 + 2e-3)
        manifest = publisher.publish_patch(2).result()
        # A server's CPU decodes it, which takes seconds in `context`.
        assert manifest.kind == kind and {d.encoding for d in [manifest.delta] if d} <= {"gap"}


def test_a_run_goes_on_and_keeps_its_base(tmp_path: Path) -> None:
    model, url = qwen(tmp_path), tmp_path / "run"
    with Publisher(url, model, adapter="default") as publisher:
        publisher.publish_patch(0)
        train(model)
        publisher.publish_patch(1)
    with Publisher(url, model, adapter="default", resume=True) as publisher:
        train(model)
        assert publisher.publish_patch(2).result().version == 3
    # The same base in another place; then another one.
    model.peft_config["default"].base_model_name_or_path = "/elsewhere/base"
    Publisher(url, model, adapter="default", resume=True).close()
    model.peft_config["default"].base_model_name_or_path = "another"
    with pytest.raises(
        SchemaMismatch, match=r"adapters of the base .*/base.* one of adapters of the base another"
    ):
        Publisher(url, model, adapter="default", resume="auto")
    with pytest.raises(SchemaMismatch, match="one of whole weights"):
        Publisher(url, model, resume="auto")


@pytest.mark.parametrize("resume", [True, "auto", 0])
def test_another_config_is_published_in_full(tmp_path: Path, resume: Any) -> None:
    model, store = qwen(tmp_path), MemoryStore()
    # In bf16 a step is a delta, which has the config of the version before.
    options: dict[str, Any] = {"adapter": "default", "dtype": torch.bfloat16}
    with Publisher(store, model, **options) as publisher:
        publisher.publish_patch(0)
    config = model.peft_config["default"]
    config.target_modules = sorted(config.target_modules, reverse=True)
    with Publisher(store, model, **options, resume=resume) as publisher:
        assert publisher.publish_patch(1).result().kind == "delta"
        config.lora_alpha, alpha = 64, config.lora_alpha
        with pytest.raises(SchemaMismatch, match=f"lora_alpha=64, and was {alpha}"):
            publisher.publish_patch(2)
    with Publisher(store, model, **options, resume=resume) as publisher:
        # No bit differs from the version by which the run was resumed, and its meaning does.
        assert publisher.publish_patch(2, if_changed=True).result().kind == "anchor"
        assert publisher.publish_patch(3).result().kind == "delta"
    assert replayed(store, tmp_path / "now")[1]["lora_alpha"] == 64
    replay(store, 0, out=tmp_path / "before")
    assert json.loads((tmp_path / "before" / "adapter_config.json").read_bytes())["lora_alpha"] == alpha


@pytest.mark.parametrize("is_stabilized", [False, True])
def test_a_scale_that_no_config_says_is_refused(tmp_path: Path, is_stabilized: bool) -> None:
    from peft.tuners.lora import LoraLayer

    model, store = qwen(tmp_path), MemoryStore()
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=["q_proj", "v_proj"],
        use_rslora=is_stabilized,
        alpha_pattern={"v_proj": 3},
    )
    model.add_adapter("policy", config)
    model.set_adapter("policy")
    layers = [each for each in model.modules() if isinstance(each, LoraLayer) and "policy" in each.scaling]
    with Publisher(store, model, adapter="policy") as publisher:
        publisher.publish_patch(0).result()
        for change in (lambda: layers[1].scale_layer(0.3), lambda: layers[0].set_scale("policy", 0)):
            change()
            with pytest.raises(
                SchemaMismatch, match=r"_proj multiplies the adapter 'policy' by \S+ now, as after"
            ):
                publisher.publish_patch(1)
            for each in layers:
                each.set_scale("policy", 1)
        # Another adapter's is no matter of this one.
        layers[0].set_scale("default", 5)
        for each in layers:
            each.scale_layer(0.3)
            each.unscale_layer(0.3)
        publisher.publish_patch(1).result()
    assert history.listed(store) == [0, 1]


def merged(model: Any) -> None:
    model.merge_and_unload()


def renamed(model: Any) -> None:
    model.add_adapter("policy", peft.LoraConfig(target_modules=["q_proj"]))
    model.set_adapter("policy")
    model.delete_adapter("default")


@pytest.mark.parametrize(("change", "says"), [(merged, "as after unload"), (renamed, "deleted or renamed")])
def test_an_adapter_that_is_gone_is_said_to_be(tmp_path: Path, change: Any, says: str) -> None:
    model, store = qwen(tmp_path), MemoryStore()
    with Publisher(store, model, adapter="default") as publisher:
        publisher.publish_patch(0).result()
        change(model)
        with pytest.raises(SchemaMismatch, match=says):
            publisher.publish_patch(1)
    assert history.listed(store) == [0]


def test_what_peft_notes_when_it_saves_is_no_change(tmp_path: Path) -> None:
    model, store = qwen(tmp_path), MemoryStore()
    model.peft_config["default"].base_model_name_or_path = None
    with Publisher(store, model, adapter="default") as publisher:
        publisher.publish_patch(0)
        saved(model, tmp_path / "saved")
        publisher.publish_patch(1).result()


def test_the_base_may_be_a_version_of_a_run(tmp_path: Path) -> None:
    model = qwen(tmp_path)
    with Publisher(tmp_path / "whole", model.get_base_model()) as publisher:
        state = publisher.publish_patch(0).result().state.total
    base = f"{tmp_path / 'whole'}@0"
    with Publisher(
        tmp_path / "run", model, adapter=PeftAdapter(base=base, base_may_change=True)
    ) as publisher:
        publisher.publish_patch(0)
    adapter = history.run_header(open_store(tmp_path / "run")).adapter
    assert adapter is not None and adapter.base.state == state and adapter.base_may_change


def test_a_signature_covers_the_base(tmp_path: Path) -> None:
    private, public = key_pair(tmp_path)
    store = MemoryStore()
    with Publisher(store, qwen(tmp_path), adapter="default", signer=KeySigner(private)) as publisher:
        publisher.publish_patch(0).result()
    verify(store, required_keys=[public])
    text = store.get(layout.HEADER).replace(b'base_may_change":false', b'base_may_change":true')
    assert manifest_json.header_from_json(text).adapter != history.run_header(store).adapter
    store.put(layout.HEADER, text)
    with pytest.raises(WrongSignature):
        verify(store, required_keys=[public])


def test_a_config_may_say_null_for_what_it_does_not_train(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "bias": null, "use_dora": null}')
    tensors = {"base_model.model.q.lora_A.weight": torch.randn(3, 4)}
    with Publisher(MemoryStore(), tensors, adapter="default", files=tmp_path) as publisher:
        assert publisher.publish_patch(0).result().version == 0


def pissa() -> Any:
    return peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa")


def activated() -> Any:
    return peft.LoraConfig(r=2, target_modules=["q_proj"], alora_invocation_tokens=[5], task_type="CAUSAL_LM")


def refusals() -> dict[str, tuple[Callable[[Any, Path], Any], str]]:
    return {
        "another name": (
            lambda model, _: (model, {"adapter": "policy"}),
            "no adapter 'policy'; it has 'default'",
        ),
        "no name": (lambda model, _: (model, {"adapter": ""}), "must be the name of an adapter"),
        "no adapter": (lambda model, _: (causal("Qwen2"), {}), "has no adapters of PEFT"),
        "another kind": (lambda *_: (adapted("ia3"), {}), "of the type LORA, and this one is IA3"),
        "dora": (lambda *_: (adapted("dora"), {}), "has use_dora; publish merged weights instead"),
        "a base that PiSSA changed": (
            lambda *_: (peft.get_peft_model(causal("Qwen2", torch.float32), pissa()), {}),
            "init_lora_weights='pissa' may have changed the base",
        ),
        "aLoRA": (
            lambda *_: (peft.get_peft_model(causal("Qwen2", torch.float32), activated()), {}),
            r"plain LoRA, and this adapter has alora_invocation_tokens=\[5\]",
        ),
        "tokens": (lambda *_: (adapted("tokens"), {}), "no single tokens"),
        "biases": (lambda *_: (adapted("rank-stabilised, with bias"), {}), "has lora_bias=True"),
        "in FP8": (lambda model, _: (model, {"quantization": "fp8-block"}), "leave quantization= out"),
        "no config": (
            lambda model, _: (peft.get_peft_model_state_dict(model), {}),
            "needs its adapter_config.json",
        ),
        "names with the adapter's": (
            lambda model, _: ({n: p for n, p in model.named_parameters() if "lora_" in n}, {}),
            r"PEFT saves no tensor of an adapter as '.*lora_A\.default\.weight'",
        ),
        "the whole model": (
            lambda model, _: (dict(model.state_dict()), {}),
            "PEFT saves no tensor of an adapter",
        ),
        "nothing": (lambda *_: ({}, {}), "the adapter has no tensors"),
        "a base that is no version": (
            lambda model, _: (model, {"adapter": PeftAdapter(base="s3://bucket/run")}),
            "must be the URL of a store, @ and a version's number",
        ),
    }


@pytest.mark.parametrize("case", refusals())
def test_what_is_refused(tmp_path: Path, case: str) -> None:
    make, reason = refusals()[case]
    source, options = make(qwen(tmp_path), tmp_path)
    store = MemoryStore()
    with pytest.raises((UsageError, SchemaMismatch), match=reason) as caught:
        Publisher(store, source, **{"adapter": "default", **options})
    assert isinstance(caught.value, PatchstoreError)
    assert not [*store.list("")]
