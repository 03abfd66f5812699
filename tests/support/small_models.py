"""Small models to publish, and what a reader of a store gets."""

import warnings
import weakref
from typing import Any

import pytest
import torch

from patchstore import Publisher, Replica, verify
from patchstore.bucket import history
from patchstore.errors import SchemaMismatch
from patchstore.publish.sources import Weights
from patchstore.stores.base import Store
from tests.support.weights import State


def published(store: Store, source: object, **options: object) -> State:
    """Publish once; return what a reader of the store gets, without the names of tied tensors."""
    with Publisher(store, source, **options) as publisher:  # type: ignore[arg-type]
        publisher.publish_patch(0).result()
    verify(store)
    tensors: State = {}
    Replica(store, tensors).update()
    return tensors


def assert_refused(
    store: Store, source: object, says: str, error: type[Exception] = SchemaMismatch, **options: object
) -> None:
    """Fail unless a publisher refuses a source, and leaves the store as it was."""
    before = list(store.list())
    with pytest.raises(error, match=says):
        Publisher(store, source, **options)  # type: ignore[arg-type]
    assert list(store.list()) == before


def tied(store: Store) -> dict[str, str]:
    header = history.read_header(store)
    assert header is not None
    return dict(header.schema.tied)


def computed(model: torch.nn.Module) -> tuple[int, int]:
    """Read a model once; return how many tensors were computed for it, and how many were held at once."""
    # Kept to the end: a copy may lie where a temporary one was.
    state = model.state_dict()
    own = {each.untyped_storage().data_ptr() for each in state.values()}
    copies: list[weakref.ref[torch.Tensor]] = []
    most = 0
    for _, tensor in Weights(model).stream():
        if tensor.untyped_storage().data_ptr() not in own:
            copies.append(weakref.ref(tensor))
        most = max(most, sum(copy() is not None for copy in copies))
    del state
    return len(copies), most


def layers(num: int = 3) -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(num)))


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    """Wrap as torch.compile does; nothing is run, so nothing is compiled."""
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def quantized_layers() -> torch.nn.Module:
    return torch.ao.quantization.quantize_dynamic(layers(), {torch.nn.Linear})  # type: ignore[no-any-return]


def gathered(model: torch.nn.Module) -> State:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return dict(get_model_state_dict(model, options=options))


def layers_of(model: torch.nn.Module) -> torch.nn.Module:
    return model.module  # type: ignore[return-value]


def in_float8(model: torch.nn.Module) -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        return convert_to_float8_training(model, config=config)


SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def causal(kind: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """Return a model of transformers with random weights, the same each time."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | changes)
    return getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype)


def experts() -> Any:
    """Return a model of transformers 5 that fuses experts."""
    pytest.importorskip("transformers", minversion="5")
    return causal("Qwen3Moe", moe_intermediate_size=12, num_experts=4, num_experts_per_tok=2)
