"""A tiny GLM-4 MoE with a layer that drafts tokens, and what engines of it hold after updates, as one file.

Run as a program: engines are forks of a process that imports vLLM in a way of its own, see `engines` of the
conformance suite, which must be on the path.
"""

import json
import shutil
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from engines import Engine, answers
from safetensors.torch import load_file, save_file
from training import NEWEST, publish
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
from vllm import LLM

from patchstore.format.hashing import digest
from patchstore.read.replay import replay
from patchstore.stores import open_store
from patchstore.tensors.bits import raw_bytes

SPECULATIVE = {"method": "mtp", "num_speculative_tokens": 1}


def save(folder: Path) -> Path:
    """Write a checkpoint whose draft layer has an embedding and a head of its own, of no use to vLLM."""
    config = Glm4MoeConfig(
        vocab_size=250,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
        use_qk_norm=True,
        num_nextn_predict_layers=1,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        dtype=torch.bfloat16,
    )
    Glm4MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    # transformers does not build the draft layer: one with experts, and a few tensors more.
    last, draft = "model.layers.1.", "model.layers.2."
    shapes |= {n.replace(last, draft): shape for n, shape in shapes.items() if n.startswith(last)}
    shapes |= {f"{draft}{name}.weight": (128,) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes |= {f"{draft}{name}.weight": (250, 128) for name in ("embed_tokens", "shared_head.head")}
    shapes[f"{draft}eh_proj.weight"] = (128, 256)
    random = torch.Generator().manual_seed(3)
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=random)
        weight = noise * 1.5 / shape[-1] ** 0.5 if len(shape) > 1 else 1 + 0.2 * noise
        made[name] = weight.to(tensors[name].dtype if name in tensors else torch.bfloat16)
    save_file(made, folder / "model.safetensors")
    return folder


def draft_bits(worker: Any) -> dict[str, str]:
    """Digest the draft model's parameters, as vLLM has it."""
    draft = worker.model_runner.get_draft_model()
    return {name: digest(raw_bytes(parameter.detach())) for name, parameter in draft.named_parameters()}


def look(llm: LLM) -> dict[str, Any]:
    # The first answer may convert buffers, so this comes first.
    said = answers(llm)
    (fingerprint,), (draft,) = llm.collective_rpc("delta_fingerprint"), llm.collective_rpc(draft_bits)
    return {"answers": said, "fingerprint": fingerprint, "draft": draft}


def main(folder: Path) -> None:
    checkpoint, store = save(folder / "checkpoint"), folder / "store"
    publish(checkpoint, store)

    def follow(llm: LLM) -> dict[str, Any]:
        found = {"start": look(llm), "status_at_start": llm.collective_rpc("delta_status")[0]}
        init = {"init_info": {"store": str(store)}}
        llm.collective_rpc("init_weight_transfer_engine", kwargs=init)
        for version in (0, 1, NEWEST):
            llm.collective_rpc("start_weight_update")
            llm.collective_rpc("update_weights", kwargs={"update_info": {"version": version}})
            llm.collective_rpc("finish_weight_update")
            found[str(version)] = look(llm)
        return found | {"status": llm.collective_rpc("delta_status")[0]}

    def engine(name: str, folder_of_target: Path, **speculative: Any) -> Engine:
        arguments = {"speculative_config": SPECULATIVE | speculative}
        return Engine(model=folder_of_target, arguments=arguments, log=folder / f"{name}.log")

    found = {"followed": engine("followed", checkpoint).run(follow)}
    out = folder / "replayed"
    with closing(open_store(store)) as bucket:
        replay(bucket, NEWEST, out=out)
    found["fresh"] = engine("fresh", out).run(look)
    # The same layer, but from a folder of its own.
    other = shutil.copytree(checkpoint, folder / "draft")
    found["separate"] = engine("separate", checkpoint, model=str(other)).run(follow)
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
