"""Names that a wrapper around the model left in a run, and what to publish instead."""

import pytest

from patchstore.bucket import schema_text
from patchstore.bucket.records import Schema, TensorSpec


def schema(*names: str) -> Schema:
    return Schema(tensors=tuple(TensorSpec(name=name, dtype="BF16", shape=(2,)) for name in sorted(names)))


@pytest.mark.parametrize(
    ("names", "publish"),
    [
        (("module.embed.weight", "module.norm.weight"), "publish model.module,"),
        (("_orig_mod.embed.weight", "_orig_mod.norm.weight"), "publish model._orig_mod,"),
        (("_orig_mod.module.embed.weight", "_orig_mod.module.b"), "publish model._orig_mod.module,"),
        (("module._orig_mod.embed.weight",), "publish model.module._orig_mod,"),
        (("base_model.model.embed.weight",), "publish model.merge_and_unload(),"),
        (
            ("embed.weight", "layers.0._checkpoint_wrapped_module.proj.weight"),
            "publish a dict of its tensors without '_checkpoint_wrapped_module.' in their names,",
        ),
        (
            ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.w", "_fsdp_wrapped_module.embed"),
            "publish a dict of its tensors without '_fsdp_wrapped_module.' in their names,",
        ),
        (
            ("module.layers.0._orig_mod.w", "module.embed"),
            "publish a dict of its tensors without 'module.' and '_orig_mod.' in their names,",
        ),
    ],
)
def test_a_wrapper_is_recognised_by_its_prefix(names: tuple[str, ...], publish: str) -> None:
    found = schema_text.of_wrapper(schema(*names))
    assert found is not None
    assert found.advice.startswith(publish)
    assert "\n" not in str(found)


@pytest.mark.parametrize(
    "names",
    [(), ("embed.weight", "module.norm.weight"), ("model.module.w",), ("module_list.w",), ("my_orig_mod.w",)],
)
def test_names_of_a_bare_model_are_no_wrappers(names: tuple[str, ...]) -> None:
    assert schema_text.of_wrapper(schema(*names)) is None
    assert schema_text.explain(schema(*names), "otherwise") == "otherwise"


def test_a_long_reason_is_cut_and_says_so() -> None:
    assert schema_text.brief("short\nas it is") == "short as it is"
    assert schema_text.brief("x" * 100_000).endswith("... (100,000 characters)")
    assert len(schema_text.brief("x" * 100_000)) < 350
