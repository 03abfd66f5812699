"""Models of Megatron-Core are published with the bits that Megatron-Bridge exports, in every layout."""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import logging
import sys
import types
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from patchstore import Publisher
from tests.support.model_bits import Bits, Versions, bits_of, check
from tests.support.ranks import Ranks

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None
        or importlib.util.find_spec("megatron.bridge") is None
        or importlib.util.find_spec("megatron.core") is None,
        reason="needs megatron-bridge and megatron-core, which are not on the list of test packages: see "
        "docs/trainers.md",
    ),
]
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}


class _Names(importlib.abc.Loader):
    """Modules that only have names: Bridge asks for TransformerEngine's when it is imported."""

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []

        def get(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            if name[0].isupper():
                return type(name, (), {})
            return importlib.import_module(f"{spec.name}.{name}")

        module.__getattr__ = get  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Finder(importlib.abc.MetaPathFinder):
    """Finds TransformerEngine for Megatron-Bridge alone; Megatron-Core works without it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] != "transformer_engine":
            return None
        frame = inspect.currentframe()
        while frame and ("importlib" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
            frame = frame.f_back
        if frame and "/megatron/bridge/" in frame.f_code.co_filename:
            return importlib.machinery.ModuleSpec(name, _Names(), is_package=True)
        return None


def load() -> Any:
    """Import Megatron-Bridge, also where TransformerEngine is not installed.

    Raises:
        ImportError: it is not installed.
    """
    if importlib.util.find_spec("transformer_engine") is None and not any(
        isinstance(each, _Finder) for each in sys.meta_path
    ):
        sys.meta_path.insert(0, _Finder())
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import megatron.bridge
    finally:
        logging.disable(logging.NOTSET)
    return megatron.bridge


_FUSIONS = (
    "apply_rope_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "cross_entropy_loss_fusion",
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_router_fusion",
    "persist_layer_norm",
)


@contextlib.contextmanager
def megatron(folder: str, sizes: tuple[int, int, int]) -> Any:
    """Build a model of Megatron-Core with random weights, for tensor, pipeline and expert parallel ranks.

    Yields:
        The bridge, and the model.
    """
    tp, pp, ep = sizes
    bridge_module = load()
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        stack.callback(parallel_state.destroy_model_parallel)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=1 if ep > 1 else tp,
        )
        bridge = bridge_module.AutoBridge.from_hf_pretrained(folder)
        provider = bridge.to_megatron_provider(load_weights=False)
        provider.tensor_model_parallel_size, provider.pipeline_model_parallel_size = tp, pp
        provider.expert_model_parallel_size = ep
        provider.expert_tensor_parallel_size = 1 if ep > 1 else tp
        provider.sequence_parallel = False
        provider.use_cpu_initialization = True
        provider.bf16, provider.params_dtype = True, torch.bfloat16
        provider.pipeline_dtype = torch.bfloat16
        provider.moe_token_dispatcher_type = "allgather"
        for name in _FUSIONS:
            setattr(provider, name, False)
        provider.transformer_layer_spec = lambda *_, **__: get_gpt_layer_local_spec(
            num_experts=provider.num_moe_experts,
            moe_grouped_gemm=False,
            qk_layernorm=provider.qk_layernorm,
            normalization=provider.normalization,
        )
        provider.finalize()
        with pytest.MonkeyPatch.context() as patched:
            # Stages with tied embeddings are moved to a GPU, which there is not.
            patched.setattr(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor)
            for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
                # A model before this one may have set them to something else.
                patched.delenv(name, raising=False)
            model = provider.provide(
                pre_process=parallel_state.is_pipeline_first_stage(),
                post_process=parallel_state.is_pipeline_last_stage(),
            )
        randomise(model)
        yield bridge, model


def randomise(model: torch.nn.Module) -> None:
    """Give weights any bits; what several ranks have the same of, the same."""
    from megatron.core import parallel_state

    for name, parameter in model.named_parameters():
        if ".experts." in name:
            shard = 1 + parallel_state.get_expert_model_parallel_rank()
            shard += 10 * parallel_state.get_expert_tensor_parallel_rank()
        elif getattr(parameter, "tensor_model_parallel", False):
            shard = 1 + parallel_state.get_tensor_model_parallel_rank()
        else:
            shard = 0
        # A tied embedding is on two stages, under two names.
        is_tied = model.share_embeddings_and_output_weights and "layers." not in name and parameter.dim() > 1
        kind = "tied" if is_tied else name
        generator = torch.Generator().manual_seed(zlib.crc32(kind.encode()) + shard)
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        flat = parameter.data.view(-1)
        flat[:2] = torch.tensor([float("nan"), -0.0]).to(flat.dtype)


def export(bridge: Any, model: Any) -> Bits:
    """Gather as Bridge does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bits_of(dict(bridge.export_hf_weights([model], show_progress=False)))


def publish(
    rank: int, url: str, folder: str, sizes: tuple[int, int, int]
) -> tuple[Versions, list[str], list[str]]:
    """Publish some steps.

    Returns:
        Versions with what Bridge gathers at each; parameters that are gathered and that are converted.
    """
    from patchstore.integrations.megatron import as_exported

    published = []
    with megatron(folder, sizes) as (bridge, model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = as_exported(bridge, [model])
        with Publisher(url, source, group=dist.group.WORLD, rank_timeout_s=100, anchor_every=2) as publisher:
            for step in range(3):
                version = publisher.publish_patch(step).result().version
                published.append((version, export(bridge, model)))
                for each in model.parameters():
                    each.data.view(-1)[step :: step + 2] *= 1.5
    return published, source.gathered, source.converted


def make_checkpoint(folder: Path, kind: str, **options: Any) -> None:
    """Save a small model of transformers."""
    import transformers

    base: dict[str, Any] = {
        "vocab_size": 72,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    config = getattr(transformers, f"{kind}Config")(**base | options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    """Ranks with time to import Megatron, which takes minutes where the machine is busy."""
    ranks = Ranks(2, timeout_s=500)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    ("kind", "options", "sizes"),
    [
        ("Qwen3Moe", MOE, (2, 1, 1)),
        ("Qwen3Moe", MOE, (1, 2, 1)),
        ("Qwen3Moe", MOE, (1, 1, 2)),
        ("Qwen3Moe", MOE, (2, 1, 2)),
        ("Qwen2", {"tie_word_embeddings": True}, (2, 1, 1)),
        ("Qwen2", {"tie_word_embeddings": True}, (1, 2, 1)),
    ],
)
def test_each_version_has_the_bits_that_bridge_exports(
    two_ranks: Ranks,
    tmp_path: Path,
    kind: str,
    options: dict[str, object],
    sizes: tuple[int, int, int],
) -> None:
    folder, url = tmp_path / "base", str(tmp_path / "store")
    make_checkpoint(folder, kind, **options)
    results = two_ranks.run(publish, url, str(folder), sizes)
    assert all(gathered == [] for _, gathered, _ in results)
    assert all(converted == [] for _, _, converted in results)
    check(url, [versions for versions, _, _ in results])
