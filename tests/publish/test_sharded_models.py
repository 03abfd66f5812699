"""Models of which each rank has a part, or whose parameters have no memory now."""

import copy
import warnings
from types import ModuleType

import pytest
import torch
from small_models import gathered, in_float8, layers, layers_of, published

from patchstore import Publisher
from patchstore.errors import SchemaMismatch
from patchstore.stores.memory import MemoryStore
from tests.support.weights import assert_same_bits, served


def test_sharded_parameters_that_are_cast_to_float8_are_published_in_bf16(
    torchao: ModuleType, group: None
) -> None:
    from torch.distributed.fsdp import fully_shard

    model = layers()
    expected = served(copy.deepcopy(model).state_dict())
    model = in_float8(model)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    for source in (model, gathered(model)):
        assert_same_bits(published(MemoryStore(), source), expected)


def test_parameters_sharded_over_one_rank_are_published_as_they_are(group: None) -> None:
    from torch.distributed.fsdp import fully_shard

    model = layers()
    expected = served(copy.deepcopy(model).state_dict())
    fully_shard(model)
    for source in (model, dict(model.named_parameters()), gathered(model)):
        assert_same_bits(published(MemoryStore(), source), expected)


def test_a_model_in_fsdp1_is_refused(store: MemoryStore, group: None) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(layers(), device_id=torch.device("cpu"))
        flat = dict(model.named_parameters())
    for source in (model, torch.nn.Sequential(model), flat):
        with pytest.raises(SchemaMismatch, match=r"FSDP.*get_model_state_dict"):
            Publisher(store, source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FullyShardedDataParallel.summon_full_params(model):
            whole = dict(layers_of(model).named_parameters())
            assert published(store, whole).keys() == {"0.weight", "1.weight", "2.weight"}


def test_a_parameter_whose_memory_was_released_is_refused(store: MemoryStore) -> None:
    model = layers()
    with Publisher(store, model) as publisher:
        publisher.publish_patch(0).result()
        model[1].weight.untyped_storage().resize_(0)
        with pytest.raises(SchemaMismatch, match=r"'1.weight' has no memory"):
            publisher.publish_patch(1)
