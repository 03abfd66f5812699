"""Names of tensors: prefixes that wrappers of models add, and tensors with several names."""

import itertools

import pytest
import torch

from patchstore import Publisher
from patchstore.errors import PatchstoreError, SchemaMismatch
from patchstore.stores.memory import MemoryStore
from tests.support.small_models import assert_refused, compiled, layers, published, tied
from tests.support.weights import assert_same_bits, newest, served

NAMES = {"0.weight", "1.weight", "2.weight"}


def test_prefixes_of_torch_compile_are_taken_off(store: MemoryStore) -> None:
    model = layers()
    assert {name.split(".")[0] for name in compiled(model).state_dict()} == {"_orig_mod"}
    assert published(store, compiled(model)).keys() == NAMES


def test_prefixes_in_the_middle_of_a_name_are_taken_off(store: MemoryStore) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = layers()
    model[0] = compiled(model[0])
    model[1] = checkpoint_wrapper(model[1])
    assert published(store, model).keys() == NAMES
    tensor = torch.ones(3)
    given = {
        "a._checkpoint_wrapped_module.w": tensor,
        "_fsdp_wrapped_module.b._orig_mod.w": tensor + 1,
        "my_orig_mod.w": tensor + 2,
    }
    assert published(MemoryStore(), given).keys() == {"a.w", "b.w", "my_orig_mod.w"}


def test_prefixes_of_data_parallel_models_are_taken_off(group: None) -> None:
    parallel = torch.nn.parallel.DistributedDataParallel
    sources = {
        "ddp": parallel(layers()),
        "dp": torch.nn.DataParallel(layers()),
        "compiled ddp": compiled(parallel(layers())),
        "ddp of compiled": parallel(compiled(layers())),
    }
    for source in sources.values():
        assert published(MemoryStore(), source).keys() == NAMES
    parts = torch.nn.ModuleDict({"policy": parallel(layers()), "critic": layers()})
    assert published(MemoryStore(), parts).keys() == {
        f"{part}.{name}" for part, name in itertools.product(("policy", "critic"), NAMES)
    }


def test_a_module_that_is_called_module_keeps_its_name(store: MemoryStore) -> None:
    model = torch.nn.ModuleDict({"module": torch.nn.Linear(2, 2), "other": torch.nn.Linear(2, 2)})
    assert "module.weight" in published(store, model)


def test_two_names_that_become_one_are_refused(store: MemoryStore) -> None:
    with pytest.raises(SchemaMismatch, match="two tensors would be published as 'w'"):
        Publisher(store, {"w": torch.zeros(3), "_orig_mod.w": torch.ones(3)})


def test_views_of_one_memory_are_tied_only_where_they_are_the_same_view(store: MemoryStore) -> None:
    memory = torch.randn(16)
    source = {
        "whole": memory,
        "again": memory.view(16),
        "square": memory.view(4, 4),
        "turned": memory.view(4, 4).t(),
        "front": memory[:4],
        "back": memory[12:],
        "as bits": memory.view(torch.int32),
    }
    found = published(store, source)
    assert tied(store) == {"whole": "again"}
    assert_same_bits(found, served({name: tensor for name, tensor in source.items() if name != "whole"}))


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (("lm_head.weight", "model.embed_tokens.weight"), "model.embed_tokens.weight"),
        (("lm_head.weight", "transformer.wte.weight"), "transformer.wte.weight"),
        (("proj_out.weight", "model.decoder.embed_tokens.weight"), "model.decoder.embed_tokens.weight"),
        (
            ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
            "bert.embeddings.word_embeddings.weight",
        ),
        (("cls.predictions.decoder.bias", "cls.predictions.bias"), "cls.predictions.bias"),
        (
            (
                "lm_head.weight",
                "encoder.embed_tokens.weight",
                "decoder.embed_tokens.weight",
                "shared.weight",
            ),
            "shared.weight",
        ),
        (("b", "a", "c"), "a"),
    ],
)
def test_the_name_that_a_tied_tensor_is_stored_under_does_not_depend_on_order(
    names: tuple[str, ...], kept: str
) -> None:
    tensor = torch.ones(3)
    for order in itertools.permutations(names):
        store = MemoryStore()
        assert published(store, dict.fromkeys(order, tensor)).keys() == {kept}
        assert tied(store) == dict.fromkeys(set(names) - {kept}, kept)


def test_a_run_goes_on_with_its_tensors_in_another_order(store: MemoryStore) -> None:
    memory = torch.randn(8)
    source = {"z.weight": memory, "b.weight": memory, "other": torch.ones(2)}
    expected = published(store, source)
    turned = dict(reversed(source.items()))
    with Publisher(store, turned, resume=True) as publisher:
        turned["other"] += 1
        assert publisher.publish_patch(1).result().kind == "delta"
        reordered = dict(sorted(turned.items()))
        turned.clear()
        turned.update(reordered)
        assert publisher.publish_patch(2).result().kind == "delta"
    tensors = newest(store)
    assert tensors.keys() == expected.keys() == {"b.weight", "other"}


def test_a_run_keeps_the_names_of_tied_tensors_that_it_began_with(store: MemoryStore) -> None:
    memory = torch.randn(8)
    published(store, {"z": memory})
    assert_refused(store, {"z": memory, "a": memory}, r"tied as \{'a': 'z'\}", PatchstoreError, resume=True)


def test_a_module_that_is_called_as_peft_calls_its_prompts_is_published(store: MemoryStore) -> None:
    given = {
        "prompt_encoder.mask_embed.conv1.weight": torch.ones(2),
        "prompt_encoder.point_embed.weight": torch.ones(2),
    }
    assert published(store, given).keys() == given.keys()
